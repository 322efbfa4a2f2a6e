"""diffusers pipelines with random weights, small enough for a CPU and built without a download.

Each one has the classes of the published pipeline (text encoders, tokenizers, VAE, transformer, scheduler) and at most
two blocks per model. The calls in `CALLS` have several hundred tokens, which is more than one block of 128 x 64.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

TEXT_DIM = 16
"""Width of all text encoders."""


def build_cogvideox() -> Any:
    """CogVideoX: text and video in one sequence, 16 x 16 pixels and 4 frames per token."""
    return diffusers.CogVideoXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(),
        vae=seeded(
            diffusers.AutoencoderKLCogVideoX,
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
        ),
        transformer=seeded(
            diffusers.CogVideoXTransformer3DModel,
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=TEXT_DIM,
            num_layers=2,
            sample_width=24,
            sample_height=24,
            sample_frames=9,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )


def build_mochi() -> Any:
    """Mochi: text without padding and video in one sequence, 16 x 16 pixels and 6 frames per token.

    Its VAE has at least 32 channels, so this one does not upsample: the video has 1/8 of the requested width.
    """
    return diffusers.MochiPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(),
        vae=seeded(
            diffusers.AutoencoderKLMochi,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
            spatial_expansions=(1, 1, 1),
        ),
        transformer=seeded(
            diffusers.MochiTransformer3DModel,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            pooled_projection_dim=TEXT_DIM,
            text_embed_dim=TEXT_DIM,
            time_embed_dim=4,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
    )


def build_sd3() -> Any:
    """Stable Diffusion 3.5: text and image in one sequence, and one block with additional attention over the image."""
    return diffusers.StableDiffusion3Pipeline(
        tokenizer=clip_tokenizer(),
        text_encoder=clip_encoder(transformers.CLIPTextModelWithProjection),
        tokenizer_2=clip_tokenizer(),
        text_encoder_2=clip_encoder(transformers.CLIPTextModelWithProjection),
        tokenizer_3=t5_tokenizer(),
        text_encoder_3=t5_encoder(2 * TEXT_DIM),
        vae=image_vae(latent_channels=4),
        transformer=seeded(
            diffusers.SD3Transformer2DModel,
            sample_size=24,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * TEXT_DIM,
            caption_projection_dim=32,
            pooled_projection_dim=2 * TEXT_DIM,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def build_flux() -> Any:
    """Flux: one block with separate tensors of text and image, one block with a joint tensor."""
    return diffusers.FluxPipeline(
        tokenizer=clip_tokenizer(),
        text_encoder=clip_encoder(transformers.CLIPTextModel),
        tokenizer_2=t5_tokenizer(),
        text_encoder_2=t5_encoder(),
        vae=image_vae(latent_channels=1),
        transformer=seeded(
            diffusers.FluxTransformer2DModel,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=TEXT_DIM,
            pooled_projection_dim=TEXT_DIM,
            guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def build_hunyuanvideo() -> Any:
    """HunyuanVideo: like Flux, with a text padding mask; 8 x 8 pixels and 4 frames per token (published: 16)."""
    return diffusers.HunyuanVideoPipeline(
        tokenizer=word_tokenizer(),
        text_encoder=seeded(
            transformers.LlamaModel,
            transformers.LlamaConfig(
                vocab_size=len(word_tokenizer()),
                hidden_size=TEXT_DIM,
                intermediate_size=TEXT_DIM,
                num_hidden_layers=3,
                num_attention_heads=2,
            ),
        ),
        tokenizer_2=clip_tokenizer(),
        text_encoder_2=clip_encoder(transformers.CLIPTextModel),
        vae=seeded(
            diffusers.AutoencoderKLHunyuanVideo,
            latent_channels=4,
            block_out_channels=(4, 4, 4, 4),
            layers_per_block=1,
            norm_num_groups=2,
        ),
        transformer=seeded(
            diffusers.HunyuanVideoTransformer3DModel,
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            text_embed_dim=TEXT_DIM,
            pooled_projection_dim=TEXT_DIM,
            rope_axes_dim=(4, 4, 8),
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=7.0),
    )


def build_wan() -> Any:
    """Wan: cross-attention to text, separate passes for guidance; 8 x 8 pixels, 4 frames per token (published: 16)."""
    return diffusers.WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(kind=transformers.UMT5EncoderModel, config=transformers.UMT5Config),
        vae=seeded(diffusers.AutoencoderKLWan, base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        transformer=seeded(
            diffusers.WanTransformer3DModel,
            patch_size=(1, 1, 1),
            num_attention_heads=2,
            attention_head_dim=16,
            text_dim=TEXT_DIM,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def build_ltx() -> Any:
    """LTX-Video: cross-attention to text with a mask; 4 x 4 pixels and 4 frames per token (published: 32 and 8)."""
    half = (True, True, False, False)
    return diffusers.LTXPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(),
        vae=seeded(
            diffusers.AutoencoderKLLTXVideo,
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=half,
            decoder_spatio_temporal_scaling=half,
            patch_size=1,
        ),
        transformer=seeded(
            diffusers.LTXVideoTransformer3DModel,
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=16,
            cross_attention_dim=32,
            num_layers=2,
            caption_channels=TEXT_DIM,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.1),
    )


def build_allegro() -> Any:
    """Allegro, which calls SDPA directly: cross-attention to text.

    Its VAE only decodes whole tiles: 24 frames of 128 x 128 pixels.
    """
    return diffusers.AllegroPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=t5_encoder(),
        vae=seeded(
            diffusers.AutoencoderKLAllegro,
            block_out_channels=(4, 4, 4, 4),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=2,
            sample_size=128,
        ),
        transformer=seeded(
            diffusers.AllegroTransformer3DModel,
            num_attention_heads=2,
            attention_head_dim=24,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            cross_attention_dim=48,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            caption_channels=TEXT_DIM,
        ),
        scheduler=diffusers.DDIMScheduler(),
    )


PIPELINES: dict[str, Callable[[], Any]] = {
    "cogvideox": build_cogvideox,
    "mochi": build_mochi,
    "sd3": build_sd3,
    "flux": build_flux,
    "hunyuanvideo": build_hunyuanvideo,
    "wan": build_wan,
    "ltx": build_ltx,
}

CALLS: dict[str, dict[str, Any]] = {
    "cogvideox": {"height": 192, "width": 192, "num_frames": 9, "guidance_scale": 6.0},
    "mochi": {"height": 256, "width": 256, "num_frames": 7, "guidance_scale": 4.5},
    "sd3": {"height": 48, "width": 48, "guidance_scale": 5.0},
    "flux": {"height": 48, "width": 48, "guidance_scale": 3.5},
    "hunyuanvideo": {"height": 112, "width": 112, "num_frames": 9, "guidance_scale": 6.0},
    "wan": {"height": 128, "width": 128, "num_frames": 9, "guidance_scale": 5.0},
    "ltx": {"height": 64, "width": 64, "num_frames": 9, "guidance_scale": 3.0},
}
"""Keyword arguments of each pipeline call besides `PROMPT` and `STEPS`."""

PROMPT = "a cat walks in the rain"
STEPS = 4


def call(name: str, pipe: Any, **more: Any) -> list[Tensor]:
    """Run `STEPS` steps from the same noise each time, and return the latents after each step."""
    latents: list[Tensor] = []

    def keep(_pipe: Any, _step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(tensors["latents"].clone())
        return tensors

    pipe.set_progress_bar_config(disable=True)
    pipe(
        PROMPT,
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        callback_on_step_end=keep,
        **CALLS[name],
        **more,
    )
    assert len(latents) == STEPS
    return latents


def seeded(kind: Any, *args: Any, **config: Any) -> Any:
    """Return a model in eval mode with the same random weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*args, **config).eval()


def image_vae(latent_channels: int) -> Any:
    """Return a VAE that keeps the size of an image."""
    return seeded(
        diffusers.AutoencoderKL,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )


def t5_tokenizer() -> Any:
    """Return a tokenizer with one token per lower-case letter."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return transformers.T5TokenizerFast(
        vocab=[*special, *((letter, -3.0) for letter in string.ascii_lowercase)], extra_ids=0
    )


def t5_encoder(width: int = TEXT_DIM, kind: Any = None, config: Any = None) -> Any:
    return seeded(
        kind or transformers.T5EncoderModel,
        (config or transformers.T5Config)(
            vocab_size=len(t5_tokenizer()), d_model=width, d_kv=8, d_ff=width, num_layers=1, num_heads=2
        ),
    )


def clip_tokenizer() -> Any:
    """Return a tokenizer with two tokens per lower-case letter, the second one for the end of a word."""
    letters = [letter + end for letter in string.ascii_lowercase for end in ("", "</w>")]
    vocab = {token: index for index, token in enumerate(["<|startoftext|>", "<|endoftext|>", *letters])}
    return transformers.CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def clip_encoder(kind: Any) -> Any:
    return seeded(
        kind,
        transformers.CLIPTextConfig(
            vocab_size=len(clip_tokenizer()),
            hidden_size=TEXT_DIM,
            intermediate_size=TEXT_DIM,
            projection_dim=TEXT_DIM,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        ),
    )


def word_tokenizer() -> Any:
    """Return a tokenizer with one token per word of `PROMPT`, and one token for all other words.

    HunyuanVideo puts a template of about 100 words before a prompt and drops the first 95 tokens.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<unk>", "<s>", "</s>", "a", "cat", "in", "rain", "the", "walks"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
