"""Mochi 1: a video from a prompt.

python examples/mochi.py --prompt "A close-up of a chameleon's eye" --topk 0.4
"""

import torch
from common import command_line, device_and_dtype, save_video
from diffusers import MochiPipeline

import sparge

args = command_line(
    __doc__,
    model="genmo/mochi-1-preview",
    prompt="A close-up of a chameleon's eye, its scales changing colour",
    height=480,
    width=848,
    frames=85,
    steps=64,
    seed=0,
    output="mochi.webp",
)
device, dtype = device_and_dtype()
pipe = MochiPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
pipe.vae.enable_tiling()  # decoding all frames at once takes more memory than the transformer

# The first steps decide what is where, and an error in them is carried through all others: they stay dense.
# The text tokens, which come last here, are kept by `enable`.
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
save_video(video, args.output, fps=30)
print(sparge.stats())
