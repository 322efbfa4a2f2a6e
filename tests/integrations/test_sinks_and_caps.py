"""Models that SDPA cannot run: GPT-OSS with sinks is sparse, Gemma 2 with soft caps dense; both equal "eager"."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from test_transformers import LENGTH, SIZES, SPARSE, padding, tokens
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

import sparge
from conftest import assert_equal_to_rounding
from sparge import Policy
from sparge.integrations.calls import substituted
from sparge.integrations.transformers import eager
from sparge.integrations.transformers.attention import attention_forward

pytestmark = pytest.mark.usefixtures("no_gradients")

ALL_BLOCKS = Policy(topk=1.0, backend="torch", on_unsupported="raise")


def gpt_oss() -> Any:
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=100, attn_implementation="eager"
    )
    model = GptOssForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_().add_(4.0)  # large enough to matter
    return model


def gemma2(cap: float | None = 0.5) -> Any:
    torch.manual_seed(0)
    config = Gemma2Config(
        **SIZES, attn_logit_softcapping=cap, query_pre_attn_scalar=16, sliding_window=100, attn_implementation="eager"
    )
    return Gemma2ForCausalLM(config).eval()


def logits(model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    return model(ids, attention_mask=mask).logits[slice(None) if mask is None else mask.bool()]


class TestSinks:
    @pytest.mark.parametrize("side", [None, "left", "right"])
    def test_all_blocks_match_eager(self, side: str | None) -> None:
        model, ids, mask = gpt_oss(), tokens(), None if side is None else padding(side)
        expected = logits(model, ids, mask)
        sparge.enable(model, ALL_BLOCKS)
        assert_equal_to_rounding(logits(model, ids, mask), expected)
        assert sparge.stats().dense == 0 and sparge.stats().sparse >= 3
        sinks = [layer.self_attn.sinks for layer in model.model.layers]
        for sink in sinks:
            sink.data.fill_(-1e4)
        assert not torch.allclose(logits(model, ids, mask), expected, atol=1e-3), "sinks affect the result"
        sparge.disable(model)
        assert model.config._attn_implementation == "eager"

    @pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 130}, {"cache_implementation": "static"}], ids=str)
    def test_generate(self, options: dict[str, Any]) -> None:
        model, ids, mask = gpt_oss(), tokens(), padding("left")
        call = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "disable_compile": True, **options}
        call |= {"output_logits": True, "return_dict_in_generate": True}
        expected = torch.stack(model.generate(ids, **call).logits)
        sparge.enable(model, ALL_BLOCKS)
        assert_equal_to_rounding(torch.stack(model.generate(ids, **call).logits), expected)
        assert sparge.stats().reasons["dense: decode"] == 3 * 3

    @pytest.mark.parametrize("limit", [2**26, 0], ids=["eager_function", "chunked"])
    def test_dense(self, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Short calls equal "eager" bitwise; calls whose scores exceed the memory limit equal it up to rounding."""
        monkeypatch.setattr(eager, "MAX_SCORES", limit)
        seen = []
        dense = eager.run.dense
        monkeypatch.setattr(eager.run, "dense", lambda *args, **call: seen.append(1) or dense(*args, **call))
        model, ids, mask = gpt_oss(), tokens(), padding("left")
        expected = logits(model, ids, mask)
        plain = model(ids).logits
        sparge.enable(model)
        got = logits(model, ids, mask)
        assert sparge.stats().reasons == {"dense: below the crossover": 3}
        assert_equal_to_rounding(got, expected)
        assert_equal_to_rounding(model(ids).logits, plain)
        assert len(seen) == (0 if limit else 6)
        if limit:
            assert torch.equal(got, expected)

    def test_quantized_dense_calls(self) -> None:
        model, ids = gpt_oss(), tokens()
        expected = model(ids).logits
        policy = Policy(backend="torch", quantization="int8_fp8", dense="8bit", dense_layers=(0, 1, 2))
        sparge.enable(model, policy)
        got = model(ids).logits
        assert sparge.stats().reasons == {"dense in 8 bits: dense layer": 3}
        assert 1e-6 < float((got - expected).abs().mean() / expected.abs().mean()) < 0.02

    def test_gradients(self) -> None:
        model, ids = gpt_oss(), tokens(1)
        with torch.enable_grad():
            expected = model(ids).logits
            sparge.enable(model, Policy(backend="torch", on_unsupported="dense"))
            got = model(ids).logits
            got.sum().backward()
        assert torch.equal(got, expected)
        assert model.model.layers[0].self_attn.sinks.grad is not None
        assert sparge.stats().reasons == {"dense: unsupported (gradients)": 3}

    def test_sinks_apply_to_the_output_of_a_substitute(self) -> None:
        """A substitute returns an output without sinks; they are applied afterward."""
        model, ids = gpt_oss(), tokens(1)
        expected = model(ids).logits
        sparge.enable(model, SPARSE)
        with substituted(lambda _, *qkv, **call: sparge.attention(*qkv, **call | {"sparsity": sparge.Dense()})):
            assert_equal_to_rounding(model(ids).logits, expected)
        assert sparge.stats().reasons == {"dense: sparsity=Dense()": 3}

    def test_compiled(self) -> None:
        model = gpt_oss()
        sparge.enable(model, SPARSE)
        attention = model.model.layers[0].self_attn
        query, key = torch.randn(1, 4, LENGTH, 16), torch.randn(1, 2, LENGTH, 16)
        call = {"scaling": 0.25, "s_aux": attention.sinks}
        compiled = torch.compile(attention_forward, fullgraph=True, backend="eager")
        got, _ = compiled(attention, query, key, key, None, **call)
        torch.testing.assert_close(got, attention_forward(attention, query, key, key, None, **call)[0])
        assert sparge.stats().reasons == {"sparse: torch": 2}


class TestCaps:
    @pytest.mark.parametrize("side", [None, "left"])
    def test_capped_scores_run_the_models_eager_function(self, side: str | None) -> None:
        model, ids, mask = gemma2(), tokens(), None if side is None else padding(side)
        expected = logits(model, ids, mask)
        sparge.enable(model, Policy(backend="torch"))
        with pytest.warns(UserWarning, match="cannot be sparse: soft-capped scores; it runs dense"):
            got = logits(model, ids, mask)
        assert torch.equal(got, expected)
        assert sparge.stats().reasons == {"dense: unsupported (soft-capped scores)": 3}
        sparge.enable(model, ALL_BLOCKS)
        with pytest.raises(NotImplementedError, match="soft-capped scores"):
            model(ids)

    def test_generate(self) -> None:
        model, ids, mask = gemma2(), tokens(), padding("left")
        call = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
        expected = model.generate(ids, **call)
        sparge.enable(model, Policy(backend="torch", on_unsupported="dense"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(model.generate(ids, **call), expected)

    def test_no_cap_runs_sparse(self) -> None:
        model, ids = gemma2(cap=None), tokens()
        expected = model(ids).logits
        sparge.enable(model, ALL_BLOCKS)
        assert_equal_to_rounding(model(ids).logits, expected)
        assert sparge.stats().reasons == {"sparse: torch": 3}


@pytest.mark.parametrize("argument", [{"softcap": 50.0}, {"s_aux": torch.zeros(2)}], ids=str)
def test_module_without_an_eager_function_raises(argument: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparge.integrations.transformers.attention._registered", {})
    query = torch.randn(1, 2, 8, 16)
    with pytest.raises(NotImplementedError, match="expected a function eager_attention_forward in the model's file"):
        attention_forward(torch.nn.Module(), query, query, query, None, **argument)
