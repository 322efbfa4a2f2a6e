"""transformers' image, video and speech models: sparse calls, token grids, text tokens and counts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Dinov2Config,
    Dinov2Model,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    FalconConfig,
    FalconModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Sam2HieraDetConfig,
    Sam2HieraDetModel,
    SamHQVisionConfig,
    SamHQVisionModel,
    SamVisionConfig,
    SamVisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    VJEPA2Config,
    VJEPA2Model,
    WhisperConfig,
    WhisperModel,
)

import sparge
from conftest import assert_equal_to_rounding
from sparge import Policy, TopK
from sparge.backends import base
from sparge.backends.base import ALWAYS
from sparge.integrations import calls, hooks
from sparge.integrations.layers import Layer
from sparge.integrations.model_call import ModelCall
from sparge.integrations.transformers import attention, images
from sparge.integrations.transformers.images import grid_of, text_of
from sparge.masks.ordering import order_of

pytestmark = pytest.mark.timeout(120)

ALL_BLOCKS = Policy(topk=1.0, backend="torch", on_unsupported="raise")
HALF = Policy(topk=0.5, backend="torch", on_unsupported="raise")
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(autouse=True)
def seeded_without_gradients() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def reasons() -> dict[str, dict[str, int]]:
    return {name: layer.reasons for name, layer in sparge.stats().layers.items()}


class TestGrid:
    @pytest.mark.parametrize(
        ("sizes", "tokens", "grid", "special"),
        [
            ((896, 896), 4096, (64, 64), 0),  # SigLIP in Gemma 3
            ((1024, 1024), 4096, (64, 64), 0),  # global layers of SAM, SAM 2
            ((1024, 1024), 196, (14, 14), 0),  # windows of SAM
            ((518, 518), 1370, (37, 37), 1),  # DINOv2, with a class token
            ((525, 700), 1 + 37 * 50, (37, 50), 1),  # the remainder is cut off
            ((1024, 768), 5 + 64 * 48, (64, 48), 5),  # DINOv3, with a class token and registers
            ((512, 864), 100 + 1 + 32 * 54, None, 0),  # YOLOS: detection tokens after the image
            ((64, 64), 7, None, 0),  # tokens of a decoder
            ((8, 8), 100, None, 0),
        ],
    )
    def test_grid_of_an_image(self, sizes: Any, tokens: int, grid: Any, special: int) -> None:
        assert grid_of(sizes, tokens) == (grid, ((0, special),) if special else ())

    @pytest.mark.parametrize("tubelet", [1, 2])
    def test_grid_of_a_video(self, tubelet: int) -> None:
        frames = 16 // tubelet
        assert grid_of((16, 256, 384), frames * 16 * 24, tubelet) == ((frames, 16, 24), ())


def dinov2() -> tuple[Any, dict[str, Tensor]]:
    return Dinov2Model(Dinov2Config(**SIZES, patch_size=4, image_size=32, mlp_ratio=1)), pixels(80, 64)


def dinov3() -> tuple[Any, dict[str, Tensor]]:
    config = DINOv3ViTConfig(**SIZES, patch_size=4, image_size=32, num_register_tokens=4)
    return DINOv3ViTModel(config), pixels(80, 64)


def siglip() -> tuple[Any, dict[str, Tensor]]:
    return SiglipVisionModel(SiglipVisionConfig(**SIZES, patch_size=4, image_size=64)), pixels(64, 64)


def sam2() -> tuple[Any, dict[str, Tensor]]:
    config = Sam2HieraDetConfig(
        hidden_size=16,
        num_attention_heads=1,
        blocks_per_stage=[1, 1, 2, 1],
        embed_dim_per_stage=[16, 32, 64, 128],
        num_attention_heads_per_stage=[1, 2, 4, 8],
        global_attention_blocks=[3],
        window_positional_embedding_background_size=[4, 4],
        image_size=[256, 384],
    )
    return Sam2HieraDetModel(config), pixels(256, 384)


def vjepa2() -> tuple[Any, dict[str, Any]]:
    predictor = {"pred_hidden_size": 32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    config = VJEPA2Config(**SIZES, **predictor, patch_size=4, crop_size=32, frames_per_clip=8, mlp_ratio=1)
    return VJEPA2Model(config), {"pixel_values_videos": torch.randn(1, 8, 3, 32, 32), "skip_predictor": True}


def pixels(height: int, width: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, height, width)}


Build = Callable[[], tuple[Any, dict[str, Any]]]
ENCODERS = [
    (dinov2, (20, 16), [(0, 1)]),
    (dinov3, (20, 16), [(0, 5)]),
    (siglip, (16, 16), []),
    (sam2, (16, 24), []),
    (vjepa2, (4, 8, 8), []),
]


class TestEncoders:
    @pytest.mark.parametrize(("build", "grid", "special"), ENCODERS, ids=[build.__name__ for build, _, _ in ENCODERS])
    def test_grid_and_special_tokens_reach_the_call(
        self, build: Build, grid: Any, special: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        @functools.wraps(calls.attend)
        def attend(layer: Layer, call: ModelCall) -> Any:
            seen.append((call.grid, list(call.text)))
            return calls.attend(layer, call)

        model, inputs = build()
        model.eval()
        expected = model(**inputs)[0]
        monkeypatch.setattr(attention, "attend", attend)
        sparge.enable(model, Policy(topk=1.0, backend="torch", on_unsupported="raise", min_tokens=100))
        assert_equal_to_rounding(model(**inputs)[0], expected)
        assert set(map(str, seen)) == {str((grid, special))}
        sparge.disable(model)
        assert torch.equal(model(**inputs)[0], expected)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert not any(name.startswith("_sparge") for module in model.modules() for name in vars(module))

    def test_special_tokens_are_exact_if_cheap(self) -> None:
        config = DINOv3ViTConfig(**{**SIZES, "num_hidden_layers": 1}, patch_size=4, num_register_tokens=4)
        model = DINOv3ViTModel(config).eval()
        inputs = pixels(4 * 48, 4 * 48)
        expected = model(**inputs)[0]
        sparge.enable(model, HALF)
        got = model(**inputs)[0]
        assert_equal_to_rounding(got[:, :5], expected[:, :5])
        assert (got[:, 5:] - expected[:, 5:]).abs().max() > 1e-4

    def test_forward_pass_leaves_no_state(self) -> None:
        model, inputs = dinov2()
        sparge.enable(model.eval(), HALF)
        model(**inputs)
        known = vars(model.encoder.layer[0].attention)[attention.INPUTS]
        assert known.grid(321) == (None, ())

    def test_compiled_layers_share_a_graph_and_copies_are_enabled(self) -> None:
        model, inputs = dinov3()
        sparge.enable(model.eval(), HALF)
        expected = model(**inputs)[0]
        assert torch.equal(copy.deepcopy(model)(**inputs)[0], expected)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for layer in model.model.layer:
            layer.compile(backend="eager", fullgraph=True)
        assert torch.equal(model(**inputs)[0], expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


SAM: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "mlp_dim": 32,
    "image_size": 64,
    "patch_size": 4,
    "num_pos_feats": 16,
    "output_channels": 32,
    "window_size": 7,
    "global_attn_indexes": [1, 2],
    "initializer_range": 0.1,
}


def sam(**options: Any) -> Any:
    """Return SAM's image encoder with random biases; a new model has biases of 0."""
    return randomize_biases(SamVisionModel(SamVisionConfig(**SAM, **options)))


def sam_hq() -> Any:
    return randomize_biases(SamHQVisionModel(SamHQVisionConfig(**SAM)))


def randomize_biases(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if "rel_pos" in name:
            parameter.normal_()
    return model.eval()


class TestModulesThatCallSdpa:
    """SAM's image encoder: a scope intercepts its calls, which have a full additive mask per head."""

    @pytest.mark.parametrize("build", [sam, sam_hq])
    def test_all_blocks_match_stock(self, build: Callable[[], Any]) -> None:
        model, inputs = build(), pixels(64, 64)
        names = [sorted(vars(module)) for module in model.modules()]
        expected = model(**inputs)[0]
        sparge.enable(model, ALL_BLOCKS)
        assert_equal_to_rounding(model(**inputs)[0], expected)
        assert list(reasons().values()) == [{"sparse: torch": 1}] * 3
        sparge.disable(model)
        assert torch.equal(model(**inputs)[0], expected)
        assert [sorted(vars(module)) for module in model.modules()] == names
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())

    def test_window_layers_are_dense_and_global_layers_sparse(self) -> None:
        model, inputs = sam(), pixels(64, 64)
        expected = model(**inputs)[0]
        sparge.enable(model, Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch", min_tokens=200))
        assert (model(**inputs)[0] - expected).abs().max() > 1e-4
        assert list(reasons().values()) == [{"dense: fewer than min_tokens": 1}, *[{"sparse: torch": 1}] * 2]
        assert list(reasons()) == [f"vision_encoder.layers.{index}.attn" for index in range(3)]

    def test_tokens_without_biases_are_reordered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orders = []
        monkeypatch.setattr(base, "order_of", lambda *order: orders.append(order[:2]) or order_of(*order))
        model, inputs = sam(use_rel_pos=False), pixels(64, 64)
        expected = model(**inputs)[0]
        sparge.enable(model, Policy(topk=1.0, backend="torch", dense_layers=(0,)))
        assert_equal_to_rounding(model(**inputs)[0], expected)
        assert set(orders) == {((16, 16), "hilbert")}

    def test_biases_run_dense_with_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(calls.dense_rules.base, "crossover_for", lambda *_: ALWAYS)
        model, inputs = sam(), pixels(64, 64)
        expected = model(**inputs)[0]
        sparge.enable(model, Policy(min_tokens=0, on_unsupported="dense"))
        assert torch.equal(model(**inputs)[0], expected)
        assert sparge.stats().reasons == {"dense: costly mask (additive mask)": 3}

    def test_compiled_layers_share_a_graph(self) -> None:
        model, inputs = sam(use_rel_pos=False), pixels(64, 64)
        sparge.enable(model, HALF)
        expected = model(**inputs)[0]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for layer in model.vision_encoder.layers[1:]:
            layer.compile(backend="eager", fullgraph=True)
        assert_equal_to_rounding(model(**inputs)[0], expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1

    def test_interrupted_pass_leaves_no_scope_open(self) -> None:
        model, inputs = sam(), pixels(64, 64)
        sparge.enable(model, HALF)
        expected = model(**inputs)[0]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.functional, "interpolate", interrupted)  # inside the attention module
            with pytest.raises(KeyboardInterrupt):
                model(**inputs)
        assert len(hooks.THREAD.scopes) == 1
        assert torch.equal(model(**inputs)[0], expected)
        assert hooks.THREAD.scopes == []
        assert torch._C._len_torch_function_stack() == 0

    def test_model_without_attention_interface_raises(self) -> None:
        sizes = {"vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = FalconModel(FalconConfig(**sizes))
        with pytest.raises(NotImplementedError, match=r"it calls SDPA directly; .*replace_sdpa"):
            sparge.enable(model)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def interrupted(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


IMAGE, VIDEO, PAD = 90, 91, 0
FRAMES = 64
"""Frames of 64 tokens each: enough that computing the last query blocks exactly is cheap."""


def qwen(version: str) -> Any:
    text = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 99}
    places = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    ids = {"pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None}
    vision = {"depth": 1, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": 92, "vision_end_token_id": 93}
    if version == "3":
        config, kind = Qwen3VLConfig, Qwen3VLForConditionalGeneration
        vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": []}
    else:
        config, kind = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        vision |= {"window_size": 32, "fullatt_block_indexes": [0]}
    text |= {"rope_parameters": places, **ids}
    return kind(config(text_config=text, vision_config={**vision, "patch_size": 4}, **tokens)).eval()


def video_and_question(version: str, padding: tuple[int, int] = (0, 0)) -> dict[str, Tensor]:
    """Return the inputs of a prompt with a video and a question; in Qwen3-VL text precedes each frame."""
    frame = [VIDEO] * 64
    frames = [3, 4, 92, *frame, 93] * FRAMES if version == "3" else [92, *frame * FRAMES, 93]
    ids = torch.tensor([[1, 2, *frames, 5, 6, 7]])
    padded = torch.nn.functional.pad(ids, padding, value=PAD)
    mask = torch.nn.functional.pad(torch.ones_like(ids), padding)
    return {
        "input_ids": padded,
        "attention_mask": mask,
        "mm_token_type_ids": (padded == VIDEO).int() * 2,
        "pixel_values_videos": torch.randn(FRAMES * 256, 3 * 2 * 4 * 4),
        "video_grid_thw": torch.tensor([[FRAMES, 16, 16]]),
    }


class TestVideosInPrompts:
    @pytest.mark.parametrize("padding", [(0, 0), (70, 0)], ids=["unpadded", "left"])
    def test_question_is_exact(self, padding: tuple[int, int]) -> None:
        model, inputs = qwen("2.5"), video_and_question("2.5", padding)
        expected = model(**inputs).logits
        sparge.enable(model, Policy(topk=0.6, backend="torch", on_unsupported="raise", min_tokens=1000))
        got = model(**inputs).logits
        start = padding[0] + 2 + 1 + FRAMES * 64
        question = slice(start, start + 4)
        assert_equal_to_rounding(got[:, question], expected[:, question])
        assert (got - expected)[:, padding[0] : start].abs().max() > 1e-3
        assert reasons() == {
            "model.visual.blocks.0.attn": {"dense: fewer than min_tokens": FRAMES},
            "model.language_model.layers.0.self_attn": {"sparse: torch": 1},
        }

    def test_questions_of_different_lengths(self) -> None:
        """The longer sequence has text where the shorter one is padded."""
        model, short = qwen("2.5"), video_and_question("2.5", (0, 100))
        long = {**short, "input_ids": short["input_ids"].where(short["attention_mask"] == 1, 8)}
        long["attention_mask"] = torch.ones_like(short["attention_mask"])
        inputs = {name: torch.cat([long[name], short[name]]) for name in short}
        expected = model(**inputs).logits
        sparge.enable(model, Policy(topk=0.9, backend="torch", on_unsupported="raise", min_tokens=1000))
        got = model(**inputs).logits
        start, stop = 2 + 1 + FRAMES * 64, int(short["attention_mask"].sum())
        assert_equal_to_rounding(got[0, start:], expected[0, start:])
        assert_equal_to_rounding(got[1, start:stop], expected[1, start:stop])

    def test_input_ids_are_read_once_and_only_by_sparse_calls(self, monkeypatch: pytest.MonkeyPatch) -> None:

        found = []
        monkeypatch.setattr(images, "text_of", lambda *args: found.append(text_of(*args)) or found[-1])
        model, inputs = qwen("3"), video_and_question("3")
        sparge.enable(model, Policy(topk=0.6, backend="torch", min_tokens=10**6))
        model(**inputs)
        assert found == []
        sparge.enable(model, Policy(topk=0.6, backend="torch", min_tokens=1000))
        output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
        assert output.shape[1] == inputs["input_ids"].shape[1] + 2
        assert [len(ranges) for ranges in found] == [8]
        length = inputs["input_ids"].shape[1]
        assert found[0][0] == (0, 5)
        assert found[0][-1] == (length - 4, length)

    def test_text_ranges(self) -> None:
        prompt = torch.tensor([[1, 1, *[VIDEO] * 1000, 1, *[IMAGE] * 1000, 1, 1]])
        assert text_of(prompt, [IMAGE, VIDEO]) == ((0, 2), (1002, 1003), (2003, 2005))
        other = prompt.roll(1)
        assert text_of(torch.cat([prompt, other]), [IMAGE, VIDEO]) == ((0, 3), (1002, 1004), (2003, 2005))
        mask = torch.ones_like(prompt)
        mask[:, 0] = 0
        assert text_of(prompt, [IMAGE, VIDEO], mask)[0] == (1, 2)

    def test_text_of_long_prompts_is_ignored(self) -> None:
        assert text_of(torch.ones(1, 4096, dtype=torch.long), [VIDEO]) == ()
        assert text_of(torch.tensor([[1] * 600 + [VIDEO] * 3000 + [1] * 600]), [VIDEO]) == ()


def test_whisper_is_below_the_crossover() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 99, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = WhisperModel(WhisperConfig(**sizes, **heads, **ids)).eval()
    sound = {"input_features": torch.randn(1, 8, 3000), "decoder_input_ids": torch.ones(1, 4, dtype=torch.long)}
    expected = model(**sound)[0]
    sparge.enable(model)
    assert torch.equal(model(**sound)[0], expected)
    assert reasons() == {
        "encoder.layers.0.self_attn": {"dense: below the crossover": 1},
        "decoder.layers.0.self_attn": {"dense: below the crossover": 1},
        "decoder.layers.0.encoder_attn": {"dense: cross-attention": 1},
    }
