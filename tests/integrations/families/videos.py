"""Transformers that generate videos."""

from __future__ import annotations

from typing import Any

import tiny_transformers
import torch
from diffusers import SanaWMLTX2RefinerTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor, nn

from families.family import (
    CHANNELS,
    HEADS,
    TEXT,
    TEXT_AT_3,
    TEXT_MASK,
    Family,
    noise,
    padding_mask,
    randomize_zero_weights,
    repeat_layers,
    self_then_cross,
)

FAMILIES: dict[str, Family] = {}

WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2, "text_dim": 16, "ffn_dim": 32}
WAN |= {"rope_max_seq_len": 32}
WAN_IMAGE = {"encoder_hidden_states": noise(1, 512, 16), "encoder_hidden_states_image": noise(1, 17, 16)}
LTX2 = {**HEADS, **CHANNELS, "num_layers": 2, "cross_attention_dim": 32, "caption_channels": 16}
LTX2 |= {"audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2}
LTX2 |= {"audio_attention_head_dim": 8, "audio_cross_attention_dim": 16}


def allegro_rotary_embedding() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the rotary embedding of 3 x 12 x 10 tokens, and the position of each."""
    *rotations, frames, rows, columns = get_3d_rotary_pos_embed_allegro(24, ((0, 0), (12, 10)), (12, 10), 3)
    places = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).T[:, None]
    return tuple(rotations), tuple(places)


# Self-attention over the video, cross-attention to the text.
FAMILIES["AllegroTransformer3DModel"] = Family(
    config={**CHANNELS, "num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 2}
    | {"cross_attention_dim": 48, "caption_channels": 16}
    | {"sample_height": 24, "sample_width": 20, "sample_frames": 3},
    inputs={
        "hidden_states": noise(1, 4, 3, 24, 20),
        "encoder_hidden_states": noise(1, 1, 70, 16),
        "timestep": torch.tensor([3]),
        "encoder_attention_mask": TEXT_MASK.long(),
        "image_rotary_emb": allegro_rotary_embedding(),
    },
    layers=self_then_cross("transformer_blocks"),
)

# Self-attention over the video; the latents have frames before channels.
FAMILIES["AnyFlowTransformer3DModel"] = Family(
    config={**WAN, **CHANNELS},
    inputs={
        "hidden_states": noise(1, 3, 4, 24, 20),
        "timestep": torch.full((1, 3), 900.0),
        "r_timestep": torch.full((1, 3), 600.0),
        **TEXT,
    },
    layers=self_then_cross("blocks"),
)

# Self-attention over the video; cross-attention to the image embedding, then to the 512 text tokens.
FAMILIES["ChronoEditTransformer3DModel"] = Family(
    config={**WAN, **CHANNELS, "image_dim": 16, "added_kv_proj_dim": 24},
    inputs={
        "hidden_states": noise(1, 4, 3, 24, 20),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 512, 16),
        "encoder_hidden_states_image": noise(1, 40, 16),
    },
    layers=self_then_cross("blocks"),
)

# Text first.
FAMILIES["CogVideoXTransformer3DModel"] = Family(
    builder=tiny_transformers.cogvideox, layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 70),)})
)

# Text and video in one sequence, text first; the attention to the face does not call SDPA.
FAMILIES["ConsisIDTransformer3DModel"] = Family(
    config={**HEADS, **CHANNELS, "time_embed_dim": 8, "text_embed_dim": 16, "num_layers": 2, "sample_width": 20}
    | {"sample_height": 24, "sample_frames": 9, "max_text_seq_length": 70}
    | {"use_rotary_positional_embeddings": True, "is_train_face": True, "cross_attn_dim_head": 8}
    | {"cross_attn_num_heads": 2, "LFE_id_dim": 8, "LFE_vit_dim": 16, "LFE_depth": 1, "LFE_dim_head": 8}
    | {"LFE_num_heads": 2, "LFE_num_querie": 4, "LFE_output_dim": 21, "LFE_num_scale": 1},
    inputs={
        "hidden_states": noise(1, 3, 4, 24, 20),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), (12, 10)), (12, 10), 3),
        "id_cond": noise(1, 8),
        "id_vit_hidden": [noise(1, 10, 16)],
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 70),)}),
)

# Two calls per layer: causal text, then queries of the video over keys of text and video, text first.
COSMOS3_POSITIONS = torch.cat(
    [torch.arange(70).expand(3, 70), torch.cartesian_prod(torch.arange(2), torch.arange(13), torch.arange(15)).T + 70],
    dim=1,
)
FAMILIES["Cosmos3OmniTransformer"] = Family(
    config={"head_dim": 16, "hidden_size": 32, "intermediate_size": 32, "latent_channel": 4}
    | {"num_attention_heads": 2, "num_hidden_layers": 2, "num_key_value_heads": 1, "patch_latent_dim": 16}
    | {"vocab_size": 32, "rope_axes_dim": (4, 2, 2), "sound_gen": True, "sound_dim": 4},
    inputs={
        "input_ids": torch.arange(70) % 32,
        "text_indexes": torch.arange(70),
        "position_ids": COSMOS3_POSITIONS,
        "und_len": 70,
        "sequence_length": 460,
        "vision_tokens": [noise(1, 4, 2, 26, 30)],
        "vision_token_shapes": [(2, 13, 15)],
        "vision_sequence_indexes": torch.arange(70, 460),
        "vision_mse_loss_indexes": torch.arange(70, 460),
        "vision_timesteps": torch.full((390,), 300.0),
        "vision_noisy_frame_indexes": [torch.arange(2)],
    },
    layers=repeat_layers(2, {"layers.{}.self_attn": ["other", ((0, 70),)]}),
)

# Sound follows the video in the same call.
FAMILIES["Cosmos3OmniTransformer, with sound"] = FAMILIES["Cosmos3OmniTransformer"].variant(
    inputs={
        "position_ids": torch.cat([COSMOS3_POSITIONS, torch.arange(70, 100).expand(3, 30)], 1),
        "sequence_length": 490,
        "sound_tokens": [noise(4, 30)],
        "sound_token_shapes": [(30, 1, 1)],
        "sound_sequence_indexes": torch.arange(460, 490),
        "sound_mse_loss_indexes": torch.arange(460, 490),
        "sound_timesteps": torch.full((30,), 300.0),
        "sound_noisy_frame_indexes": [torch.arange(30)],
    },
    layers=repeat_layers(2, {"layers.{}.self_attn": ["other", ((0, 70), (460, 490))]}),
)

# Self-attention over the video alone; the published model also takes a padding mask as a channel.
FAMILIES["CosmosTransformer3DModel"] = Family(
    config={**HEADS, **CHANNELS, "num_layers": 2, "text_embed_dim": 16, "adaln_lora_dim": 4}
    | {"max_size": (8, 40, 40), "concat_padding_mask": False},
    inputs={"hidden_states": noise(1, 4, 2, 26, 30), "timestep": torch.tensor([3.0]), "fps": 24, **TEXT},
    layers=self_then_cross("transformer_blocks"),
)

# One timestep per frame, a condition mask as a channel; cross-attention to text, then to an image.
FAMILIES["CosmosTransformer3DModel, 2.5 with image context"] = Family(
    config={**HEADS, "in_channels": 5, "out_channels": 4, "num_layers": 2, "text_embed_dim": 32}
    | {"adaln_lora_dim": 4, "max_size": (8, 40, 40), "rope_scale": (1.0, 3.0, 3.0)}
    | {"concat_padding_mask": False, "extra_pos_embed_type": None, "use_crossattn_projection": True}
    | {"crossattn_proj_in_channels": 16, "encoder_hidden_states_channels": 32, "img_context_dim_in": 8}
    | {"img_context_num_tokens": 20, "img_context_dim_out": 32},
    inputs={
        "hidden_states": noise(1, 4, 2, 26, 30),
        "timestep": torch.tensor([0.0, 3.0]).view(1, 1, 2, 1, 1),
        "encoder_hidden_states": (noise(1, 70, 16), noise(1, 20, 8)),
        "condition_mask": torch.cat([torch.ones(1, 1, 1, 26, 30), torch.zeros(1, 1, 1, 26, 30)], 2),
    },
    layers=self_then_cross("transformer_blocks"),
)

# Two texts first, then the video, in dual-stream and single-stream blocks.
FAMILIES["EasyAnimateTransformer3DModel"] = Family(
    config={**HEADS, **CHANNELS, "patch_size": 2, "num_layers": 2, "mmdit_layers": 1, "time_embed_dim": 8}
    | {"text_embed_dim": 16, "text_embed_dim_t5": 8},
    inputs={
        "hidden_states": noise(1, 4, 2, 26, 30),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 50, 16),
        "encoder_hidden_states_t5": noise(1, 20, 8),
    },
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 70),)}),
)

# Past frames in three sizes precede the current frames; only the current frames attend to the text.
HELIOS_PAST = 1 * 3 * 3 + 1 * 6 * 5 + 1 * 12 * 10
FAMILIES["HeliosTransformer3DModel"] = Family(
    config={**HEADS, **CHANNELS, "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
    | {"rope_dim": (4, 6, 6), "is_amplify_history": True},
    inputs={
        "hidden_states": noise(1, 4, 3, 24, 20),
        "indices_hidden_states": torch.arange(7, 10)[None],
        "indices_latents_history_short": torch.tensor([[6]]),
        "indices_latents_history_mid": torch.arange(4, 6)[None],
        "indices_latents_history_long": torch.arange(0, 4)[None],
        "latents_history_short": noise(1, 4, 1, 24, 20),
        "latents_history_mid": noise(1, 4, 2, 24, 20),
        "latents_history_long": noise(1, 4, 4, 24, 20),
        **TEXT_AT_3,
    },
    layers=repeat_layers(2, {"blocks.{}.attn1": ((0, HELIOS_PAST),), "blocks.{}.attn2": "cross"}),
)

# Video first, then image embeddings (masked: text to video), glyph text and text, with a full (S_q x S_k) mask.
FAMILIES["HunyuanVideo15Transformer3DModel"] = Family(
    config={**HEADS, "in_channels": 9, "out_channels": 4, "num_layers": 2, "num_refiner_layers": 1}
    | {"text_embed_dim": 16, "text_embed_2_dim": 8, "image_embed_dim": 8, "rope_axes_dim": (4, 6, 6)},
    inputs={
        "hidden_states": noise(1, 9, 2, 13, 15),
        "timestep": torch.tensor([3.0]),
        "encoder_hidden_states": noise(1, 40, 16),
        "encoder_attention_mask": padding_mask(40, valid=30).long(),
        "encoder_hidden_states_2": noise(1, 20, 8),
        "encoder_attention_mask_2": padding_mask(20, valid=11).long(),
        "image_embeds": torch.zeros(1, 13, 8),
    },
    layers={"context_embedder.token_refiner.refiner_blocks.0.attn": "other"}
    | repeat_layers(2, {"transformer_blocks.{}.attn": ((390, 463),)}),
)

# Like text to video, but the image embeddings are not masked.
FAMILIES["HunyuanVideo15Transformer3DModel, image to video"] = FAMILIES["HunyuanVideo15Transformer3DModel"].variant(
    inputs={"image_embeds": noise(1, 13, 8)}
)

# Past frames in three sizes, then the current frames, image embeddings and text without its padding.
FRAMEPACK_PAST = 1 * 3 * 3 + 1 * 6 * 5 + 2 * 12 * 10
FRAMEPACK_VIDEO = FRAMEPACK_PAST + 3 * 12 * 10
FRAMEPACK_KEYS = ((0, FRAMEPACK_PAST), (FRAMEPACK_VIDEO, FRAMEPACK_VIDEO + 13 + 50))
FAMILIES["HunyuanVideoFramepackTransformer3DModel"] = Family(
    config={**HEADS, **CHANNELS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1}
    | {"text_embed_dim": 16, "pooled_projection_dim": 8, "rope_axes_dim": (4, 6, 6)}
    | {"has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True},
    inputs={
        "hidden_states": noise(1, 4, 3, 24, 20),
        "encoder_attention_mask": TEXT_MASK.long(),
        "pooled_projections": noise(1, 8),
        "image_embeds": noise(1, 13, 8),
        "indices_latents": torch.arange(8, 11),
        "guidance": torch.tensor([6000.0]),
        "latents_clean": noise(1, 4, 2, 24, 20),
        "indices_latents_clean": torch.tensor([0, 7]),
        "latents_history_2x": noise(1, 4, 2, 24, 20),
        "indices_latents_history_2x": torch.arange(5, 7),
        "latents_history_4x": noise(1, 4, 4, 24, 20),
        "indices_latents_history_4x": torch.arange(1, 5),
        **TEXT_AT_3,
    },
    layers={
        "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
        "transformer_blocks.0.attn": FRAMEPACK_KEYS,
        "single_transformer_blocks.0.attn": FRAMEPACK_KEYS,
    },
)

# Text last, without its padding; the text refiner has its own attention.
FAMILIES["HunyuanVideoTransformer3DModel"] = Family(
    builder=tiny_transformers.hunyuanvideo,
    layers={
        "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
        "transformer_blocks.0.attn": ((392, 462),),
        "single_transformer_blocks.0.attn": ((392, 462),),
    },
)

# Channels last; its gates start at zero and are randomized.
FAMILIES["Kandinsky5Transformer3DModel"] = Family(
    config={"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 8}
    | {"model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6)}
    | {"visual_cond": True},
    inputs={
        "hidden_states": noise(1, 2, 26, 30, 9),
        "timestep": torch.tensor([3.0]),
        "pooled_projections": noise(1, 8),
        "visual_rope_pos": [torch.arange(2), torch.arange(13), torch.arange(15)],
        "text_rope_pos": torch.arange(70),
        **TEXT,
    },
    layers={
        "text_transformer_blocks.0.self_attention": "other",
        "visual_transformer_blocks.0.self_attention": (),
        "visual_transformer_blocks.0.cross_attention": "cross",
        "visual_transformer_blocks.1.self_attention": (),
        "visual_transformer_blocks.1.cross_attention": "cross",
    },
    prepare=randomize_zero_weights,
)

# A video stream, channels last, and an audio stream, each with its text, and cross-attention between the streams.
FAMILIES["Kandinsky6Transformer3DModel"] = Family(
    config={"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 8}
    | {"model_dim": 32, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 6, 6)}
    | {"in_audio_dim": 4, "out_audio_dim": 4},
    inputs={
        "hidden_states": noise(1, 2, 26, 30, 9),
        "pooled_projections": noise(1, 8),
        "timestep": torch.tensor([3.0]),
        "audio_hidden_states": noise(1, 30, 4),
        "encoder_attention_mask": TEXT_MASK,
        **TEXT,
    },
    layers={"video_text_transformer_blocks.0.attn": "other", "audio_text_transformer_blocks.0.attn": "other"}
    | repeat_layers(
        2,
        {
            "visual_transformer_blocks.{}.video_dec_block.self_attention": (),
            "visual_transformer_blocks.{}.video_dec_block.cross_attention": "cross",
            "visual_transformer_blocks.{}.audio_dec_block.self_attention": "other",
            "visual_transformer_blocks.{}.audio_dec_block.cross_attention": "other",
            "visual_transformer_blocks.{}.va_cross_attention": "cross",
            "visual_transformer_blocks.{}.av_cross_attention": "other",
        },
    ),
)

# A video stream and an audio stream, each with its text, and cross-attention between the streams.
FAMILIES["LTX2VideoTransformer3DModel"] = Family(
    config=LTX2,
    inputs={
        "hidden_states": noise(1, 392, 4),
        "audio_hidden_states": noise(1, 30, 4),
        "audio_encoder_hidden_states": noise(1, 70, 16),
        "timestep": torch.tensor([3.0]),
        "encoder_attention_mask": TEXT_MASK.long(),
        "audio_encoder_attention_mask": TEXT_MASK.long(),
        "num_frames": 2,
        "height": 14,
        "width": 14,
        "audio_num_frames": 30,
        **TEXT,
    },
    layers=repeat_layers(
        2,
        {
            "transformer_blocks.{}.attn1": (),
            "transformer_blocks.{}.audio_attn1": "other",
            "transformer_blocks.{}.attn2": "cross",
            "transformer_blocks.{}.audio_attn2": "other",
            "transformer_blocks.{}.audio_to_video_attn": "cross",
            "transformer_blocks.{}.video_to_audio_attn": "other",
        },
    ),
)

# Text by cross-attention.
FAMILIES["LTXVideoTransformer3DModel"] = Family(
    builder=tiny_transformers.ltx, layers=self_then_cross("transformer_blocks")
)

# A block over the tokens of each frame, then a block over the frames of each position.
FAMILIES["LatteTransformer3DModel"] = Family(
    config={**HEADS, "in_channels": 4, "out_channels": 8, "num_layers": 2, "cross_attention_dim": 32}
    | {"attention_bias": True, "sample_size": 40, "patch_size": 2, "activation_fn": "gelu-approximate"}
    | {"num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False}
    | {"caption_channels": 16, "video_length": 3},
    inputs={"hidden_states": noise(1, 4, 3, 40, 36), **TEXT_AT_3},
    layers=repeat_layers(
        2,
        {
            "transformer_blocks.{}.attn1": (),
            "transformer_blocks.{}.attn2": "cross",
            "temporal_transformer_blocks.{}.attn1": (),
        },
    ),
)


def minimax_h3_inputs() -> dict[str, Any]:
    """Return text, keyframe, audio and video in one sequence, with the indices that place them."""
    text, keyframe, audio, frames, height, width = 70, 110, 18, 2, 10, 11
    media = text + keyframe + audio
    total = media + frames * height * width
    tags = torch.full((total,), 2)
    tags[:text], tags[text + keyframe : media] = 0, 1
    places = torch.zeros(total, 3)
    places[:text, 0] = torch.arange(text)
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width))
    places[text : text + keyframe] = grid[:keyframe] + torch.tensor([text, 0, 0])
    places[text + keyframe : media, 0] = text + torch.arange(audio)
    places[media:] = grid + torch.tensor([text, 0, 0])
    return {
        "hidden_states": noise(1, keyframe + frames * height * width, 16),
        "audio_hidden_states": noise(1, audio, 8),
        "encoder_hidden_states": noise(1, text, 16),
        "timestep": torch.tensor([0.0, 0.5]),
        "timestep_indices": (torch.arange(total) >= text + keyframe).long(),
        "token_tags": tags,
        "position_ids": places,
        "video_indices": torch.cat([torch.arange(text, text + keyframe), torch.arange(media, total)]),
        "audio_indices": torch.arange(text + keyframe, media),
        "text_indices": torch.arange(text),
    }


# Text, keyframe, audio and video in one sequence; the keyframe is part of the latents.
FAMILIES["MiniMaxH3Transformer3DModel"] = Family(
    config={**HEADS, "hidden_size": 32, "num_layers": 2, "num_refiner_layers": 1, "ffn_dim": 32}
    | {"in_channels": 4, "audio_in_channels": 8, "text_dim": 16, "freq_dim": 16}
    | {"time_embed_hidden_dim": 16, "time_embed_dim": 16, "rope_freq_dim": 2},
    inputs=minimax_h3_inputs(),
    layers={"token_refiner.refiner_blocks.0.attn": "other"}
    | repeat_layers(2, {"transformer_blocks.{}.attn": ((0, 70), (180, 198))}),
)

# Text last, without its padding; the text pooling has its own attention.
FAMILIES["MochiTransformer3DModel"] = Family(
    builder=tiny_transformers.mochi,
    layers={"time_embed.pooler": "other"} | repeat_layers(2, {"transformer_blocks.{}.attn1": ((432, 482),)}),
)

# Video first, text last; the final decoder layer has only the latents.
MOTIF_VIDEO: dict[str, Any] = {"in_channels": 9, "out_channels": 4, "num_attention_heads": 2}
MOTIF_VIDEO |= {"attention_head_dim": 12, "num_layers": 1, "text_embed_dim": 16, "rope_axes_dim": (4, 4, 4)}
FAMILIES["MotifVideoTransformer3DModel"] = Family(
    config={**MOTIF_VIDEO, "num_single_layers": 2, "num_decoder_layers": 1}
    | {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True},
    inputs={"hidden_states": noise(1, 9, 3, 22, 24), "encoder_attention_mask": TEXT_MASK, **TEXT_AT_3},
    layers={
        "transformer_blocks.0.attn": ((396, 466),),
        "transformer_blocks.0.cross_attn": "cross",
        "single_transformer_blocks.0.attn": ((396, 466),),
        "single_transformer_blocks.0.cross_attn": "cross",
        "single_transformer_blocks.1.attn": (),
    },
)

# Video first, then image embeddings, then text.
FAMILIES["MotifVideoTransformer3DModel, image to video"] = Family(
    config={**MOTIF_VIDEO, "num_single_layers": 1, "image_embed_dim": 8},
    inputs={**FAMILIES["MotifVideoTransformer3DModel"].inputs, "image_embeds": noise(1, 17, 8)},
    layers={"transformer_blocks.0.attn": ((396, 483),), "single_transformer_blocks.0.attn": ((396, 483),)},
)


def sana_wm_refiner() -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and its inputs, with a rotary embedding that the model computes."""
    model = SanaWMLTX2RefinerTransformer3DModel(**LTX2)
    rotary = model.build_rotary_emb_for_absolute_positions(1, [0, 1, 2], 11, 12, torch.device("cpu"), 24.0)
    inputs = {
        "hidden_states": noise(1, 396, 4),
        "timestep": torch.full((1, 396), 500.0),
        "video_rotary_emb": rotary,
        "encoder_attention_mask": TEXT_MASK,
        **TEXT,
    }
    return model, inputs


def sana_wm_refiner_with_history() -> tuple[nn.Module, dict[str, Any]]:
    """Return the model and its inputs, with a cache of 132 keys of past frames."""
    model, inputs = sana_wm_refiner()
    cache = SanaWMRefinerKVCache(2)
    for index in range(2):
        cache.get(index).store_history(noise(1, 132, 32), noise(1, 132, 32) / 2)
    return model, {**inputs, "kv_cache": cache, "kv_cache_mode": "inject"}


# Like LTX; the weights of its audio stream are not used.
FAMILIES["SanaWMLTX2RefinerTransformer3DModel"] = Family(
    builder=sana_wm_refiner, layers=self_then_cross("transformer_blocks")
)

# The cached keys of past frames come first.
FAMILIES["SanaWMLTX2RefinerTransformer3DModel, with history"] = Family(
    builder=sana_wm_refiner_with_history,
    layers=repeat_layers(2, {"transformer_blocks.{}.attn1": ((0, 132),), "transformer_blocks.{}.attn2": "cross"}),
)

# Most self-attention is a linear recurrence; every n-th block has softmax attention, and again in camera space.
# Softmax always runs in bfloat16, which is slow on a CPU, so the inputs have few tokens.
SANA_WM_CAMERA = torch.cat([torch.eye(4).flatten(), torch.tensor([9.0, 9.0, 4.5, 3.5])])
FAMILIES["SanaWMTransformer3DModel"] = Family(
    config={"in_channels": 4, "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "softmax_every_n": 2}
    | {"linear_head_dim": 32, "chunk_plucker_channels": 6, "caption_channels": 16, "mlp_ratio": 1.0},
    inputs={
        "hidden_states": noise(1, 4, 3, 7, 9),
        "timestep": torch.full((1, 1, 3), 3),
        "encoder_attention_mask": TEXT_MASK,
        "camera_conditions": SANA_WM_CAMERA.expand(1, 3, 20).contiguous(),
        "chunk_plucker": noise(1, 6, 3, 7, 9),
        **TEXT,
    },
    layers={
        "blocks.0.cross_attn": "cross",
        "blocks.1.attn.attn": (),
        "blocks.1.attn.cam_attn": (),
        "blocks.1.cross_attn": "cross",
    },
    rounding=2**-8,
)

# Like Wan.
FAMILIES["SkyReelsV2Transformer3DModel"] = Family(
    config={**WAN, **CHANNELS, "num_frame_per_block": 1},
    inputs={"hidden_states": noise(1, 4, 4, 20, 18), **TEXT_AT_3},
    layers=self_then_cross("blocks"),
)

# A timestep per frame; groups of two frames are causal by a full (S_q x S_k) mask.
FAMILIES["SkyReelsV2Transformer3DModel, diffusion forcing"] = Family(
    config={**WAN, **CHANNELS, "num_frame_per_block": 2},
    inputs={
        "hidden_states": noise(1, 4, 4, 20, 18),
        "timestep": torch.tensor([[1, 1, 3, 3]]),
        "enable_diffusion_forcing": True,
        **TEXT,
    },
    layers=self_then_cross("blocks"),
)

# A part of U-Nets: attention over the frames of each pixel, twice per block.
FAMILIES["TransformerTemporalModel"] = Family(
    config={"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 16, "norm_num_groups": 4},
    inputs={"hidden_states": noise(72, 16, 5, 4), "num_frames": 72},
    layers={"transformer_blocks.0.attn1": (), "transformer_blocks.0.attn2": ()},
)

# The pass over the driving video, which fills the key cache; the pass that generates uses FlexAttention.
FAMILIES["WanAnimate2Transformer3DModel"] = Family(
    config={"text_len": 70, "in_dim": 8, "dim": 24, "ffn_dim": 32, "text_dim": 16, "out_dim": 4, "num_heads": 2}
    | {"num_layers": 2},
    inputs={
        "hidden_states": [noise(4, 3, 22, 24)],
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": [noise(50, 16)],
        "condition_latents": [noise(4, 3, 22, 24) / 2],
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 396,
        "encoder_hidden_states_image": noise(1, 17, 1280),
        "offset_grid_sizes": torch.tensor([[3, 11, 12]]),
    },
    layers=repeat_layers(2, {"blocks.{}.self_attn": (), "blocks.{}.cross_attn": "cross"}),
)

# Cross-attention to the face motion, frame by frame, after every n-th block.
FAMILIES["WanAnimateTransformer3DModel"] = Family(
    config={**WAN, "in_channels": 12, "latent_channels": 4, "out_channels": 4, "image_dim": 16}
    | {"added_kv_proj_dim": 24, "motion_encoder_channel_sizes": {"4": 8, "8": 8, "16": 8}}
    | {"motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16}
    | {"face_encoder_hidden_dim": 8, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2},
    inputs={
        "hidden_states": noise(1, 12, 3, 22, 24),
        "timestep": torch.tensor([3]),
        **WAN_IMAGE,
        "pose_hidden_states": noise(1, 4, 2, 22, 24),
        "face_pixel_values": noise(1, 3, 5, 16, 16),
    },
    layers={
        "blocks.0.attn1": (),
        "blocks.0.attn2": "cross",
        "face_adapter.0": "cross",
        "blocks.1.attn1": (),
        "blocks.1.attn2": "cross",
    },
)

# Text by cross-attention.
FAMILIES["WanTransformer3DModel"] = Family(builder=tiny_transformers.wan, layers=self_then_cross("blocks"))

# Two cross-attention calls per layer: to image embeddings, then to the 512 text tokens.
FAMILIES["WanTransformer3DModel, image to video"] = Family(
    config={**WAN, "in_channels": 12, "out_channels": 4, "cross_attn_norm": True, "image_dim": 16}
    | {"added_kv_proj_dim": 24},
    inputs={"hidden_states": noise(1, 12, 3, 22, 24), "timestep": torch.tensor([3]), **WAN_IMAGE},
    layers=self_then_cross("blocks"),
)

# The control blocks run first, over control plus latents.
FAMILIES["WanVACETransformer3DModel"] = Family(
    config={**WAN, **CHANNELS, "vace_layers": [0], "vace_in_channels": 8},
    inputs={"hidden_states": noise(1, 4, 3, 22, 24), "control_hidden_states": noise(1, 8, 3, 22, 24), **TEXT_AT_3},
    layers={"vace_blocks.0.attn1": (), "vace_blocks.0.attn2": "cross"} | self_then_cross("blocks"),
)

WITHOUT: dict[str, str] = {
    "SanaVideoTransformer3DModel": "linear self-attention; softmax only to the text",
    "AnyFlowFARTransformer3DModel": "self-attention refuses every backend but FlexAttention",
    "Kandinsky5Transformer3DModel, attention_type nabla": "sparse attention of its own (FlexAttention)",
    "Kandinsky6SRTransformer3DModel": "sparse attention of its own (FlexAttention)",
    "WanAnimate2Transformer3DModel, generation": "self-attention by FlexAttention with a block mask",
}
