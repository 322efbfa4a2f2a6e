"""Block probabilities in the kernels, compared with the reference: scores, samples, softmax, excluded blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import causality, make_qkv
from interpreted.conftest import call_of, random_bits, shape_of, visibility_of
from selection import reference_blocks
from sparge import Mean, Moment, Spread, TopK
from sparge.backends.gpu.stages.mask_blocks import MaskFacts, mask_blocks
from sparge.backends.gpu.stages.quantize import summarize_query
from sparge.backends.gpu.stages.score import block_probabilities, score_inputs
from sparge.backends.gpu.stages.summary import summarize_key_value
from sparge.masks.visibility import first_seen_keys, unfinished_blocks
from sparge.masks.window import window_of
from sparge.options.scores import Score
from sparge.reference import prediction

pytestmark = pytest.mark.usefixtures("poisoned_memory")

TOLERANCE = 2e-3
"""Relative error of a probability: bfloat16 variances move a score by 2^-9 of its variance term, here below 1."""
LENGTHS = {"square": (200, 200), "prefix": (129, 257), "odd prefix": (130, 161), "more queries": (300, 129)}


def clustered_inputs(*lengths: int, **sizes: Any) -> tuple[Tensor, Tensor]:
    """Return query and key, with keys that form a cluster in each block, so scores of blocks differ."""
    query, key, _ = make_qkv(*lengths, **sizes)
    generator = torch.Generator().manual_seed(8)
    for block in key.split(64, 2):
        block += torch.randn(key.shape[3], generator=generator).to(key)
    return query, key


def probabilities_of(
    query: Tensor,
    key: Tensor,
    score: Score,
    *,
    is_causal: bool,
    scale: float,
    attn_mask: Tensor | None = None,
    threshold: float | None = None,
) -> Tensor:
    """Run the kernels and return the block probabilities (B, H, q_blocks, kv_blocks)."""
    shape = shape_of(query, key, key)
    call = call_of(shape, is_causal=is_causal, scale=scale, score=score, attn_mask=attn_mask, sparsity=TopK(1.0))
    similarity = threshold is not None
    inputs = score_inputs(score)
    facts = seen = None
    if attn_mask is not None and attn_mask.shape[2] == 1 and attn_mask.dtype == torch.bool:
        seen = visibility_of(shape, is_causal, attn_mask)
        assert seen is not None
        facts = MaskFacts(seen, *first_seen_keys(shape, window_of(is_causal), attn_mask))
    elif attn_mask is not None:
        facts = mask_blocks(call, scored=inputs.rows(score), are_means=inputs.are_means)
        seen = facts.tokens
    key_value = summarize_key_value(
        query,
        key,
        key,
        call,
        seen,
        means=True,
        variance=inputs.variance,
        blocks=False,
        quantized=False,
        similarity=similarity,
    )
    summary = summarize_query(
        query, key_value.scales, call, seen, quantized=False, parts=inputs.parts(call.score), similarity=similarity
    )
    thresholds = None if threshold is None else torch.full((shape.heads,), threshold)
    got = block_probabilities(query, key_value, summary.mean, call, facts, thresholds)
    return got.view(shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)


def assert_probabilities(
    monkeypatch: pytest.MonkeyPatch,
    query: Tensor,
    key: Tensor,
    score: Score,
    *,
    is_causal: bool = False,
    scale: float = 0.2,
    attn_mask: Tensor | None = None,
    threshold: float | None = None,
) -> tuple[Tensor, list[prediction.QBlock]]:
    call = {"is_causal": is_causal, "scale": scale, "attn_mask": attn_mask}
    got = probabilities_of(query, key, score, threshold=threshold, **call)
    rule = TopK(1.0, min_blocks=0, sink=False, diagonal=False, similarity_threshold=threshold)
    _, chosen = reference_blocks(monkeypatch, query, key, score=score, sparsity=rule, **call)
    rows = [each.row for of_batch in chosen for each in of_batch]
    unfinished = unfinished_blocks(shape_of(query, key, key), window_of(is_causal), query.device)
    for index, (row, got_row) in enumerate(zip(rows, got.flatten(0, 2), strict=True)):
        is_unfinished = unfinished[index % len(unfinished)]
        if row.dissimilar[row.visible & ~is_unfinished].all():
            continue  # a dissimilar query block keeps all blocks, and no kernel reads its probabilities
        broken = row.forced & ~is_unfinished
        assert torch.equal(got_row.isnan() & row.visible, broken), "NaN marks non-finite scores"
        eligible = row.visible & ~row.dissimilar & ~is_unfinished & ~broken
        assert not got_row[row.visible & ~eligible & ~broken].any()
        expected = row.probabilities[eligible]
        excess = (got_row[eligible].double() - expected).abs() - TOLERANCE * expected
        assert excess.numel() == 0 or excess.max() < 1e-7, f"off by {excess.max():.3g} at row {index}"
    return got, rows


@pytest.mark.parametrize("name, is_causal", [("square", False), *((name, True) for name in LENGTHS)], ids=str)
@pytest.mark.parametrize("score", [Moment(1), Moment(3), Moment(8), Moment(32), Mean(), Spread(4), Spread()], ids=str)
def test_samples_and_lengths(monkeypatch: pytest.MonkeyPatch, name: str, is_causal: bool, score: Score) -> None:
    """With fewer samples, a program processes more query blocks; 3 samples are padded to 4."""
    query, key = clustered_inputs(*LENGTHS[name], heads=2, kv_heads=1, head_dim=24)
    got, rows = assert_probabilities(monkeypatch, query, key, score, is_causal=is_causal)
    if not isinstance(score, Spread):  # spread values do not sum to 1
        total = got[:, :, -1].sum(-1)
        assert (total >= 1 - 1e-3).all(), "a root of mean squares is no less than the mean"
        assert score.exponent == 2 or (total <= 1 + 1e-3).all()
    chosen = rows[-1].probabilities
    assert chosen.max() > 1.1 * chosen[chosen > 0].min(), "probabilities differ"


@pytest.mark.parametrize(
    "score", [Moment(128), Moment(64), Moment(16), Moment(5), Spread(128), Spread(64), Spread(2), Spread(1)], ids=str
)
def test_groups_of_query_blocks(monkeypatch: pytest.MonkeyPatch, score: Score) -> None:
    """A program processes 128 samples, from 1, 2, 8 or 16 query blocks."""
    query, key = clustered_inputs(400, 200, heads=1, head_dim=16)
    assert_probabilities(monkeypatch, query, key, score)


@pytest.mark.parametrize("score, is_causal", [(Moment(8), True), (Mean(), False), (Spread(), False)], ids=str)
def test_more_key_blocks_than_one_step_processes(
    monkeypatch: pytest.MonkeyPatch, is_causal: bool, score: Score
) -> None:
    query, key = clustered_inputs(130, 4200, heads=1, head_dim=8)
    assert_probabilities(monkeypatch, query, key, score, is_causal=is_causal)


@pytest.mark.parametrize(
    "head_dim, dtype",
    [(8, torch.float16), (72, torch.bfloat16), (128, torch.float32), (256, torch.bfloat16), (200, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("score", [Moment(8), Mean(), Spread()], ids=str)
def test_widths_and_dtypes(monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: torch.dtype, score: Score) -> None:
    query, key = clustered_inputs(130, 200, heads=1, head_dim=head_dim, dtype=dtype)
    assert_probabilities(monkeypatch, query, key, score, is_causal=True, scale=head_dim**-0.5)


@pytest.mark.parametrize(
    "kind, score",
    [
        ("right padding", Moment(8)),
        ("left padding", Moment(8)),
        ("left padding", Mean()),
        ("per head", Moment(8)),
        ("per head", Mean()),
        ("right padding", Spread(4)),
        ("left padding", Spread()),
        ("per head", Spread(4)),
        ("nothing", Moment(8)),
    ],
    ids=str,
)
@causality
def test_key_masks(monkeypatch: pytest.MonkeyPatch, is_causal: bool, score: Score, kind: str) -> None:
    """Hidden keys are NaN and have no effect."""
    query, key = clustered_inputs(140, 200, batch=2, heads=2, kv_heads=1, head_dim=16)
    positions = torch.arange(200)
    mask = {
        "right padding": (positions < torch.tensor([200, 70])[:, None])[:, None, None],
        "left padding": (positions >= torch.tensor([0, 130])[:, None])[:, None, None],
        "per head": random_bits(1, 2, 1, 200, share=0.3),
        "nothing": torch.zeros(1, 1, 1, 200, dtype=torch.bool),
    }[kind]
    seen = mask.expand(2, 2, 1, 200).any(1).squeeze(1)
    key = torch.where(seen[:, None, :, None], key, math.nan)
    assert_probabilities(monkeypatch, query, key, score, is_causal=is_causal, attn_mask=mask)


@pytest.mark.parametrize(
    "kind, score",
    [
        ("elements", Moment(5)),
        ("elements", Spread(4)),
        ("bias", Moment(8)),
        ("bias", Mean()),
        ("bias of keys", Moment(8)),
        ("bias of keys", Spread(4)),
    ],
    ids=str,
)
def test_full_and_additive_masks(monkeypatch: pytest.MonkeyPatch, kind: str, score: Score) -> None:
    """Biases are averaged over the visible keys, including values near the limits of float32; some rows are hidden."""
    query, key = clustered_inputs(140, 200, batch=2, heads=2, kv_heads=1, head_dim=16)
    generator = torch.Generator().manual_seed(4)
    mask = {
        "elements": random_bits(1, 2, 140, 200, share=0.3),
        "bias": 3 * torch.randn(2, 1, 140, 200, generator=generator),
        "bias of keys": 3 * torch.randn(2, 1, 1, 200, generator=generator),
    }[kind]
    hidden = False if kind == "elements" else -math.inf
    mask[:, :, :40] = hidden if kind != "bias of keys" else mask[:, :, :40]
    mask[:, :, 3::5, 64:128] = hidden
    if kind == "bias":
        mask[0, 0, 128:] = -3e38
        mask[1, 0, 128:, :64] = torch.finfo(torch.float32).min
    is_causal = kind != "elements" and isinstance(score, Moment)
    assert_probabilities(monkeypatch, query, key, score, is_causal=is_causal, attn_mask=mask)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("score", [Moment(128), Mean()], ids=str)
def test_non_finite_biases_are_marked(monkeypatch: pytest.MonkeyPatch, score: Score, bad: float) -> None:
    query, key = clustered_inputs(140, 200, heads=1, head_dim=16)
    mask = torch.zeros(140, 200)
    mask[17, 70] = bad
    got, _ = assert_probabilities(monkeypatch, query, key, score, attn_mask=mask[None, None])
    assert got.isnan().nonzero().tolist() == [[0, 0, 0, 1]]


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.5])
@pytest.mark.parametrize("score", [Moment(8), Mean(), Spread()], ids=str)
def test_scales(monkeypatch: pytest.MonkeyPatch, score: Score, scale: float) -> None:
    query, key = clustered_inputs(130, 200, heads=1, head_dim=16)
    assert_probabilities(monkeypatch, query * (0.1 if scale > 1 else 1), key, score, scale=scale)


@pytest.mark.parametrize("score", [Moment(8), Mean(), Spread()], ids=str)
@causality
def test_dissimilar_key_blocks_are_excluded(monkeypatch: pytest.MonkeyPatch, is_causal: bool, score: Score) -> None:
    query, key, _ = make_qkv(300, 330, heads=2, kv_heads=1, head_dim=16)
    query += 1.0
    key[:, :, 64:128] += 3.0
    key[:, :, 192:256] -= 3.0
    _, rows = assert_probabilities(monkeypatch, query, key, score, is_causal=is_causal, threshold=0.3)
    dissimilar = torch.stack([row.dissimilar for row in rows])
    assert dissimilar.any()
    assert not dissimilar.all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("score", [Moment(8), Mean(), Spread()], ids=str)
def test_non_finite_tokens_are_marked(monkeypatch: pytest.MonkeyPatch, score: Score, bad: float) -> None:
    """A bad key marks its block for every query block, a bad query marks its query block; others do not change."""
    query, key = clustered_inputs(300, 200, heads=2, kv_heads=1, head_dim=16)
    key[0, 0, 70, 3] = bad
    query[0, 1, 128 + 40, 5] = bad  # the third of eight samples
    got, _ = assert_probabilities(monkeypatch, query, key, score)
    assert got.isnan()[0, 0, :, 1].all()
    assert got.isnan()[0, 1, 1].all()
    assert int(got.isnan().sum()) == 2 * 3 + 3


def test_scores_without_a_kernel_are_rejected() -> None:
    class Unknown(Score):
        name = "unknown"

    with pytest.raises(NotImplementedError, match="expected 'moment' or 'mean' or 'spread', got 'unknown'"):
        score_inputs(Unknown())
