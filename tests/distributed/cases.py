"""Calls over several ranks, and what one process makes of them: the same cases for threads, processes and GPUs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import sparge
from sparge.distributed import computing, gathered_attention, mesh_attention, ring_attention, shard, ulysses_attention
from sparge.distributed.exchange import Exchange
from sparge.distributed.places import places_of, split_lengths
from sparge.masks.block_mask import BlockMask

MODES = {"ulysses": ulysses_attention, "gathered": gathered_attention, "ring": ring_attention}
RULES: dict[str, dict[str, Any]] = {
    "budget": {"sparsity": sparge.Budget(0.3)},
    "topk": {"sparsity": sparge.TopK(0.3, min_blocks=2)},
    "topcdf": {"sparsity": sparge.TopCdf(0.6, min_blocks=1)},
    "dense": {"sparsity": sparge.Dense()},
}


@dataclass(frozen=True)
class Case:
    """A call: its mode, what it is asked, and how its tokens lie."""

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
        words = [self.mode, self.rule, "causal" if self.is_causal else "full"]
        words += [self.sharding] * (self.sharding != "contiguous") + [
            f"{self.heads[0]}of{self.heads[1]}",
            f"{self.length}",
        ]
        return "-".join([*words, *self.options])


def tensors(case: Case, *, width: int = 32, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of the whole sequence; heads and rows differ in how much of it they look at."""
    generator = torch.Generator().manual_seed(len(str(case)))
    heads, kv_heads = case.heads
    query, key, value = (
        torch.randn(case.batch, count, case.length, width, generator=generator) for count in (heads, kv_heads, kv_heads)
    )
    query = query * torch.linspace(0.3, 2.5, heads)[:, None, None]  # some heads are sharp, some are not
    key[:, :, case.length // 3 : case.length // 3 + 40] += 1.0
    key[:, :, 5] *= 3.0
    return [tensor.to(device=device, dtype=dtype) for tensor in (query, key, value)]


def whole(case: Case, inputs: list[Tensor], backend: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Output, LSE and mask (None where it is dense) of one process."""
    call = {"is_causal": case.is_causal, "enable_gqa": True, "backend": backend}
    options = {name: value for name, value in case.options.items() if name not in ("kv_heads_at_once", "balance")}
    output, lse = sparge.attention(*inputs, return_lse=True, **call, **RULES[case.rule], **options)
    if case.rule == "dense":
        return output, lse, None
    known = ("score", "always_keep", "exact_queries", "attn_mask", "window")
    options = {name: value for name, value in options.items() if name in known}
    mask = sparge.predict(*inputs[:2], **call, **RULES[case.rule], **options)
    return output, lse, mask.to_dense()


_choose = computing.choose
_thread = threading.local()


def _remember(*arguments: Any) -> list[BlockMask]:
    found = _choose(*arguments)
    if hasattr(_thread, "masks"):
        _thread.masks.extend(found)
    return found


computing.choose = _remember


@contextmanager
def chosen_masks() -> Iterator[list[BlockMask]]:
    """The masks that ranks choose together meanwhile; those of this thread, where threads are ranks."""
    _thread.masks = []
    try:
        yield _thread.masks
    finally:
        del _thread.masks


def part(case: Case, inputs: list[Tensor], exchanges: tuple[Exchange, ...], backend: str) -> tuple[Tensor, Tensor]:
    """Output and LSE of this rank's tokens."""
    options = {"is_causal": case.is_causal, "enable_gqa": True, "backend": backend, "return_lse": True}
    options |= {**RULES[case.rule], **case.options}
    if len(exchanges) == 2:
        row, column = exchanges
        own = cut(case, inputs, exchanges)
        return mesh_attention(*own, ulysses_group=row, group=column, inner=case.mode, sharding=case.sharding, **options)
    if case.mode != "ulysses":
        options["sharding"] = case.sharding
    own = cut(case, inputs, exchanges)
    lengths = lengths_of(case, exchanges[0].size)
    return MODES[case.mode](*own, group=exchanges[0], lengths=lengths, **options)


def lengths_of(case: Case, size: int) -> tuple[int, ...]:
    if case.lengths is not None:
        return case.lengths
    return (case.length // size,) * size if case.sharding == "head_tail" else split_lengths(case.length, size)


def cut(case: Case, inputs: list[Tensor], exchanges: tuple[Exchange, ...]) -> list[Tensor]:
    """This rank's tokens of every tensor."""
    if len(exchanges) == 1:
        own, lengths = exchanges[0], lengths_of(case, exchanges[0].size)
        return [shard(x, own.rank, own.size, sharding=case.sharding, lengths=lengths) for x in inputs]
    row, column = exchanges
    lengths = (case.length // column.size,) * column.size
    parts = [shard(x, column.rank, column.size, sharding=case.sharding, lengths=lengths) for x in inputs]
    size = case.length // column.size // row.size
    return [x[:, :, row.rank * size : (row.rank + 1) * size] for x in parts]


def check(
    case: Case,
    inputs: list[Tensor],
    expected: tuple[Tensor, Tensor, Tensor | None],
    exchanges: tuple[Exchange, ...],
    backend: str,
    tolerance: float = 2e-5,
) -> None:
    """Raise unless this rank's part is that of one process: masks exactly, outputs within rounding."""
    with chosen_masks() as masks:
        output, lse = part(case, inputs, exchanges, backend)
    own_output, own_lse = cut(case, [expected[0], expected[1][..., None]], exchanges)
    torch.testing.assert_close(output, own_output, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, own_lse[..., 0], atol=tolerance, rtol=tolerance)
    check_masks(case, masks, expected[2], exchanges)


def check_masks(case: Case, masks: list[BlockMask], expected: Tensor | None, exchanges: tuple[Exchange, ...]) -> None:
    """Raise unless chosen masks are rows and heads of one process's mask."""
    if expected is None or (case.mode == "ulysses" and not masks):
        assert expected is None or case.rule != "budget"  # the others need nobody
        return
    row, column = exchanges[0], exchanges[-1]
    if case.mode == "ulysses":
        places, heads = places_of((case.length,), "contiguous").pieces[0], expected.shape[1] // row.size
    else:
        lengths = (case.length // column.size,) * column.size if len(exchanges) == 2 else lengths_of(case, row.size)
        places = places_of(lengths, case.sharding).pieces[column.rank]
        heads = expected.shape[1] // (row.size if len(exchanges) == 2 else 1)
    first = row.rank * heads if heads < expected.shape[1] else 0
    assert len(masks) == len(places)
    assert not expected.all()  # or it would say nothing
    for mask, piece in zip(masks, places, strict=True):
        own = expected[:, first : first + heads, piece.start // 128 : -(-piece.stop // 128)]
        found = mask.to_dense()
        assert not own[..., found.shape[3] :].any()
        assert torch.equal(found, own[..., : found.shape[3]])
