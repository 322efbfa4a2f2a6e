"""The stages as torch operators (``torch.ops.sparge.*``), so that each stage is one node under torch.compile.

    predict(query, key, CALL) -> (kv_num_blocks, kv_indices, visible_num_blocks)
    attend(query, key, value, kv_num_blocks, kv_indices, visible_num_blocks, CALL) -> (output, lse)
    attention(query, key, value, CALL, *, or_dense=False) -> (output, lse)
                 `predict` and `attend`, with shared passes over K; or_dense: dense below the crossover
    dense(query, key, value, CALL, with_lse, label) -> (output, lse)
    along(tensors, grid, order, start, undo) -> tensors      reorder tokens by an order of `ordering`, or undo it

All tensors are heads-first. Operators accept no objects, so a `Call` is passed as plain arguments, with an additional
tensor for each number that may differ per head. Calls are counted inside the operators, so that compiled programs are
counted too. Arguments are already validated, and backends do the computation.

Operators add launch overhead. Calls on plain tensors, outside of tracing and torch modes, bypass them (`is_direct`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch

from sparge._ops import add_op_namespace_prefix
from sparge._ops import ops as operators
from sparge.backends import base
from sparge.backends.output_layout import empty_like, match_layout
from sparge.call import Call, drop_unseen_keys, interned
from sparge.dispatch import dense_rules
from sparge.dispatch.dense_rules import Target
from sparge.dispatch.reasons import describe
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div
from sparge.masks.ordering import OrderName, TokenOrder, order_of
from sparge.masks.window import Window
from sparge.options.common import PerHead
from sparge.options.rules import SELECTIONS, Dense, Sparsity, make_unchecked
from sparge.options.scores import SCORES
from sparge.stats import counters

CALL = {
    "attn_mask": "Tensor?",
    "window_left": "SymInt?",
    "window_right": "SymInt?",
    "scale": "float",
    "quantization": "str",
    "exact_lse": "bool",
    "skipped": "str",
    "pv_threshold": "float?",
    "pv_threshold_per_head": "Tensor?",
    "selection": "str",
    "amount": "float?",
    "amount_per_head": "Tensor?",
    "similarity_threshold": "float?",
    "similarity_threshold_per_head": "Tensor?",
    "min_blocks": "int",
    "sink": "bool",
    "diagonal": "bool",
    "score": "str",
    "score_numbers": "float[]",
    "always_keep": "SymInt[]",
    "exact_queries": "SymInt[]",
    "backend": "str",
}
"""Names and types of the operator arguments that represent a call: its fields and the name of its backend."""
CALL_SCHEMA = ", ".join(f"{kind} {name}" for name, kind in CALL.items())

_LIBRARY = torch.library.Library(operators.name, "DEF")


def register(name: str, schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator; ``fake`` returns empty tensors with the metadata of the results."""
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix(name), fake, lib=_LIBRARY)


def is_direct(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a call can bypass the operator: its tensors are plain, and nothing traces or intercepts it."""
    return (
        not torch.compiler.is_compiling()
        and type(query) is type(key) is type(value) is Tensor
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._get_tracing_state() is None
        and _functorch.peek_interpreter_stack() is None
    )


def predict(query: Tensor, key: Tensor, call: Call, backend: str) -> BlockMask:
    """Predict a mask, through the operator if necessary (`is_direct`)."""
    if is_direct(query, key, key):
        return run_predict(query, key, interned(call), backend)
    counts, indices, visible = operators.predict(query, key, *pack(call, backend))
    return BlockMask(counts, indices, visible, query.shape[2], key.shape[2], window=call.window)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    backend: str,
    order: TokenOrder | None = None,
    *,
    or_dense: bool = False,
) -> tuple[Tensor, Tensor]:
    """Predict a mask and compute attention over it.

    Args:
        order: compute attention in this order of tokens. The LSE is then undefined.
        or_dense: while tracing, run dense below the crossover. The operator makes this choice each time it runs, so
            that an exported program supports any length.
    """
    if is_direct(query, key, value):
        return run_attention(query, key, value, *_serving(call, backend, query), order)
    if order is None:
        return operators.attention(query, key, value, *pack(call, backend), or_dense=or_dense)
    query, key, value = reorder_all((query, key, value), *order)
    output, lse = operators.attention(query, key, value, *pack(call, backend), or_dense=or_dense)
    return reorder(output, *order, undo=True), lse


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute attention over the blocks of a mask."""
    if is_direct(query, key, value):
        return run_attend(query, key, value, mask, *_serving(call, backend, query))
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)
    return operators.attend(query, key, value, *lists, *pack(call, backend))


def dense(
    query: Tensor, key: Tensor, value: Tensor, call: Call, backend: str, *, with_lse: bool, label: str
) -> tuple[Tensor, Tensor]:
    """Compute attention over all visible blocks.

    Args:
        backend: the requested backend; "auto" uses the faster of torch's kernels and the device's backend.
        with_lse: return the LSE; otherwise it is empty, because torch's fastest kernels do not return it.
        label: the label of the call in `sparge.stats`; empty if the call is already counted.
    """
    if is_direct(query, key, value):
        return run_dense(query, key, value, interned(call), backend, with_lse=with_lse, label=label)
    return operators.dense(query, key, value, *pack(call, backend), with_lse, label)


def reorder(tokens: Tensor, grid: tuple[int, ...], order: OrderName, start: int, *, undo: bool = False) -> Tensor:
    """Permute tokens (B, H, S, D) of a grid that begins at ``start`` into an order of `ordering`, or undo this.

    The memory layout is preserved. With ``undo``, the result is tokens-first in memory, as in models.
    """
    return reorder_all((tokens,), grid, order, start, undo=undo)[0]


def reorder_all(
    tensors: Sequence[Tensor], grid: tuple[int, ...], order: OrderName, start: int, *, undo: bool = False
) -> list[Tensor]:
    """Apply `reorder` to several tensors in one operator. For short sequences, the launch overhead of an operator is as
    long as its run time."""
    if all(is_direct(tokens, tokens, tokens) for tokens in tensors):
        return _reorder(tensors, grid, order, start, undo)
    return operators.along(tensors, grid, order, start, undo)


def pack(call: Call, backend: str) -> tuple[Any, ...]:
    """Return the operator arguments `CALL` of a call."""
    rule, causal = call.sparsity, call.is_causal
    selection: tuple[Any, ...] = ("dense", None, None, None, None, 0, False, False)
    if not isinstance(rule, Dense):
        selection = (
            rule.name,
            *_pack_number(rule.amount),
            *_pack_number(rule.similarity_threshold),
            rule.min_blocks,
            rule.keeps_sink(causal),
            rule.keeps_diagonal(causal),
        )
    return (
        call.attn_mask,
        *call.window,
        call.scale,
        call.quantization,
        call.exact_lse,
        call.skipped,
        *_pack_number(call.pv_threshold),
        *selection,
        call.score.name,
        call.score.numbers,
        [edge for pair in call.always_keep for edge in pair],
        [edge for pair in call.exact_queries for edge in pair],
        backend,
    )


def unpack(shape: Shape, arguments: Sequence[Any]) -> tuple[Call, str]:
    """Return the call and the name of its backend from arguments that `pack` returned."""
    packed = dict(zip(CALL, arguments, strict=True))

    def number(name: str) -> PerHead | None:
        per_head = packed[f"{name}_per_head"]
        return packed[name] if per_head is None else per_head

    def pairs(name: str) -> tuple[tuple[int, int], ...]:
        return tuple(zip(packed[name][::2], packed[name][1::2], strict=True))

    rule: Sparsity = Dense()
    if packed["selection"] != "dense":
        kind = SELECTIONS[packed["selection"]]
        fields = {name: packed[name] for name in ("min_blocks", "sink", "diagonal")}
        fields |= {kind.amount_field: number("amount"), "similarity_threshold": number("similarity_threshold")}
        rule = make_unchecked(kind, **fields)
    call = Call(
        shape,
        packed["window_right"] == 0,
        sparsity=rule,
        score=SCORES[packed["score"]].of(packed["score_numbers"]),
        pv_threshold=number("pv_threshold"),
        always_keep=pairs("always_keep"),
        exact_queries=pairs("exact_queries"),
        window=Window(packed["window_left"], packed["window_right"]),
        **{name: packed[name] for name in ("scale", "quantization", "attn_mask", "skipped", "exact_lse")},
    )
    return call, packed["backend"]


def _pack_number(value: PerHead | None) -> tuple[float | None, Tensor | None]:
    return (None, value.detach()) if isinstance(value, Tensor) else (value, None)


def _unpack(query: Tensor, key: Tensor, value: Tensor, arguments: Sequence[Any]) -> tuple[Call, str]:
    batch, heads, q_len, head_dim = query.shape
    return unpack(Shape(batch, heads, key.shape[1], q_len, key.shape[2], head_dim, value.shape[3]), arguments)


def _serving(call: Call, backend: str, query: Tensor) -> tuple[Call, base.Backend]:
    """Return the interned call and the backend that serves it."""
    return interned(call), base.get(backend).serving(call, query.dtype)


def _predict(query: Tensor, key: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, backend = _unpack(query, key, key, arguments)
    mask = run_predict(query, key, interned(call), backend)
    return mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks


def _attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    counts, indices, visible, *packed = arguments
    call, backend = _unpack(query, key, value, packed)
    mask = BlockMask(counts, indices, visible, call.shape.q_len, call.shape.kv_len, window=call.window)
    return run_attend(query, key, value, mask, *_serving(call, backend, query))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, *arguments: Any, or_dense: bool = False
) -> tuple[Tensor, Tensor]:
    call, backend = _unpack(query, key, value, arguments)
    reason = None
    if or_dense:
        target = Target("auto", backend, query.device, query.dtype)
        reason = dense_rules.by_arguments(call.shape, call.window, call.sparsity, "auto", target, call.attn_mask)
    if reason is None:
        return run_attention(query, key, value, *_serving(call, backend, query))
    dense_call = Call(call.shape, call.is_causal, call.scale, attn_mask=call.attn_mask, window=call.window)
    return run_dense(query, key, value, interned(dense_call), "auto", with_lse=True, label=describe(reason))


def _dense(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *packed, with_lse, label = arguments
    call, requested = _unpack(query, key, value, packed)
    return run_dense(query, key, value, interned(call), requested, with_lse=with_lse, label=label)


def _reorder(tensors: Sequence[Tensor], grid: Sequence[int], order: OrderName, start: int, undo: bool) -> list[Tensor]:
    tables = order_of(tuple(grid), order, tensors[0].device)
    return _reorder_on_device(*tensors, index=tables.inverse if undo else tables.permutation, start=start, undo=undo)


def _predict_fake(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*query.shape[:2], ceil_div(query.shape[2], BLOCK_Q))
    counts = query.new_empty(rows, dtype=torch.int32)
    indices = query.new_empty((*rows, ceil_div(key.shape[2], BLOCK_K)), dtype=torch.int32)
    return counts, indices, torch.empty_like(counts)


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    output = empty_like(query, value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


def _dense_fake(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *_, with_lse, _ = arguments
    output, lse = _attention_fake(query, key, value)
    return output, lse if with_lse else lse.new_empty(0)


def _reorder_fake(tensors: list[Tensor], grid: list[int], order: str, start: int, undo: bool) -> list[Tensor]:  # noqa: ARG001
    if not undo:
        return [empty_like(tokens, tokens.shape[3]) for tokens in tensors]
    return [tokens.new_empty(tokens.transpose(1, 2).shape).transpose(1, 2) for tokens in tensors]


def on_query_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function to run on the query's device, without autocast and without interception by `replace_sdpa`."""

    @functools.wraps(function)
    def run(query: Tensor, *arguments: Any, **options: Any) -> Any:
        device = query.device
        is_elsewhere = device.type == "cuda" and device.index != torch._C._cuda_getDevice()
        is_autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        if not (is_elsewhere or is_autocast or torch._C._len_torch_function_stack()):
            return function(query, *arguments, **options)
        with ExitStack() as stack:
            stack.enter_context(torch._C.DisableTorchFunction())
            if is_elsewhere:  # kernels launch on the current device
                stack.enter_context(torch.cuda.device(device))
            if is_autocast:
                stack.enter_context(torch.autocast(device.type, enabled=False))
            return function(query, *arguments, **options)

    return run


@on_query_device
def run_predict(query: Tensor, key: Tensor, call: Call, backend: str) -> BlockMask:
    """Predict the mask of a call. Unlike attention, this is never delegated to another backend."""
    mask = base.get(backend).predict(query, key, call)
    if mask.visible_num_blocks.is_contiguous():
        return mask
    return replace(mask, visible_num_blocks=mask.visible_num_blocks.contiguous())


@on_query_device
def run_attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, backend: base.Backend, order: TokenOrder | None = None
) -> tuple[Tensor, Tensor]:
    """Count a call, predict its mask and compute attention over it; ``backend`` is the backend that serves the call."""
    totals = counters.record_sparse(backend.name, query.device, has_threshold=call.pv_threshold is not None)
    if order is not None:
        return backend.attention(query, key, value, call, totals=totals, order=order)
    output, lse = backend.attention(query, key, value, call, totals=totals)
    return match_layout(output, query), lse


@on_query_device
def run_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, backend: base.Backend
) -> tuple[Tensor, Tensor]:
    """Count a call, and compute attention over the blocks of a mask."""
    totals = counters.record_sparse(backend.name, query.device, has_threshold=call.pv_threshold is not None)
    output, lse = backend.attend(query, key, value, mask, call, totals=totals)
    return match_layout(output, query), lse


@on_query_device
def run_dense(
    query: Tensor, key: Tensor, value: Tensor, call: Call, requested: str, *, with_lse: bool, label: str
) -> tuple[Tensor, Tensor]:
    """Count a call, and compute attention over all visible keys; ``requested`` is the caller's ``backend``."""
    if label:
        counters.record(label)
    key, value, visible_call = drop_unseen_keys(key, value, call)
    call = call if visible_call is call else interned(visible_call)
    name = base.resolve(requested, query.device) if requested == "auto" else requested
    backend = base.get(name).serving(call, query.dtype)
    output, lse = backend.dense(query, key, value, call, with_lse=with_lse, may_use_torch=requested == "auto")
    return match_layout(output, query), lse if with_lse else lse.new_empty(0)


@on_query_device
def _reorder_on_device(*tensors: Tensor, index: Tensor, start: int, undo: bool) -> list[Tensor]:
    backend = base.get(base.resolve("auto", tensors[0].device))
    return list(backend.move_all(tensors, index, start, tokens_first=True if undo else None))


@on_query_device
def run_packed(query: Tensor, key: Tensor, value: Tensor, call: Call, backend: base.Backend, *, label: str) -> None:
    """Count and compute a call over the segments of a pack, and write the results to the tensors of `Call.segments`.

    There is no operator for this function. The operator ``varlen``, which reads the bounds, calls it.

    Args:
        query, key, value: the pack, (1, H | H_kv, tokens, D | D_v), expanded over the segments.
        label: the label of a dense call in `sparge.stats`; empty for a sparse call.
    """
    if label:
        counters.record(label)
        backend.dense(query, key, value, call, with_lse=True, may_use_torch=False)
    else:
        totals = counters.record_sparse(backend.name, query.device, has_threshold=call.pv_threshold is not None)
        backend.attention(query, key, value, call, totals=totals)


_QKV = "Tensor query, Tensor key, Tensor value"
_LISTS = "Tensor kv_num_blocks, Tensor kv_indices, Tensor visible_num_blocks"
register("predict", f"(Tensor query, Tensor key, {CALL_SCHEMA}) -> (Tensor, Tensor, Tensor)", _predict, _predict_fake)
register("attend", f"({_QKV}, {_LISTS}, {CALL_SCHEMA}) -> (Tensor, Tensor)", _attend, _attention_fake)
register(
    "attention", f"({_QKV}, {CALL_SCHEMA}, *, bool or_dense=False) -> (Tensor, Tensor)", _attention, _attention_fake
)
register("dense", f"({_QKV}, {CALL_SCHEMA}, bool with_lse, str label) -> (Tensor, Tensor)", _dense, _dense_fake)
register(
    "along",
    "(Tensor[] tensors, SymInt[] grid, str order, SymInt start, bool undo) -> Tensor[]",
    _reorder,
    _reorder_fake,
)
