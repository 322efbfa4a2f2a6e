"""The segments of a pack: neighbors of equal length form a batch (`Run`), and segments of similar lengths form a packed
call (`Segments`).

In a packed call, each segment is a batch element with its own lengths. Buffers between the stages have the layout of a
batch that is padded to the longest segment. Kernels read queries, keys and values directly from the pack, compute only
blocks that exist, and write the results to the pack. A packed call therefore adds the same numbers in the same order as
a separate call for each segment.

Padding costs memory between the stages. Segments share a call only if their numbers of blocks round up to the same
power of two (`group_segments`). Buffers are then at most twice as long as a segment needs, and block maps at most 4
times as large.
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
"""Number of columns of the table that kernels read; the last column is unused."""
Q_START, Q_LEN, KV_START, KV_LEN, FIRST_ROW, TOP_LEVEL, SHIFT = range(7)
"""Columns of the table: start and length of a segment's queries and keys in the pack; number of query blocks of all
preceding segments; `rules.budget_top`; kv_len - q_len of the segment, relative to that of the maximum lengths."""
MAX_TABLES = 64
"""Maximum number of groups with cached tables. All layers of a model use the same groups."""
MAX_BLOCKS = 2**27
"""Maximum number of blocks in the block maps of a packed call. Index lists and probabilities take 4 bytes per block
each."""


class Segment(NamedTuple):
    """Starts and lengths of a segment's queries and keys in the pack."""

    q_start: int
    q_len: int
    kv_start: int
    kv_len: int


@dataclass(frozen=True)
class Run:
    """Neighboring segments of equal lengths: their number, and the fields of the first segment."""

    count: int
    q_start: int
    q_len: int
    kv_start: int
    kv_len: int

    def segment(self, index: int) -> Segment:
        """Return a segment of the run. Index ``count`` gives the position where a next segment of the run would be."""
        q_start, kv_start = self.q_start + index * self.q_len, self.kv_start + index * self.kv_len
        return Segment(q_start, self.q_len, kv_start, self.kv_len)

    def queries(self, tokens: Tensor) -> Tensor:
        """Return a view of the run's queries: (total_q, H, D) -> (count, q_len, H, D)."""
        return _batch_of(tokens, self.q_start, self.count, self.q_len)

    def keys(self, tokens: Tensor) -> Tensor:
        """Return a view of the run's keys or values: (total_k, H_kv, D) -> (count, kv_len, H_kv, D)."""
        return _batch_of(tokens, self.kv_start, self.count, self.kv_len)

    def batches(self, max_count: int) -> Iterator[Run]:
        """Split into runs of at most ``max_count`` segments."""
        for first in range(0, self.count, max_count):
            yield Run(min(max_count, self.count - first), *self.segment(first))


def _batch_of(tokens: Tensor, start: int, count: int, length: int) -> Tensor:
    """Return a view of ``count`` sequences of equal length: (tokens, H, D) -> (count, length, H, D).

    One `as_strided` takes 60 % of the time of `narrow` and `unflatten`, which matters in repeated calls.
    """
    sizes, strides = tokens.shape, tokens.stride()
    offset = tokens.storage_offset() + start * strides[0]
    return tokens.as_strided((count, length, *sizes[1:]), (length * strides[0], *strides), offset)


def runs_of(bounds_q: Sequence[int], bounds_k: Sequence[int]) -> list[Run]:
    """Return runs of neighboring segments with equal lengths, in order. Segments without queries are omitted.

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
    """Return runs of neighboring segments with equal lengths, in order. A gap between two segments starts a new run."""
    runs: list[Run] = []
    for segment in segments:
        last = runs[-1] if runs else None
        if last is not None and last.segment(last.count) == segment:
            runs[-1] = replace(last, count=last.count + 1)
        else:
            runs.append(Run(1, *segment))
    return runs


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of a packed call. The call has the shape of a batch with one element of maximum length per segment.

    Attributes:
        table: (segments, TABLE_COLUMNS) int32 on the device.
        order: int32, the indices of the existing query blocks in the padded batch.
        group: an integer that is unique to the table.
        total_q: number of queries in the pack.
        output, lse: result tensors, (total_q, H, D_v) in the query's dtype and (H, total_q) float32.
    """

    table: Tensor
    order: Tensor
    group: int
    total_q: int
    output: Tensor
    lse: Tensor


def group_segments(segments: Iterable[Segment], heads: int) -> list[tuple[Segment, ...]]:
    """Group segments that share a packed call, in order.

    Example:
        >>> segments = [Segment(0, length, 0, length) for length in (5000, 9000, 4200, 6000)]
        >>> [len(group) for group in group_segments(segments, heads=8)]
        [3, 1]
    """
    groups: dict[tuple[int, int], list[Segment]] = {}
    for segment in segments:
        blocks = ceil_div(segment.q_len, BLOCK_Q), ceil_div(segment.kv_len, BLOCK_K)
        groups.setdefault(((blocks[0] - 1).bit_length(), (blocks[1] - 1).bit_length()), []).append(segment)
    result = []
    for (q_bits, kv_bits), group in groups.items():
        max_count = max(1, MAX_BLOCKS // (heads << (q_bits + kv_bits)))
        result += [tuple(group[first : first + max_count]) for first in range(0, len(group), max_count)]
    return result


def longest(segments: Sequence[Segment]) -> tuple[int, int]:
    """Return the maximum number of queries and the maximum number of keys per segment."""
    return max(segment.q_len for segment in segments), max(segment.kv_len for segment in segments)


def is_ready(segments: tuple[Segment, ...], heads: int, device: torch.device) -> bool:
    """Return whether `tables_of` can be called. During CUDA graph capture, the tables must already exist."""
    return not _is_capturing(device) or (segments, heads, device) in _tables


class Tables:
    """The tensors of a group of segments that kernels read, see `Segments`."""

    def __init__(self, table: Tensor, order: Tensor, copied: torch.cuda.Event | None) -> None:
        self.table = table
        self.order = order
        self.group = next(_numbers)
        self._copied = copied
        self._streams: set[int] = set()

    def with_results(self, output: Tensor, lse: Tensor) -> Segments:
        """Return the segments of a call that writes its results to these tensors."""
        return Segments(self.table, self.order, self.group, len(output), output, lse)

    def wait_for_copy(self) -> None:
        """Make the current stream wait for the copy of the tables, and keep their memory while the stream uses it.

        Both happen once per stream. A captured CUDA graph may be replayed until the process ends, so tables that were
        used during capture are never freed.
        """
        if self._copied is None:  # on CPUs
            return
        device = self.table.device
        if _is_capturing(device):
            _captured[self.group] = self
            return
        handle = torch._C._cuda_getCurrentRawStream(device.index)
        if handle not in self._streams:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._copied)
            self.table.record_stream(stream)  # the order shares its memory
            self._streams.add(handle)


_numbers = itertools.count()
_tables: OrderedDict[tuple[tuple[Segment, ...], int, torch.device], Tables] = OrderedDict()
_captured: dict[int, Tables] = {}
"""Tables that captured CUDA graphs read, by group."""
_lock = threading.Lock()


def tables_of(segments: tuple[Segment, ...], heads: int, device: torch.device) -> Tables:
    """Return the tables of a group from the cache, or create them."""
    key = (segments, heads, device)
    with _lock:
        tables = _tables.get(key)
        if tables is not None:
            _tables.move_to_end(key)
            return tables
    tables = _create_tables(segments, heads, device)
    with _lock:
        _tables[key] = tables
        while len(_tables) > MAX_TABLES:
            _tables.popitem(last=False)
    return tables


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _create_tables(segments: tuple[Segment, ...], heads: int, device: torch.device) -> Tables:
    """Create `Segments.table` and `Segments.order` and copy both to the device without synchronizing."""
    q_len, kv_len = longest(segments)
    table, first_row = [], 0
    for segment in segments:
        shift = (segment.kv_len - segment.q_len) - (kv_len - q_len)
        table += [*segment, first_row, budget_top(ceil_div(segment.kv_len, BLOCK_K)), shift, 0]
        first_row += heads * ceil_div(segment.q_len, BLOCK_Q)
    q_blocks = ceil_div(q_len, BLOCK_Q)
    block_counts = torch.tensor([ceil_div(segment.q_len, BLOCK_Q) for segment in segments])
    exists = torch.arange(q_blocks).flip(0) < block_counts[:, None, None]  # longest causal query blocks first
    numbers = torch.arange(len(segments) * heads * q_blocks).view(-1, heads, q_blocks).flip(2)
    order = numbers[exists.expand_as(numbers)]
    values = torch.cat([torch.tensor(table), order]).int()
    copied = None
    if device.type == "cuda":
        values = values.pin_memory().to(device, non_blocking=True)
        copied = torch.cuda.current_stream(device).record_event()
    return Tables(values[: len(table)].view(-1, TABLE_COLUMNS), values[len(table) :], copied)
