"""Transformers that make images."""

from __future__ import annotations

from typing import Any

import tiny_transformers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed, get_2d_rotary_pos_embed_lumina
from diffusers.models.transformers.transformer_2d_dreamlite import DreamLiteTransformer2DModel
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVCache,
    Flux2KVParallelSelfAttnProcessor,
)
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0
from torch import Tensor, nn

from families.family import (
    CHANNELS,
    HEADS,
    TEXT,
    TEXT_AT_3,
    TEXT_AT_HALF,
    TEXT_MASK,
    Family,
    Layers,
    noise,
    padding_mask,
    positions,
    randomize_zero_weights,
    repeat_layers,
    self_then_cross,
)

FAMILIES: dict[str, Family] = {}

FLUX = {**HEADS, "in_channels": 4, "num_layers": 1, "num_single_layers": 2}
FLUX_INPUTS = {
    "hidden_states": noise(1, 360, 4),
    "encoder_hidden_states": noise(1, 70, 32),
    "img_ids": positions(20, 18),
    "txt_ids": torch.zeros(70, 3),
}
FLUX2_INPUTS = {"encoder_hidden_states": noise(1, 70, 32), "timestep": torch.tensor([0.7])}
JOYIMAGE = {"in_channels": 4, "hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "text_dim": 16}
JOYIMAGE |= {"mlp_width_ratio": 1.0, "rope_dim_list": [4, 6, 6]}
COGVIEW = {**HEADS, **CHANNELS, "num_layers": 2, "text_embed_dim": 16, "time_embed_dim": 8, "condition_dim": 4}
QWEN_IMAGE = {**HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 16}
QWEN_IMAGE |= {"axes_dims_rope": (4, 6, 6)}
QWEN_IMAGE_INPUTS = {
    "hidden_states": noise(1, 380, 16),
    "encoder_hidden_states_mask": TEXT_MASK.long(),
    "img_shapes": [[(1, 20, 19)]],
    **TEXT_AT_HALF,
}
Z_IMAGE: dict[str, Any] = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2}
Z_IMAGE |= {"n_kv_heads": 2, "cap_feat_dim": 16, "axes_dims": [4, 6, 6], "axes_lens": [512, 64, 64]}
Z_IMAGE_INPUTS = {"x": [noise(4, 1, 40, 38)], "t": torch.tensor([0.5]), "cap_feats": [noise(70, 16)]}


def flux_layers(*keys: tuple[int, int]) -> Layers:
    """Return the layers of one dual-stream block and two single-stream blocks with the same keys."""
    return {"transformer_blocks.0.attn": keys, **repeat_layers(2, {"single_transformer_blocks.{}.attn": keys})}


def flux2_positions(height: int, width: int, frame: int = 0) -> Tensor:
    """Return (frame, row, column, 0) of each token of an image."""
    return nn.functional.pad(positions(height, width, frame), (0, 1))


def flux2_text_positions(length: int) -> Tensor:
    """Return (0, 0, 0, index) of each text token."""
    return nn.functional.pad(torch.arange(float(length))[:, None], (3, 0))


# Eight register tokens, then text, then image in one sequence.
FAMILIES["AuraFlowTransformer2DModel"] = Family(
    config={**HEADS, **CHANNELS, "sample_size": 40, "patch_size": 2, "num_mmdit_layers": 1}
    | {"num_single_dit_layers": 2, "joint_attention_dim": 32, "caption_projection_dim": 32}
    | {"pos_embed_max_size": 400},
    inputs={
        "hidden_states": noise(1, 4, 40, 36),
        "encoder_hidden_states": noise(1, 70, 32),
        "timestep": torch.tensor([0.5]),
    },
    layers={"joint_transformer_blocks.0.attn": ((0, 78),)}
    | repeat_layers(2, {"single_transformer_blocks.{}.attn": ((0, 78),)}),
)

# The text becomes 60 gist tokens before the image; some layers also read the text itself.
BRIA_FIBO2_LAYERS: Layers = {
    "noise_refiner.0.attention": (),
    "perceiver.layers.0.cross_attention": "other",
    "perceiver.layers.0.self_attention": "other",
    **repeat_layers(2, {"layers.{}.attention": ((0, 60),)}),
    "layers.1.cross_attention": "cross",
}
FAMILIES["BriaFibo2Transformer2DModel"] = Family(
    config={"in_channels": 4, "patch_size": 2, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2}
    | {"cap_feat_dim": 16, "injection_layer_ids": (1,), "perceiver_num_layers": 1}
    | {"min_num_gist_tokens": 30, "max_num_gist_tokens": 70, "gist_step": 10}
    | {"gist_min_text_len": 16, "gist_max_text_len": 64, "axes_dims": (4, 6, 6), "axes_lens": (128, 32, 32)},
    inputs={
        "hidden_states": noise(1, 4, 40, 36),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": noise(1, 2, 70, 16),
        "encoder_attention_mask": TEXT_MASK,
    },
    layers=BRIA_FIBO2_LAYERS,
)

# Gist tokens, image, then tokens of a reference image, which is a separate argument.
FAMILIES["BriaFibo2Transformer2DModel, edit"] = FAMILIES["BriaFibo2Transformer2DModel"].variant(
    inputs={"context_latents": [noise(1, 4, 20, 20)]},
    layers=BRIA_FIBO2_LAYERS
    | {"noise_refiner.0.attention": ((360, 460),)}
    | repeat_layers(2, {"layers.{}.attention": ((0, 60), (420, 520))}),
)

# Two prompts of different lengths: the gist tokens come after the image, with a padding mask.
FAMILIES["BriaFibo2Transformer2DModel, two prompts"] = FAMILIES["BriaFibo2Transformer2DModel"].variant(
    inputs={
        "hidden_states": noise(2, 4, 40, 36),
        "timestep": torch.tensor([0.5, 0.5]),
        "encoder_hidden_states": noise(2, 2, 70, 16),
        "encoder_attention_mask": torch.cat([TEXT_MASK, padding_mask(70, valid=20)]),
    },
    layers=BRIA_FIBO2_LAYERS | repeat_layers(2, {"layers.{}.attention": ((360, 420),)}),
)

# Text and image in one sequence, text first; half of the text's channels change at each block.
BRIA_FIBO_MASK = torch.cat([TEXT_MASK, torch.ones(1, 360, dtype=torch.bool)], 1)
FAMILIES["BriaFiboTransformer2DModel"] = Family(
    config={**FLUX, "joint_attention_dim": 32, "axes_dims_rope": [4, 4, 8], "text_encoder_dim": 16},
    inputs={
        **FLUX_INPUTS,
        "text_encoder_layers": [noise(1, 70, 16)] * 3,
        "timestep": torch.tensor([500.0]),
        "joint_attention_kwargs": {"attention_mask": BRIA_FIBO_MASK[:, None, None]},
    },
    layers=flux_layers((0, 70)),
)

# Text and image in one sequence, text first; the blocks get no mask.
FAMILIES["BriaTransformer2DModel"] = Family(
    config={**FLUX, "joint_attention_dim": 32, "axes_dims_rope": [4, 4, 8]},
    inputs={**FLUX_INPUTS, "timestep": torch.tensor([500.0])},
    layers=flux_layers((0, 70)),
)

# Text and image in one sequence, text first; a float mask of zeros and ones is added for all pairs.
FAMILIES["ChromaTransformer2DModel"] = Family(
    config={**FLUX, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 16}
    | {"approximator_hidden_dim": 16, "approximator_layers": 1},
    inputs={
        **FLUX_INPUTS,
        "timestep": torch.tensor([0.5]),
        "attention_mask": torch.cat([padding_mask(70, valid=51), torch.ones(1, 360, dtype=torch.bool)], 1).float(),
    },
    layers=flux_layers((0, 70)),
)

# Text and image in one sequence, text first.
FAMILIES["CogView3PlusTransformer2DModel"] = Family(
    config={**COGVIEW, "pos_embed_max_size": 24, "sample_size": 40},
    inputs={
        "hidden_states": noise(1, 4, 40, 36),
        "original_size": torch.tensor([[320.0, 288.0]]),
        "target_size": torch.tensor([[320.0, 288.0]]),
        "crop_coords": torch.tensor([[0.0, 0.0]]),
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 70),)}),
)

# Text and image in one sequence, text first.
FAMILIES["CogView4Transformer2DModel"] = Family(
    config=COGVIEW,
    inputs={
        "hidden_states": noise(1, 4, 42, 38),
        "original_size": torch.tensor([[336.0, 304.0]]),
        "target_size": torch.tensor([[336.0, 304.0]]),
        "crop_coords": torch.zeros(1, 2),
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 70),)}),
)

# Only self-attention over a square image.
FAMILIES["DiTTransformer2DModel"] = Family(
    config={**HEADS, "num_layers": 2, "sample_size": 40},
    inputs={"hidden_states": noise(1, 4, 40, 40), "timestep": torch.tensor([3]), "class_labels": torch.tensor([7])},
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ()}),
)


def use_dreamlite_processors(model: nn.Module) -> None:
    """Set the attention processors that DreamLite's U-Net sets."""
    for block in model.transformer_blocks:
        block.attn1.set_processor(DreamLiteAttnProcessor2_0())
        block.attn2.set_processor(DreamLiteAttnProcessor2_0())


# A block of DreamLite's U-Net: grouped heads, repeated before the call.
FAMILIES["DreamLiteTransformer2DModel"] = Family(
    model_class=DreamLiteTransformer2DModel,
    config={**HEADS, "in_channels": 32, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 16}
    | {"use_linear_projection": True, "qk_norm": "rms_norm", "num_kv_heads": 1, "ff_mult": 1},
    inputs={"hidden_states": noise(1, 32, 20, 18), "encoder_attention_mask": TEXT_MASK, **TEXT},
    layers=self_then_cross("transformer_blocks"),
    prepare=use_dreamlite_processors,
)

# Image first, then text, with a mask over the keys; weights that start at zero are randomized.
FAMILIES["ErnieImageTransformer2DModel"] = Family(
    config={**CHANNELS, "hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 32}
    | {"text_in_dim": 16, "rope_axes_dim": (4, 6, 6)},
    inputs={
        "hidden_states": noise(1, 4, 21, 19),
        "timestep": torch.tensor([3.0]),
        "text_bth": noise(1, 70, 16),
        "text_lens": torch.tensor([50]),
    },
    layers=repeat_layers(2, {"layers.{}.self_attention": ((399, 469),)}),
    prepare=randomize_zero_weights,
)

# Text first, then the image; reference images follow it in the same argument.
FAMILIES["Flux2Transformer2DModel"] = Family(
    config={**FLUX, "joint_attention_dim": 32, "timestep_guidance_channels": 16, "axes_dims_rope": (4, 4, 4, 4)},
    inputs={
        "hidden_states": noise(1, 18 * 18 + 80, 4),
        "guidance": torch.tensor([4.0]),
        "img_ids": torch.cat([flux2_positions(18, 18), flux2_positions(8, 10, frame=10)])[None],
        "txt_ids": flux2_text_positions(70)[None],
        **FLUX2_INPUTS,
    },
    layers=flux_layers((0, 70)),
)


def flux2_cache() -> Flux2KVCache:
    """Return the keys and values of a reference image of 80 tokens."""
    cache = Flux2KVCache(num_double_layers=1, num_single_layers=2)
    cache.num_ref_tokens = 80
    for layer in cache.double_block_caches + cache.single_block_caches:
        layer.store(noise(1, 80, 2, 16), noise(1, 80, 2, 16))
    return cache


def use_flux2_cache_processors(model: nn.Module) -> None:
    """Set the attention processors that read the cache."""
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())


# The keys of the reference image come from a cache, between text and image.
FAMILIES["Flux2Transformer2DModel, cached reference"] = FAMILIES["Flux2Transformer2DModel"].variant(
    inputs={
        "hidden_states": noise(1, 18 * 18, 4),
        "img_ids": flux2_positions(18, 18)[None],
        "kv_cache": flux2_cache(),
        "kv_cache_mode": "cached",
    },
    layers=flux_layers((0, 150)),
    prepare=use_flux2_cache_processors,
)

# Text and image have separate blocks, then share the single blocks, text first.
FAMILIES["Flux3Transformer2DModel"] = Family(
    config={**FLUX, "cond_in_channels": 4, "joint_attention_dim": 32, "timestep_channels": 16}
    | {"axes_dims_rope": (4, 4, 4, 4)},
    inputs={
        "hidden_states": noise(1, 400, 4),
        "img_ids": flux2_positions(20, 20),
        "txt_ids": flux2_text_positions(70),
        **FLUX2_INPUTS,
    },
    layers={"txt_mode_blocks.0.attn": "other", "mode_blocks.image.0.attn": ()}
    | repeat_layers(2, {"single_transformer_blocks.{}.attn": ((0, 70),)}),
)

# The reference image has separate blocks, then follows the image.
FAMILIES["Flux3Transformer2DModel, reference image"] = FAMILIES["Flux3Transformer2DModel"].variant(
    inputs={"image_cond_hidden_states": noise(1, 80, 4), "image_cond_ids": flux2_positions(8, 10, frame=10)},
    layers={"txt_mode_blocks.0.attn": "other", "mode_blocks.image.0.attn": (), "mode_blocks.image_cond.0.attn": "other"}
    | repeat_layers(2, {"single_transformer_blocks.{}.attn": ((0, 70), (470, 550))}),
)

# Text first; the single blocks get text and image as one tensor.
FAMILIES["FluxTransformer2DModel"] = Family(builder=tiny_transformers.flux, layers=flux_layers((0, 70)))

# Text and image in one sequence, text first; the prior tokens are added to the image's.
FAMILIES["GlmImageTransformer2DModel"] = Family(
    config={**COGVIEW, "prior_vq_quantizer_codebook_size": 32},
    inputs={
        "hidden_states": noise(1, 4, 42, 38),
        "prior_token_id": (torch.arange(399) % 32)[None],
        "prior_token_drop": torch.zeros(1, 399, dtype=torch.bool),
        "target_size": torch.tensor([[336.0, 304.0]]),
        "crop_coords": torch.zeros(1, 2),
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 70),)}),
)


def glm_image_cache() -> GlmImageKVCache:
    """Return the keys and values of a reference image of 80 tokens."""
    caches = GlmImageKVCache(2)
    for cache in caches.caches:
        cache.store(noise(1, 80, 2, 16), noise(1, 80, 2, 16))
    caches.set_mode("read")
    return caches


# The keys of the reference image come from a cache, before the text.
FAMILIES["GlmImageTransformer2DModel, cached reference"] = FAMILIES["GlmImageTransformer2DModel"].variant(
    inputs={"kv_caches": glm_image_cache()}, layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 150),)})
)

# Square image first, then two texts, and a third one in each block.
FAMILIES["HiDreamImageTransformer2DModel"] = Family(
    config={**FLUX, "patch_size": 2, "out_channels": 4, "caption_channels": [16, 8], "text_emb_dim": 8}
    | {"num_routed_experts": 2, "num_activated_experts": 1, "axes_dims_rope": (8, 4, 4)}
    | {"max_resolution": (48, 48), "llama_layers": [0, 1, 1]},
    inputs={
        "hidden_states": noise(1, 4, 42, 42),
        "timesteps": torch.tensor([3]),
        "encoder_hidden_states_t5": noise(1, 30, 16),
        "encoder_hidden_states_llama3": noise(2, 1, 20, 8),
        "pooled_embeds": noise(1, 8),
    },
    layers={"double_stream_blocks.0.block.attn1": ((441, 511),)}
    | repeat_layers(2, {"single_stream_blocks.{}.block.attn1": ((441, 511),)}),
)

# An image that is not square is padded to the largest size with tokens whose keys are zero and not masked.
FAMILIES["HiDreamImageTransformer2DModel, oblong"] = FAMILIES["HiDreamImageTransformer2DModel"].variant(
    inputs={"hidden_states": noise(1, 4, 42, 38)},
    layers={"double_stream_blocks.0.block.attn1": ((399, 576 + 70),)}
    | repeat_layers(2, {"single_stream_blocks.{}.block.attn1": ((399, 576 + 70),)}),
)

# Self-attention over the image; learned vectors replace the padding of the two texts, so there is no mask.
FAMILIES["HunyuanDiT2DModel"] = Family(
    config={**HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 40, "hidden_size": 32, "num_layers": 4}
    | {"cross_attention_dim": 16, "cross_attention_dim_t5": 16, "pooled_projection_dim": 16, "text_len": 20}
    | {"text_len_t5": 50},
    inputs={
        "hidden_states": noise(1, 4, 40, 36),
        "timestep": torch.tensor([3.0]),
        "encoder_hidden_states": noise(1, 20, 16),
        "text_embedding_mask": padding_mask(20, valid=12).long(),
        "encoder_hidden_states_t5": noise(1, 50, 16),
        "text_embedding_mask_t5": padding_mask(50, valid=30).long(),
        "image_meta_size": torch.tensor([[320.0, 288.0, 320.0, 288.0, 0.0, 0.0]]),
        "style": torch.tensor([0]),
        "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), (20, 18)), (20, 18), output_type="pt"),
    },
    layers=self_then_cross("blocks", count=4),
)

# Image first, then glyph text and text, valid tokens before padding, with a mask over the keys.
FAMILIES["HunyuanImageTransformer2DModel"] = Family(
    config={**FLUX, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16, "text_embed_2_dim": 8}
    | {"rope_axes_dim": (8, 8)},
    inputs={
        "hidden_states": noise(1, 4, 21, 19),
        "timestep": torch.tensor([3.0]),
        "encoder_hidden_states": noise(1, 50, 16),
        "encoder_attention_mask": padding_mask(50, valid=30).long(),
        "encoder_hidden_states_2": noise(1, 20, 8),
        "encoder_attention_mask_2": padding_mask(20, valid=11).long(),
    },
    layers={"context_embedder.token_refiner.refiner_blocks.0.attn": "other", "transformer_blocks.0.attn": ((399, 469),)}
    | repeat_layers(2, {"single_transformer_blocks.{}.attn": ((399, 469),)}),
)

# One text only; latents and patch size have a frame axis.
FAMILIES["HunyuanImageTransformer2DModel, refiner"] = Family(
    config={**HEADS, "in_channels": 8, "out_channels": 4, "num_layers": 1, "num_single_layers": 1}
    | {"num_refiner_layers": 1, "patch_size": (1, 2, 2), "guidance_embeds": True, "text_embed_dim": 16}
    | {"rope_axes_dim": (4, 6, 6)},
    inputs={
        "hidden_states": noise(1, 8, 1, 42, 38),
        "timestep": torch.tensor([3.0]),
        "encoder_attention_mask": TEXT_MASK.long(),
        "guidance": torch.tensor([4000.0]),
        **TEXT,
    },
    layers={
        "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
        "transformer_blocks.0.attn": ((399, 469),),
        "single_transformer_blocks.0.attn": ((399, 469),),
    },
)

# Both arguments have the full length: text, padded on the left, then image; the mask is a full (S_q x S_k) mask.
IDEOGRAM4_POSITIONS = [
    torch.zeros(20, 3).long(),
    torch.arange(50)[:, None].expand(50, 3),
    positions(20, 20).long() + 50,
]
FAMILIES["Ideogram4Transformer2DModel"] = Family(
    config={**HEADS, "in_channels": 4, "num_layers": 2, "intermediate_size": 32, "adaln_dim": 8}
    | {"llm_features_dim": 16, "mrope_section": (4, 2, 2)},
    inputs={
        "hidden_states": torch.cat([torch.zeros(1, 70, 4), noise(1, 400, 4)], 1),
        "timestep": torch.tensor([0.7]),
        "encoder_hidden_states": torch.cat([noise(1, 70, 16), torch.zeros(1, 400, 16)], 1),
        "position_ids": torch.cat(IDEOGRAM4_POSITIONS)[None],
        "segment_ids": torch.tensor([-1] * 20 + [1] * 450)[None],
        "indicator": torch.tensor([0] * 20 + [3] * 50 + [2] * 400)[None],
    },
    layers=repeat_layers(2, {"layers.{}.attention": ((0, 70),)}),
)

# The unconditional pass: image tokens only, with a mask of ones.
FAMILIES["Ideogram4Transformer2DModel, without text"] = FAMILIES["Ideogram4Transformer2DModel"].variant(
    inputs={
        name: value if name == "timestep" else value[:, 70:]
        for name, value in FAMILIES["Ideogram4Transformer2DModel"].inputs.items()
    },
    layers=repeat_layers(2, {"layers.{}.attention": ()}),
)

# Patches of the image and of references of other sizes, then text, with a mask over the keys.
FAMILIES["JoyImageEditPlusTransformer3DModel"] = Family(
    config=JOYIMAGE,
    inputs={
        "hidden_states": noise(1, 18 * 17 + 8 * 11, 4, 1, 2, 2),
        "encoder_hidden_states_mask": TEXT_MASK.long(),
        "shape_list": [[(1, 18, 17), (1, 8, 11)]],
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"double_blocks.{}.attn": ((394, 464),)}),
)

# Two images (B, N, C, T, H, W), the last one moved to the front, then text.
FAMILIES["JoyImageEditTransformer3DModel"] = Family(
    config=JOYIMAGE,
    inputs={"hidden_states": noise(1, 2, 4, 1, 26, 30), **TEXT_AT_3},
    layers=repeat_layers(2, {"double_blocks.{}.attn": ((390, 460),)}),
)

# Text first, from several layers of its encoder, with a mask over the keys; grouped queries.
FAMILIES["Krea2Transformer2DModel"] = Family(
    config={**HEADS, "in_channels": 4, "num_layers": 2, "num_key_value_heads": 1, "intermediate_size": 32}
    | {"timestep_embed_dim": 16, "text_hidden_dim": 16, "num_text_layers": 3, "text_num_attention_heads": 2}
    | {"text_num_key_value_heads": 2, "text_intermediate_size": 16, "num_layerwise_text_blocks": 1}
    | {"num_refiner_text_blocks": 1, "axes_dims_rope": (4, 6, 6)},
    inputs={
        "hidden_states": noise(1, 400, 4),
        "encoder_hidden_states": noise(1, 70, 3, 16),
        "timestep": torch.tensor([0.7]),
        "position_ids": torch.cat([torch.zeros(70, 3), positions(20, 20)]),
        "encoder_attention_mask": TEXT_MASK,
    },
    layers={"text_fusion.layerwise_blocks.0.attn": "other", "text_fusion.refiner_blocks.0.attn": "other"}
    | repeat_layers(2, {"transformer_blocks.{}.attn": ((0, 70),)}),
)

# Text first, then the image; the image to edit follows it in the same argument.
FAMILIES["LongCatImageTransformer2DModel"] = Family(
    config={**FLUX, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 6, 6]},
    inputs={
        **FLUX2_INPUTS,
        "hidden_states": noise(1, 400, 4),
        "img_ids": torch.cat([positions(20, 10, frame=1), positions(20, 10, frame=2)]),
        "txt_ids": torch.arange(70.0)[:, None] * torch.tensor([0.0, 1.0, 1.0]),
    },
    layers=flux_layers((0, 70)),
)

# Text first; its padding is cut before the joint layers, which get 50 of 70 tokens.
FAMILIES["Lumina2Transformer2DModel"] = Family(
    config={"sample_size": 40, "patch_size": 2, "in_channels": 4, "hidden_size": 48, "num_layers": 2}
    | {"num_refiner_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 8}
    | {"axes_dim_rope": (4, 4, 4), "axes_lens": (300, 64, 64), "cap_feat_dim": 16},
    inputs={"hidden_states": noise(1, 4, 40, 38), "encoder_attention_mask": TEXT_MASK, **TEXT_AT_HALF},
    layers={"context_refiner.0.attn": "other", "noise_refiner.0.attn": ()}
    | repeat_layers(2, {"layers.{}.attn": ((0, 50),)}),
)

# Grouped heads; the mask of self-attention is true everywhere, cross-attention has a padding mask.
FAMILIES["LuminaNextDiT2DModel"] = Family(
    config={"sample_size": 40, "in_channels": 4, "hidden_size": 32, "num_layers": 2, "num_attention_heads": 2}
    | {"num_kv_heads": 1, "multiple_of": 8, "cross_attention_dim": 16},
    inputs={
        "hidden_states": noise(1, 4, 40, 36),
        "encoder_mask": TEXT_MASK.long(),
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 32, 32),
        "cross_attention_kwargs": {"base_sequence_length": 16},
        **TEXT_AT_HALF,
    },
    layers=self_then_cross("layers"),
    prepare=lambda model: nn.init.zeros_(model.pad_token),
)


def fill_nucleus_experts(model: nn.Module) -> None:
    """Give weights to the experts, which the class leaves uninitialized."""
    for block in model.transformer_blocks:
        for weight in (block.img_mlp.experts.gate_up_proj, block.img_mlp.experts.down_proj):
            nn.init.normal_(weight, std=0.1)


# Image queries over image and text keys, image first; GQA keys are repeated before the call.
FAMILIES["NucleusMoEImageTransformer2DModel"] = Family(
    config={"patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "joint_attention_dim": 16}
    | {"axes_dims_rope": (4, 6, 6), "dense_moe_strategy": "all_moe", "num_experts": 2}
    | {"moe_intermediate_dim": 16, "capacity_factors": 1.0},
    inputs={
        "hidden_states": noise(1, 380, 4),
        "img_shapes": [(1, 20, 19)],
        "encoder_hidden_states_mask": TEXT_MASK,
        **TEXT_AT_HALF,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ((380, 450),)}),
    prepare=fill_nucleus_experts,
)


def omnigen_mask(text: int, padding: int, total: int) -> Tensor:
    """Return a full (S_q x S_k) mask: causal text after its padding, then an image that attends to all tokens."""
    visible = torch.ones(total, total).tril()
    visible[text + 1 :] = 1
    visible[:, :padding], visible[:padding] = 0, 1
    return visible


# Causal text, padded on the left, the timestep as one token, then the image.
OMNIGEN_TOKENS = 70 + 1 + 380
FAMILIES["OmniGenTransformer2DModel"] = Family(
    config={"in_channels": 4, "patch_size": 2, "hidden_size": 32, "num_attention_heads": 2}
    | {"num_key_value_heads": 2, "intermediate_size": 32, "num_layers": 2, "pad_token_id": 0}
    | {"vocab_size": 100, "rope_scaling": {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8}}
    | {"pos_embed_max_size": 32},
    inputs={
        "hidden_states": noise(1, 4, 40, 38),
        "timestep": torch.tensor([0.5]),
        "input_ids": torch.arange(70)[None],
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": omnigen_mask(text=70, padding=20, total=OMNIGEN_TOKENS)[None],
        "position_ids": (torch.arange(OMNIGEN_TOKENS) - 20).clamp(min=0)[None],
    },
    layers=repeat_layers(2, {"layers.{}.self_attn": ((0, 71),)}),
)

# Like Flux: text first.
FAMILIES["OvisImageTransformer2DModel"] = Family(
    config={**HEADS, **CHANNELS, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 16}
    | {"axes_dims_rope": (4, 6, 6)},
    inputs={
        "hidden_states": noise(1, 380, 4),
        "img_ids": positions(20, 19),
        "txt_ids": torch.zeros(70, 3),
        **TEXT_AT_HALF,
    },
    layers={"transformer_blocks.0.attn": ((0, 70),), "single_transformer_blocks.0.attn": ((0, 70),)},
)

# Image queries over text and image keys, text first.
FAMILIES["PRXTransformer2DModel"] = Family(
    config={"in_channels": 4, "context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 1.0, "num_heads": 2}
    | {"depth": 2, "axes_dim": [8, 8]},
    inputs={"hidden_states": noise(1, 4, 40, 38), "attention_mask": TEXT_MASK, **TEXT_AT_HALF},
    layers=repeat_layers(2, {"blocks.{}.attention": ((0, 70),)}),
)

# Self-attention over the image, cross-attention to the text.
FAMILIES["PixArtTransformer2DModel"] = Family(
    config={**HEADS, "num_layers": 2, "cross_attention_dim": 32, "sample_size": 40, "caption_channels": 16},
    inputs={
        "hidden_states": noise(1, 4, 40, 36),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        "encoder_attention_mask": TEXT_MASK.long(),
        **TEXT_AT_3,
    },
    layers=self_then_cross("transformer_blocks"),
)

# Text, embedding, time, one latent token and one learned token, with a causal mask.
FAMILIES["PriorTransformer"] = Family(
    config={**HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": 77},
    inputs={
        "hidden_states": noise(1, 16),
        "timestep": torch.tensor(3),
        "proj_embedding": noise(1, 16),
        "encoder_hidden_states": noise(1, 77, 16),
        "attention_mask": padding_mask(77, valid=50),
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 79), (80, 81))}),
)

# An image token and a time token before the latents; no mask.
FAMILIES["PriorTransformer, Shap-E"] = Family(
    config={**HEADS, "num_layers": 2, "embedding_dim": 16, "num_embeddings": 400, "additional_embeddings": 0}
    | {"time_embed_act_fn": "gelu", "norm_in_type": "layer", "embedding_proj_norm_type": "layer"}
    | {"encoder_hid_proj_type": None, "added_emb_type": None, "clip_embed_dim": 32},
    inputs={"hidden_states": noise(1, 400, 16), "timestep": torch.tensor(3), "proj_embedding": noise(1, 16)},
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 2),)}),
)

# Two calls per layer: causal text, then the image over text and image.
FAMILIES["QwenImage21Transformer2DModel"] = Family(
    config={**HEADS, **CHANNELS, "num_layers": 2, "context_in_dim": 16, "axes_dims_rope": (4, 6, 6)},
    inputs={
        "hidden_states": noise(1, 360, 4),
        "encoder_hidden_states_mask": TEXT_MASK,
        "img_shapes": [[(1, 20, 18)]],
        "img_mask": (torch.arange(70 + 90) >= 70)[None],
        **TEXT_AT_HALF,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ["other", ((0, 70),)]}),
)


def qwen_image_21_cache() -> QwenImage21KVCache:
    """Return the keys and values of 70 text tokens."""
    cache = QwenImage21KVCache(2)
    for index in range(2):
        cache.get_layer(index).store(noise(1, 70, 2, 16), noise(1, 70, 2, 16) / 2)
    return cache


# The steps after the first, as the pipeline runs them: cached keys of the text, then the image.
FAMILIES["QwenImage21Transformer2DModel, cached"] = FAMILIES["QwenImage21Transformer2DModel"].variant(
    inputs={"kv_cache": qwen_image_21_cache(), "kv_cache_mode": "cached"},
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ((0, 70),)}),
)

# A reference image between two texts: four calls per layer, the last one with the queries of the noisy image.
QWEN_IMAGE_21_IS_IMAGE = [False] * 20 + [True] * 30 + [False] * 20 + [True] * 60
FAMILIES["QwenImage21Transformer2DModel, edit"] = FAMILIES["QwenImage21Transformer2DModel"].variant(
    inputs={
        "hidden_states": noise(1, 360, 4),
        "encoder_hidden_states_mask": padding_mask(70, valid=65),
        "img_shapes": [[(1, 10, 12), (1, 20, 12)]],
        "img_mask": torch.tensor([QWEN_IMAGE_21_IS_IMAGE]),
        **TEXT_AT_HALF,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ["other", ((0, 20),), "cross", ((0, 20), (140, 160))]}),
)

# Text and image in one sequence, text first; padding tokens stay in the text, masked.
FAMILIES["QwenImageTransformer2DModel"] = Family(
    config={**QWEN_IMAGE, "patch_size": 2},
    inputs=QWEN_IMAGE_INPUTS,
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ((0, 70),)}),
)

# The reference image follows the noisy one inside the latents, with the modulation of time zero.
FAMILIES["QwenImageTransformer2DModel, edit"] = Family(
    config={**QWEN_IMAGE, "patch_size": 2, "zero_cond_t": True},
    inputs={**QWEN_IMAGE_INPUTS, "hidden_states": noise(1, 390, 16), "img_shapes": [[(1, 14, 15), (1, 12, 15)]]},
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ((0, 70),)}),
)

# Text last; the first block also has attention over the image alone.
FAMILIES["SD3Transformer2DModel"] = Family(
    builder=tiny_transformers.sd3,
    layers={
        "transformer_blocks.0.attn": ((400, 470),),
        "transformer_blocks.0.attn2": (),
        "transformer_blocks.1.attn": ((400, 470),),
    },
)

# A block of a U-Net: self-attention over its pixels, cross-attention to the text.
FAMILIES["Transformer2DModel"] = Family(
    config={**HEADS, "in_channels": 8, "num_layers": 2, "norm_num_groups": 4, "cross_attention_dim": 16},
    inputs={"hidden_states": noise(1, 8, 20, 18), **TEXT},
    layers=self_then_cross("transformer_blocks"),
)

# Image first, then text; each is padded to a multiple of 32 with a learned token, unmasked.
FAMILIES["ZImageTransformer2DModel"] = Family(
    config=Z_IMAGE,
    inputs=Z_IMAGE_INPUTS,
    layers={"noise_refiner.0.attention": ((380, 384),), "context_refiner.0.attention": "other"}
    | repeat_layers(2, {"layers.{}.attention": ((380, 480),)}),
)

# Text, reference image and noisy image, image embeddings; each is padded to a multiple of 32.
FAMILIES["ZImageTransformer2DModel, omni"] = Family(
    config={**Z_IMAGE, "siglip_feat_dim": 8},
    inputs={
        "x": [[noise(4, 1, 20, 20), noise(4, 1, 30, 26)]],
        "t": torch.tensor([0.5]),
        "cap_feats": [[noise(30, 16), noise(40, 16)]],
        "siglip_feats": [[noise(6, 6, 8), None]],
        "image_noise_mask": [[0, 1]],
    },
    layers={
        "noise_refiner.0.attention": ((100, 128), (323, 352)),
        "context_refiner.0.attention": "other",
        "siglip_refiner.0.attention": "other",
    }
    | repeat_layers(2, {"layers.{}.attention": ((0, 96), (196, 224), (419, 544))}),
)

WITHOUT: dict[str, str] = {
    "DualTransformer2DModel": "a container; its parts are supported",
    "SanaTransformer2DModel": "linear self-attention; softmax only to the text",
}
