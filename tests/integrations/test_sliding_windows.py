"""Language models with sliding windows: masks are recognized, and with all blocks kept the logits equal stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    masking_utils,
)

import sparge
from conftest import assert_equal_to_rounding, watch_attention
from sparge import Policy
from sparge.integrations import calls, layers
from sparge.integrations.model_call import ModelCall
from sparge.integrations.transformers.masks import PARTS, make_mask

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_gradients")]

WINDOW, LENGTH, PADDED = 100, 400, 90
ALL_BLOCKS = Policy(topk=1.0, backend="torch", on_unsupported="raise")
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, Callable[[], Any]] = {
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **MIXED)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **MIXED, use_sliding_window=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **MIXED, use_sliding_window=True)),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the window and the mask of every call that reaches attention."""
    seen: list[Any] = []

    def note(*tensors: Any, window: Any = None, **_: Any) -> None:
        seen.append((window, tensors[3] if len(tensors) > 3 else None))

    watch_attention(monkeypatch, note)
    return seen


def tokens(batch: int = 2) -> Tensor:
    return torch.randint(1, 99, (batch, LENGTH), generator=torch.Generator().manual_seed(1))


def test_prefill(model: Any, windows: list[Any]) -> None:
    ids = tokens()
    expected = model(ids).logits
    sparge.enable(model, ALL_BLOCKS)
    assert_equal_to_rounding(model(ids).logits, expected)
    sliding = [(WINDOW - 1, 0)] * (2 if "Mistral" in type(model).__name__ else 1)
    assert [window for window, _ in windows if window is not None] == sliding
    assert all(attn_mask is None for _, attn_mask in windows), "no full mask is passed"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prefill(model: Any, windows: list[Any], side: str) -> None:
    ids, attention_mask = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    attention_mask[0, slice(0, PADDED) if side == "left" else slice(LENGTH - PADDED, None)] = 0
    expected = model(ids, attention_mask=attention_mask).logits
    sparge.enable(model, ALL_BLOCKS)
    got = model(ids, attention_mask=attention_mask).logits
    is_token = attention_mask.bool()
    assert_equal_to_rounding(got[is_token], expected[is_token])
    assert all(attn_mask is None for _, attn_mask in windows)
    assert (WINDOW - 1, 0) in [window for window, _ in windows]


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 130}, {"cache_implementation": "static"}], ids=str)
def test_generate(options: dict[str, Any]) -> None:
    """Chunks after a sliding cache of WINDOW - 1 keys, and decoding, which runs dense."""
    torch.manual_seed(0)
    model = MODELS["gemma3"]().eval()
    ids, attention_mask = tokens(), torch.ones(2, LENGTH, dtype=torch.long)
    attention_mask[0, :PADDED] = 0
    call = {"attention_mask": attention_mask, "max_new_tokens": 4, "do_sample": False, "disable_compile": True}
    call |= {"output_logits": True, "return_dict_in_generate": True, **options}
    expected = model.generate(ids, **call)
    sparge.enable(model, ALL_BLOCKS)
    got = model.generate(ids, **call)
    assert torch.equal(got.sequences, expected.sequences)
    assert_equal_to_rounding(torch.stack(got.logits), torch.stack(expected.logits))
    assert sparge.stats().reasons["dense: decode"] == 2 * 3


def test_narrow_window_is_dense() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**{**SIZES, "num_hidden_layers": 1})).eval()
    ids = torch.randint(1, 99, (1, 4224), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    sparge.enable(model, Policy(topk=0.3, on_unsupported="raise"))
    got = model(ids).logits
    assert sparge.stats().reasons == {"dense: inside the window": 1}
    assert_equal_to_rounding(got, expected)


def test_narrow_window_in_the_layer_arguments_is_dense() -> None:
    """In a compiled program, only the arguments of the layer contain the window, not its mask."""
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**{**SIZES, "num_hidden_layers": 1})).eval()
    ids = torch.randint(1, 99, (1, 4224), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(4224)
    distance = positions[:, None] - positions
    sliding = ((distance >= 0) & (distance < WINDOW))[None, None]
    expected = model(ids, attention_mask=sliding).logits
    sparge.enable(model, Policy(topk=0.3, on_unsupported="raise"))
    got = model(ids, attention_mask=sliding).logits
    assert sparge.stats().reasons == {"dense: inside the window": 1}
    assert_equal_to_rounding(got, expected)


class TestRecognition:
    def known(self, mask_function: Any, **options: Any) -> Any:
        made = make_mask(1, 70, 70, mask_function=mask_function, **options)
        return made, getattr(made, PARTS, None)

    @pytest.mark.parametrize("size", [1, 2, 31, 69])
    def test_window_equals_the_mask(self, size: int) -> None:
        overlay, causal = masking_utils.sliding_window_overlay(size), masking_utils.causal_mask_function
        distance = torch.arange(70)[:, None] - torch.arange(70)
        for function in (
            masking_utils.sliding_window_causal_mask_function(size),
            masking_utils.and_masks(causal, overlay),
        ):
            mask, (_, padding, window, _) = self.known(function, local_size=size)
            assert (padding, window) == (None, size)
            assert torch.equal(mask[0, 0], (distance >= 0) & (distance < size))

    def test_other_mask_functions_are_not_recognized(self) -> None:
        causal = masking_utils.causal_mask_function
        overlay = masking_utils.sliding_window_overlay(30)
        for function in (
            masking_utils.and_masks(overlay, causal, overlay),
            masking_utils.and_masks(causal, causal),
            masking_utils.or_masks(overlay, causal),
            masking_utils.sliding_window_bidirectional_mask_function(30),
            overlay,
            lambda _batch, _head, query, key: key <= query,
        ):
            _, found = self.known(function, local_size=30, allow_is_causal_skip=False)
            assert found is None


def test_narrow_window_with_a_named_quantization_is_dense() -> None:
    """A policy that names a quantization does not disable the crossover."""
    query = torch.randn(1, 2, 4096, 16)
    for quantization, reason in (
        ("auto", "dense: inside the window"),
        ("int8_fp16", "dense: inside the window"),
    ):
        sparge.reset_stats()
        layer = layers.Layer("", Policy(quantization=quantization))
        calls.attend(layer, ModelCall(query, query, query, is_causal=True, is_language=True, window=(63, 0)))
        assert sparge.stats().reasons == {reason: 1}
