"""Recordings of attention inputs: the output is unchanged, files round-trip, and errors are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_language import tiny_model
from torch import Tensor

import sparge
from sparge.evaluate import Recorder, attention_error
from sparge.evaluate.capture import load, save, true_mask
from sparge.evaluate.inputs import text_with_needles
from sparge.evaluate.metrics import block_mass, mass_recall
from sparge.integrations.calls import substituted


@pytest.fixture(scope="module")
def model() -> Any:
    pytest.importorskip("transformers")
    return tiny_model()


@torch.no_grad()
def test_recording_does_not_change_the_output(model: Any, tmp_path: Path) -> None:
    tokens = torch.arange(200)[None]
    stock = model(tokens).logits
    recorder = Recorder(layers=r"layers\.1\.", dtype=torch.float32)
    with recorder.recording(model):
        assert torch.allclose(model(tokens).logits, stock, atol=1e-5)
    assert torch.equal(model(tokens).logits, stock), "the model is restored"
    (call,) = recorder.calls
    assert (call.layer, call.step, call.is_causal) == ("model.layers.1.self_attn", None, True)
    assert call.query.shape == (1, 4, 200, 8) and call.key.shape == (1, 2, 200, 8)
    save(recorder.calls, tmp_path / "calls.safetensors")
    (again,) = load(tmp_path / "calls.safetensors")
    assert torch.equal(again.query, call.query) and again.scale == call.scale == pytest.approx(8**-0.5)


@torch.no_grad()
def test_recordings_respect_max_bytes_and_heads(model: Any) -> None:
    recorder = Recorder(max_bytes=2 * (4 + 2 + 2) * 100 * 8)
    with recorder.recording(model):
        for _ in range(2):
            model(torch.arange(100)[None])
    assert (len(recorder.calls), recorder.omitted) == (1, 2), "the second layer does not fit, in both passes"
    chosen = Recorder(heads=[2, 3])
    with chosen.recording(model):
        model(torch.arange(100)[None])
    assert [call.query.shape[1] for call in chosen.calls] == [2, 2] and chosen.calls[0].key.shape[1] == 1
    for heads in ([0, 1, 2], [0, 2, 1, 3]):
        wrong = Recorder(heads=heads)
        with (
            pytest.raises(ValueError, match="heads: expected equally many query heads of each key head"),
            wrong.recording(model),
        ):
            model(torch.arange(100)[None])
    assert model.config._attn_implementation != "sparge"


def test_other_files_raise(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(ValueError, match="expected recordings"):
        load(tmp_path / "x.safetensors")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("rule", [sparge.TopK(0.2, min_blocks=2), sparge.TopCdf(0.7, min_blocks=2)])
def test_error_of_known_tensors(is_causal: bool, rule: Any) -> None:
    sample = text_with_needles(2048, heads=2)
    query, key, value = sample.query, sample.key[:, :1], sample.value[:, :1]
    error = attention_error(query, key, value, is_causal=is_causal, sparsity=rule)
    mask = sparge.predict(query, key, is_causal=is_causal, sparsity=rule, enable_gqa=True)
    assert error.predicted.density == error.oracle.density == mask.density()
    mass = block_mass(query, key.repeat_interleave(2, 1), is_causal=is_causal)
    assert error.predicted.mass_recall == pytest.approx(mass_recall(mask, mass), abs=1e-6)
    output = sparge.block_sparse_attention(query, key, value, mask, enable_gqa=True, skipped="auto")
    exact = F.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), is_causal=is_causal, enable_gqa=True
    )
    assert error.predicted.relative_l1 == pytest.approx(
        float((output - exact).abs().sum() / exact.abs().sum()), rel=1e-3
    )
    assert error.predicted.mass_recall <= error.oracle.mass_recall
    assert error.predicted.recall_beyond_sink < error.predicted.mass_recall or not is_causal, (
        "the sink has much of the mass"
    )
    assert 0 < error.predicted.cosine <= 1
    with pytest.raises(TypeError, match="expected a rule that skips blocks"):
        attention_error(query, key, value, sparsity=sparge.Dense())


def test_oracle_keeps_the_blocks_with_most_mass() -> None:
    """One block per query block is kept, and one distant block has all the mass: the oracle does not keep the sink."""
    torch.manual_seed(0)
    targets = F.normalize(torch.randn(16, 32), dim=-1)
    key = 8 * targets.repeat_interleave(64, 0)[None, None]
    query = 8 * targets[[9, 3, 12, 7, 1, 15, 5, 11]].repeat_interleave(128, 0)[None, None]
    error = attention_error(query, key, torch.randn(1, 1, 1024, 32), sparsity=sparge.TopK(0.05, min_blocks=1))
    assert error.oracle.density == pytest.approx(1 / 16)
    assert error.oracle.mass_recall > 0.99 and error.oracle.relative_l1 < 0.01


@pytest.mark.parametrize("is_causal", [False, True])
def test_true_mask_has_the_highest_recall(is_causal: bool) -> None:
    sample = text_with_needles(2048, heads=2)
    rule = sparge.TopK(0.3, min_blocks=1)
    best = true_mask(sample.query, sample.key, sparsity=rule, is_causal=is_causal)
    mass = block_mass(sample.query, sample.key, is_causal=is_causal)
    for score in ("moment", "mean"):
        mask = sparge.predict(sample.query, sample.key, sparsity=rule, score=score, is_causal=is_causal)
        assert torch.equal(mask.kv_num_blocks, best.kv_num_blocks), "equal numbers of blocks"
        assert mass_recall(mask, mass) < mass_recall(best, mass)


def test_steps_of_a_pipeline_are_recorded() -> None:
    pytest.importorskip("diffusers")
    from small_pipelines import small_pipeline

    pipe = small_pipeline()
    recorder = Recorder(layers=r"blocks\.0\.attn1", steps=[0, 2])
    with recorder.recording(pipe):
        pipe(prompt="a", num_inference_steps=3, generator=torch.Generator().manual_seed(0))
    assert [call.step for call in recorder.calls] == [0, 2]
    assert [call.layer for call in recorder.calls] == ["transformer.blocks.0.attn1"] * 2


def test_recordings_have_the_token_order_of_the_model() -> None:
    from small_pipelines import small_pipeline

    pipeline = small_pipeline()
    in_rows: list[Tensor] = []
    in_hilbert_order: list[Tensor] = []
    for order, calls in (("row", in_rows), ("hilbert", in_hilbert_order)):

        def note(layer: str, query: Tensor, *tensors: Any, calls: list[Tensor] = calls, **call: Any) -> Tensor:
            del layer
            calls.append(query)
            return sparge.attention(query, *tensors, **call)

        sparge.enable(pipeline, sparge.Policy(topk=1.0, backend="torch", order=order))
        with substituted(note):
            pipeline("", 1, generator=torch.Generator().manual_seed(0))
        sparge.disable(pipeline)
    with Recorder().recording(pipeline) as recorder:
        pipeline("", 1, generator=torch.Generator().manual_seed(0))
    recorded = recorder.calls[0].query.to(in_rows[0].dtype)
    assert torch.equal(recorded, in_rows[0].to(recorder.calls[0].query.dtype).to(in_rows[0].dtype))
    assert not torch.equal(in_rows[0], in_hilbert_order[0])
