"""LTX-Video: a video from a prompt.

python examples/ltx.py --prompt "Waves break on a rocky shore at dusk" --topk 0.5
"""

import torch
from common import command_line, device_and_dtype, save_video
from diffusers import LTXPipeline

import sparge

args = command_line(
    __doc__,
    model="Lightricks/LTX-Video",
    prompt="Waves break on a rocky shore at dusk, seen from above",
    height=480,
    width=704,
    frames=161,
    steps=50,
    seed=0,
    output="ltx.webp",
)
device, dtype = device_and_dtype()
pipe = LTXPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)

# The first steps decide what is where, and an error in them is carried through all others: they stay dense.
# A token is 32 x 32 pixels and 8 frames, so there are few (6930 here) and each matters more than elsewhere.
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
