"""Packed sequences: attention within the segments of one long row of tokens, as FlashAttention's varlen function.

A segment is attended to as if it were alone: it has its own blocks, prediction and budget, and is dense or sparse by
its own sizes. Neighbours of equal lengths are one batched call on views of the pack (`segments.Run`), and on GPUs
segments of similar lengths one packed call (`segments.Segments`); nothing is copied before either.

The bounds are read on the host, once for each tensor. In a compiled program the whole pack is one operator, which reads
them when it runs:

    varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ANY_CALL, SKIPPING, SELECTION,
           with_lse) -> (output, lse)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor

from sparge import api, decide, ops, validation
from sparge.backends import base
from sparge.call import Call
from sparge.config import Dense, OnUnsupported, PerHead, Quantization, Score, ScoreName, Skipped, Sparsity
from sparge.decide import Reason
from sparge.derivatives import inside_autograd_function, needs_derivatives
from sparge.geometry import Shape
from sparge.segments import Run, Segment, alike, in_runs, longest, packed, runs_of
from sparge.window import within

Bounds = Tensor | Sequence[int]
"""Where segments begin, and where the last one ends: n + 1 numbers, on the host or the query's device."""

SMALL_SCORES = 2**26
"""Of a dense segment in 16 bits that is packed with others: torch's kernels take an H200 60 us for so many, not more
than a call takes the host (64 segments of 2048 tokens and 16 heads in a loop: 4.0 ms, docs/benchmarks.md)."""

_READ = "_sparge_bounds"


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    *,
    topk: PerHead | None = ...,
    sparsity: Sparsity | None = ...,
    score: ScoreName | Score = ...,
    quantization: Quantization = ...,
    skipped: Skipped = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    on_unsupported: OnUnsupported = ...,
) -> Tensor: ...


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ...,
    dropout_p: float = ...,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    *,
    topk: PerHead | None = ...,
    sparsity: Sparsity | None = ...,
    score: ScoreName | Score = ...,
    quantization: Quantization = ...,
    skipped: Skipped = ...,
    return_lse: Literal[True],
    backend: str = ...,
    on_unsupported: OnUnsupported = ...,
) -> tuple[Tensor, Tensor]: ...


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    *,
    topk: PerHead | None = None,
    sparsity: Sparsity | None = None,
    score: ScoreName | Score = "moment",
    quantization: Quantization = "auto",
    skipped: Skipped = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    on_unsupported: OnUnsupported = "raise",
) -> Tensor | tuple[Tensor, Tensor]:
    """Sparse attention within the segments of packed sequences, with the arguments of FlashAttention's varlen function.

    The result is that of `sparge.attention` for each segment by itself: what a segment is packed with changes nothing
    but, on GPUs, which kernel computes a short one that runs dense in 16 bits.

    Args:
        q: (total_q, H, D), the queries of all segments one after another; float16, bfloat16 or float32.
        k: (total_k, H_kv, D); H is a multiple of H_kv.
        v: (total_k, H_kv, D_v).
        cu_seqlens_q: where the queries of each segment begin, and total_q: (n + 1,) int32 or int64, on the query's
            device or the CPU; or a list or tuple of ints. A tensor on a device is read once, which waits for it, and
            again when it was changed (or may have been, made under ``torch.inference_mode()``).
        cu_seqlens_k: the same for keys. Segments may be empty on either side.
        max_seqlen_q, max_seqlen_k: lengths that no segment exceeds. Not needed: if given, they are checked.
        dropout_p: 0.0; sparse attention has no dropout.
        softmax_scale: factor on the scores, 1 / sqrt(D) by default.
        causal: query i of a segment sees its keys up to i + S_k - S_q (aligned bottom-right).
        window_size: (left, right), as ``window`` of `sparge.attention`: in each segment, query i stands at its key
            p = i + S_k - S_q and sees keys p - left .. p + right; -1 is no bound.
        softcap: 0.0; scores are not capped.
        return_lse: also return the log-sum-exp of the scores.

    The other arguments are those of `sparge.attention`, and hold for each segment: ``topk=0.25`` is a budget of each.
    `sparge.stats` counts the calls that are made: one for each run of neighbours of equal lengths, and on GPUs one for
    all segments whose numbers of blocks have the same next power of two.

    Returns:
        The output (total_q, H, D_v) in the query's dtype. With ``return_lse`` also the LSE (H, total_q), natural log,
        float32. A query that sees nothing gives 0 and -inf.

    Raises:
        TypeError, ValueError: an argument is not what was expected.
        NotImplementedError: dropout, gradients, capped scores, head_dim or device that cannot be served;
            bounds on a device while a CUDA graph is captured.

    Example:
        >>> import torch, sparge
        >>> q, k, v = (torch.randn(8192 + 300, 2, 64) for _ in range(3))
        >>> out, lse = sparge.varlen_attention(q, k, v, [0, 4096, 8192, 8492], [0, 4096, 8192, 8492],
        ...                                    causal=True, topk=0.25, return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([8492, 2, 64]), torch.Size([2, 8492]))
        >>> alone = sparge.attention(q[None, :4096], k[None, :4096], v[None, :4096],
        ...                          is_causal=True, topk=0.25, layout="NHD")
        >>> torch.equal(out[None, :4096], alone)
        True
    """
    validation.check_choice("on_unsupported", on_unsupported, validation.ON_UNSUPPORTED)
    validation.check_flag("causal", causal)
    validation.check_softcap(softcap)
    shape = validation.check_packed(q, k, v)
    window = validation.resolve_window(window_size, causal, shape.q_len, shape.kv_len, "window_size")
    validation.check_bounds("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, q.device)
    validation.check_bounds("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, q.device)
    validation.check_choice("skipped", skipped, validation.SKIPPED)
    rule = validation.resolve_sparsity(topk, sparsity, shape.heads)
    call = Call(
        shape=shape,
        is_causal=window.right == 0,
        scale=validation.check_scale(softmax_scale, shape.head_dim),
        sparsity=rule,
        score=validation.resolve_score(score),
        quantization=validation.resolve_quantization_name(quantization),
        pv_threshold=None if isinstance(rule, Dense) else rule.pv_threshold,
        skipped=skipped,
        window=window,
    )
    longest = (max_seqlen_q, max_seqlen_k)
    obstacle = decide.unsupported(shape, dropout_p, needs_derivatives(q, k, v))
    if torch.compiler.is_compiling() and obstacle is None:
        bounds = (torch.as_tensor(bounds) for bounds in (cu_seqlens_q, cu_seqlens_k))
        output, lse = torch.ops.sparge.varlen(q, k, v, *bounds, *longest, *ops.pack(call, backend), return_lse)
    else:
        options = {"dropout_p": dropout_p, "backend": backend, "on_unsupported": on_unsupported}
        output, lse = _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, call, return_lse, options)
    return (output, lse) if return_lse else output


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Bounds,
    cu_seqlens_k: Bounds,
    longest: tuple[int | None, int | None],
    call: Call,
    with_lse: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """All segments: output (total_q, H, Dv) and, if it is asked for, LSE (H, total_q).

    Args:
        call: what is asked of every segment, with the sizes of the pack.
        options: what `sparge.attention` takes besides.
    """
    bounds_q, bounds_k = read("cu_seqlens_q", cu_seqlens_q), read("cu_seqlens_k", cu_seqlens_k)
    validation.check_segments(bounds_q, bounds_k, (len(query), len(key)), longest)
    runs, groups = _planned(runs_of(bounds_q, bounds_k), query, key, value, call, options)
    parts = [part for run in runs for part in _decided_as_one(run, call, options["backend"], query)]
    if len(parts) == 1 and not groups:
        output, lse = _attend_run(parts[0], query, key, value, call, with_lse, options)
        return output.flatten(0, 1), None if lse is None else lse.transpose(0, 1).flatten(1)
    shape = call.shape
    output = query.new_empty(len(query), shape.heads, shape.value_dim)
    lse = query.new_empty(shape.heads, len(query), dtype=torch.float32)
    for part in parts:
        found, found_lse = _attend_run(part, query, key, value, call, with_lse, options)
        stop = part.q_start + part.count * part.q_len
        output[part.q_start : stop] = found.flatten(0, 1)
        if found_lse is not None:
            lse[:, part.q_start : stop] = found_lse.transpose(0, 1).flatten(1)
    for plan, group in groups:
        _attend_group(plan, group, query, key, value, call, output, lse, with_lse)
    return output, lse if with_lse else None


class Plan(NamedTuple):
    """How a segment is computed: why it is dense (None: it is not), by which backend, in which quantization."""

    reason: Reason | None
    backend: str
    quantization: str


def _planned(
    runs: list[Run], query: Tensor, key: Tensor, value: Tensor, call: Call, options: dict[str, Any]
) -> tuple[list[Run], list[tuple[Plan, tuple[Segment, ...]]]]:
    """The runs that are calls of their own, and groups of segments that are one packed call each."""
    if len(runs) < 2 or not _is_ours(query, key, value, call, options.get("dropout_p", 0.0)):
        return runs, []
    alone: list[Run] = []
    packable: dict[Plan, list[Segment]] = {}
    for run in runs:
        plan = _plan_of(run, call, options["backend"], query)
        if plan is None:
            alone.append(run)
        else:
            packable.setdefault(plan, []).extend(run.segments())
    groups = []
    for plan, segments in packable.items():
        for group in alike(segments):
            of_group = in_runs(group)
            if len(of_group) == 1:  # as a batch it need not look anything up
                alone += of_group
            else:
                groups.append((plan, group))
    return alone, groups


def _is_ours(query: Tensor, key: Tensor, value: Tensor, call: Call, dropout_p: float) -> bool:
    """Whether nothing keeps a call from the kernels, for which `sparge.attention` would do something about it."""
    if call.scale <= 0 or inside_autograd_function():
        return False
    return decide.unsupported(call.shape, dropout_p, needs_derivatives(query, key, value)) is None


def _plan_of(run: Run, call: Call, backend: str, query: Tensor) -> Plan | None:
    """How the segments of a run are computed if they are packed with others; None: they cannot or need not be.

    Where torch would compute a dense segment, the portable kernel computes small ones: a call for each would take the
    host longer than the device.
    """
    if run.kv_len == 0:
        return None
    chosen = base.resolve(backend, query.device)
    reason = _reason(run, call, backend, chosen, query)
    quantization = base.resolve_quantization(call.quantization, chosen, query.device)
    if reason in (Reason.CROSSOVER, Reason.WINDOW):
        quantization = "none"
    asked = replace(call, quantization=quantization)
    serving = base.get(chosen).serving(asked, query.dtype)
    if not serving.packs(asked):
        return None
    if reason is not None and not asked.is_quantized and backend == "auto":
        is_small = call.shape.heads * run.q_len * run.kv_len < SMALL_SCORES
        return Plan(reason, "triton", quantization) if is_small else None
    if reason is not None and call.window.left is not None:
        return None  # a call by itself leaves out what lies before all windows, and its blocks begin there
    return Plan(reason, serving.name, quantization)


def _attend_group(
    plan: Plan,
    group: tuple[Segment, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    call: Call,
    output: Tensor,
    lse: Tensor,
    with_lse: bool,
) -> None:
    """Segments of similar lengths as one call, which writes to their places in ``output`` and ``lse``."""
    q_len, kv_len = longest(group)
    shape = replace(call.shape, batch=len(group), q_len=q_len, kv_len=kv_len)
    rules: dict[str, Any] = {"sparsity": Dense(), "pv_threshold": None, "skipped": "drop"}
    if plan.reason is None:
        rules = {"skipped": validation.resolve_skipped(call.skipped, call.is_causal, None, shape)}
    whole = replace(
        call,
        shape=shape,
        window=within(call.window, q_len, kv_len),
        quantization=plan.quantization,
        exact_lse=with_lse,
        segments=packed(group, shape.heads, output, lse),
        **rules,
    )
    words = "" if plan.reason is None else decide.in_words(plan.reason)
    ops.packed(_heads_first(query), _heads_first(key), _heads_first(value), whole, plan.backend, words=words)


def _heads_first(tokens: Tensor) -> Tensor:
    """(tokens, H, D) -> (1, H, tokens, D), a view if channels lie side by side."""
    return (tokens if tokens.stride(2) == 1 else tokens.contiguous()).transpose(0, 1)[None]


def _attend_run(
    run: Run, query: Tensor, key: Tensor, value: Tensor, call: Call, with_lse: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Output (count, q_len, H, Dv) and, if it is asked for, LSE (count, H, q_len) of a run."""
    queries = run.queries(query)
    if run.kv_len == 0:
        decide.count(Reason.NOTHING_VISIBLE)
        output, lse = _nothing(queries.flatten(0, 1), call.shape)
        return output.unflatten(0, queries.shape[:2]), lse.unflatten(1, queries.shape[:2]).transpose(0, 1)
    asked = {
        "is_causal": call.is_causal,
        "window": call.window,
        "scale": call.scale,
        "sparsity": call.sparsity,
        "score": call.score,
        "quantization": call.quantization,
        "skipped": call.skipped,
        "return_lse": with_lse,
        **options,
    }
    result: Any = api.attention(queries, run.keys(key), run.keys(value), enable_gqa=True, layout="NHD", **asked)
    return result if with_lse else (result, None)


def _nothing(query: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Output and LSE of queries (tokens, H, D) that see no key."""
    sizes = (len(query), shape.heads)
    lse = query.new_full(sizes[::-1], -math.inf, dtype=torch.float32)
    return query.new_zeros(*sizes, shape.value_dim), lse


def _decided_as_one(run: Run, call: Call, backend: str, query: Tensor) -> Iterator[Run]:
    """The run in batches that are dense or sparse as each of their segments would be by itself.

    A batch has more scores than a segment, and may be above the crossover where that is below it.
    """
    chosen = base.resolve(backend, query.device)
    at_once = run.count
    if _reason(run, call, backend, chosen, query) is not _reason(run, call, backend, chosen, query, batch=run.count):
        crossover = base.crossover_of(chosen, query.device.type, query.dtype)
        at_once = max(1, (crossover.scores - 1) // (call.shape.heads * run.q_len * run.kv_len))
    return run.batches(at_once)


def _reason(run: Run, call: Call, backend: str, chosen: str, query: Tensor, *, batch: int = 1) -> Reason | None:
    """Why so many segments of a run are dense as one call; None: they are not."""
    shape = replace(call.shape, batch=batch, q_len=run.q_len, kv_len=run.kv_len)
    window = within(call.window, run.q_len, run.kv_len)
    return decide.by_arguments(
        shape, window, call.sparsity, call.quantization, backend, chosen, query.device, query.dtype
    )


def read(name: str, bounds: Bounds) -> Sequence[int]:
    """The bounds as numbers; those on a device are remembered until their tensor is written to.

    Raises:
        NotImplementedError: a CUDA graph is being captured, and they were not read before.
    """
    if not isinstance(bounds, Tensor):
        return bounds
    if bounds.device.type == "cpu":
        return bounds.tolist()
    version = None if bounds.is_inference() else bounds._version  # inference tensors may change without a trace
    version_then, found = getattr(bounds, _READ, (None, ()))
    if version is not None and version == version_then:
        return cast(Sequence[int], found)
    validation.check_not_capturing(name, bounds)
    numbers: Sequence[int] = bounds.tolist()
    setattr(bounds, _READ, (version, numbers))
    return numbers


def _varlen(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator: what `varlen_attention` does with a call that has no obstacle, once it runs."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *packed, with_lse = arguments
    shape = validation.check_packed(query, key, value)
    call, backend = ops.unpack(shape, tuple(packed))
    if not isinstance(call.sparsity, Dense):
        call = replace(call, sparsity=replace(call.sparsity, pv_threshold=call.pv_threshold))
    longest = (max_seqlen_q, max_seqlen_k)
    output, lse = _attend(query, key, value, cu_seqlens_q, cu_seqlens_k, longest, call, with_lse, {"backend": backend})
    return output.contiguous(), query.new_empty(0, dtype=torch.float32) if lse is None else lse.contiguous()


def _varlen_fake(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    *_, with_lse = arguments
    tokens, heads, _ = query.shape
    lse = query.new_empty((heads, tokens) if with_lse else (0,), dtype=torch.float32)
    return query.new_empty(tokens, heads, value.shape[2]), lse


_LIBRARY = torch.library.Library("sparge", "FRAGMENT")
_LIBRARY.define(
    "varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, "
    f"{ops.schema(ops.ANY_CALL, ops.SKIPPING, ops.SELECTION)}, bool with_lse) -> (Tensor, Tensor)"
)
_LIBRARY.impl("varlen", _varlen, "CompositeExplicitAutograd")
torch.library.register_fake("sparge::varlen", _varlen_fake, lib=_LIBRARY)
