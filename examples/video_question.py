"""A vision language model of transformers: a question about a long video.

python examples/video_question.py --video lecture.mp4 --question "What is on the blackboard at the end?"
"""

from common import command_line, device_and_dtype
from transformers import AutoModelForImageTextToText, AutoProcessor

import sparge

args = command_line(
    __doc__,
    model="Qwen/Qwen2.5-VL-7B-Instruct",
    video="video.mp4",
    question="What happens in this video?",
    fps=2.0,
    tokens=200,
)
device, dtype = device_and_dtype()
processor = AutoProcessor.from_pretrained(args.model)
model = AutoModelForImageTextToText.from_pretrained(args.model, dtype=dtype).to(device).eval()

# The prompt runs sparse: tens of thousands of video tokens and a few text tokens. Every query block keeps the text, and
# the queries of the text attend to all keys. The vision tower stays dense, because it attends within single frames,
# which are too short to gain from sparsity.
sparge.enable(model, args.policy or sparge.Policy(topk=args.topk))

content = [{"type": "video"}, {"type": "text", "text": args.question}]
prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
inputs = processor(text=[prompt], videos=[args.video], do_sample_frames=True, fps=args.fps, return_tensors="pt")
inputs = inputs.to(device, dtype)
output = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
print(processor.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(sparge.stats())
