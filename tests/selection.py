"""Predicted blocks beside the specification's: the same, but for blocks whose probabilities tie."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import BlockMask, Dense, TopCdf
from sparge.config import Selection
from sparge.reference import prediction

TIE = 2e-3
"""Relative distance within which two probabilities count as equal."""


@dataclass
class Row:
    """One row of blocks as the specification selected it; tensors are (kv_blocks,)."""

    probabilities: Tensor
    visible: Tensor
    forced: Tensor
    dissimilar: Tensor
    cdf: float | None
    kept: Tensor

    def may_differ(self) -> Tensor:
        """Blocks whose probability ties with the row's last kept or first dropped one.

        With a mass to cover, also those before which the mass covered ties with it.
        """
        free = self.visible & ~self.forced & ~self.dissimilar
        kept, dropped = free & self.kept, free & ~self.kept
        lowest = self.probabilities.masked_fill(~kept, torch.inf).amin()
        highest = self.probabilities.masked_fill(~dropped, -torch.inf).amax()
        tied = kept & (self.probabilities <= highest * (1 + TIE))
        tied |= dropped & (self.probabilities >= lowest * (1 - TIE))
        if self.cdf is not None:
            eligible = self.probabilities.masked_fill(~self.visible | self.dissimilar, -1.0)
            order = eligible.argsort(descending=True, stable=True)
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
    select = prediction.select_row

    def record(rule: Selection, amount: float, *row: Tensor) -> Tensor:
        kept = select(rule, amount, *row)
        rows.append(Row(*row, amount if isinstance(rule, TopCdf) else None, kept))
        return kept

    cpu = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(prediction, "select_row", record)
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


def assert_same_blocks(
    monkeypatch: pytest.MonkeyPatch, query: Tensor, key: Tensor, *, backend: str, **options: Any
) -> BlockMask:
    """A backend's mask is the specification's but for ties."""
    given = {name: moved(value, query.device) for name, value in options.items()}
    got = sparge.predict(query, key, enable_gqa=True, backend=backend, **given)
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
