"""The stages as torch operators (``torch.ops.sparge.*``), so that torch.compile sees one node each.

    predict(query, key, ANY_CALL, SKIPPING, SELECTION) -> (kv_num_blocks, kv_indices, visible_num_blocks)
    attend(query, key, value, kv_num_blocks, kv_indices, visible_num_blocks, ANY_CALL, SKIPPING) -> (output, lse)
    attention(query, key, value, ANY_CALL, SKIPPING, SELECTION) -> (output, lse)      sharing the passes over K
    attention_or_dense(...)      the same, dense below the crossover; for exported programs of any length
    dense(query, key, value, ANY_CALL, with_lse, label) -> (output, lse)
    along(tokens, grid, order, start, undo) -> tokens      in an order of `ordering`, or back from it

All tensors are heads-first. Operators accept no objects, so a `Call` is passed as plain arguments, with an additional
tensor for each number that may differ per head. `stats` counts inside the operators, so compiled programs are counted.
Arguments are validated before, and backends do the computation.

Packing a call into an operator's arguments adds launch overhead. Calls on plain tensors, outside of tracing and torch
modes, call the backend directly (`is_direct`).
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
from sparge.backends.output_layout import empty_like, laid_out
from sparge.call import Call, drop_unseen_keys, interned
from sparge.dispatch import dense_rules
from sparge.dispatch.reasons import describe
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape
from sparge.masks.ordering import OrderName, TokenOrder, order_of
from sparge.numerics.budget_allocation import RankPool
from sparge.options.common import PerHead
from sparge.options.rules import SELECTIONS, Dense, Sparsity, trusted
from sparge.options.scores import SCORES
from sparge.stats import counters

ANY_CALL = {
    "attn_mask": "Tensor?",
    "window_left": "SymInt?",
    "window_right": "SymInt?",
    "scale": "float",
    "quantization": "str",
    "exact_lse": "bool",
    "backend": "str",
}
"""Name and type of the arguments of every operator: fields of a call, and the name of its backend."""
SKIPPING = {"skipped": "str", "pv_threshold": "float?", "pv_threshold_per_head": "Tensor?"}
"""Arguments for skipped blocks and for the P V threshold."""
SELECTION = {
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
}
"""Further arguments of prediction."""


def schema(*parts: dict[str, str]) -> str:
    """Return arguments in the form of an operator's schema."""
    return ", ".join(f"{kind} {name}" for part in parts for name, kind in part.items())


_TENSORS = "Tensor query, Tensor key, Tensor value"
_LISTS = "Tensor kv_num_blocks, Tensor kv_indices, Tensor visible_num_blocks"
_CALL = schema(ANY_CALL, SKIPPING, SELECTION)
_LIBRARY = torch.library.Library(operators.name, "DEF")
_LIBRARY.define(f"predict(Tensor query, Tensor key, {_CALL}) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"attend({_TENSORS}, {_LISTS}, {schema(ANY_CALL, SKIPPING)}) -> (Tensor, Tensor)")
_LIBRARY.define(f"attention({_TENSORS}, {_CALL}) -> (Tensor, Tensor)")
_LIBRARY.define(f"attention_or_dense({_TENSORS}, {_CALL}) -> (Tensor, Tensor)")
_LIBRARY.define("along(Tensor tokens, SymInt[] grid, str order, SymInt start, bool undo) -> Tensor")
_LIBRARY.define(f"all_along({_TENSORS}, SymInt[] grid, str order, SymInt start) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"dense({_TENSORS}, {schema(ANY_CALL)}, bool with_lse, str label) -> (Tensor, Tensor)")


def is_direct(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether a call needs no operator: its tensors are plain, and nothing traces or intercepts operators."""
    return (
        not torch.compiler.is_compiling()
        and type(query) is type(key) is type(value) is Tensor
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._get_tracing_state() is None
        and _functorch.peek_interpreter_stack() is None
    )


def predict(query: Tensor, key: Tensor, call: Call, backend: str) -> BlockMask:
    """Predict through the operator."""
    if is_direct(query, key, key):
        return run_predict(query, key, interned(call), backend)
    counts, indices, visible = operators.predict(query, key, *pack(call, backend))
    return BlockMask(counts, indices, visible, query.shape[2], key.shape[2], window=call.window)


def attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, backend: str, order: TokenOrder | None = None
) -> tuple[Tensor, Tensor]:
    """Predict and compute attention through one operator; the LSE of a call with an ``order`` is undefined."""
    if is_direct(query, key, value):
        return run_attention(query, key, value, interned(call), base.get(backend).serving(call, query.dtype), order)
    if order is None:
        return operators.attention(query, key, value, *pack(call, backend))
    query, key, value = operators.all_along(query, key, value, *order)
    output, lse = operators.attention(query, key, value, *pack(call, backend))
    return operators.along(output, *order, True), lse


def attention_or_dense(query: Tensor, key: Tensor, value: Tensor, call: Call, backend: str) -> tuple[Tensor, Tensor]:
    """Compute `attention`, or `dense` below the crossover, which is checked each time the operator runs."""
    return operators.attention_or_dense(query, key, value, *pack(call, backend))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute attention over a mask through the operator."""
    if is_direct(query, key, value):
        return run_attend(query, key, value, mask, interned(call), base.get(backend).serving(call, query.dtype))
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)
    return operators.attend(query, key, value, *lists, *pack_attend(call, backend))


def dense(
    query: Tensor, key: Tensor, value: Tensor, call: Call, backend: str, *, with_lse: bool, label: str
) -> tuple[Tensor, Tensor]:
    """Compute attention over every visible block through the operator.

    Args:
        backend: "auto" takes the faster of torch's kernels and those of the device's backend.
        with_lse: return the LSE; otherwise it is empty, because torch's fastest kernels do not return it.
        label: the reason to count the call under; empty if it was counted before.
    """
    if is_direct(query, key, value):
        return run_dense(query, key, value, interned(call), backend, with_lse=with_lse, label=label)
    return operators.dense(query, key, value, *pack_dense(call, backend), with_lse, label)


def over_segments(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of a pack, expanded over the segments without a copy."""
    sizes = (call.shape.batch, -1, -1, -1)
    return query.expand(sizes), key.expand(sizes), value.expand(sizes)


def along(tokens: Tensor, grid: tuple[int, ...], order: str, start: int, *, undo: bool = False) -> Tensor:
    """Reorder tokens (B, H, S, D) of a grid that begins at ``start`` by an order of `ordering`, or undo it.

    The memory layout is preserved; with ``undo`` the result has tokens first, as in models.
    """
    if is_direct(tokens, tokens, tokens):
        return run_along(tokens, list(grid), order, start, undo)
    return operators.along(tokens, grid, order, start, undo)


def all_along(
    query: Tensor, key: Tensor, value: Tensor, grid: tuple[int, ...], order: str, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `along` to three tensors in one operator, whose launch overhead equals the time to move a short
    sequence."""
    if is_direct(query, key, value):
        return run_all_along(query, key, value, list(grid), order, start)
    return operators.all_along(query, key, value, grid, order, start)


def pack(call: Call, backend: str) -> tuple[Any, ...]:
    """Return a call as the arguments of `ANY_CALL`, `SKIPPING` and `SELECTION`."""
    return (
        *pack_attend(call, backend),
        *_pack_rules(call.sparsity, call.is_causal),
        call.score.name,
        call.score.numbers,
        [edge for pair in call.always_keep for edge in pair],
        [edge for pair in call.exact_queries for edge in pair],
    )


def pack_attend(call: Call, backend: str) -> tuple[Any, ...]:
    """Return a call over a given mask as the arguments of `ANY_CALL` and `SKIPPING`."""
    return (*pack_dense(call, backend), call.skipped, *_pack_number(call.pv_threshold))


def pack_dense(call: Call, backend: str) -> tuple[Any, ...]:
    """Return a call over all blocks as the arguments of `ANY_CALL`."""
    return call.attn_mask, *call.window, call.scale, call.quantization, call.exact_lse, backend


def _pack_rules(rule: Sparsity, is_causal: bool) -> tuple[Any, ...]:
    if isinstance(rule, Dense):
        return "dense", None, None, None, None, 0, False, False
    return (
        rule.name,
        *_pack_number(rule.amount),
        *_pack_number(rule.similarity_threshold),
        rule.min_blocks,
        rule.keeps_sink(is_causal),
        rule.keeps_diagonal(is_causal),
    )


def unpack(shape: Shape, arguments: tuple[Any, ...]) -> tuple[Call, str]:
    """Return the call and the name of its backend from the arguments of `pack`, `pack_attend` or `pack_dense`."""
    attn_mask, left, right, scale, quantization, exact_lse, backend, *rest = arguments
    call: dict[str, Any] = {"quantization": quantization, "attn_mask": attn_mask, "window": (left, right)}
    call["exact_lse"] = exact_lse
    if rest:
        call["skipped"], call["pv_threshold"] = rest[0], _unpack_number(*rest[1:3])
    if len(rest) > 3:
        packed = dict(zip(SELECTION, rest[3:], strict=True))
        call["score"] = SCORES[packed["score"]].of(packed["score_numbers"])
        for name in ("always_keep", "exact_queries"):
            edges = packed[name]
            call[name] = tuple(zip(edges[::2], edges[1::2], strict=True))
        if packed["selection"] != "dense":
            rule = SELECTIONS[packed["selection"]]
            rules = {name: packed[name] for name in ("min_blocks", "sink", "diagonal")}
            for field, name in ((rule.amount_field, "amount"), ("similarity_threshold", "similarity_threshold")):
                rules[field] = _unpack_number(packed[name], packed[f"{name}_per_head"])
            call["sparsity"] = trusted(rule, **rules)
    return Call(shape, right == 0, scale, **call), backend


def _pack_number(value: PerHead | None) -> tuple[float | None, Tensor | None]:
    return (None, value.detach()) if isinstance(value, Tensor) else (value, None)


def _unpack_number(number: float | None, per_head: Tensor | None) -> PerHead | None:
    return number if per_head is None else per_head


def _shape_of(query: Tensor, key: Tensor, value: Tensor) -> Shape:
    batch, heads, q_len, head_dim = query.shape
    return Shape(batch, heads, key.shape[1], q_len, key.shape[2], head_dim, value.shape[3])


def _predict(query: Tensor, key: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call, backend = unpack(_shape_of(query, key, key), arguments)
    mask = run_predict(query, key, interned(call), backend)
    return mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    visible_num_blocks: Tensor,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    call, name = unpack(_shape_of(query, key, value), arguments)
    lengths = (call.shape.q_len, call.shape.kv_len)
    mask = BlockMask(kv_num_blocks, kv_indices, visible_num_blocks, *lengths, window=call.window)
    return run_attend(query, key, value, mask, interned(call), base.get(name).serving(call, query.dtype))


def _attention(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call, name = unpack(_shape_of(query, key, value), arguments)
    return run_attention(query, key, value, interned(call), base.get(name).serving(call, query.dtype))


def _attention_or_dense(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    call, name = unpack(_shape_of(query, key, value), arguments)
    reason = dense_rules.by_arguments(
        call.shape, call.window, call.sparsity, "auto", "auto", name, query.device, query.dtype, call.attn_mask
    )
    if reason is None:
        return run_attention(query, key, value, interned(call), base.get(name).serving(call, query.dtype))
    dense_call = Call(call.shape, call.is_causal, call.scale, attn_mask=call.attn_mask, window=call.window)
    return run_dense(query, key, value, interned(dense_call), "auto", with_lse=True, label=describe(reason))


def _dense(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *packed, with_lse, label = arguments
    call, asked = unpack(_shape_of(query, key, value), tuple(packed))
    return run_dense(query, key, value, interned(call), asked, with_lse=with_lse, label=label)


def _predict_fake(query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    shape = _shape_of(query, key, key)
    rows = (shape.batch, shape.heads, shape.q_blocks)
    counts = query.new_empty(rows, dtype=torch.int32)
    return counts, query.new_empty((*rows, shape.kv_blocks), dtype=torch.int32), torch.empty_like(counts)


def _attention_fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    output = empty_like(query, value.shape[3])
    return output, query.new_empty(query.shape[:3], dtype=torch.float32)


def _dense_fake(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *_, with_lse, _ = arguments
    output, lse = _attention_fake(query, key, value)
    return output, lse if with_lse else lse.new_empty(0)


def _along_fake(tokens: Tensor, grid: list[int], order: OrderName, start: int, undo: bool) -> Tensor:  # noqa: ARG001
    batch, heads, length, width = tokens.shape
    if undo:
        return tokens.new_empty(batch, length, heads, width).transpose(1, 2)
    return empty_like(tokens, width)


def _all_along_fake(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    moved = [empty_like(tokens, tokens.shape[3]) for tokens in (query, key, value)]
    return moved[0], moved[1], moved[2]


def _in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run on the query's device, without autocast and without interception by `replace_sdpa`."""

    @functools.wraps(function)
    def run(query: Tensor, *arguments: Any, **options: Any) -> Any:
        device = query.device
        is_elsewhere = device.type == "cuda" and device.index != torch._C._cuda_getDevice()
        is_autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        if not (is_elsewhere or is_autocast or torch._C._len_torch_function_stack()):
            return function(query, *arguments, **options)
        with ExitStack() as stack:
            stack.enter_context(torch._C.DisableTorchFunction())
            if is_elsewhere:  # kernels are launched on the current device
                stack.enter_context(torch.cuda.device(device))
            if is_autocast:
                stack.enter_context(torch.autocast(device.type, enabled=False))
            return function(query, *arguments, **options)

    return run


@_in_place
def run_predict(query: Tensor, key: Tensor, call: Call, backend: str) -> BlockMask:
    """Predict the mask of a call; the named backend does so for every call."""
    mask = base.get(backend).predict(query, key, call)
    if mask.visible_num_blocks.is_contiguous():
        return mask
    return replace(mask, visible_num_blocks=mask.visible_num_blocks.contiguous())


@_in_place
def run_attention(
    query: Tensor, key: Tensor, value: Tensor, call: Call, backend: base.Backend, order: TokenOrder | None = None
) -> tuple[Tensor, Tensor]:
    """Count a call, predict its mask and compute attention over it; ``backend`` is the one that serves the call."""
    totals = counters.record_sparse(backend.name, query.device, has_threshold=call.pv_threshold is not None)
    if order is not None:
        return backend.attention_in_order(query, key, value, call, order, totals=totals)
    output, lse = backend.attention(query, key, value, call, totals=totals)
    return laid_out(output, query), lse


@_in_place
def run_attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, backend: base.Backend
) -> tuple[Tensor, Tensor]:
    """Count a call and compute attention over a given mask."""
    totals = counters.record_sparse(backend.name, query.device, has_threshold=call.pv_threshold is not None)
    output, lse = backend.attend(query, key, value, mask, call, totals=totals)
    return laid_out(output, query), lse


@_in_place
def run_dense(
    query: Tensor, key: Tensor, value: Tensor, call: Call, asked: str, *, with_lse: bool, label: str
) -> tuple[Tensor, Tensor]:
    """Count a call and compute attention over every visible key; ``asked`` is the backend as the caller named it."""
    if label:
        counters.record(label)
    key, value, cut = drop_unseen_keys(key, value, call)
    call = call if cut is call else interned(cut)
    name = base.resolve(asked, query.device) if asked == "auto" else asked
    backend = base.get(name).serving(call, query.dtype)
    output, lse = backend.dense(query, key, value, call, with_lse=with_lse, may_use_torch=asked == "auto")
    return laid_out(output, query), lse if with_lse else lse.new_empty(0)


@_in_place
def run_along(tokens: Tensor, grid: list[int], order: OrderName, start: int, undo: bool) -> Tensor:
    found = order_of(tuple(grid), order, tokens.device)
    backend = base.get(base.resolve("auto", tokens.device))
    index = found.inverse if undo else found.permutation
    (moved,) = backend.move_all((tokens,), index, start, tokens_first=True if undo else None)
    return moved


@_in_place
def run_all_along(
    query: Tensor, key: Tensor, value: Tensor, grid: list[int], order: OrderName, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    permutation = order_of(tuple(grid), order, query.device).permutation
    backend = base.get(base.resolve("auto", query.device))
    query, key, value = backend.move_all((query, key, value), permutation, start)
    return query, key, value


@_in_place
def summarize_keys(key: Tensor, call: Call, backend: str) -> tuple[Tensor, ...]:
    """Return the key statistics for prediction over several ranks. See `base.Backend.summarize_keys`."""
    return base.get(backend).summarize_keys(key, interned(call))


@_in_place
def candidates(query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call, backend: str) -> Any:
    """Return query blocks to select from. See `base.Backend.candidates`."""
    return base.get(backend).candidates(query, keys, interned(call))


@_in_place
def choose_together(
    query: Tensor,  # noqa: ARG001
    candidates: Sequence[Any],
    kv_blocks: int,
    pool: RankPool,
    backend: str,
) -> list[BlockMask]:
    """Select the kept blocks by one rule for the query blocks of all ranks. See `base.Backend.choose_together`."""
    return base.get(backend).choose_together(candidates, kv_blocks, pool)


@_in_place
def attend_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: base.KeptColumns | None,
    call: Call,
    into: base.PartialResult,
    backend: str,
    *,
    label: str,
) -> None:
    """Count a call over a part of the keys, and merge it into a result. See `base.Backend.attend_part`.

    Args:
        label: the reason to count a dense call under; empty for a sparse call.
    """
    call = interned(call)
    serving, totals = base.get(backend).serving(call, query.dtype), None
    if label:
        counters.record(label)
    else:
        totals = counters.record_sparse(serving.name, query.device, has_threshold=call.pv_threshold is not None)
    serving.attend_part(query, key, value, kept, call, into, totals=totals)


@_in_place
def run_packed(query: Tensor, key: Tensor, value: Tensor, call: Call, backend: base.Backend, *, label: str) -> None:
    """Compute and count a call over the segments of a pack, and write the results to the tensors of `Call.segments`.

    This is not an operator; the operator `varlen`, which reads the bounds, calls it.

    Args:
        query, key, value: returned by `over_segments`.
        label: the reason to count a dense call under; empty for a sparse call.
    """
    if label:
        counters.record(label)
        backend.dense(query, key, value, call, with_lse=True, may_use_torch=False)
    else:
        totals = counters.record_sparse(backend.name, query.device, has_threshold=call.pv_threshold is not None)
        backend.attention(query, key, value, call, totals=totals)


for _name, _real, _fake in (
    ("predict", _predict, _predict_fake),
    ("attend", _attend, _attention_fake),
    ("attention", _attention, _attention_fake),
    ("attention_or_dense", _attention_or_dense, _attention_fake),
    ("dense", _dense, _dense_fake),
    ("along", run_along, _along_fake),
    ("all_along", run_all_along, _all_along_fake),
):
    _LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(add_op_namespace_prefix(_name), _fake, lib=_LIBRARY)
