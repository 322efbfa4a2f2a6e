"""ControlNets."""

from __future__ import annotations

import torch
from diffusers import ZImageControlNetModel, ZImageTransformer2DModel

from families.family import (
    CHANNELS,
    HEADS,
    TEXT_AT_3,
    TEXT_AT_HALF,
    Family,
    noise,
    padding_mask,
    positions,
    randomize,
    repeat_layers,
    self_then_cross,
    transformers_in,
)
from families.images import QWEN_IMAGE, QWEN_IMAGE_INPUTS, Z_IMAGE, Z_IMAGE_INPUTS
from families.unets import UNET, UNET_INPUTS

FAMILIES: dict[str, Family] = {}

CONTROLNET = {**UNET, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 2}
CONTROLNET |= {"conditioning_embedding_out_channels": (8, 8)}
SD3_CONTROLNET = {**HEADS, **CHANNELS, "sample_size": 40, "num_layers": 2, "caption_projection_dim": 32}
SD3_CONTROLNET |= {"pooled_projection_dim": 16, "pos_embed_max_size": 32}

# The first half of UNet2DConditionModel.
FAMILIES["ControlNetModel"] = Family(
    config=CONTROLNET,
    inputs={**UNET_INPUTS, "controlnet_cond": noise(1, 3, 40, 36)},
    layers=transformers_in("down_blocks.0.attentions.0", "mid_block.attentions.0"),
    prepare=randomize("controlnet_down_blocks", "controlnet_mid_block"),
)

# Like ControlNetModel; a small nn.MultiheadAttention mixes one token per control and one token of the image.
FAMILIES["ControlNetUnionModel"] = Family(
    config={**CONTROLNET, "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 48}
    | {"num_control_type": 6, "num_trans_channel": 16, "num_trans_head": 2, "num_proj_channel": 16},
    inputs={
        **UNET_INPUTS,
        "controlnet_cond": [noise(1, 3, 40, 36)],
        "control_type": torch.tensor([[0, 1, 0, 0, 0, 0]]),
        "control_type_idx": [1],
    },
    layers=transformers_in("down_blocks.0.attentions.0", "mid_block.attentions.0"),
    prepare=randomize("controlnet_down_blocks", "controlnet_mid_block"),
)

# Like Flux: text first.
FAMILIES["FluxControlNetModel"] = Family(
    config={**HEADS, "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}
    | {"joint_attention_dim": 16, "pooled_projection_dim": 16, "axes_dims_rope": [4, 6, 6], "num_mode": None},
    inputs={
        "hidden_states": noise(1, 380, 4),
        "controlnet_cond": noise(1, 380, 4) / 2,
        "controlnet_mode": None,
        "pooled_projections": noise(1, 16),
        "img_ids": positions(20, 19),
        "txt_ids": torch.zeros(70, 3),
        **TEXT_AT_HALF,
    },
    layers={"transformer_blocks.0.attn": ((0, 70),), "single_transformer_blocks.0.attn": ((0, 70),)},
    prepare=randomize("controlnet_blocks", "controlnet_single_blocks"),
)

# Like Flux: a token for the kind of control, text, image.
FAMILIES["FluxControlNetModel, union"] = FAMILIES["FluxControlNetModel"].variant(
    config={"num_mode": 2},
    inputs={"controlnet_mode": torch.tensor([[1]])},
    layers={"transformer_blocks.0.attn": ((0, 71),), "single_transformer_blocks.0.attn": ((0, 71),)},
)

# Self- and cross-attention; padding of the text is a learned embedding, unmasked.
FAMILIES["HunyuanDiT2DControlNetModel"] = Family(
    config={"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2}
    | {"sample_size": 40, "hidden_size": 16, "transformer_num_layers": 6, "mlp_ratio": 1.0}
    | {"cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 16}
    | {"text_len": 20, "text_len_t5": 50},
    inputs={
        "hidden_states": noise(1, 4, 40, 38),
        "timestep": torch.tensor([3.0]),
        "controlnet_cond": noise(1, 4, 40, 38) / 2,
        "encoder_hidden_states": noise(1, 20, 16),
        "text_embedding_mask": padding_mask(20, valid=10).long(),
        "encoder_hidden_states_t5": noise(1, 50, 16),
        "text_embedding_mask_t5": padding_mask(50, valid=30).long(),
        "image_meta_size": torch.tensor([[320.0, 304.0, 320.0, 304.0, 0.0, 0.0]]),
        "style": torch.tensor([0]),
        "image_rotary_emb": (noise(380, 8).cos(), noise(380, 8).sin()),
    },
    layers=self_then_cross("blocks"),
    prepare=randomize("controlnet_blocks"),
)

# Like Qwen-Image: text first.
FAMILIES["QwenImageControlNetModel"] = Family(
    config=QWEN_IMAGE,
    inputs={**QWEN_IMAGE_INPUTS, "controlnet_cond": noise(1, 380, 16) / 2},
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ((0, 70),)}),
    prepare=randomize("controlnet_blocks"),
)

# Like Stable Diffusion 3: image first.
FAMILIES["SD3ControlNetModel"] = Family(
    config={**SD3_CONTROLNET, "joint_attention_dim": 16},
    inputs={
        "hidden_states": noise(1, 4, 40, 38),
        "controlnet_cond": noise(1, 4, 40, 38) / 2,
        "pooled_projections": noise(1, 16),
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ((380, 450),)}),
    prepare=randomize("controlnet_blocks"),
)

# ControlNets of Stable Diffusion 3.5: image tokens only, already embedded by the transformer.
FAMILIES["SD3ControlNetModel, without text"] = Family(
    config={**SD3_CONTROLNET, "joint_attention_dim": None, "pos_embed_type": None, "use_pos_embed": False},
    inputs={
        "hidden_states": noise(1, 380, 32),
        "controlnet_cond": noise(1, 4, 40, 38) / 2,
        "pooled_projections": noise(1, 16),
        "timestep": torch.tensor([3]),
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ()}),
    prepare=randomize("controlnet_blocks"),
)

CONTROLNET_XS_PLACES = (
    "down_blocks.0.base_attentions.0",
    "down_blocks.0.ctrl_attentions.0",
    "down_blocks.0.base_attentions.1",
    "down_blocks.0.ctrl_attentions.1",
    "mid_block.base_midblock.attentions.0",
    "mid_block.ctrl_midblock.attentions.0",
    "up_blocks.1.attentions.0",
    "up_blocks.1.attentions.1",
    "up_blocks.1.attentions.2",
)
# A U-Net with a narrow control branch, whose tokens depend on the latents through convolutions.
FAMILIES["UNetControlNetXSModel"] = Family(
    config={"sample_size": 20, "block_out_channels": (16, 32), "norm_num_groups": 8, "cross_attention_dim": 16}
    | {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "num_attention_heads": 2}
    | {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "ctrl_num_attention_heads": 2}
    | {"ctrl_conditioning_embedding_out_channels": (8, 8), "ctrl_block_out_channels": (8, 16)}
    | {"ctrl_max_norm_num_groups": 4},
    inputs={**UNET_INPUTS, "controlnet_cond": noise(1, 3, 40, 36)},
    layers=transformers_in(*CONTROLNET_XS_PLACES),
)


def connect_z_image(model: ZImageControlNetModel) -> None:
    """Randomize the outputs of the control layers, and connect the embedders of a transformer."""
    randomize("control_layers.0.after_proj", "control_layers.1.after_proj")(model)
    ZImageControlNetModel.from_transformer(model, ZImageTransformer2DModel(**Z_IMAGE))


# Like Z-Image: image first, then text; the control refiner gets only control tokens, on the image's grid.
FAMILIES["ZImageControlNetModel"] = Family(
    config={"dim": 32, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "control_in_dim": 4}
    | {"control_layers_places": [0, 1], "control_refiner_layers_places": [0], "add_control_noise_refiner": None},
    inputs={**Z_IMAGE_INPUTS, "control_context": [noise(4, 1, 40, 38) / 2]},
    layers={
        "noise_refiner.0.attention": ((380, 384),),
        "context_refiner.0.attention": "other",
        "control_noise_refiner.0.attention": "other",
    }
    | repeat_layers(2, {"control_layers.{}.attention": ((380, 480),)}),
    prepare=connect_z_image,
)

# The control refiner runs first, on the sum of control and image.
FAMILIES["ZImageControlNetModel, control refiner"] = FAMILIES["ZImageControlNetModel"].variant(
    config={"add_control_noise_refiner": "control_noise_refiner"},
    layers={
        "control_noise_refiner.0.attention": ((380, 384),),
        "noise_refiner.0.attention": ((380, 384),),
        "context_refiner.0.attention": "other",
    }
    | repeat_layers(2, {"control_layers.{}.attention": ((380, 480),)}),
)

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
