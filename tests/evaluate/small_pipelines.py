"""Pipelines that run in milliseconds: a transformer on pixels, without text encoder and VAE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

FRAMES, HEIGHT, WIDTH = 3, 64, 64
LAYERS, STEPS = 2, 3


def wan_transformer() -> Any:
    """Return a Wan transformer in which 3 frames of 64 x 64 pixels are 192 tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 8, 8),
            num_attention_heads=2,
            attention_head_dim=32,
            in_channels=3,
            out_channels=3,
            text_dim=8,
            ffn_dim=64,
            num_layers=LAYERS,
            rope_max_seq_len=32,
        ).eval()


class Denoiser(diffusers.ModelMixin):
    """A model that `sparge.enable` does not support: one SDPA call over patches of pixels."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.projection = nn.Linear(192, 3 * 192)

    def forward(self, clips: Tensor) -> Tensor:
        patches = clips.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8))  # [1, 3, F, h, 8, w, 8]
        tokens = patches.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        query, key, value = self.projection(tokens).unflatten(-1, (3, 3, 64)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(4 * query, key, value)
        out = out.transpose(1, 2).flatten(2)
        frames, height, width = clips.shape[2], clips.shape[3] // 8, clips.shape[4] // 8
        out = out.unflatten(1, (frames, height, width)).unflatten(-1, (3, 8, 8))
        return out.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)


class SmallPipeline(diffusers.DiffusionPipeline):
    """Generate clips with a Wan transformer whose text tokens depend on ``prompt``; count the calls."""

    def __init__(self, transformer: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(transformer=transformer, scheduler=scheduler)
        self.calls: list[tuple[Any, int]] = []

    def denoise(self, latents: Tensor, time: Tensor, prompt: str) -> Tensor:
        text = torch.full((1, 4, 8), len(prompt) / 50)
        return self.transformer(latents, time.expand(1), text, return_dict=False)[0]

    @torch.no_grad()
    def __call__(
        self,
        prompt: str = "",
        num_inference_steps: int = STEPS,
        num_frames: int = FRAMES,
        generator: Any = None,
        output_type: str = "np",
    ) -> Any:
        self.calls.append((prompt, num_inference_steps))
        latents = torch.randn(1, 3, num_frames, HEIGHT, WIDTH, generator=generator)
        self.scheduler.set_timesteps(num_inference_steps)
        for time in self.progress_bar(self.scheduler.timesteps):
            latents = self.scheduler.step(self.denoise(latents, time, prompt), time, latents)[0]
        pixels = (latents / 4 + 0.5).clamp(0, 1).transpose(1, 2)  # [1, F, 3, H, W]
        if output_type == "pt":
            return SimpleNamespace(frames=pixels)
        arrays = pixels.permute(0, 1, 3, 4, 2).numpy()
        if output_type == "np":
            return SimpleNamespace(frames=arrays)
        return SimpleNamespace(images=diffusers.DiffusionPipeline.numpy_to_pil(arrays[:, 0]))


class UnknownPipeline(SmallPipeline):
    """Generate images without a prompt with a model that `sparge.enable` does not support."""

    def denoise(self, latents: Tensor, time: Tensor, prompt: str) -> Tensor:
        del time, prompt
        return self.transformer(latents)

    def __call__(self, num_inference_steps: int = STEPS, generator: Any = None) -> Any:
        return super().__call__("", num_inference_steps, FRAMES, generator, "pil")


def small_pipeline() -> Any:
    return SmallPipeline(wan_transformer(), diffusers.FlowMatchEulerDiscreteScheduler())


def unknown_pipeline() -> Any:
    return UnknownPipeline(Denoiser(), diffusers.FlowMatchEulerDiscreteScheduler())
