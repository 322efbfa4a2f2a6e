"""Wan 2.1: a video from a prompt.

python examples/wan.py --model Wan-AI/Wan2.1-T2V-14B-Diffusers --height 720 --width 1280 --topk 0.4
"""

import torch
from common import command_line, device_and_dtype, save_video
from diffusers import WanPipeline

import sparge

args = command_line(
    __doc__,
    model="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    prompt="Two cats in boxing gloves fight on a spotlighted stage",
    height=480,
    width=832,
    frames=81,
    steps=50,
    seed=0,
    output="wan.webp",
)
device, dtype = device_and_dtype()
dtypes = {"vae": torch.float32, "default": dtype}  # this VAE loses detail in 16 bits
pipe = WanPipeline.from_pretrained(args.model, torch_dtype=dtypes).to(device)

# The first steps decide what is where, and an error in them is carried through all others: they stay dense.
# Text comes by cross-attention, which is short and always dense.
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
save_video(video, args.output, fps=16)
print(sparge.stats())
