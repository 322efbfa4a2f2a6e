"""HunyuanVideo: a video from a prompt.

python examples/hunyuanvideo.py --prompt "A cat walks on the grass, realistic" --topk 0.3
"""

import torch
from common import command_line, device_and_dtype, save_video
from diffusers import HunyuanVideoPipeline

import sparge

args = command_line(
    __doc__,
    model="hunyuanvideo-community/HunyuanVideo",
    prompt="A cat walks on the grass, realistic",
    height=720,
    width=1280,
    frames=129,
    steps=50,
    seed=0,
    output="hunyuanvideo.webp",
)
device, dtype = device_and_dtype()
pipe = HunyuanVideoPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
pipe.vae.enable_tiling()  # decoding all frames at once takes more memory than the transformer

# The first steps decide what is where, and an error in them is carried through all others: they stay dense.
# The text tokens, which come last here, are kept by `enable`; the mask over padded ones is honoured.
policy = sparge.Policy(topk=args.topk, dense_first_steps=0.1)
sparge.enable(pipe, args.policy or policy)

video = pipe(
    args.prompt,
    height=args.height,
    width=args.width,
    num_frames=args.frames,
    num_inference_steps=args.steps,
    generator=torch.Generator().manual_seed(args.seed),
    output_type="pil",
).frames[0]
save_video(video, args.output, fps=24)
print(sparge.stats())
