"""An image from a prompt, with Flux or Stable Diffusion 3.5.

python examples/text_to_image.py flux --prompt "A tiny astronaut hatching from an egg on the moon" \
    --height 2048 --width 2048
python examples/text_to_image.py sd3 --prompt "A lighthouse in a storm, oil on canvas" --height 1440 --width 1440

At 1024 x 1024 pixels (4096 image tokens) a GPU is faster dense: no call runs sparse, and the statistics at the end give
the reason ("below the crossover").
"""

import torch
from common import command_line_of_models, device_and_dtype
from diffusers import FluxPipeline, StableDiffusion3Pipeline

import sparge

PIPELINES = {"flux": FluxPipeline, "sd3": StableDiffusion3Pipeline}
SIZES = {"height": 1024, "width": 1024, "steps": 28, "seed": 0}
MODELS = {
    "flux": {
        "model": "black-forest-labs/FLUX.1-dev",
        "prompt": "A tiny astronaut hatching from an egg on the moon",
        "output": "flux.png",
        **SIZES,
    },
    "sd3": {
        "model": "stabilityai/stable-diffusion-3.5-medium",
        "prompt": "A lighthouse in a storm, oil on canvas",
        "output": "sd3.png",
        **SIZES,
    },
}

args = command_line_of_models(__doc__, MODELS)
device, dtype = device_and_dtype()
pipe = PIPELINES[args.name].from_pretrained(args.model, torch_dtype=dtype).to(device)

# The first steps stay dense, because they decide the layout of the image and later steps cannot correct their errors.
policy = sparge.Policy(topk=args.topk, dense_first_steps=0.1)
sparge.enable(pipe, args.policy or policy)

image = pipe(
    args.prompt,
    height=args.height,
    width=args.width,
    num_inference_steps=args.steps,
    generator=torch.Generator().manual_seed(args.seed),
    output_type="pil",
).images[0]
image.save(args.output)
print(sparge.stats())
