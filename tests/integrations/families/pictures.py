"""Transformers that make pictures."""

from __future__ import annotations

from typing import Any

import tiny_transformers
import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    BriaFibo2Transformer2DModel,
    BriaFiboTransformer2DModel,
    BriaTransformer2DModel,
    ChromaTransformer2DModel,
    CogView3PlusTransformer2DModel,
    CogView4Transformer2DModel,
    DiTTransformer2DModel,
    ErnieImageTransformer2DModel,
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    GlmImageTransformer2DModel,
    HiDreamImageTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanImageTransformer2DModel,
    Ideogram4Transformer2DModel,
    JoyImageEditPlusTransformer3DModel,
    JoyImageEditTransformer3DModel,
    Krea2Transformer2DModel,
    LongCatImageTransformer2DModel,
    Lumina2Transformer2DModel,
    LuminaNextDiT2DModel,
    NucleusMoEImageTransformer2DModel,
    OmniGenTransformer2DModel,
    OvisImageTransformer2DModel,
    PixArtTransformer2DModel,
    PriorTransformer,
    PRXTransformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    Transformer2DModel,
    ZImageTransformer2DModel,
)
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

from families.tiny import Builder, Tiny, noise

TEXT_MASK = (torch.arange(70) < 50)[None]


def _positions(height: int, width: int) -> Tensor:
    """The ids of a Flux-like picture: (frame, row, column) of each token."""
    grid = torch.cartesian_prod(torch.arange(float(height)), torch.arange(float(width)))
    return torch.cat([torch.zeros(height * width, 1), grid], 1)


def _first(true: int, length: int) -> Tensor:
    """A padding mask of one row whose first `true` entries hold."""
    return (torch.arange(length) < true)[None]


def chroma() -> Tiny:
    """Text and picture in one sequence, text first; a float mask of zeros and ones is added over all pairs."""
    model = ChromaTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=16,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 360, 4),
            "encoder_hidden_states": noise(1, 70, 32),
            "timestep": torch.tensor([0.5]),
            "img_ids": _positions(20, 18),
            "txt_ids": torch.zeros(70, 3),
            "attention_mask": torch.cat([_first(51, 70), torch.ones(1, 360, dtype=torch.bool)], 1).float(),
        },
        {
            "transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.1.attn": ((0, 70),),
        },
    )


def auraflow() -> Tiny:
    """Eight register tokens, then text, then picture in one sequence."""
    model = AuraFlowTransformer2DModel(
        sample_size=40,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=400,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 40, 36),
            "encoder_hidden_states": noise(1, 70, 32),
            "timestep": torch.tensor([0.5]),
        },
        {
            "joint_transformer_blocks.0.attn": ((0, 78),),
            "single_transformer_blocks.0.attn": ((0, 78),),
            "single_transformer_blocks.1.attn": ((0, 78),),
        },
    )


def bria() -> Tiny:
    """Text and picture in one sequence, text first; no mask reaches the blocks."""
    model = BriaTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 360, 4),
            "encoder_hidden_states": noise(1, 70, 32),
            "timestep": torch.tensor([500.0]),
            "img_ids": _positions(20, 18),
            "txt_ids": torch.zeros(70, 3),
        },
        {
            "transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.1.attn": ((0, 70),),
        },
    )


def bria_fibo() -> Tiny:
    """Text and picture in one sequence, text first; half of the text's channels change at each block."""
    model = BriaFiboTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=[4, 4, 8],
        text_encoder_dim=16,
    )
    mask = torch.cat([_first(50, 70), torch.ones(1, 360, dtype=torch.bool)], 1)
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 360, 4),
            "encoder_hidden_states": noise(1, 70, 32),
            "text_encoder_layers": [noise(1, 70, 16)] * 3,
            "timestep": torch.tensor([500.0]),
            "img_ids": _positions(20, 18),
            "txt_ids": torch.zeros(70, 3),
            "joint_attention_kwargs": {"attention_mask": mask[:, None, None]},
        },
        {
            "transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.1.attn": ((0, 70),),
        },
    )


def _bria_fibo2() -> BriaFibo2Transformer2DModel:
    return BriaFibo2Transformer2DModel(
        in_channels=4,
        patch_size=2,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=16,
        injection_layer_ids=(1,),
        perceiver_num_layers=1,
        min_num_gist_tokens=30,
        max_num_gist_tokens=70,
        gist_step=10,
        gist_min_text_len=16,
        gist_max_text_len=64,
        axes_dims=(4, 6, 6),
        axes_lens=(128, 32, 32),
    )


def bria_fibo2() -> Tiny:
    """The text becomes 60 gist tokens that stand before the picture; some layers read the text itself as well."""
    return Tiny(
        _bria_fibo2(),
        {
            "hidden_states": noise(1, 4, 40, 36),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": noise(1, 2, 70, 16),
            "encoder_attention_mask": _first(50, 70),
        },
        {
            "noise_refiner.0.attention": (),
            "perceiver.layers.0.cross_attention": "other",
            "perceiver.layers.0.self_attention": "other",
            "layers.0.attention": ((0, 60),),
            "layers.1.attention": ((0, 60),),
            "layers.1.cross_attention": "cross",
        },
    )


def bria_fibo2_edit() -> Tiny:
    """Gist tokens, picture, then the tokens of a given picture, which come by their own argument."""
    return Tiny(
        _bria_fibo2(),
        {
            "hidden_states": noise(1, 4, 40, 36),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": noise(1, 2, 70, 16),
            "encoder_attention_mask": _first(50, 70),
            "context_latents": [noise(1, 4, 20, 20)],
        },
        {
            "noise_refiner.0.attention": ((360, 460),),
            "perceiver.layers.0.cross_attention": "other",
            "perceiver.layers.0.self_attention": "other",
            "layers.0.attention": ((0, 60), (420, 520)),
            "layers.1.attention": ((0, 60), (420, 520)),
            "layers.1.cross_attention": "cross",
        },
    )


def bria_fibo2_batch() -> Tiny:
    """Two prompts of unlike length: the gist tokens now stand after the picture, under a padding mask."""
    return Tiny(
        _bria_fibo2(),
        {
            "hidden_states": noise(2, 4, 40, 36),
            "timestep": torch.tensor([0.5, 0.5]),
            "encoder_hidden_states": noise(2, 2, 70, 16),
            "encoder_attention_mask": torch.cat([_first(50, 70), _first(20, 70)]),
        },
        {
            "noise_refiner.0.attention": (),
            "perceiver.layers.0.cross_attention": "other",
            "perceiver.layers.0.self_attention": "other",
            "layers.0.attention": ((360, 420),),
            "layers.1.attention": ((360, 420),),
            "layers.1.cross_attention": "cross",
        },
    )


def cogview3plus() -> Tiny:
    """Text and picture in one sequence, text first."""
    model = CogView3PlusTransformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        pos_embed_max_size=24,
        sample_size=40,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 40, 36),
            "encoder_hidden_states": noise(1, 70, 16),
            "timestep": torch.tensor([3]),
            "original_size": torch.tensor([[320.0, 288.0]]),
            "target_size": torch.tensor([[320.0, 288.0]]),
            "crop_coords": torch.tensor([[0.0, 0.0]]),
        },
        {"transformer_blocks.0.attn1": ((0, 70),), "transformer_blocks.1.attn1": ((0, 70),)},
    )


def pixart() -> Tiny:
    """Self-attention over the picture, cross-attention to the text."""
    model = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        cross_attention_dim=32,
        sample_size=40,
        caption_channels=16,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 40, 36),
            "encoder_hidden_states": noise(1, 70, 16),
            "timestep": torch.tensor([3]),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
            "encoder_attention_mask": _first(50, 70).long(),
        },
        {
            "transformer_blocks.0.attn1": (),
            "transformer_blocks.0.attn2": "cross",
            "transformer_blocks.1.attn1": (),
            "transformer_blocks.1.attn2": "cross",
        },
    )


def hunyuandit() -> Tiny:
    """Self-attention over the picture; learned vectors stand for the padding of the two texts, so no mask."""
    model = HunyuanDiT2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        patch_size=2,
        sample_size=40,
        hidden_size=32,
        num_layers=4,
        cross_attention_dim=16,
        cross_attention_dim_t5=16,
        pooled_projection_dim=16,
        text_len=20,
        text_len_t5=50,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 40, 36),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": noise(1, 20, 16),
            "text_embedding_mask": _first(12, 20).long(),
            "encoder_hidden_states_t5": noise(1, 50, 16),
            "text_embedding_mask_t5": _first(30, 50).long(),
            "image_meta_size": torch.tensor([[320.0, 288.0, 320.0, 288.0, 0.0, 0.0]]),
            "style": torch.tensor([0]),
            "image_rotary_emb": get_2d_rotary_pos_embed(16, ((0, 0), (20, 18)), (20, 18), output_type="pt"),
        },
        {f"blocks.{i}.attn{j}": () if j == 1 else "cross" for i in range(4) for j in (1, 2)},
    )


def lumina_next() -> Tiny:
    """Grouped heads; self-attention has a mask that is true everywhere, cross-attention one with padding."""
    model = LuminaNextDiT2DModel(
        sample_size=40,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        cross_attention_dim=16,
    )
    torch.nn.init.zeros_(model.pad_token)
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 40, 36),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": noise(1, 70, 16),
            "encoder_mask": _first(50, 70).long(),
            "image_rotary_emb": get_2d_rotary_pos_embed_lumina(16, 32, 32),
            "cross_attention_kwargs": {"base_sequence_length": 16},
        },
        {"layers.0.attn1": (), "layers.0.attn2": "cross", "layers.1.attn1": (), "layers.1.attn2": "cross"},
    )


def dit() -> Tiny:
    """Self-attention over a square picture and nothing else."""
    model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=16, num_layers=2, sample_size=40)
    return Tiny(
        model,
        {"hidden_states": noise(1, 4, 40, 40), "timestep": torch.tensor([3]), "class_labels": torch.tensor([7])},
        {"transformer_blocks.0.attn1": (), "transformer_blocks.1.attn1": ()},
    )


def prior() -> Tiny:
    """Text, embedding, time, one latent token, one learned token, under a causal mask."""
    model = PriorTransformer(
        num_attention_heads=2, attention_head_dim=16, num_layers=2, embedding_dim=16, num_embeddings=77
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 16),
            "timestep": torch.tensor(3),
            "proj_embedding": noise(1, 16),
            "encoder_hidden_states": noise(1, 77, 16),
            "attention_mask": _first(50, 77),
        },
        {"transformer_blocks.0.attn1": ((0, 79), (80, 81)), "transformer_blocks.1.attn1": ((0, 79), (80, 81))},
    )


def prior_shap_e() -> Tiny:
    """A token of the picture and one of the time stand before the latents; no mask."""
    model = PriorTransformer(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        embedding_dim=16,
        num_embeddings=400,
        additional_embeddings=0,
        time_embed_act_fn="gelu",
        norm_in_type="layer",
        embedding_proj_norm_type="layer",
        encoder_hid_proj_type=None,
        added_emb_type=None,
        clip_embed_dim=32,
    )
    return Tiny(
        model,
        {"hidden_states": noise(1, 400, 16), "timestep": torch.tensor(3), "proj_embedding": noise(1, 16)},
        {"transformer_blocks.0.attn1": ((0, 2),), "transformer_blocks.1.attn1": ((0, 2),)},
    )


def transformer_2d() -> Tiny:
    """A block of a UNet: self-attention over its pixels, cross-attention to the text."""
    model = Transformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=8,
        num_layers=2,
        norm_num_groups=4,
        cross_attention_dim=16,
    )
    return Tiny(
        model,
        {"hidden_states": noise(1, 8, 20, 18), "encoder_hidden_states": noise(1, 70, 16)},
        {
            "transformer_blocks.0.attn1": (),
            "transformer_blocks.0.attn2": "cross",
            "transformer_blocks.1.attn1": (),
            "transformer_blocks.1.attn2": "cross",
        },
    )


def dreamlite() -> Tiny:
    """A block of DreamLite's UNet: grouped heads, repeated before the call, by the processor which that UNet sets."""
    model = DreamLiteTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=32,
        num_layers=2,
        norm_num_groups=4,
        cross_attention_dim=16,
        use_linear_projection=True,
        qk_norm="rms_norm",
        num_kv_heads=1,
        ff_mult=1,
    )
    for block in model.transformer_blocks:
        block.attn1.set_processor(DreamLiteAttnProcessor2_0())
        block.attn2.set_processor(DreamLiteAttnProcessor2_0())
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 32, 20, 18),
            "encoder_hidden_states": noise(1, 70, 16),
            "encoder_attention_mask": _first(50, 70),
        },
        {
            "transformer_blocks.0.attn1": (),
            "transformer_blocks.0.attn2": "cross",
            "transformer_blocks.1.attn1": (),
            "transformer_blocks.1.attn2": "cross",
        },
    )


def _ids(frame: int, height: int, width: int) -> Tensor:
    """Places (frame, row, column, 0) of one picture's tokens."""
    axes = (torch.tensor([frame]), torch.arange(height), torch.arange(width), torch.zeros(1).long())
    return torch.cartesian_prod(*axes).float()


def _text_ids(length: int) -> Tensor:
    return torch.cat([torch.zeros(length, 3), torch.arange(length)[:, None]], 1)


def _mask(length: int, valid: int) -> Tensor:
    return (torch.arange(length) < valid).long()[None]


def _awake(model: nn.Module) -> nn.Module:
    """Small random weights for the linear layers that start at zero and would hide what the attention does."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.2)
    return model


def flux2() -> Tiny:
    """Text first, then the picture; reference pictures stand behind it in the same argument."""
    model = Flux2Transformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 18 * 18 + 80, 4),
            "encoder_hidden_states": noise(1, 70, 32),
            "timestep": torch.tensor([0.7]),
            "guidance": torch.tensor([4.0]),
            "img_ids": torch.cat([_ids(0, 18, 18), _ids(10, 8, 10)])[None],
            "txt_ids": _text_ids(70)[None],
        },
        {
            "transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.1.attn": ((0, 70),),
        },
    )


def flux2_cached() -> Tiny:
    """The keys of the reference picture come from a cache and stand between text and picture."""
    tiny = flux2()
    model = tiny.model
    cache = Flux2KVCache(len(model.transformer_blocks), len(model.single_transformer_blocks))
    cache.num_ref_tokens = 80
    for layer in cache.double_block_caches + cache.single_block_caches:
        layer.store(noise(1, 80, 2, 16), noise(1, 80, 2, 16))
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    picture = {"hidden_states": noise(1, 18 * 18, 4), "img_ids": _ids(0, 18, 18)[None]}
    return Tiny(
        model,
        {**tiny.inputs, **picture, "kv_cache": cache, "kv_cache_mode": "cached"},
        dict.fromkeys(tiny.layers, ((0, 150),)),
    )


def flux3() -> Tiny:
    """Text and picture have blocks of their own, then share the single blocks, text first."""
    model = Flux3Transformer2DModel(
        in_channels=4,
        cond_in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 400, 4),
            "encoder_hidden_states": noise(1, 70, 32),
            "timestep": torch.tensor([0.7]),
            "img_ids": _ids(0, 20, 20),
            "txt_ids": _text_ids(70),
        },
        {
            "txt_mode_blocks.0.attn": "other",
            "mode_blocks.image.0.attn": (),
            "single_transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.1.attn": ((0, 70),),
        },
    )


def flux3_reference() -> Tiny:
    """The reference picture has blocks of its own, then stands behind the picture."""
    tiny = flux3()
    reference = {"image_cond_hidden_states": noise(1, 80, 4), "image_cond_ids": _ids(10, 8, 10)}
    return Tiny(
        tiny.model,
        {**tiny.inputs, **reference},
        {
            "txt_mode_blocks.0.attn": "other",
            "mode_blocks.image.0.attn": (),
            "mode_blocks.image_cond.0.attn": "other",
            "single_transformer_blocks.0.attn": ((0, 70), (470, 550)),
            "single_transformer_blocks.1.attn": ((0, 70), (470, 550)),
        },
    )


def hunyuan_image() -> Tiny:
    """Picture first, then glyph text and text, valid tokens before padding, with a mask over the keys."""
    model = HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=8,
        rope_axes_dim=(8, 8),
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 21, 19),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": noise(1, 50, 16),
            "encoder_attention_mask": _mask(50, 30),
            "encoder_hidden_states_2": noise(1, 20, 8),
            "encoder_attention_mask_2": _mask(20, 11),
        },
        {
            "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
            "transformer_blocks.0.attn": ((399, 469),),
            "single_transformer_blocks.0.attn": ((399, 469),),
            "single_transformer_blocks.1.attn": ((399, 469),),
        },
    )


def hunyuan_image_refiner() -> Tiny:
    """One text only; latents and patch size have a frame axis."""
    model = HunyuanImageTransformer2DModel(
        in_channels=8,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 2, 2),
        guidance_embeds=True,
        text_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 8, 1, 42, 38),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": noise(1, 70, 16),
            "encoder_attention_mask": _mask(70, 50),
            "guidance": torch.tensor([4000.0]),
        },
        {
            "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
            "transformer_blocks.0.attn": ((399, 469),),
            "single_transformer_blocks.0.attn": ((399, 469),),
        },
    )


def cogview4() -> Tiny:
    """Text and picture in one sequence, text first."""
    model = CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
    )
    size = torch.tensor([[336.0, 304.0]])
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 42, 38),
            "encoder_hidden_states": noise(1, 70, 16),
            "timestep": torch.tensor([3]),
            "original_size": size,
            "target_size": size,
            "crop_coords": torch.zeros(1, 2),
        },
        {"transformer_blocks.0.attn1": ((0, 70),), "transformer_blocks.1.attn1": ((0, 70),)},
    )


def ernie_image() -> Tiny:
    """Picture first, then text, with a mask over the keys; new weights where it starts at zero."""
    model = ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=4,
        out_channels=4,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return Tiny(
        _awake(model),
        {
            "hidden_states": noise(1, 4, 21, 19),
            "timestep": torch.tensor([3.0]),
            "text_bth": noise(1, 70, 16),
            "text_lens": torch.tensor([50]),
        },
        {"layers.0.self_attention": ((399, 469),), "layers.1.self_attention": ((399, 469),)},
    )


def glm_image() -> Tiny:
    """Text and picture in one sequence, text first; the prior tokens are added to the picture's."""
    model = GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=8,
        condition_dim=4,
        prior_vq_quantizer_codebook_size=32,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 42, 38),
            "encoder_hidden_states": noise(1, 70, 16),
            "prior_token_id": (torch.arange(399) % 32)[None],
            "prior_token_drop": torch.zeros(1, 399, dtype=torch.bool),
            "timestep": torch.tensor([3]),
            "target_size": torch.tensor([[336.0, 304.0]]),
            "crop_coords": torch.zeros(1, 2),
        },
        {"transformer_blocks.0.attn1": ((0, 70),), "transformer_blocks.1.attn1": ((0, 70),)},
    )


def glm_image_cached() -> Tiny:
    """The keys of the reference picture come from a cache and stand before the text."""
    tiny = glm_image()
    caches = GlmImageKVCache(2)
    for cache in caches.caches:
        cache.store(noise(1, 80, 2, 16), noise(1, 80, 2, 16))
    caches.set_mode("read")
    return Tiny(tiny.model, {**tiny.inputs, "kv_caches": caches}, dict.fromkeys(tiny.layers, ((0, 150),)))


def hidream() -> Tiny:
    """Square picture first, then two texts, and in each block a third one of its own."""
    model = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[16, 8],
        text_emb_dim=8,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(8, 4, 4),
        max_resolution=(48, 48),
        llama_layers=[0, 1, 1],
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 42, 42),
            "timesteps": torch.tensor([3]),
            "encoder_hidden_states_t5": noise(1, 30, 16),
            "encoder_hidden_states_llama3": noise(2, 1, 20, 8),
            "pooled_embeds": noise(1, 8),
        },
        {
            "double_stream_blocks.0.block.attn1": ((441, 511),),
            "single_stream_blocks.0.block.attn1": ((441, 511),),
            "single_stream_blocks.1.block.attn1": ((441, 511),),
        },
    )


def hidream_oblong() -> Tiny:
    """A picture that is not square is filled up to the largest size with tokens whose keys are zero, not masked."""
    tiny = hidream()
    picture = {"hidden_states": noise(1, 4, 42, 38)}
    return Tiny(tiny.model, {**tiny.inputs, **picture}, dict.fromkeys(tiny.layers, ((399, 576 + 70),)))


def ideogram4() -> Tiny:
    """Both arguments have the whole length: text, padded on the left, then picture; the mask is a full matrix."""
    model = Ideogram4Transformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        intermediate_size=32,
        adaln_dim=8,
        llm_features_dim=16,
        mrope_section=(4, 2, 2),
    )
    text, picture = torch.arange(50)[:, None].expand(50, 3), _ids(0, 20, 20)[:, :3].long() + 50
    return Tiny(
        model,
        {
            "hidden_states": torch.cat([torch.zeros(1, 70, 4), noise(1, 400, 4)], 1),
            "timestep": torch.tensor([0.7]),
            "encoder_hidden_states": torch.cat([noise(1, 70, 16), torch.zeros(1, 400, 16)], 1),
            "position_ids": torch.cat([torch.zeros(20, 3).long(), text, picture])[None],
            "segment_ids": torch.tensor([-1] * 20 + [1] * 450)[None],
            "indicator": torch.tensor([0] * 20 + [3] * 50 + [2] * 400)[None],
        },
        {"layers.0.attention": ((0, 70),), "layers.1.attention": ((0, 70),)},
    )


def ideogram4_without_text() -> Tiny:
    """The unconditional pass: the picture alone, with a mask of ones."""
    tiny = ideogram4()
    inputs = {name: value if name == "timestep" else value[:, 70:] for name, value in tiny.inputs.items()}
    return Tiny(tiny.model, inputs, dict.fromkeys(tiny.layers, ()))


def joyimage_edit() -> Tiny:
    """Two pictures (B, N, C, T, H, W), the last one moved to the front, then text."""
    model = JoyImageEditTransformer3DModel(
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=16,
        mlp_width_ratio=1.0,
        num_layers=2,
        rope_dim_list=[4, 6, 6],
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 2, 4, 1, 26, 30),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 70, 16),
        },
        {"double_blocks.0.attn": ((390, 460),), "double_blocks.1.attn": ((390, 460),)},
    )


def joyimage_edit_plus() -> Tiny:
    """Patches of the picture and of references of other sizes, then text, with a mask over the keys."""
    model = JoyImageEditPlusTransformer3DModel(
        in_channels=4,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=16,
        mlp_width_ratio=1.0,
        num_layers=2,
        rope_dim_list=[4, 6, 6],
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 18 * 17 + 8 * 11, 4, 1, 2, 2),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 70, 16),
            "encoder_hidden_states_mask": _mask(70, 50),
            "shape_list": [[(1, 18, 17), (1, 8, 11)]],
        },
        {"double_blocks.0.attn": ((394, 464),), "double_blocks.1.attn": ((394, 464),)},
    )


def krea2() -> Tiny:
    """Text first, out of many layers of its encoder, with a mask over the keys; grouped queries."""
    model = Krea2Transformer2DModel(
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=16,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=16,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 400, 4),
            "encoder_hidden_states": noise(1, 70, 3, 16),
            "timestep": torch.tensor([0.7]),
            "position_ids": torch.cat([torch.zeros(70, 3), _ids(0, 20, 20)[:, :3]]),
            "encoder_attention_mask": _mask(70, 50).bool(),
        },
        {
            "text_fusion.layerwise_blocks.0.attn": "other",
            "text_fusion.refiner_blocks.0.attn": "other",
            "transformer_blocks.0.attn": ((0, 70),),
            "transformer_blocks.1.attn": ((0, 70),),
        },
    )


def longcat_image() -> Tiny:
    """Text first, then the picture; when it edits, the picture to edit stands behind it in the same argument."""
    model = LongCatImageTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 6, 6],
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 400, 4),
            "encoder_hidden_states": noise(1, 70, 32),
            "timestep": torch.tensor([0.7]),
            "img_ids": torch.cat([_ids(1, 20, 10), _ids(2, 20, 10)])[:, :3],
            "txt_ids": torch.arange(70.0)[:, None] * torch.tensor([0.0, 1.0, 1.0]),
        },
        {
            "transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.0.attn": ((0, 70),),
            "single_transformer_blocks.1.attn": ((0, 70),),
        },
    )


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


def qwen_image() -> Tiny:
    """Text and picture in one sequence, text first; padding tokens stay in the text, masked."""
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    return Tiny(model, _qwen_image_inputs(), {f"transformer_blocks.{i}.attn": ((0, 70),) for i in range(2)})


def qwen_image_edit() -> Tiny:
    """The reference picture follows the noisy one inside the latents, with modulation for time zero."""
    model = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        zero_cond_t=True,
    )
    inputs = {
        "hidden_states": noise(1, 390, 16),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_hidden_states_mask": TEXT_MASK.long(),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 14, 15), (1, 12, 15)]],
    }
    return Tiny(model, inputs, {f"transformer_blocks.{i}.attn": ((0, 70),) for i in range(2)})


def _qwen_image_21() -> QwenImage21Transformer2DModel:
    return QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=16,
        axes_dims_rope=(4, 6, 6),
    )


def _qwen_image_21_inputs() -> dict[str, Any]:
    return {
        "hidden_states": noise(1, 360, 4),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_hidden_states_mask": TEXT_MASK,
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 20, 18)]],
        "img_mask": (torch.arange(70 + 90) >= 70)[None],
    }


def qwen_image_21() -> Tiny:
    """Text first and causal in a call of its own, then the picture over text and itself: two calls a layer."""
    layers = {f"transformer_blocks.{i}.attn": ["other", ((0, 70),)] for i in range(2)}
    return Tiny(_qwen_image_21(), _qwen_image_21_inputs(), layers)


def qwen_image_21_cached() -> Tiny:
    """The steps after the first, as its pipeline runs them: cached keys of the text, then the picture."""
    cache = QwenImage21KVCache(2)
    for index in range(2):
        cache.get_layer(index).store(noise(1, 70, 2, 16), noise(1, 70, 2, 16) / 2)
    layers = {f"transformer_blocks.{i}.attn": ((0, 70),) for i in range(2)}
    inputs = {**_qwen_image_21_inputs(), "kv_cache": cache, "kv_cache_mode": "cached"}
    return Tiny(_qwen_image_21(), inputs, layers)


def qwen_image_21_edit() -> Tiny:
    """A reference picture amid the text, text after it: four calls a layer, the last one the noisy picture's."""
    image = torch.zeros(1, 20 + 30 + 20 + 60, dtype=torch.bool)
    image[:, 20:50] = image[:, 70:] = True
    inputs = {
        "hidden_states": noise(1, 360, 4),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_hidden_states_mask": (torch.arange(70) < 65)[None],
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 10, 12), (1, 20, 12)]],
        "img_mask": image,
    }
    layers = {f"transformer_blocks.{i}.attn": ["other", ((0, 20),), "cross", ((0, 20), (140, 160))] for i in range(2)}
    return Tiny(_qwen_image_21(), inputs, layers)


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


def z_image() -> Tiny:
    """Picture first, then text; each is filled up to a multiple of 32 with a learned token, unmasked."""
    layers = {
        "noise_refiner.0.attention": ((380, 384),),
        "context_refiner.0.attention": "other",
        "layers.0.attention": ((380, 480),),
        "layers.1.attention": ((380, 480),),
    }
    return Tiny(_z_image(), _z_image_inputs(), layers)


def z_image_omni() -> Tiny:
    """Text, reference picture and noisy picture, image embeddings; each is filled up to a multiple of 32."""
    inputs = {
        "x": [[noise(4, 1, 20, 20), noise(4, 1, 30, 26)]],
        "t": torch.tensor([0.5]),
        "cap_feats": [[noise(30, 16), noise(40, 16)]],
        "siglip_feats": [[noise(6, 6, 8), None]],
        "image_noise_mask": [[0, 1]],
    }
    layers = {
        "noise_refiner.0.attention": ((100, 128), (323, 352)),
        "context_refiner.0.attention": "other",
        "siglip_refiner.0.attention": "other",
        "layers.0.attention": ((0, 96), (196, 224), (419, 544)),
        "layers.1.attention": ((0, 96), (196, 224), (419, 544)),
    }
    return Tiny(_z_image(siglip_feat_dim=8), inputs, layers)


def lumina2() -> Tiny:
    """Text first, its padding cut before the joint layers: 50 of 70 tokens arrive."""
    model = Lumina2Transformer2DModel(
        sample_size=40,
        patch_size=2,
        in_channels=4,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=8,
        axes_dim_rope=(4, 4, 4),
        axes_lens=(300, 64, 64),
        cap_feat_dim=16,
    )
    inputs = {
        "hidden_states": noise(1, 4, 40, 38),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_attention_mask": TEXT_MASK,
    }
    layers = {
        "context_refiner.0.attn": "other",
        "noise_refiner.0.attn": (),
        "layers.0.attn": ((0, 50),),
        "layers.1.attn": ((0, 50),),
    }
    return Tiny(model, inputs, layers)


def nucleus_moe_image() -> Tiny:
    """Picture queries over picture and text keys, picture first; GQA keys are repeated before the call."""
    model = NucleusMoEImageTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
        dense_moe_strategy="all_moe",
        num_experts=2,
        moe_intermediate_dim=16,
        capacity_factors=1.0,
    )
    with torch.no_grad():
        for block in model.transformer_blocks:
            for weight in (block.img_mlp.experts.gate_up_proj, block.img_mlp.experts.down_proj):
                weight.normal_(std=0.1)
    inputs = {
        "hidden_states": noise(1, 380, 4),
        "img_shapes": [(1, 20, 19)],
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_hidden_states_mask": TEXT_MASK,
        "timestep": torch.tensor([0.5]),
    }
    return Tiny(model, inputs, {f"transformer_blocks.{i}.attn": ((380, 450),) for i in range(2)})


def omnigen() -> Tiny:
    """Text (causal, padded on the left), the timestep as one token, picture; a (tokens, tokens) mask."""
    model = OmniGenTransformer2DModel(
        in_channels=4,
        patch_size=2,
        hidden_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        num_layers=2,
        pad_token_id=0,
        vocab_size=100,
        rope_scaling={"short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
        pos_embed_max_size=32,
    )
    text, padding, total = 70, 20, 70 + 1 + 380
    visible = torch.ones(total, total).tril()
    visible[text + 1 :] = 1
    visible[:, :padding], visible[:padding] = 0, 1
    inputs = {
        "hidden_states": noise(1, 4, 40, 38),
        "timestep": torch.tensor([0.5]),
        "input_ids": torch.arange(text)[None],
        "input_img_latents": [],
        "input_image_sizes": {},
        "attention_mask": visible[None],
        "position_ids": (torch.arange(total) - padding).clamp(min=0)[None],
    }
    return Tiny(model, inputs, {f"layers.{i}.self_attn": ((0, 71),) for i in range(2)})


def ovis_image() -> Tiny:
    """As Flux: text first."""
    model = OvisImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    inputs = {
        "hidden_states": noise(1, 380, 4),
        "encoder_hidden_states": noise(1, 70, 16),
        "timestep": torch.tensor([0.5]),
        "img_ids": _grid_ids(20, 19),
        "txt_ids": torch.zeros(70, 3),
    }
    layers = {"transformer_blocks.0.attn": ((0, 70),), "single_transformer_blocks.0.attn": ((0, 70),)}
    return Tiny(model, inputs, layers)


def prx() -> Tiny:
    """Picture queries over text and picture keys, text first."""
    model = PRXTransformer2DModel(
        in_channels=4, context_in_dim=16, hidden_size=32, mlp_ratio=1.0, num_heads=2, depth=2, axes_dim=[8, 8]
    )
    inputs = {
        "hidden_states": noise(1, 4, 40, 38),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": noise(1, 70, 16),
        "attention_mask": TEXT_MASK,
    }
    return Tiny(model, inputs, {f"blocks.{i}.attention": ((0, 70),) for i in range(2)})


def flux() -> Tiny:
    """Text first, as one tensor with the picture in the second list."""
    text = ((0, 70),)
    return Tiny(
        *tiny_transformers.build("flux"),
        {
            "transformer_blocks.0.attn": text,
            "single_transformer_blocks.0.attn": text,
            "single_transformer_blocks.1.attn": text,
        },
    )


def sd3() -> Tiny:
    """Text last, and a layer of the picture alone beside the first."""
    text = ((400, 470),)
    return Tiny(
        *tiny_transformers.build("sd3"),
        {"transformer_blocks.0.attn": text, "transformer_blocks.0.attn2": (), "transformer_blocks.1.attn": text},
    )


FAMILIES: dict[str, Builder] = {
    "FluxTransformer2DModel": flux,
    "SD3Transformer2DModel": sd3,
    "AuraFlowTransformer2DModel": auraflow,
    "BriaFibo2Transformer2DModel": bria_fibo2,
    "BriaFibo2Transformer2DModel, edit": bria_fibo2_edit,
    "BriaFibo2Transformer2DModel, two prompts": bria_fibo2_batch,
    "BriaFiboTransformer2DModel": bria_fibo,
    "BriaTransformer2DModel": bria,
    "ChromaTransformer2DModel": chroma,
    "CogView3PlusTransformer2DModel": cogview3plus,
    "CogView4Transformer2DModel": cogview4,
    "DiTTransformer2DModel": dit,
    "DreamLiteTransformer2DModel": dreamlite,
    "ErnieImageTransformer2DModel": ernie_image,
    "Flux2Transformer2DModel": flux2,
    "Flux2Transformer2DModel, cached reference": flux2_cached,
    "Flux3Transformer2DModel": flux3,
    "Flux3Transformer2DModel, reference image": flux3_reference,
    "GlmImageTransformer2DModel": glm_image,
    "GlmImageTransformer2DModel, cached reference": glm_image_cached,
    "HiDreamImageTransformer2DModel": hidream,
    "HiDreamImageTransformer2DModel, oblong": hidream_oblong,
    "HunyuanDiT2DModel": hunyuandit,
    "HunyuanImageTransformer2DModel": hunyuan_image,
    "HunyuanImageTransformer2DModel, refiner": hunyuan_image_refiner,
    "Ideogram4Transformer2DModel": ideogram4,
    "Ideogram4Transformer2DModel, without text": ideogram4_without_text,
    "JoyImageEditPlusTransformer3DModel": joyimage_edit_plus,
    "JoyImageEditTransformer3DModel": joyimage_edit,
    "Krea2Transformer2DModel": krea2,
    "LongCatImageTransformer2DModel": longcat_image,
    "Lumina2Transformer2DModel": lumina2,
    "LuminaNextDiT2DModel": lumina_next,
    "NucleusMoEImageTransformer2DModel": nucleus_moe_image,
    "OmniGenTransformer2DModel": omnigen,
    "OvisImageTransformer2DModel": ovis_image,
    "PRXTransformer2DModel": prx,
    "PixArtTransformer2DModel": pixart,
    "PriorTransformer": prior,
    "PriorTransformer, Shap-E": prior_shap_e,
    "QwenImage21Transformer2DModel": qwen_image_21,
    "QwenImage21Transformer2DModel, cached": qwen_image_21_cached,
    "QwenImage21Transformer2DModel, edit": qwen_image_21_edit,
    "QwenImageTransformer2DModel": qwen_image,
    "QwenImageTransformer2DModel, edit": qwen_image_edit,
    "Transformer2DModel": transformer_2d,
    "ZImageTransformer2DModel": z_image,
    "ZImageTransformer2DModel, omni": z_image_omni,
}

WITHOUT: dict[str, str] = {
    "DualTransformer2DModel": "a container; its parts are supported",
    "SanaTransformer2DModel": "linear self-attention; softmax only to the text",
}
