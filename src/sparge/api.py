"""The three public functions: validate -> `Call` -> decide -> operator.

`validation` checks what the caller passed, `decide` says sparse or dense, `ops` hands the call to a backend.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends import base
from sparge.call import Call
from sparge.dispatch import call_cache, dense_rules, ops, validation
from sparge.dispatch.dense_rules import Reason
from sparge.dispatch.gradients import inside_autograd_function, needs_grad_of
from sparge.masks.block_mask import BlockMask
from sparge.masks.ordering import TokenOrder
from sparge.masks.visibility import allowed_elements, window_elements
from sparge.masks.window import Window
from sparge.options import checks
from sparge.options.common import Layout, OnUnsupported, PerHead, Quantization, ScoreName, Skipped
from sparge.options.rules import Dense, Sparsity, check_pv_threshold
from sparge.options.scores import Score


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window: tuple[int | None, int | None] | None = ...,
    topk: PerHead | None = ...,
    sparsity: Sparsity | None = ...,
    score: ScoreName | Score = ...,
    quantization: Quantization = ...,
    layout: Layout = ...,
    always_keep: Sequence[tuple[int, int]] | None = ...,
    exact_queries: Sequence[tuple[int, int]] | None = ...,
    skipped: Skipped = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
    on_unsupported: OnUnsupported = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = ...,
    dropout_p: float = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    enable_gqa: bool = ...,
    *,
    window: tuple[int | None, int | None] | None = ...,
    topk: PerHead | None = ...,
    sparsity: Sparsity | None = ...,
    score: ScoreName | Score = ...,
    quantization: Quantization = ...,
    layout: Layout = ...,
    always_keep: Sequence[tuple[int, int]] | None = ...,
    exact_queries: Sequence[tuple[int, int]] | None = ...,
    skipped: Skipped = ...,
    return_lse: Literal[True],
    backend: str = ...,
    on_unsupported: OnUnsupported = ...,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    topk: PerHead | None = None,
    sparsity: Sparsity | None = None,
    score: ScoreName | Score = "moment",
    quantization: Quantization = "auto",
    layout: Layout = "HND",
    always_keep: Sequence[tuple[int, int]] | None = None,
    exact_queries: Sequence[tuple[int, int]] | None = None,
    skipped: Skipped = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    on_unsupported: OnUnsupported = "raise",
) -> Tensor | tuple[Tensor, Tensor]:
    """Sparse attention with the signature of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: (B, H, S_q, D), or (B, S_q, H, D) with ``layout="NHD"``; float16, bfloat16 or float32.
        key: (B, H_kv, S_k, D).
        value: (B, H_kv, S_k, D_v).
        attn_mask: bool (True = may attend) or additive, broadcastable to (B, H, S_q, S_k). An additive mask hides with
            -inf or its dtype's lowest number. May be combined with ``is_causal``. torch's ``causal_lower_right`` and
            ``causal_upper_left`` mean what they say.
        dropout_p: 0.0; sparse attention has no dropout.
        is_causal: query i sees keys up to i + S_k - S_q (aligned bottom-right, as for a KV prefix).
        scale: factor on the scores, 1 / sqrt(D) by default.
        enable_gqa: allow H to be a multiple of H_kv.
        window: (left, right), as FlashAttention's window_size: query i, which stands at key p = i + S_k - S_q, sees
            keys p - left to p + right. None (or -1) in either place is no bound on that side. ``is_causal`` is
            right = 0, and (None, 0) is causal. May be combined with ``attn_mask``.
        topk: share of the visible blocks to keep, in (0, 1]; 0.5 by default. A `Budget`: heads and rows get of it what
            they need. A tensor (H,) is the share each row of a head keeps, a `TopK`.
        sparsity: `Budget`, `TopK`, `TopCdf` or `Dense` instead of ``topk``, with all their thresholds.
        score: "moment" (default); "spread", for tokens in an order of `sparge.masks.ordering` whose skipped blocks are
            replaced; or the paper's "mean". ``Moment(samples)`` sets the number of sampled queries.
        quantization: "none"; "int8_fp8" or "int8_fp16" (Q K^T in INT8, P V in FP8 or FP16); "int8_fp8_fast", which
            is "int8_fp8" with probabilities rounded to FP8 straight from the scores instead of through exponentials
            (Hopper, without ``attn_mask``, and the reference); or "auto": the fastest on the device. Naming one with
            8 bits also switches the crossover off, below which "auto" runs dense.
        layout: "HND" or "NHD", of inputs and output.
        always_keep: key ranges ``[(start, stop), ...]`` whose blocks every row keeps, e.g. text tokens.
        exact_queries: query ranges whose blocks of 128 keep all that they see, e.g. text tokens. Under a `Budget` this
            is part of it.
        skipped: what becomes of a block that is not kept: "drop" leaves it out; "mean" lets it enter the softmax as one
            key of 64 times the weight, with the mean of its keys and of its values; "auto" is "mean" unless attention
            is causal or has a mask other than a bool one over keys. A block that only some queries of a row of blocks
            see, at the edge of a window, has no mean.
        return_lse: also return the log-sum-exp of the scores.
        backend: "auto", "hopper", "triton", "torch" or "reference". A named backend never falls back to dense.
        on_unsupported: what ``backend="auto"`` does with calls no sparse backend can serve (dropout, autograd,
            head_dim outside 8..256): "raise", "warn" and run dense, or silently run "dense"; dense, they have no LSE.

    Returns:
        The output (B, H, S_q, D_v) in the query's dtype and layout. With ``return_lse`` also the LSE (B, H, S_q),
        natural log, float32. A query that sees nothing gives 0 and -inf.

    Raises:
        TypeError, ValueError: an argument is not what was expected.
        NotImplementedError: dropout, gradients, head_dim or device that cannot be served.

    Example:
        >>> import torch, sparge
        >>> q, k, v = (torch.randn(1, 2, 4096, 64) for _ in range(3))
        >>> out = sparge.attention(q, k, v, is_causal=True, topk=0.25)
        >>> out.shape
        torch.Size([1, 2, 4096, 64])
        >>> out, lse = sparge.attention(q, k, v, sparsity=sparge.TopCdf(0.95), return_lse=True)
        >>> lse.shape
        torch.Size([1, 2, 4096])
    """
    kind = None
    if not torch.compiler.is_compiling():
        flags = (type(is_causal), type(enable_gqa), type(return_lse), type(topk), type(scale), type(dropout_p))
        choices = (score, quantization, layout, skipped, backend, on_unsupported)
        options = (is_causal, enable_gqa, return_lse, topk, scale, dropout_p, window, sparsity, flags, choices)
        kind = call_cache.kind_of(query, key, value, attn_mask, always_keep, exact_queries, options)
        runner = call_cache.find(kind)
        if runner is not None:
            output, lse = runner(query, key, value, attn_mask)
            return (output, lse) if return_lse else output
    output, lse, runner = resolve_and_run(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window=window,
        topk=topk,
        sparsity=sparsity,
        score=score,
        quantization=quantization,
        layout=layout,
        always_keep=always_keep,
        exact_queries=exact_queries,
        skipped=skipped,
        return_lse=return_lse,
        backend=backend,
        on_unsupported=on_unsupported,
        stacklevel=3,
    )
    if runner is not None:
        call_cache.remember(kind, runner)
    return (output, lse) if return_lse else output


def resolve_and_run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    topk: PerHead | None = None,
    sparsity: Sparsity | None = None,
    score: ScoreName | Score = "moment",
    quantization: Quantization = "auto",
    layout: Layout = "HND",
    always_keep: Sequence[tuple[int, int]] | None = None,
    exact_queries: Sequence[tuple[int, int]] | None = None,
    skipped: Skipped = "auto",
    return_lse: bool = False,
    backend: str = "auto",
    on_unsupported: OnUnsupported = "raise",
    order: TokenOrder | None = None,
    stacklevel: int = 2,
) -> tuple[Tensor, Tensor, call_cache.Runner | None]:
    """Check the arguments of `attention`, decide how the call runs, and run it.

    Args:
        order: reorder the tokens for this call; the output has the original order. Requires as many queries as keys and
            no mask; the LSE is undefined.
        stacklevel: of warnings, counted from here.

    Returns:
        Output, LSE, and a runner for further calls of the same kind; None if each of them must be resolved again.
    """
    checks.check_choice("on_unsupported", on_unsupported, checks.ON_UNSUPPORTED)
    checks.check_flag("is_causal", is_causal)
    checks.check_flag("return_lse", return_lse)
    named, quantization = quantization, checks.resolve_quantization_name(quantization, stacklevel + 1)
    strides = _last_strides(query, key, value)
    query, key, value, shape = validation.check_query_key_value(query, key, value, layout, enable_gqa)
    scale = validation.check_scale(scale, shape.head_dim)
    # Tensors that are copied first, and old names, which warn, are resolved each time.
    is_repeatable = strides == (1, 1, 1) and scale > 0 and named == quantization
    query, scale = positively_scaled(query, scale)
    attn_mask, is_causal = validation.resolve_causal_bias(attn_mask, is_causal, shape, query.device)
    bounds = validation.resolve_window(window, is_causal, shape.q_len, shape.kv_len)
    is_causal = bounds.right == 0
    attn_mask = validation.check_attn_mask(attn_mask, shape, query.device)
    rule = validation.resolve_sparsity(topk, sparsity, shape.heads)
    resolved_score = checks.resolve_score(score)
    ranges = validation.check_always_keep(always_keep, shape.kv_len)
    exact = validation.check_exact_queries(exact_queries, shape.q_len)
    checks.check_choice("skipped", skipped, checks.SKIPPED)
    chosen = base.resolve(backend, query.device)
    reason = dense_rules.by_arguments(shape, bounds, rule, quantization, backend, chosen, query.device, query.dtype)
    needs_grad = needs_grad_of(query, key, value, attn_mask)
    if backend == "auto" and on_unsupported != "raise" and inside_autograd_function():
        needs_grad = True  # its backward calls again and goes dense: so does its forward
    obstacle = dense_rules.unsupported(shape, dropout_p, needs_grad)
    if obstacle is None and reason is None and skipped == "mean":
        obstacle = dense_rules.no_means(attn_mask, shape.group)
    if obstacle is not None:
        if on_unsupported == "raise" or backend != "auto":
            raise NotImplementedError(obstacle.message)
        if return_lse:
            raise NotImplementedError(f"{obstacle.message}; running dense instead cannot return the LSE")
        if on_unsupported == "warn" and not torch.compiler.is_compiling():  # a warning cannot be traced
            warnings.warn(f"sparge runs dense: {obstacle.message}", stacklevel=stacklevel)
        dense_rules.count(Reason.UNSUPPORTED, detail=obstacle.word)
        call = Call(shape, is_causal, scale, attn_mask=attn_mask, window=bounds)
        output = _in_layout(_sdpa(query, key, value, call, dropout_p, enable_gqa), layout)
        return output, output, None

    runner: call_cache.Runner | None = None
    resolved = base.resolve_quantization(quantization, chosen, query.device, has_mask=attn_mask is not None)
    if reason is None:
        assert not isinstance(rule, Dense)
        call = Call(
            shape=shape,
            is_causal=is_causal,
            scale=scale,
            sparsity=rule,
            score=resolved_score,
            always_keep=ranges,
            exact_queries=exact,
            quantization=resolved,
            pv_threshold=rule.pv_threshold,
            attn_mask=attn_mask,
            skipped=validation.resolve_skipped(skipped, is_causal, attn_mask, shape),
            window=bounds,
            exact_lse=return_lse,
        )
        if is_repeatable and not call.has_per_head_numbers:
            runner = call_cache.SparseCalls(call, chosen, query.dtype, layout=layout, with_lse=return_lse, order=order)
        output, lse = ops.attention(query, key, value, call, chosen, order)
    else:
        resolved = "none" if reason in (Reason.CROSSOVER, Reason.WINDOW) else resolved
        call = Call(shape, is_causal, scale, quantization=resolved, attn_mask=attn_mask, window=bounds)
        words = dense_rules.describe(reason)
        if is_repeatable:
            runner = call_cache.DenseCalls(call, backend, chosen, query, words, with_lse=return_lse, layout=layout)
        output, lse = ops.dense(query, key, value, call, backend, with_lse=return_lse, words=words)
    return _in_layout(output, layout), lse, runner


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    quantization: Quantization = "none",
    backend: str = "auto",
    return_lse: bool = False,
    words: str = "",
    window: tuple[int | None, int | None] | None = None,
) -> Any:
    """`attention` over all blocks, for a call of a model whose integration knows why it is dense.

    The arguments and the result are those of `attention`, which would count the call as one that was asked for.

    Args:
        words: what it is counted as; nothing where it was counted before.
    """
    query, key, value, shape = validation.check_query_key_value(query, key, value, "HND", enable_gqa)
    query, scale = positively_scaled(query, validation.check_scale(scale, shape.head_dim))
    attn_mask = validation.check_attn_mask(attn_mask, shape, query.device)
    chosen = base.resolve(backend, query.device)
    resolved = base.resolve_quantization(quantization, chosen, query.device, has_mask=attn_mask is not None)
    bounds = validation.resolve_window(window, is_causal, shape.q_len, shape.kv_len)
    call = Call(shape, bounds.right == 0, scale, quantization=resolved, attn_mask=attn_mask, window=bounds)
    output, lse = ops.dense(query, key, value, call, backend, with_lse=return_lse, words=words)
    return (output, lse) if return_lse else output


def predict(
    query: Tensor,
    key: Tensor,
    *,
    topk: PerHead | None = None,
    sparsity: Sparsity | None = None,
    score: ScoreName | Score = "moment",
    is_causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool = False,
    layout: Layout = "HND",
    always_keep: Sequence[tuple[int, int]] | None = None,
    exact_queries: Sequence[tuple[int, int]] | None = None,
    backend: str = "auto",
) -> BlockMask:
    """Predict which blocks of the attention map matter.

    The arguments are those of `attention`. Unlike it, `predict` always predicts, however short the sequence. What
    becomes of the other blocks is said where the mask is used: ``block_sparse_attention(..., skipped="auto")`` does as
    `attention`.

    Returns:
        A `BlockMask` of the kept blocks of 128 queries x 64 keys.

    Raises:
        TypeError, ValueError: an argument is not what was expected.
        NotImplementedError: the backend cannot serve the device.

    Example:
        >>> import torch, sparge
        >>> q, k = torch.randn(1, 2, 4096, 64), torch.randn(1, 2, 4096, 64)
        >>> mask = sparge.predict(q, k, topk=0.25)
        >>> mask.shape, mask.density()
        ((1, 2, 32, 64), 0.25)
    """
    kind = None
    if not torch.compiler.is_compiling():
        flags = (type(is_causal), type(enable_gqa), type(topk), type(scale))
        options = ("predict", is_causal, enable_gqa, topk, scale, window, sparsity, score, layout, backend, flags)
        kind = call_cache.kind_of(query, key, key, attn_mask, always_keep, exact_queries, options)
        runner = call_cache.find(kind)
        if runner is not None:
            found: BlockMask = runner(query, key, attn_mask)
            return found
    strides = (query.stride(-1), key.stride(-1)) if kind is not None else ()
    checks.check_flag("is_causal", is_causal)
    query, key, shape = validation.check_query_key(query, key, layout, enable_gqa)
    scale = validation.check_scale(scale, shape.head_dim)
    is_repeatable = strides == (1, 1) and scale > 0
    query, scale = positively_scaled(query, scale)
    attn_mask, is_causal = validation.resolve_causal_bias(attn_mask, is_causal, shape, query.device)
    call = Call(
        shape=shape,
        is_causal=is_causal,
        scale=scale,
        sparsity=validation.resolve_sparsity(topk, sparsity, shape.heads),
        score=checks.resolve_score(score),
        always_keep=validation.check_always_keep(always_keep, shape.kv_len),
        exact_queries=validation.check_exact_queries(exact_queries, shape.q_len),
        attn_mask=validation.check_attn_mask(attn_mask, shape, query.device),
        window=validation.resolve_window(window, is_causal, shape.q_len, shape.kv_len),
    )
    chosen = base.resolve(backend, query.device)
    if is_repeatable and not call.has_per_head_numbers:
        call_cache.remember(kind, call_cache.Predictions(call, chosen, layout=layout))
    return ops.predict(query.detach(), key.detach(), call, chosen)


def block_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask | Tensor,
    *,
    is_causal: bool | None = None,
    window: tuple[int | None, int | None] | None = None,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    pv_threshold: PerHead | None = None,
    skipped: Skipped = "drop",
    quantization: Quantization = "auto",
    layout: Layout = "HND",
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over the blocks a mask keeps.

    Args:
        mask: a `BlockMask`, or a bool tensor broadcastable to (B, H, ceil(S_q / 128), ceil(S_k / 64)).
        is_causal: apply causality inside the kept blocks. By default as the `BlockMask` says, False for a tensor.
        window: apply this window inside the kept blocks, in the same way.
        pv_threshold: skip P V of 64 rows whose scores lie further below the running maximum (negative, natural log).
        skipped: "drop" (default: only what the mask says), "mean" or "auto", as in `attention`. A block that is only
            partly visible to a row of blocks, as on the diagonal or at a window's edge, has no mean: it is dropped.

    The other arguments and the result are those of `attention`. A row that keeps nothing, and has no means, gives 0 and
    LSE -inf.

    Raises:
        TypeError, ValueError: an argument is not what was expected.
        NotImplementedError: gradients, head_dim or device that cannot be served.

    Example:
        >>> import torch, sparge
        >>> q, k, v = (torch.randn(1, 2, 512, 64) for _ in range(3))
        >>> mask = sparge.predict(q, k, topk=0.5, is_causal=True)
        >>> sparge.block_sparse_attention(q, k, v, mask).shape
        torch.Size([1, 2, 512, 64])
        >>> sparge.block_sparse_attention(q, k, v, torch.ones(8, 4, dtype=torch.bool))
        Traceback (most recent call last):
        ...
        ValueError: mask: expected a shape that broadcasts to (B, H, ceil(S_q / 128), ceil(S_k / 64)) = (1, 2, 4, 8) ...
    """
    kind = None
    if not torch.compiler.is_compiling():
        of_blocks = call_cache.kind_of_blocks(mask)
        if of_blocks is not None:
            flags = (type(is_causal), type(enable_gqa), type(return_lse), type(pv_threshold), type(scale))
            choices = (skipped, quantization, layout, backend)
            options = (is_causal, enable_gqa, return_lse, pv_threshold, scale, window, flags, choices)
            kind = call_cache.kind_of(query, key, value, attn_mask, None, None, ("blocks", of_blocks, options))
        runner = call_cache.find(kind)
        if runner is not None:
            output, lse = runner(query, key, value, attn_mask, mask)
            return (output, lse) if return_lse else output
    if is_causal is not None:
        checks.check_flag("is_causal", is_causal)
    checks.check_flag("return_lse", return_lse)
    named, quantization = quantization, checks.resolve_quantization_name(quantization)
    strides = (query.stride(-1), key.stride(-1), value.stride(-1)) if kind is not None else ()
    query, key, value, shape = validation.check_query_key_value(query, key, value, layout, enable_gqa)
    scale = validation.check_scale(scale, shape.head_dim)
    is_repeatable = strides == (1, 1, 1) and scale > 0 and named == quantization
    query, scale = positively_scaled(query, scale)
    attn_mask, _ = validation.resolve_causal_bias(attn_mask, bool(is_causal), shape, query.device, as_mask=True)
    obstacle = dense_rules.unsupported(shape, 0.0, needs_grad_of(query, key, value, attn_mask))
    if obstacle is not None:
        raise NotImplementedError(obstacle.message)
    if pv_threshold is not None:
        check_pv_threshold(pv_threshold)
        validation.check_per_head("pv_threshold", pv_threshold, shape.heads)
    chosen = base.resolve(backend, query.device)
    given, mask = mask, validation.check_block_mask(mask, shape, is_causal, query.device, window)
    attn_mask = validation.check_attn_mask(attn_mask, shape, query.device)
    call = Call(
        shape=shape,
        is_causal=mask.is_causal,
        scale=scale,
        quantization=base.resolve_quantization(quantization, chosen, query.device, has_mask=attn_mask is not None),
        pv_threshold=pv_threshold,
        attn_mask=attn_mask,
        skipped=validation.resolve_skipped(skipped, mask.is_causal, attn_mask, shape),
        window=mask.window,
        exact_lse=return_lse,
    )
    if is_repeatable and given is mask and not call.has_per_head_numbers:
        call_cache.remember(kind, call_cache.SparseCalls(call, chosen, query.dtype, layout=layout, with_lse=return_lse))
    output, lse = ops.attend(query, key, value, mask, call, chosen)
    output = _in_layout(output, layout)
    return (output, lse) if return_lse else output


def _last_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of channels; nothing for what is traced, and for anything but plain tensors."""
    if torch.compiler.is_compiling():
        return ()
    are_plain = all(type(tensor) is Tensor and tensor.ndim > 0 for tensor in tensors)
    if not are_plain or any(tensor.is_nested or tensor.layout != torch.strided for tensor in tensors):
        return ()
    return tuple([tensor.stride(-1) for tensor in tensors])


def positively_scaled(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same scores by a scale above 0: torch's kernels hide with -inf before they scale, and -inf times 0 is NaN."""
    if scale > 0:
        return query, scale
    return (-query, -scale) if scale < 0 else (query * 0.0, 1.0)


def _in_layout(output: Tensor, layout: str) -> Tensor:
    return output.transpose(1, 2) if layout == "NHD" else output


def _sdpa(query: Tensor, key: Tensor, value: Tensor, call: Call, dropout_p: float, enable_gqa: bool) -> Tensor:
    """torch's attention with this library's causal alignment and window, for calls that need dropout or gradients."""
    shape, attn_mask, is_causal = call.shape, call.attn_mask, call.is_causal
    is_plain = call.window == Window() or (is_causal and call.window.left is None and shape.q_len == shape.kv_len)
    if not is_plain or (is_causal and attn_mask is not None):
        inside = window_elements(shape, call.window, torch.arange(shape.q_len, device=query.device))
        if attn_mask is None or attn_mask.dtype == torch.bool:
            attn_mask = inside if attn_mask is None else attn_mask & inside
        else:
            attn_mask = attn_mask.masked_fill(~inside, -torch.inf)
        is_causal = False
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.masked_fill(~allowed_elements(attn_mask), -torch.inf).to(query.dtype)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=call.scale, enable_gqa=enable_gqa
    )
