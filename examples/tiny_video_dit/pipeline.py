"""A diffusers pipeline that generates clips from captions of known words, without a text encoder or VAE.

"a red striped star moves left over the cat, the camera pans right" has one word for each slot. Each word is a one-hot
token. The transformer works on pixels, with additional channels for their positions. It predicts the clean clip, from
which the pipeline computes the velocity for the scheduler.

`save_pretrained` copies this file beside the weights, so it imports nothing from its folder.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor

TEXTURE_PHOTOGRAPHS = ("brick", "grass", "gravel")
SLOTS = {
    "color": ("red", "green", "blue", "yellow", "purple", "white"),
    "texture": ("striped", "checked", "dotted", *TEXTURE_PHOTOGRAPHS),
    "shape": ("disc", "square", "triangle", "star"),
    "motion": ("stays", "moves left", "moves right", "moves up", "moves down"),
    "photograph": ("astronaut", "cat", "coffee", "rocket", "galaxies", "tissue", "retina"),
    "camera": ("stays", "pans left", "pans right", "pans up", "pans down", "zooms in", "zooms out"),
}
"""The words of each slot. Words of the slot "camera" follow the word camera."""

FILLERS = ("a", "an", "the", "over", "and", "camera")
TEXT_DIM = 64
CLIP_FRAMES = 17
FREQUENCIES = (0.5, 1.0, 2.0)
POSITION_CHANNELS = 3 * 2 * len(FREQUENCIES)
"""Sine and cosine of the position of a pixel along time, height and width."""

TRANSFORMER = {
    "patch_size": (1, 8, 8),
    "num_attention_heads": 3,
    "attention_head_dim": 128,
    "in_channels": 3 + POSITION_CHANNELS,
    "out_channels": 3,
    "text_dim": TEXT_DIM,
    "ffn_dim": 1152,
    "num_layers": 10,
}
"""The configuration of the WanTransformer3DModel that was trained."""


def write_caption(words: dict[str, str]) -> str:
    """Return the caption with these words by slot. Slots may be missing."""
    shape = ["a", *(words[slot] for slot in ("color", "texture", "shape", "motion") if slot in words)]
    parts = [" ".join(shape)] if len(shape) > 1 else []
    if "photograph" in words:
        parts.append(f"over the {words['photograph']}")
    caption = " ".join(parts)
    if "camera" in words:
        caption = f"{caption}, the camera {words['camera']}" if caption else f"the camera {words['camera']}"
    return caption


def read_caption(caption: str) -> dict[str, str]:
    """Return the words of a caption by slot.

    Raises:
        ValueError: a word is unknown, or two words have the same slot.
    """
    before, _, behind = " ".join(re.findall(r"[^\s,.]+", caption.lower())).partition("camera")
    words: dict[str, str] = {}
    for text, slots in ((before, [slot for slot in SLOTS if slot != "camera"]), (behind, ["camera"])):
        known = {word: slot for slot in slots for word in SLOTS[slot]}
        rest = text.split()
        while rest:
            pair = " ".join(rest[:2])
            word = pair if pair in known else rest[0]
            rest = rest[len(word.split()) :]
            if word in FILLERS:
                continue
            if word not in known:
                expected = ", ".join(known)
                got = pair if any(name.startswith(f"{word} ") for name in known) else word
                raise ValueError(f"prompt: expected one of {expected}, got {got!r} in {caption!r}")
            if words.setdefault(known[word], word) != word:
                raise ValueError(
                    f"prompt: expected one {known[word]}, got {words[known[word]]!r} and {word!r} in {caption!r}"
                )
    return words


def slot_indices(caption: str) -> list[int]:
    """Return 1 + the index of the word of each slot, or 0 for a slot that the caption does not mention."""
    words = read_caption(caption)
    return [1 + SLOTS[slot].index(words[slot]) if slot in words else 0 for slot in SLOTS]


def one_hot_tokens(indices: Tensor) -> Tensor:
    """Return one-hot tokens (B, slots, TEXT_DIM) of indices (B, slots) from `slot_indices`."""
    sizes = [len(words) for words in SLOTS.values()]
    first = torch.tensor([sum(sizes[:slot]) for slot in range(len(sizes))], device=indices.device)
    return torch.nn.functional.one_hot(torch.where(indices > 0, indices + first, 0), TEXT_DIM).float()


def with_positions(clips: Tensor) -> Tensor:
    """Append position channels, which do not depend on the resolution: (B, 3, F, H, W) -> (B, 21, F, H, W)."""
    _, _, frames, height, width = clips.shape
    times = torch.arange(frames, device=clips.device) / (CLIP_FRAMES - 1) * 2 - 1
    rows = (torch.arange(height, device=clips.device) + 0.5) / height * 2 - 1
    columns = (torch.arange(width, device=clips.device) + 0.5) / width * 2 - 1
    channels = []
    for axis in (times[:, None, None], rows[:, None], columns):
        for frequency in FREQUENCIES:
            angle = axis * (math.pi * frequency)
            channels += [wave.expand(frames, height, width) for wave in (angle.sin(), angle.cos())]
    positions = torch.stack(channels).to(clips.dtype)
    return torch.cat([clips, positions.expand(len(clips), *positions.shape)], dim=1)


@dataclass
class TinyVideoOutput(BaseOutput):
    """Clips as lists of PIL images, or as an array (B, F, H, W, 3) or tensor (B, F, 3, H, W) in [0, 1]."""

    frames: Any


class TinyVideoPipeline(DiffusionPipeline):
    """Generate clips from captions.

    Args:
        transformer: predicts the clean clip from the noisy clip with its position channels.
        scheduler: takes steps along the velocity.
        num_frames, height, width, guidance_scale: defaults of `__call__`.
    """

    examples = (
        "a red striped star moves left over the cat, the camera pans right",
        "a yellow checked square moves down over the astronaut, the camera stays",
        "a blue brick disc moves right over the coffee, the camera zooms in",
        "a green dotted triangle moves up over the retina, the camera pans left",
        "a white grass star stays over the rocket, the camera zooms out",
        "a purple gravel square moves left over the tissue, the camera pans down",
    )
    """Captions for evaluation, with words of every slot."""

    model_cpu_offload_seq = "transformer"
    _callback_tensor_inputs = ("latents",)

    def __init__(
        self,
        transformer: WanTransformer3DModel,
        scheduler: FlowMatchEulerDiscreteScheduler,
        num_frames: int = CLIP_FRAMES,
        height: int = 256,
        width: int = 256,
        guidance_scale: float = 2.0,
    ) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.register_to_config(num_frames=num_frames, height=height, width=width, guidance_scale=guidance_scale)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        num_frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 30,
        guidance_scale: float | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        callback_on_step_end: Callable[[Any, int, Tensor, dict[str, Tensor]], dict[str, Tensor]] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        return_dict: bool = True,
    ) -> TinyVideoOutput | tuple[Any]:
        """Generate one clip for each prompt.

        Args:
            prompt: a caption of known words (`SLOTS`), or several captions.
            num_frames, height, width: size of the clips; height and width must be multiples of the patch size (8).
            num_inference_steps: number of steps of the scheduler.
            guidance_scale: scale of classifier-free guidance; 1.0 switches it off, which halves the work.
            generator: generator of the noise, one for all clips or one for each.
            latents: the initial noise, (B, 3, F, H, W).
            output_type: "pil", "np", "pt", or "latent" (in [-1, 1], (B, 3, F, H, W)).
            callback_on_step_end: called with the pipeline, the step, the timestep and a dict of tensors.
            callback_on_step_end_tensor_inputs: names of these tensors; "latents" is the only one.
            return_dict: return a `TinyVideoOutput` instead of a tuple.

        Raises:
            ValueError: a word, a size or a type is not supported.
        """
        num_frames = self.config.num_frames if num_frames is None else num_frames
        height = self.config.height if height is None else height
        width = self.config.width if width is None else width
        guidance_scale = self.config.guidance_scale if guidance_scale is None else guidance_scale
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        self._check(num_frames, height, width, output_type, callback_on_step_end_tensor_inputs)
        device, dtype = self._execution_device, self.transformer.dtype

        indices = torch.tensor([slot_indices(prompt) for prompt in prompts], device=device)
        text = one_hot_tokens(indices).to(dtype)
        nothing = one_hot_tokens(torch.zeros_like(indices)).to(dtype)
        if latents is None:
            shape = (len(prompts), 3, num_frames, height, width)
            latents = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        latents = latents.to(device, torch.float32)

        self.scheduler.set_timesteps(num_inference_steps, device=device)
        timesteps, sigmas = self.scheduler.timesteps, self.scheduler.sigmas
        for step, timestep in enumerate(self.progress_bar(timesteps)):
            clean = self._clean(latents, timestep, text)
            if guidance_scale != 1.0:
                unguided = self._clean(latents, timestep, nothing)
                clean = unguided + guidance_scale * (clean - unguided)
            velocity = (latents - clean) / sigmas[step]
            latents = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
            if callback_on_step_end is not None:
                changed = callback_on_step_end(self, step, timestep, {"latents": latents}) or {}
                latents = changed.get("latents", latents)
        self.maybe_free_model_hooks()

        frames = self._decoded(latents, output_type)
        return TinyVideoOutput(frames=frames) if return_dict else (frames,)

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Save the pipeline and a copy of this file, for `from_pretrained(folder, trust_remote_code=True)`."""
        super().save_pretrained(save_directory, *args, **kwargs)
        source, copy = Path(inspect.getfile(type(self))), Path(save_directory) / "pipeline.py"
        if source.resolve() != copy.resolve():
            shutil.copyfile(source, copy)
        path = Path(save_directory) / "model_index.json"
        index = json.loads(path.read_text())
        path.write_text(json.dumps({**index, "_class_name": ["pipeline", type(self).__name__]}, indent=2) + "\n")

    def _clean(self, noisy: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
        """Return the predicted clean clips in float32."""
        hidden = with_positions(noisy).to(self.transformer.dtype)
        predicted = self.transformer(
            hidden_states=hidden,
            timestep=timestep.expand(len(noisy)),
            encoder_hidden_states=text,
            return_dict=False,
        )
        return predicted[0].float()

    def _decoded(self, latents: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return latents
        pixels = (latents / 2 + 0.5).clamp(0, 1).transpose(1, 2)  # (B, F, 3, H, W)
        if output_type == "pt":
            return pixels
        arrays = pixels.permute(0, 1, 3, 4, 2).cpu().numpy()
        if output_type == "np":
            return arrays
        return [[Image.fromarray(np.round(frame * 255).astype(np.uint8)) for frame in clip] for clip in arrays]

    def _check(self, num_frames: int, height: int, width: int, output_type: str, tensors: Sequence[str]) -> None:
        patch_frames, *patch = self.transformer.config.patch_size
        sizes = (("num_frames", num_frames, patch_frames), ("height", height, patch[0]), ("width", width, patch[1]))
        for name, size, divisor in sizes:
            if size <= 0 or size % divisor:
                raise ValueError(f"{name}: expected a positive multiple of {divisor}, got {size}")
        if output_type not in ("pil", "np", "pt", "latent"):
            raise ValueError(f"output_type: expected one of pil, np, pt, latent, got {output_type!r}")
        unknown = [name for name in tensors if name not in self._callback_tensor_inputs]
        if unknown:
            raise ValueError(f"callback_on_step_end_tensor_inputs: expected latents, got {', '.join(unknown)}")
