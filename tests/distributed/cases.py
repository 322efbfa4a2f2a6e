"""Calls over several ranks and their comparison with one process, for tests with threads, processes and GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge.distributed import context_parallel_attention, prediction, shard, split_lengths
from sparge.distributed.communicator import Communicator
from sparge.distributed.sharding import token_sharding
from sparge.masks.block_mask import BlockMask

MODES = ("ulysses", "gather", "ring")
RULES: dict[str, dict[str, Any]] = {
    "budget": {"sparsity": sparge.Budget(0.3)},
    "topk": {"sparsity": sparge.TopK(0.3, min_blocks=2)},
    "topcdf": {"sparsity": sparge.TopCdf(0.6, min_blocks=1)},
    "dense": {"sparsity": sparge.Dense()},
}


@dataclass(frozen=True)
class Case:
    """A call: its mode, its options, and how its tokens are split."""

    mode: str
    rule: str = "budget"
    is_causal: bool = False
    sharding: str = "contiguous"
    heads: tuple[int, int] = (4, 2)
    length: int = 1024
    lengths: tuple[int, ...] | None = None
    batch: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = [self.mode, self.rule, "causal" if self.is_causal else "full"]
        parts += [self.sharding] * (self.sharding != "contiguous") + [
            f"{self.heads[0]}of{self.heads[1]}",
            f"{self.length}",
        ]
        return "-".join([*parts, *self.options])


def make_tensors(
    case: Case, *, width: int = 32, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Return query, key and value of the whole sequence. Heads differ in how sharply they attend."""
    generator = torch.Generator().manual_seed(len(str(case)))
    heads, kv_heads = case.heads
    query, key, value = (
        torch.randn(case.batch, count, case.length, width, generator=generator) for count in (heads, kv_heads, kv_heads)
    )
    query = query * torch.linspace(0.3, 2.5, heads)[:, None, None]  # some heads are sharp, some are not
    key[:, :, case.length // 3 : case.length // 3 + 40] += 1.0
    key[:, :, 5] *= 3.0
    return [tensor.to(device=device, dtype=dtype) for tensor in (query, key, value)]


def run_one_process(case: Case, inputs: list[Tensor], backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run one process and return output, LSE and mask (None if dense)."""
    call = {"is_causal": case.is_causal, "enable_gqa": True, "backend": backend}
    options = {name: value for name, value in case.options.items() if name not in ("kv_heads_at_once", "balance")}
    output, lse = sparge.attention(*inputs, return_lse=True, **call, **RULES[case.rule], **options)
    if case.rule == "dense":
        return output, lse, None
    predict_options = ("score", "always_keep", "exact_queries", "attn_mask", "window")
    options = {name: value for name, value in options.items() if name in predict_options}
    mask = sparge.predict(*inputs[:2], **call, **RULES[case.rule], **options)
    return output, lse, mask.to_dense()


_choose = prediction.choose_masks
_thread = threading.local()


def _record_masks(*arguments: Any) -> list[BlockMask]:
    masks = _choose(*arguments)
    if hasattr(_thread, "masks"):
        _thread.masks.extend(masks)
    return masks


prediction.choose_masks = _record_masks


@contextmanager
def recorded_masks() -> Iterator[list[BlockMask]]:
    """Collect the masks that the ranks select together. If ranks are threads, collect the masks of this thread."""
    _thread.masks = []
    try:
        yield _thread.masks
    finally:
        del _thread.masks


def run_rank(
    case: Case, inputs: list[Tensor], communicators: tuple[Communicator, ...], backend: str
) -> tuple[Tensor, Tensor]:
    """Run this rank and return output and LSE of its tokens."""
    options = {"is_causal": case.is_causal, "enable_gqa": True, "backend": backend, "return_lse": True}
    options |= {**RULES[case.rule], **case.options}
    local = shard_of_rank(case, inputs, communicators)
    group: Any = communicators[0]
    if len(communicators) == 2:
        row, column = communicators
        group = column, row
    else:
        options["lengths"] = lengths_of(case, communicators[0].size)
    return context_parallel_attention(*local, mode=case.mode, group=group, sharding=case.sharding, **options)


def lengths_of(case: Case, size: int) -> tuple[int, ...]:
    if case.lengths is not None:
        return case.lengths
    return (case.length // size,) * size if case.sharding == "head_tail" else split_lengths(case.length, size)


def shard_of_rank(case: Case, inputs: list[Tensor], communicators: tuple[Communicator, ...]) -> list[Tensor]:
    """Return the tokens of this rank of every tensor."""
    if len(communicators) == 1:
        ranks, lengths = communicators[0], lengths_of(case, communicators[0].size)
        return [shard(x, ranks.rank, ranks.size, sharding=case.sharding, lengths=lengths) for x in inputs]
    row, column = communicators
    lengths = (case.length // column.size,) * column.size
    parts = [shard(x, column.rank, column.size, sharding=case.sharding, lengths=lengths) for x in inputs]
    size = case.length // column.size // row.size
    return [x[:, :, row.rank * size : (row.rank + 1) * size] for x in parts]


def check_rank(
    case: Case,
    inputs: list[Tensor],
    expected: tuple[Tensor, Tensor, Tensor | None],
    communicators: tuple[Communicator, ...],
    backend: str,
    tolerance: float = 2e-5,
) -> None:
    """Check that this rank's result equals one process: masks exactly, outputs within rounding."""
    with recorded_masks() as masks:
        output, lse = run_rank(case, inputs, communicators, backend)
    own_output, own_lse = shard_of_rank(case, [expected[0], expected[1][..., None]], communicators)
    torch.testing.assert_close(output, own_output, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, own_lse[..., 0], atol=tolerance, rtol=tolerance)
    check_rank_masks(case, masks, expected[2], communicators)


def check_rank_masks(
    case: Case, masks: list[BlockMask], expected: Tensor | None, communicators: tuple[Communicator, ...]
) -> None:
    """Check that the selected masks equal the mask of one process for the query blocks and heads of this rank."""
    if expected is None or (case.mode == "ulysses" and not masks):
        assert expected is None or case.rule != "budget"  # other rules do not depend on other ranks
        return
    row, column = communicators[0], communicators[-1]
    if case.mode == "ulysses":
        pieces, heads = token_sharding((case.length,), "contiguous").pieces[0], expected.shape[1] // row.size
    else:
        lengths = (case.length // column.size,) * column.size if len(communicators) == 2 else lengths_of(case, row.size)
        pieces = token_sharding(lengths, case.sharding).pieces[column.rank]
        heads = expected.shape[1] // (row.size if len(communicators) == 2 else 1)
    first = row.rank * heads if heads < expected.shape[1] else 0
    assert len(masks) == len(pieces)
    assert not expected.all()  # some blocks are skipped
    for mask, piece in zip(masks, pieces, strict=True):
        expected_rows = expected[:, first : first + heads, piece.start // 128 : -(-piece.stop // 128)]
        dense = mask.to_dense()
        assert not expected_rows[..., dense.shape[3] :].any()
        assert torch.equal(dense, expected_rows[..., : dense.shape[3]])
