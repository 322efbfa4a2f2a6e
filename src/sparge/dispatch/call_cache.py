"""Cache of resolved calls: each kind of call is resolved once and then looked up.

Checking the options and choosing between dense and sparse takes longer than a short call on a GPU, and has the same
result for all calls with equal shapes, strides, dtypes and options. `find` returns the cached runner of a call:
`SparseCalls`, `DenseCalls`, `PackedCalls` or `Predictions`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad

from sparge.backends import base
from sparge.backends.output_layout import gapless_strides, is_tokens_first, match_layout
from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.dispatch.gradients import inside_autograd_function
from sparge.dispatch.resolve import Options
from sparge.masks.block_mask import BlockMask
from sparge.masks.segments import Segment, Tables, is_ready, tables_of
from sparge.stats import counters

MAX_KINDS = 512
"""Maximum number of cached kinds."""
Runner = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]
"""A function that computes calls of one kind: query, key, value and mask -> output and LSE."""


class Kind(NamedTuple):
    """A kind of calls that is not cached yet.

    Attributes:
        key: the options and sizes of the calls.
        tensors: query, key, value and mask of a call, whose metadata all calls of the kind share.
    """

    key: Any
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]


MetadataCheck = Callable[[Tensor], bool]
"""Returns whether a tensor has the metadata of a kind."""


class _Entry(NamedTuple):
    """A cached kind. ``runner`` is a `Request` for distributed calls."""

    checks: tuple[MetadataCheck, MetadataCheck, MetadataCheck, MetadataCheck]
    runner: Any


_entries: dict[Any, tuple[_Entry, ...]] = {}
"""The cached kinds by `Kind.key`, for tensors in the caller's layout."""


def find(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, options: tuple[Any, ...], extra: Any = None
) -> tuple[Kind | None, Any]:
    """Return the kind of a call if it is not cached yet, and the cached runner of its kind. At least one is None.

    A kind contains everything that determines how a call runs, except the values of its tensors. Both are None for
    calls that cannot be cached: traced, intercepted, under autocast, or with gradients.

    Args:
        options: `Options`, or a tuple of hashable values. The kind includes their types, because 1 equals True but may
            be invalid where True is valid.
        extra: another hashable value that the call depends on.
    """
    if (
        not ops.is_direct(query, key, value)
        or not (attn_mask is None or type(attn_mask) is Tensor)
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
        or (not torch._C._is_fwd_grad_enabled() and inside_autograd_function())  # the first part is faster
    ):
        return None, None
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (attn_mask is not None and attn_mask.requires_grad)
    ):
        return None, None
    types = tuple(map(type, options))
    if type(options) is Options and (options.always_keep is not None or options.exact_queries is not None):
        always_keep, exact_queries = as_hashable(options.always_keep), as_hashable(options.exact_queries)
        options = options._replace(always_keep=always_keep, exact_queries=exact_queries)
    try:
        # TensorGuards can crash on nested tensors, whose `shape` raises
        sizes = query.shape, key.shape, value.shape, None if attn_mask is None else attn_mask.shape
        threads = torch.get_num_threads() if query.is_cpu else 0  # the crossover depends on it
        key_of_kind = (sizes, threads, options, types, extra)
        for (is_query, is_key, is_value, is_mask), runner in _entries.get(key_of_kind, ()):
            if is_query(query) and is_key(key) and is_value(value) and (attn_mask is None or is_mask(attn_mask)):
                return None, runner
    except (TypeError, RuntimeError):  # tensors without sizes, or options that cannot be hashed or compared
        return None, None
    return Kind(key_of_kind, (query, key, value, attn_mask)), None


def _metadata_check(tensor: Tensor) -> MetadataCheck:
    """Return a function that compares the metadata of another tensor with those of ``tensor``.

    The metadata are type, device, dtype, sizes, strides, dispatch keys and ``requires_grad``. The function is faster
    than comparing tuples of metadata in Python.
    """
    guards: Any = TensorGuards
    check: MetadataCheck = guards(tensor, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def as_hashable(ranges: Any) -> Any:
    """Convert lists of (start, stop) to tuples, and return invalid values unchanged."""
    if isinstance(ranges, (list, tuple)) and all(isinstance(pair, (list, tuple)) for pair in ranges):
        return tuple(map(tuple, ranges))
    return ranges


def remember(kind: Kind | None, runner: Any) -> None:
    """Store the runner of a kind. Do nothing if either is None."""
    if kind is None or runner is None:
        return
    if len(runners()) >= MAX_KINDS:
        _entries.clear()
    query, key, value, mask = kind.tensors
    is_query, is_key, is_value = map(_metadata_check, (query, key, value))
    is_mask = is_query if mask is None else _metadata_check(mask)  # without a mask, it is not called
    entry = _Entry((is_query, is_key, is_value, is_mask), runner)
    _entries[kind.key] = (*_entries.get(kind.key, ()), entry)


def runners() -> list[Any]:
    """Return all cached runners."""
    return [entry.runner for entries in list(_entries.values()) for entry in entries]


def forget() -> None:
    """Clear the cache."""
    _entries.clear()


class _Runner:
    """Base class of runners: the options and the layout that all calls of one kind have in common."""

    def __init__(self, call: Call, options: Options) -> None:
        self._call = interned(call).with_tensors()  # without the mask, which would stay in memory
        self._is_tokens_first = options.layout == "NHD"

    def _call_with(self, attn_mask: Tensor | None) -> Call:
        if attn_mask is None:
            return self._call
        sizes = (1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape)
        return self._call.with_tensors(attn_mask=attn_mask.reshape(sizes))


class SparseCalls(_Runner):
    """Runner of sparse calls of one kind. If the backend records a call, later calls replay the recording."""

    def __init__(self, call: Call, backend: str, dtype: torch.dtype, options: Options) -> None:
        super().__init__(call, options)
        self._order = options.order
        self._backend = base.get(backend).serving(call, dtype)
        self._stats_label = f"sparse: {self._backend.name}"
        self._with_lse = options.return_lse
        self._recorded: base.RecordedAttention | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, blocks: BlockMask | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the LSE. ``blocks`` is the mask of `sparge.block_sparse_attention`."""
        recorded = self._recorded
        if recorded is not None and _can_replay(query.device) and not self._backend.is_overridden():
            addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr()]
            if attn_mask is not None:
                addresses.append(attn_mask.data_ptr())
            lists = [] if blocks is None else [tensor.data_ptr() for tensor in _block_lists(blocks)]
            totals = counters.block_totals(query.device)
            if totals is not None and _are_aligned_and_distinct(addresses + lists):
                counters.record(self._stats_label, has_threshold=self._call.pv_threshold is not None)
                addresses = [*addresses, totals.data_ptr(), *lists]
                if self._with_lse:
                    output, lse = recorded.run(addresses)
                else:
                    output = lse = recorded.run_without_lse(addresses)
                return (output.transpose(1, 2) if self._is_tokens_first else output), lse
        if self._is_tokens_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        call = self._call_with(attn_mask)
        if blocks is None:
            output, lse = ops.run_attention(query, key, value, call, self._backend, self._order)
        else:
            output, lse = ops.run_attend(query, key, value, blocks, call, self._backend)
        if recorded is None:
            tensors = [query, key, value, *([] if attn_mask is None else [attn_mask])]
            tensors += [] if blocks is None else _block_lists(blocks)
            if _are_aligned_and_distinct([tensor.data_ptr() for tensor in tensors]):
                totals = counters.block_totals(query.device)
                self._recorded = self._backend.recorded_attention(
                    query, key, value, call, totals=totals, blocks=blocks, order=self._order
                )
        return (output.transpose(1, 2) if self._is_tokens_first else output), lse


def kind_of_blocks(blocks: Any) -> Any:
    """Return the properties of a block mask for the kind of a call; None if every call must check or copy the mask."""
    if type(blocks) is not BlockMask:
        return None
    lists = _block_lists(blocks)
    if not all(type(tensor) is Tensor and tensor.is_contiguous() for tensor in lists):
        return None
    tensors = tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in lists])
    return blocks.q_len, blocks.kv_len, blocks.window, tensors


def _block_lists(blocks: BlockMask) -> list[Tensor]:
    return [blocks.kv_num_blocks, blocks.kv_indices, blocks.visible_num_blocks]


class Predictions(_Runner):
    """Runner of `sparge.predict` for calls of one kind."""

    def __init__(self, call: Call, backend: str, options: Options) -> None:
        super().__init__(call, options)
        self._backend = backend

    def __call__(self, query: Tensor, key: Tensor, attn_mask: Tensor | None) -> BlockMask:
        if self._is_tokens_first:
            query, key = query.transpose(1, 2), key.transpose(1, 2)
        return ops.run_predict(query, key, self._call_with(attn_mask), self._backend)


class PackedCalls:
    """Runner of packed calls of one kind, for a fixed group of segments."""

    def __init__(
        self, call: Call, backend: str, dtype: torch.dtype, segments: tuple[Segment, ...], dense_label: str
    ) -> None:
        """Create the runner.

        Args:
            call: a batch with one element per segment and the lengths of the longest segment, without `Call.segments`.
            dense_label: the label of dense calls in `sparge.stats`; empty for sparse calls.
        """
        self._call = call
        self._backend = base.get(backend).serving(call, dtype)
        self._segments = segments
        self._dense_label = dense_label
        self._stats_label = dense_label or f"sparse: {self._backend.name}"
        self._tables: Tables | None = None
        self._recorded: base.RecordedAttention | None = None

    def is_ready(self, device: torch.device) -> bool:
        """Return whether the calls can run now. During CUDA graph capture, their tables must already exist."""
        return self._tables is not None or is_ready(self._segments, self._call.shape.heads, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor) -> None:
        """Write the results of all segments into the result tensors of the pack.

        Args:
            query, key, value: the pack, (tokens, H | H_kv, D | D_v).
            output, lse: results of the pack, (tokens, H, D_v) and (H, tokens).
        """
        tables = self._tables
        if tables is None:
            tables = self._tables = tables_of(self._segments, self._call.shape.heads, query.device)
            self._call = interned(self._call.with_tensors(segments=tables.with_results(output, lse))).with_tensors()
        tables.wait_for_copy()
        recorded = self._recorded
        if recorded is not None and _can_replay(query.device) and not self._backend.is_overridden():
            addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr()]
            totals = None if self._dense_label else counters.block_totals(query.device)
            if _are_aligned_and_distinct(addresses) and (self._dense_label or totals is not None):
                counters.record(self._stats_label, has_threshold=self._call.pv_threshold is not None)
                if totals is not None:
                    addresses.append(totals.data_ptr())
                recorded.run([*addresses, output.data_ptr(), lse.data_ptr()])
                return
        call = self._call.with_tensors(segments=tables.with_results(output, lse))
        packed_addresses = [tensor.data_ptr() for tensor in (query, key, value)]
        query, key, value = (_over_segments(tensor, len(self._segments)) for tensor in (query, key, value))
        ops.run_packed(query, key, value, call, self._backend, label=self._dense_label)
        addresses = [tensor.data_ptr() for tensor in (query, key, value)]
        was_copied = addresses != packed_addresses
        if recorded is None and not was_copied and _are_aligned_and_distinct(addresses):
            totals = None if self._dense_label else counters.block_totals(query.device)
            self._recorded = self._backend.recorded_attention(query, key, value, call, totals=totals)


def _over_segments(tokens: Tensor, count: int) -> Tensor:
    """Expand (tokens, H, D) to (count, H, tokens, D). Tokens are copied only if channels are not contiguous."""
    tokens = tokens if tokens.stride(2) == 1 else tokens.contiguous()
    return tokens.transpose(0, 1)[None].expand(count, -1, -1, -1)


def _are_aligned_and_distinct(addresses: list[int]) -> bool:
    """Return whether addresses are aligned to 16 bytes and distinct, as recorded calls require."""
    all_bits = 0
    for address in addresses:
        all_bits |= address
    return not all_bits & 15 and len(set(addresses)) == len(addresses)


def _can_replay(device: torch.device) -> bool:
    """Return whether launches can be replayed: on the current CUDA device, while its stream is not being captured."""
    return (
        device.type == "cuda"
        and device.index == torch._C._cuda_getDevice()
        and not torch._C._cuda_isCurrentStreamCapturing()
    )


class DenseCalls(_Runner):
    """Runner of dense calls of one kind. Calls that need no LSE go directly to SDPA where the backend would use it."""

    def __init__(self, call: Call, backend: str, query: Tensor, options: Options, label: str) -> None:
        super().__init__(call, options)
        self._requested = options.backend
        self._label = label
        self._with_lse = options.return_lse
        shape, serving = call.shape, base.get(backend).serving(call, query.dtype)
        self._is_sdpa = options.backend == "auto" and not self._with_lse and serving.dense_is_sdpa(query, call)
        sizes = (shape.batch, shape.heads, shape.q_len, shape.value_dim)
        self._strides = gapless_strides(sizes, tokens_first=is_tokens_first(query))
        sdpa_options: dict[str, Any] = {"scale": call.scale}
        if call.is_causal and shape.q_len > 1:  # one query sees all keys, but SDPA aligns top-left
            sdpa_options["is_causal"] = True
        if shape.group > 1:
            sdpa_options["enable_gqa"] = True
        sdpa: Any = F.scaled_dot_product_attention
        self._sdpa = functools.partial(sdpa, **sdpa_options)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._is_tokens_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self._is_sdpa:  # without autocast, under which calls are not cached
            counters.record(self._label)
            output = self._sdpa(query, key, value)
            if output.stride() != self._strides:
                output = match_layout(output, query)
            lse = output  # undefined, because the caller does not request it
        else:
            call, with_lse, label = self._call_with(attn_mask), self._with_lse, self._label
            output, lse = ops.run_dense(query, key, value, call, self._requested, with_lse=with_lse, label=label)
        return (output.transpose(1, 2) if self._is_tokens_first else output), lse
