"""Predicted blocks beside the specification's: the same, but for blocks whose probabilities tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import BlockMask, Budget, Dense, TopCdf
from sparge.config import COARSE_BITS, Selection
from sparge.reference import prediction

TIE = 2e-3
"""Relative distance within which two probabilities count as equal."""


@dataclass
class Chosen:
    """A row of blocks as the specification selected it, or all rows of a batch element as one."""

    row: prediction.Row
    kept: Tensor
    cdf: float | None = None

    def may_differ(self) -> Tensor:
        """Blocks whose probability ties with the last kept or first dropped one.

        With a mass to cover, also those before which the mass covered ties with it.
        """
        row, probabilities = self.row, self.row.probabilities
        free = row.visible & ~row.forced & ~row.dissimilar
        kept, dropped = free & self.kept, free & ~self.kept
        lowest = probabilities.masked_fill(~kept, torch.inf).amin()
        highest = probabilities.masked_fill(~dropped, -torch.inf).amax()
        tied = kept & (probabilities <= highest * (1 + TIE))
        tied |= dropped & (probabilities >= lowest * (1 - TIE))
        if self.cdf is not None:
            eligible = probabilities.masked_fill(~row.visible | row.dissimilar, -1.0)
            order = eligible.argsort(descending=True, stable=True)
            masses = probabilities[order]
            before = torch.empty_like(masses)
            before[order] = masses.cumsum(0) - masses
            mass = self.cdf * masses[eligible[order] >= 0].sum()
            tied |= free & ((before - mass).abs() <= TIE * mass)
        return tied


def may_differ(rule: Selection, chosen: Sequence[Chosen]) -> Tensor:
    """Blocks of the rows of one batch element that may be chosen otherwise, (rows, kv_blocks).

    Under a budget those that tie with the last kept or first dropped of all rows, and what a row is sure of as far as
    ties decide about it.
    """
    if not rule.is_call_wide:
        return torch.stack([each.may_differ() for each in chosen])
    names = ("probabilities", "visible", "forced", "dissimilar")
    parts = [torch.stack([getattr(each.row, name) for each in chosen]) for name in names]
    sure = torch.zeros_like(parts[1])
    for place, each in enumerate(chosen):
        sure[place][each.row.guaranteed()] = True
    parts[2] = parts[2] | sure
    rows = prediction.Row(*(part.flatten() for part in parts), chosen[0].row.amount, 0)
    tied = Chosen(rows, torch.stack([each.kept for each in chosen]).flatten()).may_differ().view_as(sure)
    return tied | torch.stack([unsure(each.row) for each in chosen])


def unsure(row: prediction.Row) -> Tensor:
    """What ties decide about in the guaranteed part of a row: which block is the best, and all of the last quarter of
    an octave that it reaches if a block lies near its edges."""
    probabilities = row.probabilities.float()
    free = row.visible & ~row.forced & ~row.dissimilar
    best = probabilities.masked_fill(~free, -1.0).amax()
    near_best = free & (probabilities >= best * (1 - TIE))
    orders = probabilities.contiguous().view(torch.int32) >> COARSE_BITS
    reached = [int(orders[j]) for j in row.guaranteed() if free[j]]
    if not reached:
        return near_best
    edges = (torch.tensor([min(reached), min(reached) + 1], dtype=torch.int32) << COARSE_BITS).view(torch.float32)
    near_edge = free & ((probabilities[:, None] - edges).abs() <= TIE * edges).any(1)
    if near_edge.any() or near_best.sum() > 1:
        return near_best | near_edge | (free & (orders == min(reached)))
    return near_best


def moved(value: Any, device: torch.device) -> Any:
    """The value, or a selection's per-head tensors, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value):
        return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})
    return value


def specified(
    monkeypatch: pytest.MonkeyPatch, query: Tensor, key: Tensor, **options: Any
) -> tuple[BlockMask, list[list[Chosen]]]:
    """The specification's mask, computed on the CPU, and its rows in the order of (batch, head and row)."""
    chosen: list[list[Chosen]] = []
    select = prediction.select_rows

    def record(rule: Selection, rows: Sequence[prediction.Row]) -> list[Tensor]:
        kept = select(rule, rows)
        pairs = zip(rows, kept, strict=True)
        chosen.append([Chosen(row, each, row.amount if isinstance(rule, TopCdf) else None) for row, each in pairs])
        return kept

    cpu = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(prediction, "select_rows", record)
        given = {name: moved(value, cpu) for name, value in options.items()}
        mask = sparge.predict(query.cpu(), key.cpu(), enable_gqa=True, backend="reference", **given)
    return mask, chosen


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


def assert_same_blocks(
    monkeypatch: pytest.MonkeyPatch, query: Tensor, key: Tensor, *, backend: str, **options: Any
) -> BlockMask:
    """A backend's mask is the specification's but for ties."""
    given = {name: moved(value, query.device) for name, value in options.items()}
    got = sparge.predict(query, key, enable_gqa=True, backend=backend, **given)
    expected, chosen = specified(monkeypatch, query, key, **options)
    assert_valid_lists(got)
    assert torch.equal(got.visible_num_blocks.cpu(), expected.visible_num_blocks)
    rule = options["sparsity"]
    if isinstance(rule, Budget):
        assert torch.equal(got.kv_num_blocks.cpu().sum((1, 2)), expected.kv_num_blocks.sum((1, 2)))
    elif not isinstance(rule, TopCdf):
        assert torch.equal(got.kv_num_blocks.cpu(), expected.kv_num_blocks)
    differs = got.to_dense().cpu() != expected.to_dense()
    if isinstance(rule, Dense):
        assert not differs.any()
        return got
    allowed = torch.stack([may_differ(rule, rows) for rows in chosen]).view_as(differs)
    assert not (differs & ~allowed).any(), f"other blocks at (b, h, row, block) {(differs & ~allowed).nonzero()[:8]}"
    return got
