"""Attention within the segments of packed sequences, like FlashAttention's varlen function.

Each segment has its own blocks, prediction and budget, and is dense or sparse independently of the others. Neighboring
segments of equal length are computed in one batched call on views of the pack (`segments.Run`). On GPUs, segments of
similar lengths are computed in one packed call (`segments.Segments`). Neither copies the pack.

The host reads each tensor of bounds once. In a compiled program, the whole pack is one operator, which reads the bounds
when it runs:

    varlen(query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, CALL, with_lse) -> (output, lse)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from sparge._ops import ops as operators
from sparge.call import Call
from sparge.dispatch import call_cache, dense_rules, ops, run, validation
from sparge.dispatch.gradients import needs_grad_of
from sparge.dispatch.packs import PackedSequences
from sparge.options import checks
from sparge.options.common import QUANTIZATIONS, OnUnsupported, PerHead, Quantization, ScoreName, Skipped
from sparge.options.rules import Dense, Sparsity
from sparge.options.scores import Score

Bounds = Tensor | Sequence[int]
"""Starts of the n segments and the end of the last segment: n + 1 numbers, on the host or the query's device."""

_BOUNDS_CACHE = f"{__name__}: bounds"
"""Attribute of a bounds tensor that caches its values. Each copy of this library uses another attribute."""


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
    """Compute sparse attention within the segments of packed sequences.

    The first arguments are those of FlashAttention's varlen function. The result of each segment equals that of
    `sparge.attention`, with one exception on GPUs: the other segments of the pack affect which kernel computes a short
    segment in dense 16-bit attention.

    Args:
        q: (total_q, H, D), the concatenated queries of all segments; float16, bfloat16 or float32.
        k: (total_k, H_kv, D); H is a multiple of H_kv.
        v: (total_k, H_kv, D_v).
        cu_seqlens_q: the start of each segment's queries, followed by total_q: (n + 1,) int32 or int64, on the query's
            device or the CPU; or a list or tuple of ints. The first call with a GPU tensor copies it to the host, which
            synchronizes with the GPU. Later calls copy it again only if it was modified in place or created under
            ``torch.inference_mode()``.
        cu_seqlens_k: the same for keys. Segments may have no queries or no keys.
        max_seqlen_q: an upper bound of the number of queries per segment. Optional, but checked.
        max_seqlen_k: the same for keys.
        dropout_p: must be 0.0; sparse attention has no dropout.
        softmax_scale: factor on the scores. Default: 1 / sqrt(D).
        causal: query i of a segment sees its keys up to i + S_k - S_q (aligned bottom-right).
        window_size: (left, right), like ``window`` of `sparge.attention`: in each segment, query i is at key position
            p = i + S_k - S_q and sees keys p - left to p + right; -1 means no bound.
        softcap: must be 0.0; soft-capping of scores is not supported.
        return_lse: also return the log-sum-exp of the scores.

    The other arguments are those of `sparge.attention` and apply to each segment separately: with ``topk=0.25`` every
    segment keeps a quarter of its blocks. `sparge.stats` counts one call for neighboring segments of equal length, and
    on GPUs one call for all segments whose numbers of blocks round up to the same power of two.

    Returns:
        The output (total_q, H, D_v) in the query's dtype. With ``return_lse`` also the LSE (H, total_q), natural log,
        float32. For a query that sees no key, the output is 0 and the LSE is -inf.

    Raises:
        TypeError, ValueError: an argument is invalid.
        NotImplementedError: the call needs dropout, gradients or a softcap, its head_dim or device is not supported, or
            bounds on a GPU would have to be read during CUDA graph capture.

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
    _check_bounds("q", cu_seqlens_q, max_seqlen_q, q)
    _check_bounds("k", cu_seqlens_k, max_seqlen_k, q)
    if not torch.compiler.is_compiling():
        bounds = read_bounds("cu_seqlens_q", cu_seqlens_q), read_bounds("cu_seqlens_k", cu_seqlens_k)
        numbers = (causal, return_lse, topk, softmax_scale, dropout_p, softcap, max_seqlen_q, max_seqlen_k)
        choices = (sparsity, score, quantization, skipped, backend, on_unsupported, window_size)
        kind, runner = call_cache.find(q, k, v, None, numbers + choices, ("packed", bounds))
        if runner is not None:
            output, lse = runner(q, k, v, None)
            return (output, lse) if return_lse else output
    q, k, v, _ = run.as_autocast(q, k, v, None)
    checks.check_choice("on_unsupported", on_unsupported, checks.ON_UNSUPPORTED)
    checks.check_flag("causal", causal)
    validation.check_softcap(softcap)
    shape = validation.check_packed(q, k, v)
    window = validation.resolve_window(window_size, causal, shape.q_len, shape.kv_len, "window_size")
    checks.check_choice("skipped", skipped, checks.SKIPPED)
    checks.check_choice("quantization", quantization, QUANTIZATIONS)
    rule = validation.resolve_sparsity(topk, sparsity, shape.heads)
    call = Call(
        shape=shape,
        is_causal=window.right == 0,
        scale=validation.check_scale(softmax_scale, shape.head_dim),
        sparsity=rule,
        score=checks.resolve_score(score),
        quantization=quantization,
        pv_threshold=None if isinstance(rule, Dense) else rule.pv_threshold,
        skipped=skipped,
        window=window,
    )
    longest = (max_seqlen_q, max_seqlen_k)
    obstacle = dense_rules.unsupported(shape, dropout_p, needs_grad_of(q, k, v))
    if torch.compiler.is_compiling() and obstacle is None:
        starts_q, starts_k = torch.as_tensor(cu_seqlens_q), torch.as_tensor(cu_seqlens_k)
        output, lse = operators.varlen(q, k, v, starts_q, starts_k, *longest, *ops.pack(call, backend), return_lse)
    else:
        if torch.compiler.is_compiling():
            bounds = read_bounds("cu_seqlens_q", cu_seqlens_q), read_bounds("cu_seqlens_k", cu_seqlens_k)
        options: Any = {"dropout_p": dropout_p, "on_unsupported": on_unsupported, "backend": backend}
        calls = PackedSequences((q, k, v), bounds, longest, call, with_lse=return_lse, **options)
        if obstacle is None and call.quantization == quantization and not call.has_per_head_numbers:
            call_cache.remember(kind, calls)
        output, lse = calls(q, k, v)
    return (output, lse) if return_lse else output


def _check_bounds(side: str, bounds: Any, max_length: Any, query: Tensor) -> None:
    """Check the types of bounds and of a maximum length, without reading the values of tensors."""
    name = f"cu_seqlens_{side}"
    if isinstance(bounds, Tensor):
        if bounds.ndim != 1 or bounds.dtype not in (torch.int32, torch.int64):
            got = f"shape {tuple(bounds.shape)} and dtype {bounds.dtype}"
            raise TypeError(f"{name}: expected int32 or int64 (n + 1,), got {got}")
        if bounds.device.type != "cpu" and isinstance(query, Tensor) and bounds.device != query.device:
            raise ValueError(f"{name}: expected the query's device {query.device} or the CPU, got {bounds.device}")
    elif not isinstance(bounds, (list, tuple)):
        raise TypeError(f"{name}: expected a tensor, a list or a tuple of ints, got {type(bounds).__name__}")
    elif set(map(type, bounds)) - {int}:
        raise TypeError(f"{name}: expected ints, got {bounds!r}")
    if max_length is not None and (isinstance(max_length, bool) or not isinstance(max_length, (int, torch.SymInt))):
        raise TypeError(f"max_seqlen_{side}: expected an int or None, got {type(max_length).__name__}")


def read_bounds(name: str, bounds: Bounds) -> tuple[int, ...]:
    """Return checked bounds as ints. The values of a GPU tensor are cached until it is modified.

    Args:
        name: name of the argument, for error messages.

    Raises:
        NotImplementedError: the values are not cached, and a CUDA graph is being captured.
    """
    if not isinstance(bounds, Tensor):
        return tuple(bounds)
    if bounds.device.type == "cpu":
        return tuple(bounds.tolist())
    version = None if bounds.is_inference() else bounds._version  # inference tensors do not track changes
    cached_version, numbers = getattr(bounds, _BOUNDS_CACHE, (None, ()))
    if version is not None and version == cached_version:
        return cast(tuple[int, ...], numbers)
    if bounds.is_cuda and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"{name}: expected bounds on the host (a list, a tuple or a CPU tensor) while a CUDA graph is captured, "
            f"got a tensor on {bounds.device}"
        )
    numbers = tuple(bounds.tolist())
    setattr(bounds, _BOUNDS_CACHE, (version, numbers))
    return numbers


def _varlen(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Implement the operator ``varlen``: `varlen_attention` for supported calls."""
    cu_seqlens_q, cu_seqlens_k, *max_lengths, with_lse = arguments[:4] + arguments[-1:]
    packed = tuple(tuple(argument) if isinstance(argument, list) else argument for argument in arguments[4:-1])
    bounds = read_bounds("cu_seqlens_q", cu_seqlens_q), read_bounds("cu_seqlens_k", cu_seqlens_k)
    kind, calls = call_cache.find(query, key, value, None, packed, ("varlen", bounds, *max_lengths, with_lse))
    if calls is None:
        call, backend = ops.unpack(validation.check_packed(query, key, value), packed)
        if not isinstance(call.sparsity, Dense):
            call = replace(call, sparsity=replace(call.sparsity, pv_threshold=call.pv_threshold))
        tensors, longest = (query, key, value), tuple(max_lengths)
        calls = PackedSequences(tensors, bounds, longest, call, with_lse=with_lse, backend=backend)
        if not call.has_per_head_numbers:
            call_cache.remember(kind, calls)
    output, lse = calls(query, key, value)
    return output.contiguous(), lse.contiguous() if with_lse else query.new_empty(0, dtype=torch.float32)


def _varlen_fake(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    *_, with_lse = arguments
    tokens, heads, _ = query.shape
    lse = query.new_empty((heads, tokens) if with_lse else (0,), dtype=torch.float32)
    return query.new_empty(tokens, heads, value.shape[2]), lse


ops.register(
    "varlen",
    "(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    f"SymInt? max_seqlen_q, SymInt? max_seqlen_k, {ops.CALL_SCHEMA}, bool with_lse) -> (Tensor, Tensor)",
    _varlen,
    _varlen_fake,
)
