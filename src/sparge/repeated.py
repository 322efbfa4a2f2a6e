"""Calls that are repeated: how a kind of call runs is resolved once, then looked up.

Checking options and deciding between dense and sparse takes longer than a short call takes a GPU, and gives the same
answer for every call of the same shapes, strides, dtypes and options. `kind_of` is the key of such a call, `find` looks
it up, and `SparseCalls` or `DenseCalls` runs it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from sparge import ops
from sparge.backends import base
from sparge.call import Call
from sparge.derivatives import inside_autograd_function
from sparge.layout import gapless_strides, is_tokens_first, laid_out
from sparge.stats import counters

Runner = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], tuple[Tensor, Tensor]]
"""Computes output and LSE of calls of one kind, from tensors as the caller passed them."""

MAX_KINDS = 512
_runners: dict[Any, Runner] = {}


def kind_of(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    always_keep: Any,
    exact_queries: Any,
    options: tuple[Any, ...],
) -> Any:
    """Return all that decides how a call runs, but for the numbers in its tensors; None for calls that are unusual.

    A call is unusual if something traces it, intercepts it or wants its derivatives, or if its options hold tensors.

    Args:
        options: all other options. Flags and numbers come with their types: 1 and True are equal, and one of them may
            be an error.
    """
    if (
        not ops.is_direct(query, key, value)
        or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
        or forward_ad._current_level >= 0
        or inside_autograd_function()
    ):
        return None
    if attn_mask is not None and (
        type(attn_mask) is not Tensor or (attn_mask.requires_grad and torch.is_grad_enabled())
    ):
        return None
    if always_keep is not None or exact_queries is not None:
        options = (*options, _hashable(always_keep), _hashable(exact_queries))
    try:
        mask: Any = None
        if attn_mask is not None:
            mask = (attn_mask.shape, attn_mask.stride(), attn_mask.dtype, attn_mask.device)
        device = query.device
        return (
            query.shape,
            key.shape,
            value.shape,
            query.stride(),
            key.stride(),
            value.stride(),
            query.dtype,
            key.dtype,
            value.dtype,
            device,
            key.device,
            value.device,
            torch.get_num_threads() if device.type == "cpu" else 0,  # the crossover of CPUs depends on it
            mask,
            options,
        )
    except RuntimeError:  # nested and sparse tensors have no strides
        return None


def _hashable(ranges: Any) -> Any:
    """Return lists of (start, stop) as tuples; anything else, which is an error, as it is."""
    if isinstance(ranges, (list, tuple)) and all(isinstance(pair, (list, tuple)) for pair in ranges):
        return tuple(map(tuple, ranges))
    return ranges


def find(kind: Any) -> Runner | None:
    """Return what runs calls of a kind, None for a new or unusual one."""
    if kind is None:
        return None
    try:
        return _runners.get(kind)
    except (TypeError, RuntimeError):  # an option that cannot be hashed or compared, such as a tensor
        return None


def remember(kind: Any, runner: Runner) -> None:
    """Keep what runs calls of a kind."""
    if kind is None:
        return
    if len(_runners) >= MAX_KINDS:
        _runners.clear()
    with contextlib.suppress(TypeError, RuntimeError):
        _runners[kind] = runner


def forget() -> None:
    """Drop everything that was remembered."""
    _runners.clear()


class SparseCalls:
    """Sparse calls of one kind. Once a backend has recorded one, the others repeat it."""

    def __init__(self, call: Call, backend: str, dtype: torch.dtype, *, layout: str, with_lse: bool) -> None:
        self._call = ops.interned(call)
        self._backend = base.get(backend).serving(call, dtype)
        self._counted = f"sparse: {self._backend.name}"
        self._is_tokens_first = layout == "NHD"
        self._with_lse = with_lse
        self._recorded: base.RecordedAttention | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        recorded = self._recorded
        if recorded is not None and _is_current(query.device) and not self._backend.is_overridden():
            addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr()]
            totals = counters.block_totals(query.device)
            if _are_plain(*addresses) and totals is not None:
                counters.record(self._counted, has_threshold=self._call.pv_threshold is not None)
                addresses.append(totals.data_ptr())
                output, lse = recorded.run(addresses, with_lse=self._with_lse)
                return (output.transpose(1, 2) if self._is_tokens_first else output), lse
        if self._is_tokens_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        call = self._call if attn_mask is None else _with_mask(self._call, attn_mask)
        output, lse = ops.run_attention(query, key, value, call, self._backend)
        if recorded is None and _are_plain(query.data_ptr(), key.data_ptr(), value.data_ptr()):
            totals = counters.block_totals(query.device)
            self._recorded = self._backend.recorded_attention(query, key, value, call, totals=totals)
        return (output.transpose(1, 2) if self._is_tokens_first else output), lse


def _are_plain(query: int, key: int, value: int) -> bool:
    """Return whether addresses are aligned to 16 bytes and different, as those of recorded calls are."""
    return not (query | key | value) & 15 and query != key != value != query


def _is_current(device: torch.device) -> bool:
    """Return whether kernels that are launched now go to the device."""
    return device.type == "cuda" and device.index == torch._C._cuda_getDevice()


class DenseCalls:
    """Dense calls of one kind."""

    def __init__(
        self, call: Call, asked: str, resolved: str, query: Tensor, words: str, *, with_lse: bool, layout: str
    ) -> None:
        self._call = call
        self._asked = asked
        self._words = words
        self._with_lse = with_lse
        self._is_tokens_first = layout == "NHD"
        backend = base.get(resolved).serving(call, query.dtype)
        self._is_sdpa = asked == "auto" and not with_lse and backend.dense_is_sdpa(query, call)
        self._strides = gapless_strides(
            (call.shape.batch, call.shape.heads, call.shape.q_len, call.shape.value_dim),
            tokens_first=is_tokens_first(query),
        )
        options: dict[str, Any] = {"scale": call.scale}
        if call.is_causal and call.shape.q_len > 1:  # one query sees all keys, and torch aligns it to the first
            options["is_causal"] = True
        if call.shape.group > 1:
            options["enable_gqa"] = True
        sdpa: Any = F.scaled_dot_product_attention
        self._sdpa = functools.partial(sdpa, **options)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._is_tokens_first:
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self._is_sdpa and not torch.is_autocast_enabled(query.device.type):
            counters.record(self._words)
            output = self._sdpa(query, key, value)
            if output.stride() != self._strides:
                output = laid_out(output, query)
            lse = output  # nobody reads it
        else:
            call = self._call if attn_mask is None else _with_mask(self._call, attn_mask)
            with_lse, words = self._with_lse, self._words
            output, lse = ops.run_dense(query, key, value, call, self._asked, with_lse=with_lse, words=words)
        return (output.transpose(1, 2) if self._is_tokens_first else output), lse


def _with_mask(call: Call, attn_mask: Tensor) -> Call:
    """Return a call with another mask of the same shape and dtype; it shares the recordings."""
    changed = object.__new__(Call)
    mask = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + tuple(attn_mask.shape))
    vars(changed).update(vars(call), attn_mask=mask)
    return changed
