"""Transformers that make sound and proteins."""

from __future__ import annotations

import torch
from diffusers import (
    AceStepTransformer1DModel,
    LongCatAudioDiTTransformer,
    MiniMaxMusic3Transformer1DModel,
    RFD4ProteinaTransformer,
    StableAudio3DiTModel,
    StableAudioDiTModel,
)
from diffusers.models.embeddings import get_1d_rotary_pos_embed
from torch import Tensor, nn

from families.tiny import Builder, Keys, Tiny, noise

TEXT_MASK = (torch.arange(70) < 50)[None]


def ace_step() -> Tiny:
    """Grouped heads, a band mask in every other layer; the context lies in the channels, an odd end is padded."""
    model = AceStepTransformer1DModel(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        in_channels=12,
        audio_acoustic_hidden_dim=4,
        encoder_hidden_size=16,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 801, 4),
            "timestep": torch.tensor([0.5]),
            "timestep_r": torch.tensor([0.5]),
            "encoder_hidden_states": noise(1, 70, 16),
            "context_latents": noise(1, 801, 8),
        },
        {
            "layers.0.self_attn": (),
            "layers.0.cross_attn": "cross",
            "layers.1.self_attn": (),
            "layers.1.cross_attn": "cross",
        },
    )


def stable_audio() -> Tiny:
    """Sound: one token of duration and time stands before the latents; grouped heads in cross-attention."""
    model = StableAudioDiTModel(
        sample_size=401,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=1,
        out_channels=4,
        cross_attention_dim=16,
        time_proj_dim=16,
        global_states_input_dim=16,
        cross_attention_input_dim=16,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 401),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 70, 16),
            "global_hidden_states": noise(1, 1, 16),
            "rotary_embedding": get_1d_rotary_pos_embed(8, 402, use_real=True, repeat_interleave_real=False),
        },
        {
            "transformer_blocks.0.attn1": ((0, 1),),
            "transformer_blocks.0.attn2": "cross",
            "transformer_blocks.1.attn1": ((0, 1),),
            "transformer_blocks.1.attn2": "cross",
        },
    )


def minimax_music3() -> Tiny:
    """Sound: one token of the time stands before the latents; the condition lies in the channels."""
    model = MiniMaxMusic3Transformer1DModel(
        in_channels=4,
        condition_dim=8,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=16,
        ff_inner_dim=32,
        rotary_dim=8,
        fourier_embedding_dim=16,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 401),
            "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": noise(1, 401, 8),
        },
        {"transformer_blocks.0.attn": ((0, 1),), "transformer_blocks.1.attn": ((0, 1),)},
    )


def _mask(length: int, valid: int) -> Tensor:
    return (torch.arange(length) < valid).long()[None]


def _self_and_cross(blocks: int, own: str, cross: str) -> dict[str, Keys]:
    """Blocks of a self-attention over latents alone, then a cross-attention."""
    pairs: list[tuple[str, Keys]] = [(own, ()), (cross, "cross")]
    return {name.format(i): keys for i in range(blocks) for name, keys in pairs}


def _awake(model: nn.Module) -> nn.Module:
    """Small random weights for the linear layers that start at zero and would hide what the attention does."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.2)
    return model


def longcat_audio() -> Tiny:
    """Latents are a line of sound, with a mask over the keys; new weights where it starts at zero."""
    model = LongCatAudioDiTTransformer(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=16, latent_dim=4)
    return Tiny(
        _awake(model),
        {
            "hidden_states": noise(1, 390, 4),
            "encoder_hidden_states": noise(1, 70, 16),
            "encoder_attention_mask": _mask(70, 50).bool(),
            "timestep": torch.tensor([0.7]),
            "attention_mask": _mask(390, 390).bool(),
            "latent_cond": noise(1, 390, 4),
        },
        _self_and_cross(2, "blocks.{}.self_attn", "blocks.{}.cross_attn"),
    )


def stable_audio_3() -> Tiny:
    """Audio. Learned memory tokens come first; each layer subtracts two attentions: two calls."""
    model = StableAudio3DiTModel(
        io_channels=4,
        embed_dim=32,
        depth=2,
        num_heads=2,
        cond_token_dim=16,
        global_cond_dim=8,
        local_add_cond_dim=5,
        timestep_features_dim=8,
        ff_mult=1.0,
        num_memory_tokens=16,
    )
    inputs = {
        "hidden_states": noise(1, 4, 380),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": noise(1, 70, 16),
        "global_hidden_states": noise(1, 8),
        "encoder_attention_mask": TEXT_MASK,
        "local_add_cond": noise(1, 5, 380),
    }
    layers = {
        f"transformer_blocks.{i}.{name}": keys
        for i in range(2)
        for name, keys in (("self_attn", ((0, 16),)), ("cross_attn", "cross"))
    }
    return Tiny(model, inputs, layers)


def rfd4_proteina() -> Tiny:
    """Residues of a protein; each layer adds a learned bias of (heads, residues, residues), padding in it."""
    model = RFD4ProteinaTransformer(
        nlayers=2,
        token_dim=32,
        nheads=2,
        dim_cond=8,
        pair_repr_dim=4,
        latent_dim=4,
        t_emb_dim=8,
        xt_pair_dist_dim=6,
        feats_seq=("xt_bb_ca", "xt_local_latents"),
        feats_cond_seq=("time_emb_bb_ca", "time_emb_local_latents"),
        feats_pair_repr=("xt_bb_ca_pair_dists",),
        tri_mult_c=2,
        num_sequence_classes=5,
    )
    inputs = {
        "bb_ca": noise(1, 200, 3),
        "local_latents": noise(1, 200, 4),
        "bb_ca_time": torch.tensor([0.5]),
        "local_latents_time": torch.tensor([0.5]),
        "padding_mask": (torch.arange(200) < 190)[None],
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(1, 200, dtype=torch.bool),
            "supports_local_latent": torch.ones(1, 200, dtype=torch.bool),
        },
    }
    return Tiny(model, inputs, {f"transformer_layers.{i}.mhba.mha": ((190, 200),) for i in range(2)})


FAMILIES: dict[str, Builder] = {
    "AceStepTransformer1DModel": ace_step,
    "LongCatAudioDiTTransformer": longcat_audio,
    "MiniMaxMusic3Transformer1DModel": minimax_music3,
    "RFD4ProteinaTransformer": rfd4_proteina,
    "StableAudio3DiTModel": stable_audio_3,
    "StableAudioDiTModel": stable_audio,
}

WITHOUT: dict[str, str] = {
    "MiniMaxMusic3RVQDepthDecoder": "no latents: a causal decoder over at most 16 codebook tokens",
    "T5FilmDecoder": "computes softmax by hand",
}
