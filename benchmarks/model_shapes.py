"""Published models in their original shapes, with random weights and inputs, on the GPU in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A model in bf16 on the GPU, its initial latents (None for a language model), and a forward pass."""

    model: Any
    latents: Tensor | None
    forward: Callable[[Any, Tensor | None, Tensor], Tensor]
    """Function of a model, latents and a timestep that returns the output."""


def wan(heads: int, width: int, layers: int, video: tuple[int, int, int]) -> Case:
    """Wan 2.1 T2V."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(num_attention_heads=heads, ffn_dim=width, num_layers=layers)
    text = torch.randn(1, 512, 4096)
    return Case(
        model, torch.randn(1, 16, *video), lambda model, latents, step: model(latents, step, text, return_dict=False)[0]
    )


def hunyuanvideo() -> Case:
    """HunyuanVideo with a fifth of its blocks: 129 frames of 1280 x 720 are 118,800 tokens, plus 256 text tokens."""
    from diffusers import HunyuanVideoTransformer3DModel

    model = HunyuanVideoTransformer3DModel(num_layers=4, num_single_layers=8)
    text, pooled = torch.randn(1, 256, 4096), torch.randn(1, 768)
    mask, guidance = torch.ones(1, 256), torch.tensor([6000.0])

    def forward(model: Any, latents: Tensor | None, step: Tensor) -> Tensor:
        return model(latents, step, text, mask, pooled, guidance=guidance, return_dict=False)[0]

    return Case(model, torch.randn(1, 16, 33, 90, 160), forward)


def flux(side: int = 64) -> Case:
    """Flux 1: 1024 x 1024 pixels are 4096 tokens, 2048 x 2048 pixels are 16,384, plus 512 text tokens."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(guidance_embeds=True)
    text, pooled, guidance = torch.randn(1, 512, 4096), torch.randn(1, 768), torch.tensor([3.5])
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(float(side)), torch.arange(float(side)))
    text_places = torch.zeros(512, 3)

    def forward(model: Any, latents: Tensor | None, step: Tensor) -> Tensor:
        ids = {"img_ids": places, "txt_ids": text_places}
        return model(latents, text, pooled, step / 1000, guidance=guidance, **ids, return_dict=False)[0]

    return Case(model, torch.randn(1, side * side, 64), forward)


def qwen_image() -> Case:
    """Qwen-Image, 20B: 1664 x 928 pixels are 6032 tokens, plus 256 text tokens without a mask (one prompt)."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel()
    text = torch.randn(1, 256, 3584)

    def forward(model: Any, latents: Tensor | None, step: Tensor) -> Tensor:
        return model(latents, text, None, step / 1000, img_shapes=[[(1, 58, 104)]], return_dict=False)[0]

    return Case(model, torch.randn(1, 58 * 104, 64), forward)


def llama(tokens: int = 32768) -> Case:
    """Llama 3.1 8B: prefill."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
    )
    prompt = torch.randint(0, 1024, (1, tokens))
    return Case(LlamaModel(config), None, lambda model, *_: model(prompt, use_cache=False).last_hidden_state)


CASES: dict[str, Callable[[], Case]] = {
    "Wan 2.1 1.3B": partial(wan, heads=12, width=8960, layers=30, video=(21, 60, 104)),  # 81 frames of 832 x 480
    "Wan 2.1 14B": partial(wan, heads=40, width=13824, layers=40, video=(21, 90, 160)),  # 81 frames of 1280 x 720
    "HunyuanVideo, 12 of 60 blocks": hunyuanvideo,
    "Flux, 1024 x 1024": flux,
    "Flux, 2048 x 2048": partial(flux, side=128),
    "Qwen-Image": qwen_image,
    "Llama 3.1 8B": llama,
    "Llama 3.1 8B, 128K": partial(llama, tokens=131072),
}


def build(name: str) -> Case:
    """Build a model of `CASES` for inference, with a fixed seed."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            case = CASES[name]()
    finally:
        torch.set_default_dtype(torch.float32)
    case.model.eval()
    return case
