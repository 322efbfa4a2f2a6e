"""The public functions `attention`, `predict` and `block_sparse_attention`.

Each function collects its options and passes the call to `dispatch.run`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypedDict, overload

from torch import Tensor

from sparge.dispatch import run
from sparge.dispatch.resolve import Options
from sparge.masks.block_mask import BlockMask
from sparge.options.common import Layout, OnUnsupported, PerHead, Quantization, ScoreName, Skipped
from sparge.options.rules import Sparsity
from sparge.options.scores import Score

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionOptions(TypedDict, total=False):
    """The keyword options of `attention`, except ``return_lse``, which determines the return type."""

    window: tuple[int | None, int | None] | None
    topk: PerHead | None
    sparsity: Sparsity | None
    score: ScoreName | Score
    quantization: Quantization
    layout: Layout
    always_keep: Sequence[tuple[int, int]] | None
    exact_queries: Sequence[tuple[int, int]] | None
    skipped: Skipped
    backend: str
    on_unsupported: OnUnsupported


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
    return_lse: Literal[False] = ...,
    **options: Unpack[AttentionOptions],
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
    return_lse: Literal[True],
    **options: Unpack[AttentionOptions],
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
    """Compute attention over the most important blocks of the attention map, without training.

    The first arguments are those of ``torch.nn.functional.scaled_dot_product_attention``. The attention map is divided
    into blocks of 128 queries x 64 keys. A cheap score predicts the importance of every block, and the least important
    blocks are skipped. Short calls run dense, because sparse attention would be slower (`sparge.stats` counts both).

    Args:
        query: (B, H, S_q, D), or (B, S_q, H, D) with ``layout="NHD"``; float16, bfloat16 or float32.
        key: (B, H_kv, S_k, D).
        value: (B, H_kv, S_k, D_v).
        attn_mask: bool (True = may attend) or additive, broadcastable to (B, H, S_q, S_k). An additive mask hides keys
            with -inf or with the lowest number of its dtype. It may be combined with ``is_causal``. torch's
            ``causal_lower_right`` and ``causal_upper_left`` are supported.
        dropout_p: must be 0.0; sparse attention has no dropout.
        is_causal: query i sees keys up to i + S_k - S_q (aligned bottom-right, as with a KV cache).
        scale: factor on the scores. Default: 1 / sqrt(D).
        enable_gqa: allow H to be a multiple of H_kv.
        window: (left, right), as FlashAttention's ``window_size``: query i is at key position p = i + S_k - S_q and
            sees keys p - left to p + right. None or -1 means no bound. ``(None, 0)`` is the same as ``is_causal``. A
            window may be combined with ``attn_mask``.
        topk: share of the visible blocks to keep, in (0, 1]. Default: 0.5. A number is a `Budget` of the whole call:
            heads and query blocks with spread-out attention keep more blocks than others. A tensor of shape (H,) is a
            `TopK`: every query block of a head keeps the share of that head.
        sparsity: a `Budget`, `TopK`, `TopCdf` or `Dense` in place of ``topk``, with further options.
        score: how the importance of blocks is predicted: "moment" (default), "spread", or "mean", the paper's score.
            "spread" is for reordered tokens (`sparge.masks.ordering`) with ``skipped="mean"``. ``Moment(samples)`` sets
            the number of sampled queries.
        quantization: "none"; "int8_fp8" or "int8_fp16" (Q K^T in INT8, P V in FP8 or FP16); "int8_fp8_fast", which is
            "int8_fp8" with P computed without exp2 (on Hopper without ``attn_mask``, and on the reference backend); or
            "auto" (default), the fastest on the device. With a named INT8/FP8 mode, short calls are sparse too.
        layout: "HND" (default) or "NHD", the layout of inputs and output.
        always_keep: key ranges ``[(start, stop), ...]`` whose blocks every query block keeps, for example text tokens.
        exact_queries: query ranges whose query blocks keep all visible key blocks, for example text tokens. These
            blocks count toward a `Budget`.
        skipped: "drop" omits skipped blocks. "mean" replaces each of them by one key and one value, the means of the
            block, weighted by its number of visible keys. "auto" (default) is "drop" for causal attention and for masks
            other than bool masks over keys, else "mean". A skipped block is dropped in any case if only some queries of
            the query block see it, as at the edge of a window.
        return_lse: also return the log-sum-exp of the scores.
        backend: "auto" (default), "hopper", "triton", "torch" or "reference". A named backend never falls back to
            dense.
        on_unsupported: what ``backend="auto"`` does with unsupported calls (dropout, gradients, head_dim outside
            8..256): "raise" (default), "warn" and run dense, or run "dense" without a warning. These dense calls
            cannot return the LSE.

    Returns:
        The output (B, H, S_q, D_v) in the query's dtype and layout. With ``return_lse`` also the LSE (B, H, S_q),
        natural log, float32. For a query that sees no key, the output is 0 and the LSE is -inf.

    Raises:
        TypeError, ValueError: an argument is invalid.
        NotImplementedError: the call needs dropout or gradients, or its head_dim or device is not supported.

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
    options = Options(
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window,
        topk,
        sparsity,
        score,
        quantization,
        layout,
        always_keep,
        exact_queries,
        skipped,
        return_lse,
        backend,
        on_unsupported,
    )
    output, lse = run.attention(query, key, value, attn_mask, options)
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
    """Predict the blocks of the attention map to keep.

    The arguments are those of `attention`. Unlike `attention`, this function also predicts masks for short calls. Pass
    ``skipped="auto"`` to `block_sparse_attention` to handle skipped blocks as `attention` does.

    Returns:
        A `BlockMask` of the kept blocks of 128 queries x 64 keys.

    Raises:
        TypeError, ValueError: an argument is invalid.
        NotImplementedError: the backend does not support the device.

    Example:
        >>> import torch, sparge
        >>> q, k = torch.randn(1, 2, 4096, 64), torch.randn(1, 2, 4096, 64)
        >>> mask = sparge.predict(q, k, topk=0.25)
        >>> mask.shape, mask.density()
        ((1, 2, 32, 64), 0.25)
    """
    options = Options(
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
        topk=topk,
        sparsity=sparsity,
        score=score,
        layout=layout,
        always_keep=always_keep,
        exact_queries=exact_queries,
        backend=backend,
    )
    return run.predict(query, key, attn_mask, options)


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
    """Compute attention over the blocks that a mask keeps.

    Args:
        mask: a `BlockMask`, or a bool tensor broadcastable to (B, H, ceil(S_q / 128), ceil(S_k / 64)).
        is_causal: apply causality inside the kept blocks. Default: that of the `BlockMask`, or False for a tensor.
        window: apply this window inside the kept blocks. Default: that of the `BlockMask`, or none for a tensor.
        pv_threshold: skip the product P V of 64 rows if all of their scores are below the running maximum by more than
            this (negative, natural log). One number or a tensor (H,). Default: skip nothing.
        skipped: "drop" (default), "mean" or "auto", as in `attention`.

    The other arguments and the result are those of `attention`. If a query block keeps no block and all of its skipped
    blocks are dropped, its output is 0 and its LSE is -inf.

    Raises:
        TypeError, ValueError: an argument is invalid.
        NotImplementedError: the call needs gradients, or its head_dim or device is not supported.

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
    options = Options(
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
        quantization=quantization,
        layout=layout,
        skipped=skipped,
        return_lse=return_lse,
        backend=backend,
        pv_threshold=pv_threshold,
    )
    output, lse = run.block_sparse_attention(query, key, value, mask, attn_mask, options)
    return (output, lse) if return_lse else output
