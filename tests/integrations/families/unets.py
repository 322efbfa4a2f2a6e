"""U-Nets."""

from __future__ import annotations

import torch

from families.family import (
    CHANNELS,
    Family,
    Layers,
    noise,
    padding_mask,
    repeat_layers,
    self_then_cross,
    transformers_in,
)

FAMILIES: dict[str, Family] = {}

UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8, "cross_attention_dim": 16}
UNET_INPUTS = {"sample": noise(1, 4, 20, 18), "timestep": 3, "encoder_hidden_states": noise(1, 77, 16)}
VIDEO_INPUTS = {"sample": noise(1, 4, 2, 20, 18), "timestep": 3, "encoder_hidden_states": noise(1, 77, 16)}
UNET_3D = {
    **UNET,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "attention_head_dim": 8,
}

PLACES = (
    "down_blocks.0.attentions.0",
    "mid_block.attentions.0",
    "up_blocks.1.attentions.0",
    "up_blocks.1.attentions.1",
)
"""Modules with attention in a U-Net of two levels, in which the upper level has attention."""


def unet_3d_layers() -> Layers:
    """Return attention over the pixels of a frame, then twice over the frames of a pixel, at each place."""
    layers = transformers_in("transformer_in", attn2=())
    for place in PLACES:
        layers |= transformers_in(place)
        layers |= transformers_in(place.replace("attentions", "temp_attentions"), attn2=())
    return layers


# Self-attention in some levels only; one key head, repeated before the call.
FAMILIES["DreamLiteUNetModel"] = Family(
    config={**UNET, "sample_size": (20, 18), "attention_head_dim": 2}
    | {"down_block_types": ("DreamLiteCrossAttnDownBlock2D", "DreamLiteCrossAttnNoSelfAttnDownBlock2D")}
    | {"up_block_types": ("DreamLiteCrossAttnNoSelfAttnUpBlock2D", "DreamLiteCrossAttnUpBlock2D")},
    inputs=UNET_INPUTS,
    layers=transformers_in("down_blocks.0.attentions.0")
    | {"down_blocks.1.attentions.0.transformer_blocks.0.attn2": "cross"}
    | transformers_in("mid_block.attentions.0")
    | repeat_layers(2, {"up_blocks.0.attentions.{}.transformer_blocks.0.attn2": "cross"})
    | transformers_in("up_blocks.1.attentions.0", "up_blocks.1.attentions.1"),
)

# Like UNet3DConditionModel; the image latents also have temporal attention, with four channels.
FAMILIES["I2VGenXLUNet"] = Family(
    config=UNET_3D,
    inputs={
        **VIDEO_INPUTS,
        "fps": torch.tensor([8]),
        "image_latents": noise(1, 4, 2, 20, 18) / 2,
        "image_embeddings": noise(1, 16),
    },
    layers={"image_latents_temporal_encoder.attn1": "other", **unet_3d_layers()},
)


def kandinsky3_layers() -> Layers:
    """Return the layers of three levels down and three up: one self-attention and two cross-attentions each."""
    layers: Layers = {"add_time_condition.attention": "other"}
    for block in ("down_blocks.1", "down_blocks.2", "down_blocks.3", "up_blocks.0", "up_blocks.1", "up_blocks.2"):
        order = (0, 1, 2) if block.startswith("down") else (1, 2, 0)
        layers |= {f"{block}.attentions.{i}.attention": "cross" if i else () for i in order}
    return layers


# No attention at the top level, 320 tokens at the second; one call pools the text.
FAMILIES["Kandinsky3UNet"] = Family(
    config={"time_embedding_dim": 16, "groups": 4, "attention_head_dim": 8, "layers_per_block": 2}
    | {"block_out_channels": (16, 16, 16, 16), "cross_attention_dim": 16, "encoder_hid_dim": 8},
    inputs={
        "sample": noise(1, 4, 40, 32),
        "timestep": 3,
        "encoder_hidden_states": noise(1, 77, 8),
        "encoder_attention_mask": padding_mask(77, valid=50),
    },
    layers=kandinsky3_layers(),
)

# Image queries over the image, then text and image embeddings: 70 text, 4 pooled text, 4 image.
FAMILIES["StableCascadeUNet"] = Family(
    config={**CHANNELS, "timestep_ratio_embedding_dim": 8, "conditioning_dim": 16}
    | {"block_out_channels": (16, 16), "num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1)}
    | {"up_num_layers_per_block": (1, 1), "clip_text_in_channels": 16, "clip_text_pooled_in_channels": 8}
    | {"clip_image_in_channels": 8, "switch_level": (False,)},
    inputs={
        "sample": noise(1, 4, 20, 18),
        "timestep_ratio": torch.tensor([0.5]),
        "clip_text_pooled": noise(1, 1, 8),
        "clip_text": noise(1, 70, 16),
        "clip_img": noise(1, 1, 8),
    },
    layers=repeat_layers(2, {"down_blocks.{}.2.attention": ((360, 438),)})
    | repeat_layers(2, {"up_blocks.{}.2.attention": ((360, 438),)}),
)

# Like Stable Diffusion 1.5: 360 tokens at the top, 90 in the middle block.
FAMILIES["UNet2DConditionModel"] = Family(
    config={**UNET, "sample_size": (20, 18), "attention_head_dim": 2}
    | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
    | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
    inputs=UNET_INPUTS,
    layers=transformers_in(*PLACES),
)

# No text: one self-attention after each resnet.
FAMILIES["UNet2DModel"] = Family(
    config={"sample_size": (20, 18), "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    | {"down_block_types": ("AttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "AttnUpBlock2D")},
    inputs={"sample": noise(1, 3, 20, 18), "timestep": 3},
    layers=dict.fromkeys(PLACES, ()),
)

# Attention over the pixels of a frame, then twice over the frames of a pixel.
FAMILIES["UNet3DConditionModel"] = Family(config=UNET_3D, inputs=VIDEO_INPUTS, layers=unet_3d_layers())


def unet_motion_layers() -> Layers:
    """Return the layers of AnimateDiff: motion modules at every level, attention over pixels at some levels."""
    layers: Layers = {}
    for block, count in (
        ("down_blocks.0", 1),
        ("down_blocks.1", 1),
        ("mid_block", 1),
        ("up_blocks.0", 2),
        ("up_blocks.1", 2),
    ):
        for index in range(count):
            if block not in ("down_blocks.1", "up_blocks.0"):
                layers |= transformers_in(f"{block}.attentions.{index}")
            layers |= transformers_in(f"{block}.motion_modules.{index}", attn2=())
    return layers


# AnimateDiff: motion modules attend twice over the frames of a pixel; the text is repeated for each frame.
FAMILIES["UNetMotionModel"] = Family(
    config={**UNET, "block_out_channels": (32, 64), "num_attention_heads": 2, "motion_num_attention_heads": 2}
    | {"down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion")}
    | {"up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion")},
    inputs={**VIDEO_INPUTS, "encoder_hidden_states": noise(2, 77, 16)},
    layers=unet_motion_layers(),
)


def unet_spatio_temporal_layers() -> Layers:
    """Return attention over pixels, then over frames, each with cross-attention, at each place."""
    layers: Layers = {}
    for place in PLACES:
        layers |= self_then_cross(f"{place}.transformer_blocks", 1)
        layers |= self_then_cross(f"{place}.temporal_transformer_blocks", 1)
    return layers


# Stable Video Diffusion: the image embedding is the only key of cross-attention.
FAMILIES["UNetSpatioTemporalConditionModel"] = Family(
    config={"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal")}
    | {"up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")}
    | {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 16}
    | {"addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 24}
    | {"num_attention_heads": (2, 2), "num_frames": 2},
    inputs={
        "sample": noise(1, 2, 8, 20, 18),
        "timestep": 3,
        "encoder_hidden_states": noise(1, 1, 16),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]]),
    },
    layers=unet_spatio_temporal_layers(),
)

# Tokens of a codebook; the outer blocks have two cross-attentions and no self-attention.
FAMILIES["UVit2DModel"] = Family(
    config={"hidden_size": 32, "cond_embed_dim": 8, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20}
    | {"encoder_hidden_size": 16, "vocab_size": 32, "codebook_size": 24, "in_channels": 16}
    | {"block_out_channels": 16, "num_res_blocks": 1, "block_num_heads": 2, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "intermediate_size": 32, "sample_size": 20},
    inputs={
        "input_ids": torch.arange(360).remainder(32).view(1, 20, 18),
        "encoder_hidden_states": noise(1, 77, 16),
        "pooled_text_emb": noise(1, 8),
        "micro_conds": torch.tensor([[512.0, 512.0, 0.0, 0.0, 6.0]]),
    },
    layers={"down_block.attention_blocks.0.attn1": "cross", "down_block.attention_blocks.0.attn2": "cross"}
    | self_then_cross("transformer_layers")
    | {"up_block.attention_blocks.0.attn1": "cross", "up_block.attention_blocks.0.attn2": "cross"},
)

WITHOUT: dict[str, str] = {
    "MotionAdapter": "a container; its parts are supported",
    "UNet1DModel": "some blocks compute softmax by hand",
}
