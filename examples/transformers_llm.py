"""A language model of transformers: a question about a long text.

python examples/transformers_llm.py --prompt-file report.txt --question "What did they decide, and why?"
python examples/transformers_llm.py --model folder --gguf-file model.Q4_1.gguf --prompt-file report.txt
"""

from pathlib import Path

from common import command_line, device_and_dtype
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparge

args = command_line(
    __doc__,
    model="Qwen/Qwen2.5-7B-Instruct",
    prompt_file=Path(__file__).parents[1] / "README.md",
    question="Summarize this text.",
    tokens=200,
    gguf_file="",
)
device, dtype = device_and_dtype()
source = {"pretrained_model_name_or_path": args.model, "gguf_file": args.gguf_file or None}
tokenizer = AutoTokenizer.from_pretrained(**source)
model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).to(device).eval()

# The prompt runs sparse. Decoding (one query at a time) is always dense. To keep a fraction of the attention mass
# instead of a fraction of the blocks, use sparge.Policy(sparsity=sparge.TopCdf(0.98)).
sparge.enable(model, args.policy or sparge.Policy(topk=args.topk))

prompt = f"{args.prompt_file.read_text()}\n\n{args.question}"
if tokenizer.chat_template:
    messages = [{"role": "user", "content": prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template).to(device)
output = model.generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
print(sparge.stats())
