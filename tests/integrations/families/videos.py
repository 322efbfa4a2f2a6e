"""Transformers that make videos."""

from __future__ import annotations

from typing import Any

import tiny_transformers
import torch
from diffusers import (
    AllegroTransformer3DModel,
    AnyFlowTransformer3DModel,
    ChronoEditTransformer3DModel,
    ConsisIDTransformer3DModel,
    Cosmos3OmniTransformer,
    CosmosTransformer3DModel,
    EasyAnimateTransformer3DModel,
    HeliosTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoFramepackTransformer3DModel,
    Kandinsky5Transformer3DModel,
    Kandinsky6Transformer3DModel,
    LatteTransformer3DModel,
    LTX2VideoTransformer3DModel,
    MiniMaxH3Transformer3DModel,
    MotifVideoTransformer3DModel,
    SanaWMLTX2RefinerTransformer3DModel,
    SanaWMTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    TransformerTemporalModel,
    WanAnimate2Transformer3DModel,
    WanAnimateTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed, get_3d_rotary_pos_embed_allegro
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache
from torch import Tensor, nn

from families.tiny import Builder, Keys, Tiny, noise

TEXT_MASK = (torch.arange(70) < 50)[None]


def _first(true: int, length: int) -> Tensor:
    """A padding mask of one row whose first `true` entries hold."""
    return (torch.arange(length) < true)[None]


def allegro() -> Tiny:
    """Self-attention over the video, cross-attention to the text."""
    model = AllegroTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        cross_attention_dim=48,
        sample_height=24,
        sample_width=20,
        sample_frames=3,
        caption_channels=16,
    )
    *rotations, frames, rows, columns = get_3d_rotary_pos_embed_allegro(24, ((0, 0), (12, 10)), (12, 10), 3)
    places = torch.cartesian_prod(frames.long(), rows.long(), columns.long()).T[:, None]
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 3, 24, 20),
            "encoder_hidden_states": noise(1, 1, 70, 16),
            "timestep": torch.tensor([3]),
            "encoder_attention_mask": _first(50, 70).long(),
            "image_rotary_emb": (tuple(rotations), tuple(places)),
        },
        {
            "transformer_blocks.0.attn1": (),
            "transformer_blocks.0.attn2": "cross",
            "transformer_blocks.1.attn1": (),
            "transformer_blocks.1.attn2": "cross",
        },
    )


def chronoedit() -> Tiny:
    """Self-attention over the video; cross-attention asks the picture's embedding, then the 512 text tokens."""
    model = ChronoEditTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        image_dim=16,
        added_kv_proj_dim=24,
        rope_max_seq_len=32,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 3, 24, 20),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 512, 16),
            "encoder_hidden_states_image": noise(1, 40, 16),
        },
        {"blocks.0.attn1": (), "blocks.0.attn2": "cross", "blocks.1.attn1": (), "blocks.1.attn2": "cross"},
    )


def anyflow() -> Tiny:
    """Self-attention over the video, whose latents put the frames before the channels."""
    model = AnyFlowTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 3, 4, 24, 20),
            "timestep": torch.full((1, 3), 900.0),
            "r_timestep": torch.full((1, 3), 600.0),
            "encoder_hidden_states": noise(1, 70, 16),
        },
        {"blocks.0.attn1": (), "blocks.0.attn2": "cross", "blocks.1.attn1": (), "blocks.1.attn2": "cross"},
    )


def consisid() -> Tiny:
    """Text and video in one sequence, text first; the attention to the face computes its softmax by hand."""
    model = ConsisIDTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=20,
        sample_height=24,
        sample_frames=9,
        max_text_seq_length=70,
        use_rotary_positional_embeddings=True,
        is_train_face=True,
        cross_attn_dim_head=8,
        cross_attn_num_heads=2,
        LFE_id_dim=8,
        LFE_vit_dim=16,
        LFE_depth=1,
        LFE_dim_head=8,
        LFE_num_heads=2,
        LFE_num_querie=4,
        LFE_output_dim=21,
        LFE_num_scale=1,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 3, 4, 24, 20),
            "encoder_hidden_states": noise(1, 70, 16),
            "timestep": torch.tensor([3]),
            "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 0), (12, 10)), (12, 10), 3),
            "id_cond": noise(1, 8),
            "id_vit_hidden": [noise(1, 10, 16)],
        },
        {"transformer_blocks.0.attn1": ((0, 70),), "transformer_blocks.1.attn1": ((0, 70),)},
    )


def latte() -> Tiny:
    """A block over each frame's tokens, then a block over each place's frames."""
    model = LatteTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        attention_bias=True,
        sample_size=40,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=16,
        video_length=3,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 3, 40, 36),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 70, 16),
        },
        {
            "transformer_blocks.0.attn1": (),
            "transformer_blocks.0.attn2": "cross",
            "temporal_transformer_blocks.0.attn1": (),
            "transformer_blocks.1.attn1": (),
            "transformer_blocks.1.attn2": "cross",
            "temporal_transformer_blocks.1.attn1": (),
        },
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


def ltx2() -> Tiny:
    """A stream of video and one of audio, each with its text, that look at each other."""
    model = LTX2VideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
    )
    block: dict[str, Keys] = {
        "attn1": (),
        "audio_attn1": "other",
        "attn2": "cross",
        "audio_attn2": "other",
        "audio_to_video_attn": "cross",
        "video_to_audio_attn": "other",
    }
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 392, 4),
            "audio_hidden_states": noise(1, 30, 4),
            "encoder_hidden_states": noise(1, 70, 16),
            "audio_encoder_hidden_states": noise(1, 70, 16),
            "timestep": torch.tensor([3.0]),
            "encoder_attention_mask": _mask(70, 50),
            "audio_encoder_attention_mask": _mask(70, 50),
            "num_frames": 2,
            "height": 14,
            "width": 14,
            "audio_num_frames": 30,
        },
        {f"transformer_blocks.{i}.{name}": keys for i in range(2) for name, keys in block.items()},
    )


def hunyuan_video15() -> Tiny:
    """Video first, then picture embeddings (masked: text to video), glyph text and text, with a full mask."""
    model = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=16,
        text_embed_2_dim=8,
        image_embed_dim=8,
        rope_axes_dim=(4, 6, 6),
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 9, 2, 13, 15),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": noise(1, 40, 16),
            "encoder_attention_mask": _mask(40, 30),
            "encoder_hidden_states_2": noise(1, 20, 8),
            "encoder_attention_mask_2": _mask(20, 11),
            "image_embeds": torch.zeros(1, 13, 8),
        },
        {
            "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
            "transformer_blocks.0.attn": ((390, 463),),
            "transformer_blocks.1.attn": ((390, 463),),
        },
    )


def hunyuan_video15_image() -> Tiny:
    """As the text-to-video one, the picture embeddings not masked."""
    tiny = hunyuan_video15()
    return Tiny(tiny.model, {**tiny.inputs, "image_embeds": noise(1, 13, 8)}, tiny.layers)


def hunyuan_video_framepack() -> Tiny:
    """Past frames in three sizes, then the frames in work, picture embeddings and text, its padding cut off."""
    model = HunyuanVideoFramepackTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
        has_image_proj=True,
        image_proj_dim=8,
        has_clean_x_embedder=True,
    )
    past, picture, text = 1 * 3 * 3 + 1 * 6 * 5 + 2 * 12 * 10, 3 * 12 * 10, 13 + 50
    keys = ((0, past), (past + picture, past + picture + text))
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 3, 24, 20),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 70, 16),
            "encoder_attention_mask": _mask(70, 50),
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
        },
        {
            "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
            "transformer_blocks.0.attn": keys,
            "single_transformer_blocks.0.attn": keys,
        },
    )


def cosmos() -> Tiny:
    """Video alone in the self-attention; the real one also takes a padding mask as a channel."""
    model = CosmosTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(8, 40, 40),
        concat_padding_mask=False,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 2, 26, 30),
            "timestep": torch.tensor([3.0]),
            "encoder_hidden_states": noise(1, 70, 16),
            "fps": 24,
        },
        _self_and_cross(2, "transformer_blocks.{}.attn1", "transformer_blocks.{}.attn2"),
    )


def cosmos25() -> Tiny:
    """One timestep a frame, a condition mask as a channel; the cross-attention looks at text, then at a picture."""
    model = CosmosTransformer3DModel(
        in_channels=5,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        text_embed_dim=32,
        adaln_lora_dim=4,
        max_size=(8, 40, 40),
        rope_scale=(1.0, 3.0, 3.0),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
        use_crossattn_projection=True,
        crossattn_proj_in_channels=16,
        encoder_hidden_states_channels=32,
        img_context_dim_in=8,
        img_context_num_tokens=20,
        img_context_dim_out=32,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 2, 26, 30),
            "timestep": torch.tensor([0.0, 3.0]).view(1, 1, 2, 1, 1),
            "encoder_hidden_states": (noise(1, 70, 16), noise(1, 20, 8)),
            "condition_mask": torch.cat([torch.ones(1, 1, 1, 26, 30), torch.zeros(1, 1, 1, 26, 30)], 2),
        },
        _self_and_cross(2, "transformer_blocks.{}.attn1", "transformer_blocks.{}.attn2"),
    )


def cosmos3() -> Tiny:
    """Each attention makes two calls: text alone, causal; then queries of the video, keys of text before video."""
    model = Cosmos3OmniTransformer(
        head_dim=16,
        hidden_size=32,
        intermediate_size=32,
        latent_channel=4,
        num_attention_heads=2,
        num_hidden_layers=2,
        num_key_value_heads=1,
        patch_latent_dim=16,
        vocab_size=32,
        rope_axes_dim=(4, 2, 2),
        sound_gen=True,
        sound_dim=4,
    )
    places = torch.cartesian_prod(torch.arange(2), torch.arange(13), torch.arange(15)).T + 70
    return Tiny(
        model,
        {
            "input_ids": torch.arange(70) % 32,
            "text_indexes": torch.arange(70),
            "position_ids": torch.cat([torch.arange(70).expand(3, 70), places], 1),
            "und_len": 70,
            "sequence_length": 460,
            "vision_tokens": [noise(1, 4, 2, 26, 30)],
            "vision_token_shapes": [(2, 13, 15)],
            "vision_sequence_indexes": torch.arange(70, 460),
            "vision_mse_loss_indexes": torch.arange(70, 460),
            "vision_timesteps": torch.full((390,), 300.0),
            "vision_noisy_frame_indexes": [torch.arange(2)],
        },
        {f"layers.{i}.self_attn": ["other", ((0, 70),)] for i in range(2)},
    )


def cosmos3_sound() -> Tiny:
    """Sound stands behind the video and shares its queries."""
    tiny = cosmos3()
    sound = {
        "position_ids": torch.cat([tiny.inputs["position_ids"], torch.arange(70, 100).expand(3, 30)], 1),
        "sequence_length": 490,
        "sound_tokens": [noise(4, 30)],
        "sound_token_shapes": [(30, 1, 1)],
        "sound_sequence_indexes": torch.arange(460, 490),
        "sound_mse_loss_indexes": torch.arange(460, 490),
        "sound_timesteps": torch.full((30,), 300.0),
        "sound_noisy_frame_indexes": [torch.arange(30)],
    }
    return Tiny(tiny.model, {**tiny.inputs, **sound}, {key: ["other", ((0, 70), (460, 490))] for key in tiny.layers})


def easyanimate() -> Tiny:
    """Two texts first, then the video, in blocks of two streams and of one."""
    model = EasyAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        patch_size=2,
        num_layers=2,
        mmdit_layers=1,
        time_embed_dim=8,
        text_embed_dim=16,
        text_embed_dim_t5=8,
    )
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 2, 26, 30),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 50, 16),
            "encoder_hidden_states_t5": noise(1, 20, 8),
        },
        {"transformer_blocks.0.attn1": ((0, 70),), "transformer_blocks.1.attn1": ((0, 70),)},
    )


def helios() -> Tiny:
    """Past frames in three sizes stand before the frames in work, which alone look at the text."""
    model = HeliosTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_dim=(4, 6, 6),
        is_amplify_history=True,
    )
    past = 1 * 3 * 3 + 1 * 6 * 5 + 1 * 12 * 10
    layers = _self_and_cross(2, "blocks.{}.attn1", "blocks.{}.attn2")
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 4, 3, 24, 20),
            "timestep": torch.tensor([3]),
            "encoder_hidden_states": noise(1, 70, 16),
            "indices_hidden_states": torch.arange(7, 10)[None],
            "indices_latents_history_short": torch.tensor([[6]]),
            "indices_latents_history_mid": torch.arange(4, 6)[None],
            "indices_latents_history_long": torch.arange(0, 4)[None],
            "latents_history_short": noise(1, 4, 1, 24, 20),
            "latents_history_mid": noise(1, 4, 2, 24, 20),
            "latents_history_long": noise(1, 4, 4, 24, 20),
        },
        {name: keys if keys == "cross" else ((0, past),) for name, keys in layers.items()},
    )


def kandinsky5() -> Tiny:
    """Latents have their channels last; new weights where its gates start at zero."""
    model = Kandinsky5Transformer3DModel(
        in_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=8,
        out_visual_dim=4,
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        visual_cond=True,
    )
    blocks = "visual_transformer_blocks.{}."
    return Tiny(
        _awake(model),
        {
            "hidden_states": noise(1, 2, 26, 30, 9),
            "encoder_hidden_states": noise(1, 70, 16),
            "timestep": torch.tensor([3.0]),
            "pooled_projections": noise(1, 8),
            "visual_rope_pos": [torch.arange(2), torch.arange(13), torch.arange(15)],
            "text_rope_pos": torch.arange(70),
        },
        {
            "text_transformer_blocks.0.self_attention": "other",
            **_self_and_cross(2, blocks + "self_attention", blocks + "cross_attention"),
        },
    )


def kandinsky6() -> Tiny:
    """A stream of video, channels last, and one of audio, each with its text, that look at each other."""
    model = Kandinsky6Transformer3DModel(
        in_visual_dim=4,
        out_visual_dim=4,
        in_text_dim=16,
        in_text_dim2=8,
        time_dim=8,
        model_dim=32,
        ff_dim=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        axes_dims=(4, 6, 6),
        in_audio_dim=4,
        out_audio_dim=4,
    )
    block: dict[str, Keys] = {
        "video_dec_block.self_attention": (),
        "video_dec_block.cross_attention": "cross",
        "audio_dec_block.self_attention": "other",
        "audio_dec_block.cross_attention": "other",
        "va_cross_attention": "cross",
        "av_cross_attention": "other",
    }
    return Tiny(
        model,
        {
            "hidden_states": noise(1, 2, 26, 30, 9),
            "encoder_hidden_states": noise(1, 70, 16),
            "pooled_projections": noise(1, 8),
            "timestep": torch.tensor([3.0]),
            "audio_hidden_states": noise(1, 30, 4),
            "encoder_attention_mask": _mask(70, 50).bool(),
        },
        {
            "video_text_transformer_blocks.0.attn": "other",
            "audio_text_transformer_blocks.0.attn": "other",
            **{f"visual_transformer_blocks.{i}.{name}": keys for i in range(2) for name, keys in block.items()},
        },
    )


def wan_image_to_video() -> Tiny:
    """Two cross-attention calls a layer: image embeddings, then the 512 text tokens."""
    model = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=12,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        image_dim=16,
        added_kv_proj_dim=24,
        rope_max_seq_len=32,
    )
    inputs = {
        "hidden_states": noise(1, 12, 3, 22, 24),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 512, 16),
        "encoder_hidden_states_image": noise(1, 17, 16),
    }
    return Tiny(model, inputs, _self_then_cross("blocks", 2))


def _self_then_cross(blocks: str, count: int) -> dict[str, tuple[()] | str]:
    return {f"{blocks}.{i}.{name}": keys for i in range(count) for name, keys in (("attn1", ()), ("attn2", "cross"))}


def wan_vace() -> Tiny:
    """The control blocks run first, over control plus latents."""
    model = WanVACETransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        vace_layers=[0],
        vace_in_channels=8,
    )
    inputs = {
        "hidden_states": noise(1, 4, 3, 22, 24),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 70, 16),
        "control_hidden_states": noise(1, 8, 3, 22, 24),
    }
    return Tiny(model, inputs, {**_self_then_cross("vace_blocks", 1), **_self_then_cross("blocks", 2)})


def wan_animate() -> Tiny:
    """Face motion comes in by cross-attention, frame by frame, after every n-th block."""
    model = WanAnimateTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=12,
        latent_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        image_dim=16,
        added_kv_proj_dim=24,
        rope_max_seq_len=32,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8},
        motion_encoder_size=16,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=8,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    inputs = {
        "hidden_states": noise(1, 12, 3, 22, 24),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 512, 16),
        "encoder_hidden_states_image": noise(1, 17, 16),
        "pose_hidden_states": noise(1, 4, 2, 22, 24),
        "face_pixel_values": noise(1, 3, 5, 16, 16),
    }
    layers = {"blocks.0.attn1": (), "blocks.0.attn2": "cross", "face_adapter.0": "cross"}
    return Tiny(model, inputs, {**layers, "blocks.1.attn1": (), "blocks.1.attn2": "cross"})


def wan_animate_2() -> Tiny:
    """The pass over the driving video, which fills the cache of keys; the pass that generates uses FlexAttention."""
    model = WanAnimate2Transformer3DModel(
        text_len=70, in_dim=8, dim=24, ffn_dim=32, text_dim=16, out_dim=4, num_heads=2, num_layers=2
    )
    inputs = {
        "hidden_states": [noise(4, 3, 22, 24)],
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": [noise(50, 16)],
        "condition_latents": [noise(4, 3, 22, 24) / 2],
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 396,
        "encoder_hidden_states_image": noise(1, 17, 1280),
        "offset_grid_sizes": torch.tensor([[3, 11, 12]]),
    }
    layers = {
        f"blocks.{i}.{name}": keys for i in range(2) for name, keys in (("self_attn", ()), ("cross_attn", "cross"))
    }
    return Tiny(model, inputs, layers)


def _skyreels_v2(num_frame_per_block: int) -> SkyReelsV2Transformer3DModel:
    return SkyReelsV2Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=32,
        num_frame_per_block=num_frame_per_block,
    )


def skyreels_v2() -> Tiny:
    """As Wan."""
    inputs = {
        "hidden_states": noise(1, 4, 4, 20, 18),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 70, 16),
    }
    return Tiny(_skyreels_v2(1), inputs, _self_then_cross("blocks", 2))


def skyreels_v2_diffusion_forcing() -> Tiny:
    """A timestep for each frame; groups of two frames are causal by a full (tokens, tokens) mask."""
    inputs = {
        "hidden_states": noise(1, 4, 4, 20, 18),
        "timestep": torch.tensor([[1, 1, 3, 3]]),
        "encoder_hidden_states": noise(1, 70, 16),
        "enable_diffusion_forcing": True,
    }
    return Tiny(_skyreels_v2(2), inputs, _self_then_cross("blocks", 2))


def minimax_h3() -> Tiny:
    """Text, keyframe, audio and video in one sequence, placed by indices; the keyframe is among the latents."""
    model = MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=32,
        in_channels=4,
        audio_in_channels=8,
        text_dim=16,
        freq_dim=16,
        time_embed_hidden_dim=16,
        time_embed_dim=16,
        rope_freq_dim=2,
    )
    text, keyframe, audio, frames, height, width = 70, 110, 18, 2, 10, 11
    media = text + keyframe + audio
    total = media + frames * height * width
    tags = torch.full((total,), 2)
    tags[:text], tags[text + keyframe : media] = 0, 1
    where = torch.zeros(total, 3)
    where[:text, 0] = torch.arange(text)
    grid = torch.cartesian_prod(torch.arange(frames), torch.arange(height), torch.arange(width))
    where[text : text + keyframe] = grid[:keyframe] + torch.tensor([text, 0, 0])
    where[text + keyframe : media, 0] = text + torch.arange(audio)
    where[media:] = grid + torch.tensor([text, 0, 0])
    inputs = {
        "hidden_states": noise(1, keyframe + frames * height * width, 16),
        "audio_hidden_states": noise(1, audio, 8),
        "encoder_hidden_states": noise(1, text, 16),
        "timestep": torch.tensor([0.0, 0.5]),
        "timestep_indices": (torch.arange(total) >= text + keyframe).long(),
        "token_tags": tags,
        "position_ids": where,
        "video_indices": torch.cat([torch.arange(text, text + keyframe), torch.arange(media, total)]),
        "audio_indices": torch.arange(text + keyframe, media),
        "text_indices": torch.arange(text),
    }
    layers = {f"transformer_blocks.{i}.attn": ((0, 70), (180, 198)) for i in range(2)}
    return Tiny(model, inputs, {"token_refiner.refiner_blocks.0.attn": "other", **layers})


def _motif_video(**options: int | bool) -> MotifVideoTransformer3DModel:
    return MotifVideoTransformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=1,
        text_embed_dim=16,
        rope_axes_dim=(4, 4, 4),
        **options,
    )


def motif_video() -> Tiny:
    """Picture first, text last; the last layers join the latents before with the latents after the layers."""
    inputs = {
        "hidden_states": noise(1, 9, 3, 22, 24),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_attention_mask": TEXT_MASK,
    }
    options = {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True}
    layers = {
        "transformer_blocks.0.attn": ((396, 466),),
        "transformer_blocks.0.cross_attn": "cross",
        "single_transformer_blocks.0.attn": ((396, 466),),
        "single_transformer_blocks.0.cross_attn": "cross",
        "single_transformer_blocks.1.attn": (),
    }
    return Tiny(_motif_video(num_single_layers=2, num_decoder_layers=1, **options), inputs, layers)


def motif_video_image_to_video() -> Tiny:
    """Picture first, then image embeddings, then text."""
    inputs = {
        "hidden_states": noise(1, 9, 3, 22, 24),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_attention_mask": TEXT_MASK,
        "image_embeds": noise(1, 17, 8),
    }
    layers = {"transformer_blocks.0.attn": ((396, 483),), "single_transformer_blocks.0.attn": ((396, 483),)}
    return Tiny(_motif_video(num_single_layers=1, image_embed_dim=8), inputs, layers)


def sana_wm() -> Tiny:
    """Most self-attention is a linear recurrence; every n-th block has softmax, once more in camera space.

    Softmax runs in bfloat16 whatever the weights are, slow on a CPU: hence few tokens.
    """
    model = SanaWMTransformer3DModel(
        in_channels=4,
        num_layers=2,
        hidden_size=64,
        num_attention_heads=2,
        softmax_every_n=2,
        linear_head_dim=32,
        chunk_plucker_channels=6,
        caption_channels=16,
        mlp_ratio=1.0,
    )
    camera = torch.cat([torch.eye(4).flatten(), torch.tensor([9.0, 9.0, 4.5, 3.5])])
    inputs = {
        "hidden_states": noise(1, 4, 3, 7, 9),
        "timestep": torch.full((1, 1, 3), 3),
        "encoder_hidden_states": noise(1, 70, 16),
        "encoder_attention_mask": TEXT_MASK,
        "camera_conditions": camera.expand(1, 3, 20).contiguous(),
        "chunk_plucker": noise(1, 6, 3, 7, 9),
    }
    layers = {"blocks.0.cross_attn": "cross", "blocks.1.attn.attn": (), "blocks.1.attn.cam_attn": ()}
    return Tiny(model, inputs, {**layers, "blocks.1.cross_attn": "cross"}, rounding=2**-8)


def _sana_wm_refiner() -> tuple[SanaWMLTX2RefinerTransformer3DModel, dict[str, Any]]:
    model = SanaWMLTX2RefinerTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_in_channels=4,
        audio_out_channels=4,
        audio_num_attention_heads=2,
        audio_attention_head_dim=8,
        audio_cross_attention_dim=16,
        num_layers=2,
        caption_channels=16,
    )
    inputs = {
        "hidden_states": noise(1, 396, 4),
        "encoder_hidden_states": noise(1, 70, 16),
        "timestep": torch.full((1, 396), 500.0),
        "video_rotary_emb": model.build_rotary_emb_for_absolute_positions(
            1, [0, 1, 2], 11, 12, torch.device("cpu"), 24.0
        ),
        "encoder_attention_mask": TEXT_MASK,
    }
    return model, inputs


def sana_wm_refiner() -> Tiny:
    """As LTX, without a use for the weights of its audio half."""
    return Tiny(*_sana_wm_refiner(), _self_then_cross("transformer_blocks", 2))


def sana_wm_refiner_with_history() -> Tiny:
    """Cached keys of the frames before come first."""
    model, inputs = _sana_wm_refiner()
    cache = SanaWMRefinerKVCache(2)
    for index in range(2):
        cache.get(index).store_history(noise(1, 132, 32), noise(1, 132, 32) / 2)
    layers = {
        f"transformer_blocks.{i}.{name}": keys
        for i in range(2)
        for name, keys in (("attn1", ((0, 132),)), ("attn2", "cross"))
    }
    return Tiny(model, {**inputs, "kv_cache": cache, "kv_cache_mode": "inject"}, layers)


def transformer_temporal() -> Tiny:
    """A part of U-Nets: every pixel attends to itself in the other frames, twice a block."""
    model = TransformerTemporalModel(num_attention_heads=2, attention_head_dim=8, in_channels=16, norm_num_groups=4)
    layers = {"transformer_blocks.0.attn1": (), "transformer_blocks.0.attn2": ()}
    return Tiny(model, {"hidden_states": noise(72, 16, 5, 4), "num_frames": 72}, layers)


def cogvideox() -> Tiny:
    """Text first."""
    return Tiny(*tiny_transformers.build("cogvideox"), {f"transformer_blocks.{i}.attn1": ((0, 70),) for i in range(2)})


def hunyuanvideo() -> Tiny:
    """Text last, without its padding; refined by attention of its own."""
    text = ((392, 462),)
    return Tiny(
        *tiny_transformers.build("hunyuanvideo"),
        {
            "context_embedder.token_refiner.refiner_blocks.0.attn": "other",
            "transformer_blocks.0.attn": text,
            "single_transformer_blocks.0.attn": text,
        },
    )


def ltx() -> Tiny:
    """Text by cross-attention."""
    return Tiny(*tiny_transformers.build("ltx"), _alternating("transformer_blocks"))


def mochi() -> Tiny:
    """Text last, without its padding, and pooled by attention of its own."""
    layers: dict[str, Keys | list[Keys]] = {f"transformer_blocks.{i}.attn1": ((432, 482),) for i in range(2)}
    return Tiny(*tiny_transformers.build("mochi"), {"time_embed.pooler": "other", **layers})


def wan() -> Tiny:
    """Text by cross-attention."""
    return Tiny(*tiny_transformers.build("wan"), _alternating("blocks"))


def _alternating(blocks: str) -> dict[str, Keys | list[Keys]]:
    kinds: tuple[tuple[str, Keys], ...] = (("attn1", ()), ("attn2", "cross"))
    return {f"{blocks}.{i}.{name}": keys for i in range(2) for name, keys in kinds}


FAMILIES: dict[str, Builder] = {
    "CogVideoXTransformer3DModel": cogvideox,
    "HunyuanVideoTransformer3DModel": hunyuanvideo,
    "LTXVideoTransformer3DModel": ltx,
    "MochiTransformer3DModel": mochi,
    "WanTransformer3DModel": wan,
    "AllegroTransformer3DModel": allegro,
    "AnyFlowTransformer3DModel": anyflow,
    "ChronoEditTransformer3DModel": chronoedit,
    "ConsisIDTransformer3DModel": consisid,
    "Cosmos3OmniTransformer": cosmos3,
    "Cosmos3OmniTransformer, with sound": cosmos3_sound,
    "CosmosTransformer3DModel": cosmos,
    "CosmosTransformer3DModel, 2.5 with image context": cosmos25,
    "EasyAnimateTransformer3DModel": easyanimate,
    "HeliosTransformer3DModel": helios,
    "HunyuanVideo15Transformer3DModel": hunyuan_video15,
    "HunyuanVideo15Transformer3DModel, image to video": hunyuan_video15_image,
    "HunyuanVideoFramepackTransformer3DModel": hunyuan_video_framepack,
    "Kandinsky5Transformer3DModel": kandinsky5,
    "Kandinsky6Transformer3DModel": kandinsky6,
    "LTX2VideoTransformer3DModel": ltx2,
    "LatteTransformer3DModel": latte,
    "MiniMaxH3Transformer3DModel": minimax_h3,
    "MotifVideoTransformer3DModel": motif_video,
    "MotifVideoTransformer3DModel, image to video": motif_video_image_to_video,
    "SanaWMLTX2RefinerTransformer3DModel": sana_wm_refiner,
    "SanaWMLTX2RefinerTransformer3DModel, with history": sana_wm_refiner_with_history,
    "SanaWMTransformer3DModel": sana_wm,
    "SkyReelsV2Transformer3DModel": skyreels_v2,
    "SkyReelsV2Transformer3DModel, diffusion forcing": skyreels_v2_diffusion_forcing,
    "TransformerTemporalModel": transformer_temporal,
    "WanAnimate2Transformer3DModel": wan_animate_2,
    "WanAnimateTransformer3DModel": wan_animate,
    "WanTransformer3DModel, image to video": wan_image_to_video,
    "WanVACETransformer3DModel": wan_vace,
}

WITHOUT: dict[str, str] = {
    "SanaVideoTransformer3DModel": "linear self-attention; softmax only to the text",
    "AnyFlowFARTransformer3DModel": "self-attention refuses every backend but FlexAttention",
    "Kandinsky5Transformer3DModel, attention_type nabla": "sparse attention of its own (FlexAttention)",
    "Kandinsky6SRTransformer3DModel": "sparse attention of its own (FlexAttention)",
    "WanAnimate2Transformer3DModel, generation": "self-attention by FlexAttention with a block mask",
}
