"""Compare predicted blocks with the reference: they are equal except for blocks whose probabilities tie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import BlockMask, Budget, Dense, TopCdf
from sparge.options.rules import BUDGET_BITS, Selection
from sparge.reference import prediction

TIE = 2e-3
"""Relative distance within which two probabilities count as equal."""


@dataclass
class ChosenBlocks:
    """The selection of the reference for one query block."""

    row: prediction.QBlock
    kept: Tensor
    cdf: float | None = None

    def may_differ(self) -> Tensor:
        """Return the blocks whose probability ties with the last kept or the first dropped block.

        For `TopCdf`, also return the blocks at which the cumulative probability ties with the threshold.
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


def may_differ(rule: Selection, chosen: Sequence[ChosenBlocks]) -> Tensor:
    """Return the blocks of one batch item on which two correct selections may differ, (q_blocks, kv_blocks).

    `Budget` allocates the blocks of its last probability level to query blocks. Rounding can move a block across the
    edge of that level, and then some query blocks keep one block more or less. Therefore every block on or near that
    level may differ.
    """
    by_row = torch.stack([each.may_differ() for each in chosen])
    if not rule.is_call_wide:
        return by_row
    rows = [each.row for each in chosen]
    free = torch.stack([row.visible & ~row.forced & ~row.dissimilar for row in rows])
    probabilities = torch.stack([row.probabilities for row in rows]).float()
    kept = torch.stack([each.kept for each in chosen])
    beyond = [
        free[i] & kept[i] if len(row.best(row.kept_by_level()[-1])) < int(kept[i].sum()) else free[i] & False
        for i, row in enumerate(rows)
    ]
    taken = probabilities[torch.stack(beyond)]
    if not len(taken):
        return by_row
    level = int(taken.min().view(torch.int32)) >> BUDGET_BITS
    edges = (torch.tensor([level, level + 1], dtype=torch.int32) << BUDGET_BITS).view(torch.float32)
    return by_row | (free & (probabilities >= edges[0] * (1 - TIE)) & (probabilities <= edges[1] * (1 + TIE)))


def to_device(value: Any, device: torch.device) -> Any:
    """Move a tensor, or the per-head tensors of a selection rule, to a device. Return other values unchanged."""
    if isinstance(value, Tensor):
        return value.to(device)
    if is_dataclass(value):
        return replace(value, **{field.name: to_device(getattr(value, field.name), device) for field in fields(value)})
    return value


def reference_blocks(
    monkeypatch: pytest.MonkeyPatch, query: Tensor, key: Tensor, **options: Any
) -> tuple[BlockMask, list[list[ChosenBlocks]]]:
    """Return the reference's mask, computed on the CPU, and its selections by batch item, then head and query block."""
    chosen: list[list[ChosenBlocks]] = []
    select = prediction.apply_rule

    def record(rule: Selection, rows: Sequence[prediction.QBlock]) -> list[Tensor]:
        kept = select(rule, rows)
        pairs = zip(rows, kept, strict=True)
        chosen.append(
            [ChosenBlocks(row, each, row.amount if isinstance(rule, TopCdf) else None) for row, each in pairs]
        )
        return kept

    cpu = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(prediction, "apply_rule", record)
        moved = {name: to_device(value, cpu) for name, value in options.items()}
        mask = sparge.predict(query.cpu(), key.cpu(), enable_gqa=True, backend="reference", **moved)
    return mask, chosen


def assert_valid_lists(mask: BlockMask) -> None:
    """Check that each list has the kept blocks first, in ascending order, and contains every block once."""
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
    """Check that the mask of a backend equals the mask of the reference except for ties. Return it."""
    moved = {name: to_device(value, query.device) for name, value in options.items()}
    got = sparge.predict(query, key, enable_gqa=True, backend=backend, **moved)
    expected, chosen = reference_blocks(monkeypatch, query, key, **options)
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
