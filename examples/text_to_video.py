"""A video from a prompt, with one of five models.

python examples/text_to_video.py cogvideox --prompt "A panda plays the guitar in a bamboo forest" --topk 0.4
python examples/text_to_video.py wan --model Wan-AI/Wan2.1-T2V-14B-Diffusers --height 720 --width 1280 --topk 0.4

`python examples/text_to_video.py wan --help` lists the options with the defaults of a model.
"""

from typing import Any, NamedTuple

import torch
from common import command_line_of_models, device_and_dtype, pipeline_arguments, save_video
from diffusers import CogVideoXPipeline, HunyuanVideoPipeline, LTXPipeline, MochiPipeline, WanPipeline

import sparge


class VideoModel(NamedTuple):
    """A pipeline class with the published settings of its model."""

    pipeline: Any
    options: dict[str, Any]
    frames_per_second: int
    tile_vae: bool = False  # set if decoding all frames at once needs more memory than the transformer
    vae_dtype: torch.dtype | None = None


def options(model: str, prompt: str, height: int, width: int, frames: int, steps: int = 50) -> dict[str, Any]:
    """Return the command-line options of a model with their defaults."""
    sizes = {"height": height, "width": width, "frames": frames, "steps": steps, "seed": 0}
    return {"model": model, "prompt": prompt, **sizes}


COGVIDEOX = options("THUDM/CogVideoX-5b", "A panda plays the guitar in a bamboo forest", 480, 720, frames=49)
HUNYUANVIDEO = options(
    "hunyuanvideo-community/HunyuanVideo", "A cat walks on the grass, realistic", 720, 1280, frames=129
)
LTX = options("Lightricks/LTX-Video", "Waves break on a rocky shore at dusk, seen from above", 480, 704, frames=161)
MOCHI = options(
    "genmo/mochi-1-preview", "A close-up of a chameleon's eye, its scales changing color", 480, 848, frames=85, steps=64
)
WAN = options(
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "Two cats in boxing gloves fight on a spotlighted stage", 480, 832, frames=81
)
MODELS = {
    # Text tokens are in the same sequence as the video tokens. `enable` keeps them.
    "cogvideox": VideoModel(CogVideoXPipeline, COGVIDEOX, frames_per_second=8, tile_vae=True),
    "hunyuanvideo": VideoModel(HunyuanVideoPipeline, HUNYUANVIDEO, frames_per_second=24, tile_vae=True),
    "mochi": VideoModel(MochiPipeline, MOCHI, frames_per_second=30, tile_vae=True),
    # In LTX-Video and Wan, text enters by cross-attention, which is dense. A token of LTX-Video covers 32 x 32 pixels
    # and 8 frames, so there are few tokens (6930 here), and each matters more than in other models.
    "ltx": VideoModel(LTXPipeline, LTX, frames_per_second=24),
    # The VAE of Wan loses detail in 16 bits.
    "wan": VideoModel(WanPipeline, WAN, frames_per_second=16, vae_dtype=torch.float32),
}

args = command_line_of_models(
    __doc__, {name: {**model.options, "output": f"{name}.webp"} for name, model in MODELS.items()}
)
model = MODELS[args.name]
device, dtype = device_and_dtype()
dtypes = {"vae": model.vae_dtype, "default": dtype} if model.vae_dtype else dtype
pipe = model.pipeline.from_pretrained(args.model, torch_dtype=dtypes).to(device)
if model.tile_vae:
    pipe.vae.enable_tiling()

# The first steps stay dense, because they decide the layout of the video and later steps cannot correct their errors.
policy = sparge.Policy(topk=args.topk, dense_first_steps=0.1)
sparge.enable(pipe, args.policy or policy)

video = pipe(**pipeline_arguments(args)).frames[0]
save_video(video, args.output, fps=model.frames_per_second)
print(sparge.stats())
