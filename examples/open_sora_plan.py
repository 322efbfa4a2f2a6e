"""Open-Sora-Plan, or any other model without an integration: one line replaces its attention.

Open-Sora-Plan has no class in diffusers. Its own code calls SDPA, and its pipeline has a `transformer`. In its sampling
script, add after the line that creates the pipeline

    make_sparse(pipeline.transformer, sparge.Policy(topk=0.5))

This script does the same for Allegro:

python examples/open_sora_plan.py --model rhymes-ai/Allegro --topk 0.5
"""

import torch
from common import command_line, device_and_dtype, pipeline_arguments, save_video
from diffusers import DiffusionPipeline

import sparge


def make_sparse(module: torch.nn.Module, policy: sparge.Policy) -> None:
    """Make the SDPA calls of one module sparse.

    `with sparge.replace_sdpa(policy):` around the whole pipeline would also replace the calls of its text encoders and
    VAE. The policy cannot have rules about layers or steps, which are unknown here.
    """
    module.forward = sparge.replace_sdpa(policy)(module.forward)


args = command_line(
    __doc__,
    model="rhymes-ai/Allegro",
    prompt="A seaside harbor with bright sunlight and sparkling water, many boats at anchor",
    height=720,
    width=1280,
    frames=88,
    steps=100,
    seed=0,
    output="open_sora_plan.webp",
)
device, dtype = device_and_dtype()
pipe = DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype).to(device)
pipe.vae.enable_tiling()  # Allegro's VAE only decodes tiles
make_sparse(pipe.transformer, args.policy or sparge.Policy(topk=args.topk))

video = pipe(**pipeline_arguments(args)).frames[0]
save_video(video, args.output, fps=15)
print(sparge.stats())
