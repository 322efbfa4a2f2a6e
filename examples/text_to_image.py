"""An image from a prompt, with Flux or Stable Diffusion 3.5.

python examples/text_to_image.py flux --prompt "A tiny astronaut hatching from an egg on the moon" \
    --height 2048 --width 2048
python examples/text_to_image.py sd3 --prompt "A lighthouse in a storm, oil on canvas" --height 1440 --width 1440

At 1024 x 1024 pixels (4096 image tokens) a GPU is faster dense: no call runs sparse, and the statistics at the end give
the reason ("below the crossover").
"""

from common import command_line_of_models, device_and_dtype, pipeline_arguments
from diffusers import FluxPipeline, StableDiffusion3Pipeline

import sparge

PIPELINES = {"flux": FluxPipeline, "sd3": StableDiffusion3Pipeline}
SIZES = {"height": 1024, "width": 1024, "steps": 28, "seed": 0}
FLUX = {"model": "black-forest-labs/FLUX.1-dev", "prompt": "A tiny astronaut hatching from an egg on the moon"}
SD3 = {"model": "stabilityai/stable-diffusion-3.5-medium", "prompt": "A lighthouse in a storm, oil on canvas"}
MODELS = {"flux": {**FLUX, **SIZES, "output": "flux.png"}, "sd3": {**SD3, **SIZES, "output": "sd3.png"}}

args = command_line_of_models(__doc__, MODELS)
device, dtype = device_and_dtype()
pipe = PIPELINES[args.name].from_pretrained(args.model, torch_dtype=dtype).to(device)

# The first steps stay dense, because they decide the layout of the image and later steps cannot correct their errors.
policy = sparge.Policy(topk=args.topk, dense_first_steps=0.1)
sparge.enable(pipe, args.policy or policy)

image = pipe(**pipeline_arguments(args)).images[0]
image.save(args.output)
print(sparge.stats())
