"""Flux: a picture from a prompt.

python examples/flux.py --prompt "A tiny astronaut hatching from an egg on the moon" --height 2048 --width 2048

At 1024 x 1024 pixels attention is short enough that a GPU is faster dense: nothing runs sparse, and the table at the
end says so ("below the crossover").
"""

import torch
from common import command_line, device_and_dtype
from diffusers import FluxPipeline

import sparge

args = command_line(
    __doc__,
    model="black-forest-labs/FLUX.1-dev",
    prompt="A tiny astronaut hatching from an egg on the moon",
    height=1024,
    width=1024,
    steps=28,
    seed=0,
    output="flux.png",
)
device, dtype = device_and_dtype()
pipe = FluxPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)

# The first steps decide what is where, and an error in them is carried through all others: they stay dense.
# A picture has few tokens (4096 at 1024 x 1024): the larger it is, the more there is to skip.
policy = sparge.Policy(topk=args.topk, dense_first_steps=0.1)
sparge.enable(pipe, args.policy or policy)

picture = pipe(
    args.prompt,
    height=args.height,
    width=args.width,
    num_inference_steps=args.steps,
    generator=torch.Generator().manual_seed(args.seed),
    output_type="pil",
).images[0]
picture.save(args.output)
print(sparge.stats())
