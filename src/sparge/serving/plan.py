"""Which requests of a batch are long prefills, and which are left to the engine. Lengths are the host's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparge.dispatch.reasons import Reason


@dataclass(frozen=True)
class Request:
    """One request of a packed batch.

    Attributes:
        index: its place in the batch.
        start, stop: the rows of its queries.
        kv_len: keys it sees in all: those before its queries, which lie in the cache alone, and those of its queries.
    """

    index: int
    start: int
    stop: int
    kv_len: int

    @property
    def has_context(self) -> bool:
        """Whether it sees keys besides those of its own queries."""
        return self.kv_len > self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """A batch in two parts.

    Attributes:
        long: what runs sparse, in layers that can.
        others: the rest. Requests without queries, as padded batches have, are in neither: kernels need not take a
            batch that has no others.
        reason: why the longest of the rest runs dense; that of all, if nothing is long.
    """

    long: tuple[Request, ...] = ()
    others: tuple[Request, ...] = ()
    reason: Reason = Reason.DECODE


def split(
    starts: Sequence[int],
    kv_lens: Sequence[int],
    why_dense: Callable[[int, int], Reason | None],
    fewest: int,
) -> Plan:
    """Which requests are long prefills.

    Args:
        starts: where the queries of each request begin, and where the last ones end.
        kv_lens: keys of each; those of requests with fewer than ``fewest`` queries may be too large.
        why_dense: asked by numbers of queries and keys; None means sparse.
        fewest: requests with fewer queries are left alone, and not asked about.
    """
    long, others = [], []
    longest, reason = -1, Reason.DECODE
    for index, kv_len in enumerate(kv_lens):
        request = Request(index, starts[index], starts[index + 1], kv_len)
        queries = request.stop - request.start
        if not queries:
            continue
        why = why_dense(queries, kv_len) if queries >= fewest else _why_short(queries)
        if why is None:
            long.append(request)
            continue
        others.append(request)
        if queries > longest:
            longest, reason = queries, why
    return Plan(tuple(long), tuple(others), reason)


def _why_short(queries: int) -> Reason:
    return Reason.DECODE if queries <= 1 else Reason.CROSSOVER


def rows_of(requests: Sequence[Request], device: torch.device) -> slice | Tensor:
    """The rows of some requests: a slice where they lie together, or numbers on the device."""
    spans = [(request.start, request.stop) for request in requests]
    if all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return to_device(torch.cat([torch.arange(*span, device="cpu") for span in spans]), device)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """A few numbers of the host's, without waiting for the device."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
