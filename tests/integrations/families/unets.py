"""U-Nets."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    DreamLiteUNetModel,
    I2VGenXLUNet,
    Kandinsky3UNet,
    StableCascadeUNet,
    UNet2DConditionModel,
    UNet2DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
    UVit2DModel,
)

from families.tiny import Builder, Tiny, noise

UNET = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 16,
}


def _self_then_cross(blocks: str, count: int) -> dict[str, tuple[()] | str]:
    return {f"{blocks}.{i}.{name}": keys for i in range(count) for name, keys in (("attn1", ()), ("attn2", "cross"))}


def _blocks(*places: str, attn2: tuple[()] | str = "cross") -> dict[str, tuple[()] | str]:
    names = [f"{place}.transformer_blocks.0" for place in places]
    return {f"{name}.{part}": keys for name in names for part, keys in (("attn1", ()), ("attn2", attn2))}


def _unet_inputs() -> dict[str, Any]:
    return {"sample": noise(1, 4, 20, 18), "timestep": 3, "encoder_hidden_states": noise(1, 77, 16)}


def _video_unet_inputs(texts: int) -> dict[str, Any]:
    return {"sample": noise(1, 4, 2, 20, 18), "timestep": 3, "encoder_hidden_states": noise(texts, 77, 16)}


def unet_2d_condition() -> Tiny:
    """As Stable Diffusion 1.5: 360 tokens at the top, 90 in the middle block."""
    model = UNet2DConditionModel(
        sample_size=(20, 18),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=2,
        **UNET,
    )
    places = ("down_blocks.0.attentions.0", "mid_block.attentions.0", "up_blocks.1.attentions.0")
    return Tiny(model, _unet_inputs(), _blocks(*places, "up_blocks.1.attentions.1"))


def _spatial_then_temporal(*places: str) -> dict[str, tuple[()] | str]:
    layers = {}
    for place in places:
        layers |= _blocks(place) | _blocks(place.replace("attentions", "temp_attentions"), attn2=())
    return layers


def unet_3d_condition() -> Tiny:
    """Attention over the pixels of a frame, then twice over the frames of a pixel."""
    model = UNet3DConditionModel(
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=8,
        **UNET,
    )
    places = ("down_blocks.0.attentions.0", "mid_block.attentions.0", "up_blocks.1.attentions.0")
    layers = _spatial_then_temporal(*places, "up_blocks.1.attentions.1")
    return Tiny(model, _video_unet_inputs(1), _blocks("transformer_in", attn2=()) | layers)


def unet_motion() -> Tiny:
    """AnimateDiff: motion modules attend twice over the frames of a pixel; the text comes once for each frame."""
    model = UNetMotionModel(
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        up_block_types=("UpBlockMotion", "CrossAttnUpBlockMotion"),
        num_attention_heads=2,
        motion_num_attention_heads=2,
        **(UNET | {"block_out_channels": (32, 64)}),
    )
    layers = {}
    for block, count in (
        ("down_blocks.0", 1),
        ("down_blocks.1", 1),
        ("mid_block", 1),
        ("up_blocks.0", 2),
        ("up_blocks.1", 2),
    ):
        for index in range(count):
            if block not in ("down_blocks.1", "up_blocks.0"):
                layers |= _blocks(f"{block}.attentions.{index}")
            layers |= _blocks(f"{block}.motion_modules.{index}", attn2=())
    return Tiny(model, _video_unet_inputs(2), layers)


def unet_spatio_temporal_condition() -> Tiny:
    """Stable Video Diffusion: the only key of a cross-attention is the image embedding."""
    model = UNetSpatioTemporalConditionModel(
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        block_out_channels=(32, 64),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=24,
        layers_per_block=1,
        cross_attention_dim=16,
        num_attention_heads=(2, 2),
        num_frames=2,
    )
    inputs = {
        "sample": noise(1, 2, 8, 20, 18),
        "timestep": 3,
        "encoder_hidden_states": noise(1, 1, 16),
        "added_time_ids": torch.tensor([[6.0, 127.0, 0.02]]),
    }
    places = (
        "down_blocks.0.attentions.0",
        "mid_block.attentions.0",
        "up_blocks.1.attentions.0",
        "up_blocks.1.attentions.1",
    )
    layers = {}
    for place in places:
        layers |= _self_then_cross(f"{place}.transformer_blocks", 1)
        layers |= _self_then_cross(f"{place}.temporal_transformer_blocks", 1)
    return Tiny(model, inputs, layers)


def kandinsky_3() -> Tiny:
    """No attention at the top level: 320 tokens at the second; one call pools the text."""
    model = Kandinsky3UNet(
        time_embedding_dim=16,
        groups=4,
        attention_head_dim=8,
        layers_per_block=2,
        block_out_channels=(16, 16, 16, 16),
        cross_attention_dim=16,
        encoder_hid_dim=8,
    )
    inputs = {
        "sample": noise(1, 4, 40, 32),
        "timestep": 3,
        "encoder_hidden_states": noise(1, 77, 8),
        "encoder_attention_mask": (torch.arange(77) < 50)[None],
    }
    layers = {"add_time_condition.attention": "other"}
    for level in (1, 2, 3):
        layers |= {f"down_blocks.{level}.attentions.{i}.attention": "cross" if i else () for i in (0, 1, 2)}
    for level in (0, 1, 2):
        layers |= {f"up_blocks.{level}.attentions.{i}.attention": "cross" if i else () for i in (1, 2, 0)}
    return Tiny(model, inputs, layers)


def i2vgen_xl() -> Tiny:
    """As UNet3DConditionModel; the image latents have a temporal attention of their own, of four channels."""
    model = I2VGenXLUNet(
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        attention_head_dim=8,
        **UNET,
    )
    inputs = {
        **_video_unet_inputs(1),
        "fps": torch.tensor([8]),
        "image_latents": noise(1, 4, 2, 20, 18) / 2,
        "image_embeddings": noise(1, 16),
    }
    places = ("down_blocks.0.attentions.0", "mid_block.attentions.0", "up_blocks.1.attentions.0")
    layers = _blocks("transformer_in", attn2=()) | _spatial_then_temporal(*places, "up_blocks.1.attentions.1")
    return Tiny(model, inputs, {"image_latents_temporal_encoder.attn1": "other"} | layers)


def dreamlite() -> Tiny:
    """Self-attention in some levels only; one key head, repeated before the call."""
    model = DreamLiteUNetModel(
        sample_size=(20, 18),
        down_block_types=("DreamLiteCrossAttnDownBlock2D", "DreamLiteCrossAttnNoSelfAttnDownBlock2D"),
        up_block_types=("DreamLiteCrossAttnNoSelfAttnUpBlock2D", "DreamLiteCrossAttnUpBlock2D"),
        attention_head_dim=2,
        **UNET,
    )
    cross = {
        f"{place}.transformer_blocks.0.attn2": "cross"
        for place in ("up_blocks.0.attentions.0", "up_blocks.0.attentions.1")
    }
    return Tiny(
        model,
        _unet_inputs(),
        _blocks("down_blocks.0.attentions.0")
        | {"down_blocks.1.attentions.0.transformer_blocks.0.attn2": "cross"}
        | _blocks("mid_block.attentions.0")
        | cross
        | _blocks("up_blocks.1.attentions.0", "up_blocks.1.attentions.1"),
    )


def unet_2d() -> Tiny:
    """No text: one self-attention after each resnet."""
    model = UNet2DModel(
        sample_size=(20, 18),
        down_block_types=("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
    )
    places = ("down_blocks.0.attentions.0", "mid_block.attentions.0", "up_blocks.1.attentions.0")
    layers = dict.fromkeys((*places, "up_blocks.1.attentions.1"), ())
    return Tiny(model, {"sample": noise(1, 3, 20, 18), "timestep": 3}, layers)


def uvit_2d() -> Tiny:
    """Tokens of a codebook; the outer blocks have two cross-attentions and no self-attention."""
    model = UVit2DModel(
        hidden_size=32,
        cond_embed_dim=8,
        micro_cond_encode_dim=4,
        micro_cond_embed_dim=20,
        encoder_hidden_size=16,
        vocab_size=32,
        codebook_size=24,
        in_channels=16,
        block_out_channels=16,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        sample_size=20,
    )
    inputs = {
        "input_ids": torch.arange(360).remainder(32).view(1, 20, 18),
        "encoder_hidden_states": noise(1, 77, 16),
        "pooled_text_emb": noise(1, 8),
        "micro_conds": torch.tensor([[512.0, 512.0, 0.0, 0.0, 6.0]]),
    }
    outer = {part: "cross" for part in ("attn1", "attn2")}
    return Tiny(
        model,
        inputs,
        {f"down_block.attention_blocks.0.{part}": keys for part, keys in outer.items()}
        | _self_then_cross("transformer_layers", 2)
        | {f"up_block.attention_blocks.0.{part}": keys for part, keys in outer.items()},
    )


def stable_cascade() -> Tiny:
    """Picture queries over picture and then text and image embeddings: 70 text, 4 pooled text, 4 image."""
    model = StableCascadeUNet(
        in_channels=4,
        out_channels=4,
        timestep_ratio_embedding_dim=8,
        conditioning_dim=16,
        block_out_channels=(16, 16),
        num_attention_heads=(2, 2),
        down_num_layers_per_block=(1, 1),
        up_num_layers_per_block=(1, 1),
        clip_text_in_channels=16,
        clip_text_pooled_in_channels=8,
        clip_image_in_channels=8,
        switch_level=(False,),
    )
    inputs = {
        "sample": noise(1, 4, 20, 18),
        "timestep_ratio": torch.tensor([0.5]),
        "clip_text_pooled": noise(1, 1, 8),
        "clip_text": noise(1, 70, 16),
        "clip_img": noise(1, 1, 8),
    }
    places = ("down_blocks.0", "down_blocks.1", "up_blocks.0", "up_blocks.1")
    return Tiny(model, inputs, {f"{place}.2.attention": ((360, 438),) for place in places})


FAMILIES: dict[str, Builder] = {
    "DreamLiteUNetModel": dreamlite,
    "I2VGenXLUNet": i2vgen_xl,
    "Kandinsky3UNet": kandinsky_3,
    "StableCascadeUNet": stable_cascade,
    "UNet2DConditionModel": unet_2d_condition,
    "UNet2DModel": unet_2d,
    "UNet3DConditionModel": unet_3d_condition,
    "UNetMotionModel": unet_motion,
    "UNetSpatioTemporalConditionModel": unet_spatio_temporal_condition,
    "UVit2DModel": uvit_2d,
}

WITHOUT: dict[str, str] = {
    "MotionAdapter": "a container; its parts are supported",
    "UNet1DModel": "some blocks compute softmax by hand",
}
