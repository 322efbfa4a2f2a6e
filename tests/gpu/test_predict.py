"""The predicted blocks are those of the specification, whatever the masks, lengths and rules."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import causality
from gpu.conftest import BACKEND, DEVICE, make_inputs, random_bits
from sparge import BlockMask, Dense, Mean, Moment, TopCdf, TopK, reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

TIE = 2e-3
"""Relative distance within which two probabilities count as equal."""

SHAPES = {
    "square": {"q_len": 600, "heads": 2, "kv_heads": 1},
    "ragged": {"q_len": 129, "kv_len": 500, "batch": 2, "heads": 4, "kv_heads": 2},
    "more queries": {"q_len": 300, "kv_len": 129, "heads": 2},
    "one query": {"q_len": 1, "kv_len": 600, "heads": 3, "kv_heads": 1},
    "prefix": {"q_len": 256, "kv_len": 576, "heads": 2, "kv_heads": 1},
}
RULES = {
    "topk": TopK(0.4, min_blocks=1),
    "floor": TopK(0.1, min_blocks=3, sink=False, diagonal=False),
    "sink": TopK(0.3, min_blocks=1, sink=True, diagonal=False),
    "diagonal": TopK(0.3, min_blocks=1, sink=False, diagonal=True),
    "no flags": TopK(0.3, min_blocks=0, sink=False, diagonal=False),
    "per head": TopK(torch.tensor([0.2, 0.7]), min_blocks=1, sink=False, diagonal=False),
    "judged": TopK(0.3, min_blocks=1, similarity_threshold=0.3),
    "judged per head": TopK(0.3, min_blocks=1, similarity_threshold=torch.tensor([0.0, 0.3])),
    "topcdf": TopCdf(0.7, min_blocks=2),
    "topcdf per head": TopCdf(torch.tensor([0.3, 0.9]), min_blocks=0),
    "judged topcdf": TopCdf(0.5, min_blocks=0, similarity_threshold=0.3),
    "dense": Dense(),
}


@dataclass
class Row:
    """One row of blocks as the specification selected it; tensors are (kv_blocks,)."""

    probabilities: Tensor
    visible: Tensor
    forced: Tensor
    unjudged: Tensor
    cdf: float | None
    kept: Tensor

    def may_differ(self) -> Tensor:
        """Blocks whose probability ties with the row's last kept or first dropped one.

        With a mass to cover, also those before which the mass covered ties with it.
        """
        free = self.visible & ~self.forced & ~self.unjudged
        kept, dropped = free & self.kept, free & ~self.kept
        lowest = self.probabilities.masked_fill(~kept, torch.inf).amin()
        highest = self.probabilities.masked_fill(~dropped, -torch.inf).amax()
        tied = kept & (self.probabilities <= highest * (1 + TIE))
        tied |= dropped & (self.probabilities >= lowest * (1 - TIE))
        if self.cdf is not None:
            judged = self.probabilities.masked_fill(~self.visible | self.unjudged, -1.0)
            order = judged.argsort(descending=True, stable=True)
            masses = self.probabilities[order]
            before = torch.empty_like(masses)
            before[order] = masses.cumsum(0) - masses
            tied |= free & ((before - self.cdf).abs() <= TIE * self.cdf)
        return tied


def moved(value: Any, device: torch.device) -> Any:
    """The value, or a selection's per-head tensors, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def specified(
    monkeypatch: pytest.MonkeyPatch, query: Tensor, key: Tensor, **options: Any
) -> tuple[BlockMask, list[Row]]:
    """The specification's mask, computed on the CPU, and its rows in the order of (batch, head, row)."""
    rows: list[Row] = []
    select = reference.select_row

    def record(
        probabilities: Tensor, visible: Tensor, forced: Tensor, unjudged: Tensor, *, cdf: float | None, **rule: Any
    ) -> Tensor:
        kept = select(probabilities, visible, forced, unjudged, cdf=cdf, **rule)
        rows.append(Row(probabilities, visible, forced, unjudged, cdf, kept))
        return kept

    cpu = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(reference, "select_row", record)
        given = {name: moved(value, cpu) for name, value in options.items()}
        mask = sparge.predict(query.cpu(), key.cpu(), enable_gqa=True, backend="reference", **given)
    return mask, rows


def assert_valid_lists(mask: BlockMask) -> None:
    """Kept blocks first, ascending; a whole row names every block once."""
    counts, indices = mask.kv_num_blocks.cpu(), mask.kv_indices.cpu()
    assert counts.dtype == indices.dtype == torch.int32
    blocks = indices.shape[-1]
    assert torch.equal(indices.sort(-1).values, torch.arange(blocks, dtype=torch.int32).expand_as(indices))
    ascending = indices[..., 1:] > indices[..., :-1]
    listed = torch.arange(1, blocks) < counts[..., None]
    assert bool((ascending | ~listed).all())
    assert bool((counts <= mask.visible_num_blocks.cpu()).all())


def assert_same_blocks(monkeypatch: pytest.MonkeyPatch, query: Tensor, key: Tensor, **options: Any) -> BlockMask:
    given = {name: moved(value, DEVICE) for name, value in options.items()}
    got = sparge.predict(query, key, enable_gqa=True, backend=BACKEND, **given)
    expected, rows = specified(monkeypatch, query, key, **options)
    assert_valid_lists(got)
    assert torch.equal(got.visible_num_blocks.cpu(), expected.visible_num_blocks)
    if not isinstance(options["sparsity"], TopCdf):
        assert torch.equal(got.kv_num_blocks.cpu(), expected.kv_num_blocks)
    differs = got.to_dense().cpu() != expected.to_dense()
    if isinstance(options["sparsity"], Dense):
        assert not differs.any()
        return got
    allowed = torch.stack([row.may_differ() for row in rows]).view_as(differs)
    assert not (differs & ~allowed).any(), f"other blocks at (b, h, row, block) {(differs & ~allowed).nonzero()[:8]}"
    return got


def structured(name: str, **sizes: Any) -> tuple[Tensor, Tensor]:
    """Queries that agree, and every other key block too: the judge lets some pass, and the scores differ."""
    query, key, _ = make_inputs(**{**SHAPES[name], **sizes})
    directions = torch.randn(key.shape[2] // 128, key.shape[3], generator=torch.Generator().manual_seed(8)).to(key)
    for index, direction in enumerate(directions):
        key[:, :, 128 * index : 128 * index + 64] += 2 * direction
    return query + 1.0, key


def mask_of(kind: str, query: Tensor, key: Tensor) -> Tensor | None:
    (batch, heads, q_len, _), kv_len = query.shape, key.shape[2]
    if kind == "padding":
        return (
            torch.arange(kv_len, device=DEVICE)
            < torch.tensor([kv_len, kv_len // 3], device=DEVICE)[-batch:, None, None, None]
        )
    if kind == "keys per head":
        mask = random_bits(1, heads, 1, kv_len, share=0.7)
        mask[..., kv_len // 2 : kv_len // 2 + 80] = False
        return mask
    if kind == "elements":
        mask = random_bits(1, 1, q_len, kv_len, share=0.5)
        mask[..., : q_len // 2, kv_len // 3 :] = False
        return mask
    if kind == "bias per key":
        bias = torch.randn(batch, 1, 1, kv_len, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        bias[..., :70] = -torch.inf
        return bias
    if kind == "bias":
        bias = 3 * torch.randn(1, heads, q_len, kv_len, generator=torch.Generator().manual_seed(3)).to(DEVICE)
        bias[..., 70:140] = torch.finfo(torch.float32).min
        return bias
    return None


@pytest.mark.parametrize("score", [Moment(), Mean()], ids=str)
@causality
@pytest.mark.parametrize("rule", RULES)
def test_rules(monkeypatch: pytest.MonkeyPatch, rule: str, is_causal: bool, score: Any) -> None:
    query, key = structured("square")
    mask = assert_same_blocks(monkeypatch, query, key, sparsity=RULES[rule], is_causal=is_causal, score=score)
    if rule != "dense":
        assert 0 < mask.density() < 1, "a choice was made"


@pytest.mark.parametrize("kind", ["none", "padding", "keys per head", "elements", "bias per key", "bias"])
@causality
@pytest.mark.parametrize("name", ["ragged", "more queries", "one query", "prefix"])
def test_masks_and_lengths(monkeypatch: pytest.MonkeyPatch, name: str, is_causal: bool, kind: str) -> None:
    query, key = structured(name)
    options = {"is_causal": is_causal, "attn_mask": mask_of(kind, query, key), "sparsity": TopK(0.4, min_blocks=1)}
    assert_same_blocks(monkeypatch, query, key, **options)


@pytest.mark.parametrize("kind", ["padding", "bias"])
@causality
def test_masks_and_the_mean_score(monkeypatch: pytest.MonkeyPatch, is_causal: bool, kind: str) -> None:
    query, key = structured("ragged")
    options = {"is_causal": is_causal, "attn_mask": mask_of(kind, query, key), "sparsity": TopCdf(0.6, min_blocks=1)}
    assert_same_blocks(monkeypatch, query, key, score="mean", **options)


@pytest.mark.parametrize("samples", [1, 5, 16])
@pytest.mark.parametrize("kind", ["none", "padding"])
def test_numbers_of_samples(monkeypatch: pytest.MonkeyPatch, kind: str, samples: int) -> None:
    query, key = structured("ragged")
    options = {"attn_mask": mask_of(kind, query, key), "sparsity": TopK(0.4, min_blocks=1), "score": Moment(samples)}
    assert_same_blocks(monkeypatch, query, key, is_causal=True, **options)


@pytest.mark.parametrize("head_dim, dtype", [(40, torch.bfloat16), (128, torch.float16), (256, torch.float32)], ids=str)
@causality
def test_widths_and_dtypes(monkeypatch: pytest.MonkeyPatch, is_causal: bool, head_dim: int, dtype: torch.dtype) -> None:
    query, key = structured("ragged", head_dim=head_dim, dtype=dtype)
    assert_same_blocks(monkeypatch, query, key, is_causal=is_causal, sparsity=TopK(0.4, min_blocks=1))


@pytest.mark.parametrize("rule", ["no flags", "topcdf", "judged"])
@causality
def test_always_keep(monkeypatch: pytest.MonkeyPatch, is_causal: bool, rule: str) -> None:
    query, key = structured("square")
    ranges = [(65, 70), (300, 330)]
    options = {"is_causal": is_causal, "sparsity": RULES[rule], "always_keep": ranges}
    kept = assert_same_blocks(monkeypatch, query, key, **options).to_dense()
    visible = sparge.predict(query, key, is_causal=is_causal, sparsity=Dense(), enable_gqa=True, backend=BACKEND)
    for column in (1, 4, 5):
        assert torch.equal(kept[..., column], visible.to_dense()[..., column])


@pytest.mark.parametrize("score", ["moment", "mean"])
def test_scale(monkeypatch: pytest.MonkeyPatch, score: str) -> None:
    query, key = structured("square")
    for scale in (0.02, 0.5, -0.1):
        assert_same_blocks(monkeypatch, query, key, scale=scale, sparsity=TopCdf(0.8, min_blocks=1), score=score)
