"""CogVideoX: a video from a prompt.

python examples/cogvideox.py --prompt "A panda plays the guitar in a bamboo forest" --topk 0.4
"""

import torch
from common import command_line, device_and_dtype, save_video
from diffusers import CogVideoXPipeline

import sparge

args = command_line(
    __doc__,
    model="THUDM/CogVideoX-5b",
    prompt="A panda plays the guitar in a bamboo forest",
    height=480,
    width=720,
    frames=49,
    steps=50,
    seed=0,
    output="cogvideox.webp",
)
device, dtype = device_and_dtype()
pipe = CogVideoXPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
pipe.vae.enable_tiling()  # decoding all frames at once takes more memory than the transformer

# The first steps decide what is where, and an error in them is carried through all others: they stay dense.
# The text tokens, which come first here, are kept by `enable`.
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
save_video(video, args.output, fps=8)
print(sparge.stats())
