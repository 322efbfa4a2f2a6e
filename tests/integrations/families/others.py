"""Transformers that generate sound or proteins."""

from __future__ import annotations

import torch
from diffusers.models.embeddings import get_1d_rotary_pos_embed

from families.family import (
    CHANNELS,
    HEADS,
    TEXT,
    TEXT_AT_3,
    TEXT_AT_HALF,
    TEXT_MASK,
    Family,
    noise,
    padding_mask,
    randomize_zero_weights,
    repeat_layers,
)

FAMILIES: dict[str, Family] = {}

# Grouped heads, a band mask in every other layer; the context is in the channels, an odd end is padded.
FAMILIES["AceStepTransformer1DModel"] = Family(
    config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "head_dim": 16, "in_channels": 12, "audio_acoustic_hidden_dim": 4}
    | {"encoder_hidden_size": 16},
    inputs={
        "hidden_states": noise(1, 801, 4),
        "timestep_r": torch.tensor([0.5]),
        "context_latents": noise(1, 801, 8),
        **TEXT_AT_HALF,
    },
    layers=repeat_layers(2, {"layers.{}.self_attn": (), "layers.{}.cross_attn": "cross"}),
)

# A sequence of sound, with a mask over the keys; weights that start at zero are randomized.
FAMILIES["LongCatAudioDiTTransformer"] = Family(
    config={"dit_dim": 32, "dit_depth": 2, "dit_heads": 2, "dit_text_dim": 16, "latent_dim": 4},
    inputs={
        "hidden_states": noise(1, 390, 4),
        "encoder_attention_mask": TEXT_MASK,
        "timestep": torch.tensor([0.7]),
        "attention_mask": padding_mask(390, valid=390),
        "latent_cond": noise(1, 390, 4),
        **TEXT,
    },
    layers=repeat_layers(2, {"blocks.{}.self_attn": (), "blocks.{}.cross_attn": "cross"}),
    prepare=randomize_zero_weights,
)

# Sound: a time token before the latents; the condition is in the channels.
FAMILIES["MiniMaxMusic3Transformer1DModel"] = Family(
    config={**HEADS, "in_channels": 4, "condition_dim": 8, "num_layers": 2, "ff_inner_dim": 32, "rotary_dim": 8}
    | {"fourier_embedding_dim": 16},
    inputs={
        "hidden_states": noise(1, 4, 401),
        "timestep": torch.tensor([0.5]),
        "encoder_hidden_states": noise(1, 401, 8),
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn": ((0, 1),)}),
)

# Residues of a protein; each layer adds a learned bias (heads, residues, residues) that includes the padding.
FAMILIES["RFD4ProteinaTransformer"] = Family(
    config={"nlayers": 2, "token_dim": 32, "nheads": 2, "dim_cond": 8, "pair_repr_dim": 4, "latent_dim": 4}
    | {"t_emb_dim": 8, "xt_pair_dist_dim": 6, "feats_seq": ("xt_bb_ca", "xt_local_latents")}
    | {"feats_cond_seq": ("time_emb_bb_ca", "time_emb_local_latents")}
    | {"feats_pair_repr": ("xt_bb_ca_pair_dists",), "tri_mult_c": 2, "num_sequence_classes": 5},
    inputs={
        "bb_ca": noise(1, 200, 3),
        "local_latents": noise(1, 200, 4),
        "bb_ca_time": torch.tensor([0.5]),
        "local_latents_time": torch.tensor([0.5]),
        "padding_mask": padding_mask(200, valid=190),
        "conditioning": {
            "is_in_context_conditioning": torch.zeros(1, 200, dtype=torch.bool),
            "supports_local_latent": torch.ones(1, 200, dtype=torch.bool),
        },
    },
    layers=repeat_layers(2, {"transformer_layers.{}.mhba.mha": ((190, 200),)}),
)

# Sound: learned memory tokens come first; each layer subtracts two attentions, in two calls.
FAMILIES["StableAudio3DiTModel"] = Family(
    config={"io_channels": 4, "embed_dim": 32, "depth": 2, "num_heads": 2, "cond_token_dim": 16}
    | {"global_cond_dim": 8, "local_add_cond_dim": 5, "timestep_features_dim": 8, "ff_mult": 1.0}
    | {"num_memory_tokens": 16},
    inputs={
        "hidden_states": noise(1, 4, 380),
        "global_hidden_states": noise(1, 8),
        "encoder_attention_mask": TEXT_MASK,
        "local_add_cond": noise(1, 5, 380),
        **TEXT_AT_HALF,
    },
    layers=repeat_layers(
        2, {"transformer_blocks.{}.self_attn": ((0, 16),), "transformer_blocks.{}.cross_attn": "cross"}
    ),
)

# Sound: a token of duration and time before the latents; grouped heads in cross-attention.
FAMILIES["StableAudioDiTModel"] = Family(
    config={**HEADS, **CHANNELS, "sample_size": 401, "num_layers": 2, "num_key_value_attention_heads": 1}
    | {"cross_attention_dim": 16, "time_proj_dim": 16, "global_states_input_dim": 16}
    | {"cross_attention_input_dim": 16},
    inputs={
        "hidden_states": noise(1, 4, 401),
        "global_hidden_states": noise(1, 1, 16),
        "rotary_embedding": get_1d_rotary_pos_embed(8, 402, use_real=True, repeat_interleave_real=False),
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 1),), "transformer_blocks.{}.attn2": "cross"}),
)

WITHOUT: dict[str, str] = {
    "MiniMaxMusic3RVQDepthDecoder": "no latents: a causal decoder over at most 16 codebook tokens",
    "T5FilmDecoder": "computes softmax by hand",
}
