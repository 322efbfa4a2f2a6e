"""The segments of a pack: neighbours of equal lengths as one batch (`Run`), unequal ones as one call (`Segments`).

In a packed call each segment is a batch element with lengths of its own. It looks like a batch that is padded to its
longest segment: the buffers between the stages lie so. Queries, keys and values are read where they lie in the pack,
blocks that a segment does not have are not computed, and results go to the pack. So a segment's numbers, and the order
in which they are added, are those of a call by itself.

What padding costs is memory between the stages. Segments are taken together whose numbers of blocks have the same next
power of two (`alike`): no buffer is more than twice as long as its segment needs, no block map four times as large.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div
from sparge.options.rules import budget_top

TABLE_COLUMNS = 8
"""Of the table that kernels read, one of them unused."""
Q_START, Q_LEN, KV_START, KV_LEN, FIRST_ROW, TOP_LEVEL, SHIFT = range(7)
"""What they hold: where a segment's queries and keys begin in the pack and how many there are; how many rows of blocks
other segments before it have; `config.budget_top`; how far its causal diagonal lies right of the longest one's."""
MAX_TABLES = 64
"""So many groups of segments are remembered: all layers of a model have the same ones."""
MAX_BLOCKS = 2**27
"""Of the block maps of a packed call: its lists take 4 bytes for each, and its probabilities as many."""


class Segment(NamedTuple):
    """Where a segment's queries and keys begin in the pack, and how many there are of each."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int


@dataclass(frozen=True)
class Run:
    """Neighbouring segments of equal lengths.

    Attributes:
        count: how many.
        q_start, kv_start: where the first one begins.
        q_len, kv_len: of each.
    """

    count: int
    q_start: int
    q_len: int
    kv_start: int
    kv_len: int

    def segments(self) -> Iterator[Segment]:
        """Its segments, one by one."""
        for index in range(self.count):
            q_start, kv_start = self.q_start + index * self.q_len, self.kv_start + index * self.kv_len
            yield Segment(q_start, self.q_len, kv_start, self.kv_len)

    def queries(self, tokens: Tensor) -> Tensor:
        """(total_q, H, D) -> (count, q_len, H, D), a view."""
        return _cut(tokens, self.q_start, self.count, self.q_len)

    def keys(self, tokens: Tensor) -> Tensor:
        """(total_k, H_kv, D) -> (count, kv_len, H_kv, D), a view."""
        return _cut(tokens, self.kv_start, self.count, self.kv_len)

    def next(self) -> Segment:
        """The segment that would go on with it."""
        q_start, kv_start = self.q_start + self.count * self.q_len, self.kv_start + self.count * self.kv_len
        return Segment(q_start, self.q_len, kv_start, self.kv_len)

    def batches(self, at_once: int) -> Iterator[Run]:
        """Its segments in runs of so many, and one of those that are left."""
        for first in range(0, self.count, at_once):
            yield Run(
                min(at_once, self.count - first),
                self.q_start + first * self.q_len,
                self.q_len,
                self.kv_start + first * self.kv_len,
                self.kv_len,
            )


def runs_of(bounds_q: Sequence[int], bounds_k: Sequence[int]) -> list[Run]:
    """The segments in their order, neighbours of equal lengths together, those without queries left out.

    Example:
        >>> runs_of([0, 4, 8, 8, 9], [0, 4, 8, 8, 12])
        [Run(count=2, q_start=0, q_len=4, kv_start=0, kv_len=4), Run(count=1, q_start=8, q_len=1, kv_start=8, kv_len=4)]
    """
    edges = zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
    return in_runs(
        Segment(q_start, q_stop - q_start, kv_start, kv_stop - kv_start)
        for q_start, q_stop, kv_start, kv_stop in edges
        if q_start < q_stop
    )


def in_runs(segments: Iterable[Segment]) -> list[Run]:
    """Segments in their order, neighbours of equal lengths together."""
    runs: list[Run] = []
    for segment in segments:
        last = runs[-1] if runs else None
        if last is not None and last.next() == segment:
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Run(1, *segment))
    return runs


def _cut(tokens: Tensor, start: int, count: int, length: int) -> Tensor:
    return tokens[start : start + count * length].unflatten(0, (count, length))


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a packed call, whose shape is that of a batch of so many, as long as the longest.

    Attributes:
        table: (n, TABLE_COLUMNS) int32 on the device.
        order: (rows,) int32, the rows of blocks that exist, numbered as in the padded batch.
        group: a number that no other table has.
        total_q: queries of the pack.
        output, lse: (total_q, H, Dv) in the query's dtype and (H, total_q) float32, where results are written.
    """

    table: Tensor
    order: Tensor
    group: int
    total_q: int
    output: Tensor
    lse: Tensor


def alike(segments: Iterable[Segment], heads: int) -> list[tuple[Segment, ...]]:
    """Segments that are computed together, in their order.

    Example:
        >>> segments = [Segment(0, length, 0, length) for length in (5000, 9000, 4200, 6000)]
        >>> [len(group) for group in alike(segments, heads=8)]
        [3, 1]
    """
    groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        blocks = ceil_div(segment.q_len, BLOCK_Q), ceil_div(segment.kv_len, BLOCK_K)
        groups.setdefault(((blocks[0] - 1).bit_length(), (blocks[1] - 1).bit_length()), []).append(segment)
    cut = []
    for (q_bits, kv_bits), group in groups.items():
        at_once = max(1, MAX_BLOCKS // (heads << (q_bits + kv_bits)))
        cut += [tuple(group[first : first + at_once]) for first in range(0, len(group), at_once)]
    return cut


def longest(segments: Sequence[Segment]) -> tuple[int, int]:
    """The most queries and the most keys that one of them has."""
    return max(segment.q_len for segment in segments), max(segment.kv_len for segment in segments)


def packed(segments: tuple[Segment, ...], heads: int, output: Tensor, lse: Tensor) -> Segments:
    """What a packed call carries of its segments; results are written into ``output`` and ``lse``."""
    tables = tables_of(segments, heads, output.device)
    tables.arrive()
    return tables.with_results(output, lse)


def is_ready(segments: tuple[Segment, ...], heads: int, device: torch.device) -> bool:
    """Whether `packed` can be called now: while a CUDA graph is captured, if it was before."""
    return not _is_capturing(device) or (segments, heads, device) in _tables


class Tables:
    """What kernels read of a group of segments.

    Attributes:
        table, order, group: as `Segments` has them.
    """

    def __init__(self, table: Tensor, order: Tensor, arrived: torch.cuda.Event | None) -> None:
        self.table = table
        self.order = order
        self.group = next(_numbers)
        self._arrived = arrived
        self._streams: set[int] = set()

    def with_results(self, output: Tensor, lse: Tensor) -> Segments:
        """The segments of a call that writes to these."""
        return Segments(self.table, self.order, self.group, len(output), output, lse)

    def arrive(self) -> None:
        """Let the current stream wait until the tables were copied, and the tables for the stream before they go.

        Both are needed once for a stream. A CUDA graph may be replayed as long as the process lives, and so the tables
        live that are used while one is captured.
        """
        if self._arrived is None:  # on CPUs
            return
        device = self.table.device
        if _is_capturing(device):
            _captured[self.group] = self
            return
        handle = torch._C._cuda_getCurrentRawStream(device.index)
        if handle not in self._streams:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._arrived)
            self.table.record_stream(stream)  # and the order, which lies behind it
            self._streams.add(handle)


_numbers = itertools.count()
_tables: OrderedDict[tuple[tuple[Segment, ...], int, torch.device], Tables] = OrderedDict()
_captured: dict[int, Tables] = {}
"""Those that CUDA graphs read."""
_lock = threading.Lock()


def tables_of(segments: tuple[Segment, ...], heads: int, device: torch.device) -> Tables:
    """The tables of a group, made or remembered."""
    key = (segments, heads, device)
    with _lock:
        found = _tables.get(key)
        if found is not None:
            _tables.move_to_end(key)
            return found
    found = _made(segments, heads, device)
    with _lock:
        _tables[key] = found
        while len(_tables) > MAX_TABLES:
            _tables.popitem(last=False)
    return found


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _made(segments: tuple[Segment, ...], heads: int, device: torch.device) -> Tables:
    """`Segments.table` and `Segments.order`, copied to the device together; the host does not wait."""
    q_len, kv_len = longest(segments)
    table, first_row = [], 0
    for segment in segments:
        shift = (segment.kv_len - segment.q_len) - (kv_len - q_len)
        table += [*segment, first_row, budget_top(ceil_div(segment.kv_len, BLOCK_K)), shift, 0]
        first_row += heads * ceil_div(segment.q_len, BLOCK_Q)
    q_blocks = ceil_div(q_len, BLOCK_Q)
    own = torch.tensor([ceil_div(segment.q_len, BLOCK_Q) for segment in segments])
    exists = torch.arange(q_blocks).flip(0) < own[:, None, None]  # causal rows begin with the longest
    numbers = torch.arange(len(segments) * heads * q_blocks).view(-1, heads, q_blocks).flip(2)
    order = numbers[exists.expand_as(numbers)]
    both = torch.cat([torch.tensor(table), order]).int()
    arrived = None
    if device.type == "cuda":
        both = both.pin_memory().to(device, non_blocking=True)
        arrived = torch.cuda.current_stream(device).record_event()
    return Tables(both[: len(table)].view(-1, TABLE_COLUMNS), both[len(table) :], arrived)
