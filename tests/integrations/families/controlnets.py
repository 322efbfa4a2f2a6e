"""Control nets."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    FluxControlNetModel,
    HunyuanDiT2DControlNetModel,
    QwenImageControlNetModel,
    SD3ControlNetModel,
    UNetControlNetXSModel,
    ZImageControlNetModel,
    ZImageTransformer2DModel,
)
from torch import Tensor, nn

from families.tiny import Builder, Tiny, noise

TEXT_MASK = (torch.arange(70) < 50)[None]
UNET = {
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "cross_attention_dim": 16,
}


def _grid_ids(height: int, width: int) -> Tensor:
    grid = torch.cartesian_prod(torch.arange(float(height)), torch.arange(float(width)))
    return torch.cat([torch.zeros(height * width, 1), grid], 1)


def _qwen_image_inputs() -> dict[str, Any]:
    return {
        "hidden_states": noise(1, 380, 16),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_hidden_states_mask": TEXT_MASK.long(),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 20, 19)]],
    }


def _z_image(**options: int) -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[4, 6, 6],
        axes_lens=[512, 64, 64],
        **options,
    )


def _z_image_inputs() -> dict[str, Any]:
    return {"x": [noise(4, 1, 40, 38)], "t": torch.tensor([0.5]), "cap_feats": [noise(70, 16)]}


def _self_then_cross(blocks: str, count: int) -> dict[str, tuple[()] | str]:
    return {f"{blocks}.{i}.{name}": keys for i in range(count) for name, keys in (("attn1", ()), ("attn2", "cross"))}


def _blocks(*places: str, attn2: tuple[()] | str = "cross") -> dict[str, tuple[()] | str]:
    names = [f"{place}.transformer_blocks.0" for place in places]
    return {f"{name}.{part}": keys for name in names for part, keys in (("attn1", ()), ("attn2", attn2))}


def _unet_inputs() -> dict[str, Any]:
    return {"sample": noise(1, 4, 20, 18), "timestep": 3, "encoder_hidden_states": noise(1, 77, 16)}


def _video_unet_inputs(texts: int) -> dict[str, Any]:
    return {"sample": noise(1, 4, 2, 20, 18), "timestep": 3, "encoder_hidden_states": noise(texts, 77, 16)}


def _awake(layers: nn.Module) -> None:
    """Gives the zero output layers of a ControlNet weights."""
    for weight in layers.parameters():
        nn.init.normal_(weight, std=0.1)


def flux_controlnet() -> Tiny:
    """As Flux: text first."""
    return _flux_controlnet(None)


def flux_controlnet_union() -> Tiny:
    """As Flux: a token for the kind of control, text, picture."""
    return _flux_controlnet(2)


def _flux_controlnet(num_mode: int | None) -> Tiny:
    model = FluxControlNetModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        pooled_projection_dim=16,
        axes_dims_rope=[4, 6, 6],
        num_mode=num_mode,
    )
    _awake(model.controlnet_blocks)
    _awake(model.controlnet_single_blocks)
    inputs = {
        "hidden_states": noise(1, 380, 4),
        "controlnet_cond": noise(1, 380, 4) / 2,
        "controlnet_mode": None if num_mode is None else torch.tensor([[1]]),
        "encoder_hidden_states": noise(1, 70, 16),
        "pooled_projections": noise(1, 16),
        "timestep": torch.tensor([0.5]),
        "img_ids": _grid_ids(20, 19),
        "txt_ids": torch.zeros(70, 3),
    }
    text = 70 if num_mode is None else 71
    layers = {"transformer_blocks.0.attn": ((0, text),), "single_transformer_blocks.0.attn": ((0, text),)}
    return Tiny(model, inputs, layers)


def qwen_image_controlnet() -> Tiny:
    """As Qwen-Image: text first."""
    model = QwenImageControlNetModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    _awake(model.controlnet_blocks)
    inputs = {**_qwen_image_inputs(), "controlnet_cond": noise(1, 380, 16) / 2}
    return Tiny(model, inputs, {f"transformer_blocks.{i}.attn": ((0, 70),) for i in range(2)})


def sd3_controlnet() -> Tiny:
    """As Stable Diffusion 3: picture first."""
    model = SD3ControlNetModel(
        sample_size=40,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=32,
    )
    _awake(model.controlnet_blocks)
    inputs = {
        "hidden_states": noise(1, 4, 40, 38),
        "controlnet_cond": noise(1, 4, 40, 38) / 2,
        "encoder_hidden_states": noise(1, 70, 16),
        "pooled_projections": noise(1, 16),
        "timestep": torch.tensor([3]),
    }
    return Tiny(model, inputs, {f"transformer_blocks.{i}.attn": ((380, 450),) for i in range(2)})


def sd3_controlnet_without_text() -> Tiny:
    """The ControlNets of Stable Diffusion 3.5: picture tokens alone, already embedded by the transformer."""
    model = SD3ControlNetModel(
        sample_size=40,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=None,
        caption_projection_dim=32,
        pooled_projection_dim=16,
        out_channels=4,
        pos_embed_max_size=32,
        pos_embed_type=None,
        use_pos_embed=False,
    )
    _awake(model.controlnet_blocks)
    inputs = {
        "hidden_states": noise(1, 380, 32),
        "controlnet_cond": noise(1, 4, 40, 38) / 2,
        "pooled_projections": noise(1, 16),
        "timestep": torch.tensor([3]),
    }
    return Tiny(model, inputs, {f"transformer_blocks.{i}.attn": () for i in range(2)})


def _z_image_controlnet(refiner: str | None) -> ZImageControlNetModel:
    model = ZImageControlNetModel(
        control_layers_places=[0, 1],
        control_refiner_layers_places=[0],
        control_in_dim=4,
        add_control_noise_refiner=refiner,
        dim=32,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
    )
    for layer in model.control_layers:
        _awake(layer.after_proj)
    return ZImageControlNetModel.from_transformer(model, _z_image())


def z_image_controlnet() -> Tiny:
    """Picture first, then text, as Z-Image; the control's refiner sees the control alone, on the picture's grid."""
    layers = {
        "noise_refiner.0.attention": ((380, 384),),
        "context_refiner.0.attention": "other",
        "control_noise_refiner.0.attention": "other",
        "control_layers.0.attention": ((380, 480),),
        "control_layers.1.attention": ((380, 480),),
    }
    return Tiny(_z_image_controlnet(None), {**_z_image_inputs(), "control_context": [noise(4, 1, 40, 38) / 2]}, layers)


def z_image_controlnet_refiner() -> Tiny:
    """The control's refiner runs first, over control plus picture."""
    layers = {
        "control_noise_refiner.0.attention": ((380, 384),),
        "noise_refiner.0.attention": ((380, 384),),
        "context_refiner.0.attention": "other",
        "control_layers.0.attention": ((380, 480),),
        "control_layers.1.attention": ((380, 480),),
    }
    inputs = {**_z_image_inputs(), "control_context": [noise(4, 1, 40, 38) / 2]}
    return Tiny(_z_image_controlnet("control_noise_refiner"), inputs, layers)


def hunyuan_dit_controlnet() -> Tiny:
    """Self- and cross-attention; padding of the text is a learned embedding, unmasked."""
    model = HunyuanDiT2DControlNetModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        patch_size=2,
        sample_size=40,
        hidden_size=16,
        transformer_num_layers=6,
        mlp_ratio=1.0,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        text_len=20,
        text_len_t5=50,
    )
    _awake(model.controlnet_blocks)
    inputs = {
        "hidden_states": noise(1, 4, 40, 38),
        "timestep": torch.tensor([3.0]),
        "controlnet_cond": noise(1, 4, 40, 38) / 2,
        "encoder_hidden_states": noise(1, 20, 16),
        "text_embedding_mask": TEXT_MASK[:, 40:60].long(),
        "encoder_hidden_states_t5": noise(1, 50, 16),
        "text_embedding_mask_t5": TEXT_MASK[:, 20:].long(),
        "image_meta_size": torch.tensor([[320.0, 304.0, 320.0, 304.0, 0.0, 0.0]]),
        "style": torch.tensor([0]),
        "image_rotary_emb": (noise(380, 8).cos(), noise(380, 8).sin()),
    }
    return Tiny(model, inputs, _self_then_cross("blocks", 2))


def controlnet() -> Tiny:
    """The first half of UNet2DConditionModel."""
    model = ControlNetModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        attention_head_dim=2,
        conditioning_embedding_out_channels=(8, 8),
        **UNET,
    )
    _awake(model.controlnet_down_blocks)
    _awake(model.controlnet_mid_block)
    inputs = {**_unet_inputs(), "controlnet_cond": noise(1, 3, 40, 36)}
    return Tiny(model, inputs, _blocks("down_blocks.0.attentions.0", "mid_block.attentions.0"))


def controlnet_union() -> Tiny:
    """As ControlNetModel; a small nn.MultiheadAttention mixes one token for each control and one for the picture."""
    model = ControlNetUnionModel(
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        attention_head_dim=2,
        conditioning_embedding_out_channels=(8, 8),
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=48,
        num_control_type=6,
        num_trans_channel=16,
        num_trans_head=2,
        num_proj_channel=16,
        **UNET,
    )
    _awake(model.controlnet_down_blocks)
    _awake(model.controlnet_mid_block)
    inputs = {
        **_unet_inputs(),
        "controlnet_cond": [noise(1, 3, 40, 36)],
        "control_type": torch.tensor([[0, 1, 0, 0, 0, 0]]),
        "control_type_idx": [1],
    }
    return Tiny(model, inputs, _blocks("down_blocks.0.attentions.0", "mid_block.attentions.0"))


def controlnet_xs() -> Tiny:
    """A U-Net and a narrow control beside it; control tokens see the latents through convolutions."""
    model = UNetControlNetXSModel(
        sample_size=20,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(16, 32),
        norm_num_groups=8,
        cross_attention_dim=16,
        num_attention_heads=2,
        ctrl_conditioning_embedding_out_channels=(8, 8),
        ctrl_block_out_channels=(8, 16),
        ctrl_num_attention_heads=2,
        ctrl_max_norm_num_groups=4,
    )
    inputs = {**_unet_inputs(), "controlnet_cond": noise(1, 3, 40, 36)}
    down = [f"down_blocks.0.{half}_attentions.{i}" for i in range(2) for half in ("base", "ctrl")]
    middle = [f"mid_block.{half}_midblock.attentions.0" for half in ("base", "ctrl")]
    return Tiny(model, inputs, _blocks(*down, *middle, *(f"up_blocks.1.attentions.{i}" for i in range(3))))


FAMILIES: dict[str, Builder] = {
    "ControlNetModel": controlnet,
    "ControlNetUnionModel": controlnet_union,
    "FluxControlNetModel": flux_controlnet,
    "FluxControlNetModel, union": flux_controlnet_union,
    "HunyuanDiT2DControlNetModel": hunyuan_dit_controlnet,
    "QwenImageControlNetModel": qwen_image_controlnet,
    "SD3ControlNetModel": sd3_controlnet,
    "SD3ControlNetModel, without text": sd3_controlnet_without_text,
    "UNetControlNetXSModel": controlnet_xs,
    "ZImageControlNetModel": z_image_controlnet,
    "ZImageControlNetModel, control refiner": z_image_controlnet_refiner,
}

WITHOUT: dict[str, str] = {
    "CosmosControlNetModel": "not tested, because it needs torchvision",
    "SparseControlNetModel": "its latents are set to zero, so it denoises nothing",
    "SanaControlNetModel": "linear self-attention; softmax only to the text",
    "ControlNetXSAdapter": "a container; its parts are supported",
    "FluxMultiControlNetModel": "a container; its parts are supported",
    "HunyuanDiT2DMultiControlNetModel": "a container; its parts are supported",
    "MultiControlNetModel": "a container; its parts are supported",
    "MultiControlNetUnionModel": "a container; its parts are supported",
    "QwenImageMultiControlNetModel": "a container; its parts are supported",
    "SD3MultiControlNetModel": "a container; its parts are supported",
}
