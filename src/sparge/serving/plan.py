"""Split a batch into long prefills, which may run sparse, and other requests, by lengths that are known on the host."""

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
        index: position of the request in the batch.
        start, stop: range of its queries in the packed batch.
        kv_len: number of its keys: the context before its queries, which is only in the cache, and one per query.
    """

    index: int
    start: int
    stop: int
    kv_len: int

    @property
    def has_context(self) -> bool:
        """Whether there are keys before the first query."""
        return self.kv_len > self.stop - self.start


def split(
    starts: Sequence[int],
    kv_lens: Sequence[int],
    why_dense: Callable[[int, int], Reason | None],
    min_queries: int,
) -> tuple[tuple[Request, ...], tuple[Request, ...], Reason]:
    """Split a batch into long prefills and other requests. Requests without queries (padding) are dropped.

    Args:
        starts: index of the first query of each request, and the end of the last request.
        kv_lens: number of keys of each request; may be too large for requests with fewer than ``min_queries`` queries.
        why_dense: returns the reason to run dense from the numbers of queries and keys, or None for sparse.
        min_queries: requests with fewer queries are never long; ``why_dense`` is not called for them.

    Returns:
        The long requests, the other requests, and why the longest of the other requests runs dense.
    """
    long, others = [], []
    longest, reason = -1, Reason.DECODE
    for index, ((start, stop), kv_len) in enumerate(zip(itertools.pairwise(starts), kv_lens, strict=True)):
        queries = stop - start
        if not queries:
            continue
        request = Request(index, start, stop, kv_len)
        why = why_dense(queries, kv_len) if queries >= min_queries else why_short(queries)
        if why is None:
            long.append(request)
            continue
        others.append(request)
        if queries > longest:
            longest, reason = queries, why
    return tuple(long), tuple(others), reason


def why_short(queries: int) -> Reason:
    """Return why a request with few queries runs dense."""
    return Reason.DECODE if queries <= 1 else Reason.CROSSOVER


def rows_of(requests: Sequence[Request], device: torch.device) -> slice | Tensor:
    """Return the queries of some requests in the packed batch: a slice if contiguous, else indices on the device."""
    spans = [(request.start, request.stop) for request in requests]
    if all(stop == start for (_, stop), (start, _) in itertools.pairwise(spans)):
        return slice(spans[0][0], spans[-1][1])
    return to_device(torch.cat([torch.arange(*span, device="cpu") for span in spans]), device)


def to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host without waiting for the device."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers.to(device)
