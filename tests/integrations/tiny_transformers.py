"""Tiny random-weight transformers of diffusers, with inputs of a few hundred tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    CogVideoXTransformer3DModel,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    MochiTransformer3DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor

Tiny = tuple[Any, dict[str, Any]]


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def cogvideox() -> Tiny:
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=24,
        sample_height=24,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=70,
    )
    inputs = {"hidden_states": _noise(1, 3, 4, 24, 24), "encoder_hidden_states": _noise(1, 70, 16)}
    return model, {**inputs, "timestep": torch.tensor([3])}


def flux() -> Tiny:
    model = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    grid = torch.cartesian_prod(torch.arange(20.0), torch.arange(20.0))
    return model, {
        "hidden_states": _noise(1, 400, 4),
        "encoder_hidden_states": _noise(1, 70, 32),
        "pooled_projections": _noise(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.cat([torch.zeros(400, 1), grid], 1),
        "txt_ids": torch.zeros(70, 3),
    }


def hunyuanvideo() -> Tiny:
    model = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    )
    return model, {
        "hidden_states": _noise(1, 4, 2, 14, 14),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": _noise(1, 70, 16),
        "encoder_attention_mask": (torch.arange(70) < 50).long()[None],
        "pooled_projections": _noise(1, 8),
        "guidance": torch.tensor([6000.0]),
    }


def ltx() -> Tiny:
    model = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=2,
        caption_channels=16,
    )
    return model, {
        "hidden_states": _noise(1, 392, 8),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": _noise(1, 70, 16),
        "encoder_attention_mask": (torch.arange(70) < 50).long()[None],
        "num_frames": 2,
        "height": 14,
        "width": 14,
        "rope_interpolation_scale": (1.0, 1.0, 1.0),
    }


def mochi() -> Tiny:
    model = MochiTransformer3DModel(
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=16,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )
    return model, {
        "hidden_states": _noise(1, 4, 3, 24, 24),
        "encoder_hidden_states": _noise(1, 70, 16),
        "timestep": torch.tensor([3]),
        "encoder_attention_mask": (torch.arange(70) < 50)[None],
    }


def sd3() -> Tiny:
    """SD3.5, with a dual-attention layer."""
    model = SD3Transformer2DModel(
        sample_size=32,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=96,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return model, {
        "hidden_states": _noise(1, 4, 20, 20),
        "encoder_hidden_states": _noise(1, 70, 32),
        "pooled_projections": _noise(1, 64),
        "timestep": torch.tensor([3]),
    }


def wan() -> Tiny:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    return model, {
        "hidden_states": _noise(1, 4, 3, 24, 24),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": _noise(1, 70, 16),
    }


TRANSFORMERS: dict[str, Callable[[], Tiny]] = {
    function.__name__: function for function in (cogvideox, flux, hunyuanvideo, ltx, mochi, sd3, wan)
}


def build(name: str) -> Tiny:
    """Return a model with seeded weights, and its inputs."""
    torch.manual_seed(0)
    model, inputs = TRANSFORMERS[name]()
    return model.eval(), inputs
