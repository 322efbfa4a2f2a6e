"""A video from a prompt, with one of five models.

python examples/text_to_video.py cogvideox --prompt "A panda plays the guitar in a bamboo forest" --topk 0.4
python examples/text_to_video.py wan --model Wan-AI/Wan2.1-T2V-14B-Diffusers --height 720 --width 1280 --topk 0.4

`python examples/text_to_video.py wan --help` lists the options with the defaults of a model.
"""

from typing import Any, NamedTuple

import torch
from common import command_line_of_models, device_and_dtype, save_video
from diffusers import CogVideoXPipeline, HunyuanVideoPipeline, LTXPipeline, MochiPipeline, WanPipeline

import sparge


class VideoModel(NamedTuple):
    """A pipeline class with the published settings of its model."""

    pipeline: Any
    options: dict[str, Any]
    frames_per_second: int
    tile_vae: bool = (
        False  # for models whose VAE takes more memory than the transformer if it decodes all frames at once
    )
    vae_dtype: torch.dtype | None = None


MODELS = {
    # Text and video are one sequence, text first. `enable` keeps the text tokens.
    "cogvideox": VideoModel(
        CogVideoXPipeline,
        {
            "model": "THUDM/CogVideoX-5b",
            "prompt": "A panda plays the guitar in a bamboo forest",
            "height": 480,
            "width": 720,
            "frames": 49,
            "steps": 50,
        },
        frames_per_second=8,
        tile_vae=True,
    ),
    # Text last, with a mask over its padding.
    "hunyuanvideo": VideoModel(
        HunyuanVideoPipeline,
        {
            "model": "hunyuanvideo-community/HunyuanVideo",
            "prompt": "A cat walks on the grass, realistic",
            "height": 720,
            "width": 1280,
            "frames": 129,
            "steps": 50,
        },
        frames_per_second=24,
        tile_vae=True,
    ),
    # Text has cross-attention, which is short and always dense. A token is 32 x 32 pixels and 8 frames, so there are
    # few tokens (6930 here), and each one matters more than in other models.
    "ltx": VideoModel(
        LTXPipeline,
        {
            "model": "Lightricks/LTX-Video",
            "prompt": "Waves break on a rocky shore at dusk, seen from above",
            "height": 480,
            "width": 704,
            "frames": 161,
            "steps": 50,
        },
        frames_per_second=24,
    ),
    # Text last.
    "mochi": VideoModel(
        MochiPipeline,
        {
            "model": "genmo/mochi-1-preview",
            "prompt": "A close-up of a chameleon's eye, its scales changing color",
            "height": 480,
            "width": 848,
            "frames": 85,
            "steps": 64,
        },
        frames_per_second=30,
        tile_vae=True,
    ),
    # Text has cross-attention, which is short and always dense. The VAE loses detail in 16 bits.
    "wan": VideoModel(
        WanPipeline,
        {
            "model": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            "prompt": "Two cats in boxing gloves fight on a spotlighted stage",
            "height": 480,
            "width": 832,
            "frames": 81,
            "steps": 50,
        },
        frames_per_second=16,
        vae_dtype=torch.float32,
    ),
}

args = command_line_of_models(
    __doc__, {name: {**model.options, "seed": 0, "output": f"{name}.webp"} for name, model in MODELS.items()}
)
model = MODELS[args.name]
device, dtype = device_and_dtype()
dtypes = {"vae": model.vae_dtype, "default": dtype} if model.vae_dtype else dtype
pipe = model.pipeline.from_pretrained(args.model, torch_dtype=dtypes).to(device)
if model.tile_vae:
    pipe.vae.enable_tiling()

# The first steps decide the layout of the video, and later steps carry their errors on: they stay dense.
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
save_video(video, args.output, fps=model.frames_per_second)
print(sparge.stats())
