"""FlashAttention's functions with their original names and signatures, computed by this library's sparse attention.

    flash_attn_func             a batch of sequences
    flash_attn_varlen_func      packed sequences

They are for programs that already call FlashAttention. They keep half of the visible blocks, run short calls dense, and
do not support gradients. `sparge.attention` and `sparge.varlen_attention` have all options.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sparge import api, varlen
from sparge.dispatch import validation
from sparge.dispatch.sinks import apply_sinks
from sparge.options import checks


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Compute attention over half of the visible blocks, for tensors in layout (B, S, H, D).

    Args:
        q: (B, S_q, H, D).
        k: (B, S_k, H_kv, D).
        v: (B, S_k, H_kv, D_v).

    The other arguments, the result and the errors are those of `flash_attn_varlen_func`; the LSE is (B, H, S_q).

    Example:
        >>> import torch
        >>> from sparge.compat import flash_attn_func
        >>> q, k, v = (torch.randn(1, 512, 2, 64) for _ in range(3))
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([1, 512, 2, 64])
    """
    _check(q, alibi_slopes, deterministic, return_attn_probs, s_aux)
    checks.check_flag("causal", causal)
    validation.check_softcap(softcap)
    with_lse = return_attn_probs or s_aux is not None
    call = {"dropout_p": dropout_p, "is_causal": causal, "scale": softmax_scale, "return_lse": with_lse}
    attention: Any = api.attention
    result = attention(q, k, v, enable_gqa=True, layout="NHD", window=window_size, **call)
    return _in_published_form(result, s_aux, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: None = None,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Compute attention over half of the visible blocks of each segment of packed sequences.

    Args:
        max_seqlen_q, max_seqlen_k: maximum lengths of segments. Numbers are checked. Tensors, which transformers passes
            if it derives segments from position ids, are not read, because the bounds are sufficient.
        alibi_slopes, block_table: must be None; ALiBi and paged KV caches are not supported.
        deterministic: True or False without any effect: the forward pass is always deterministic, and there is no
            backward pass.
        return_attn_probs: also return the LSE (H, total_q), and None in place of the dropout probabilities.
        s_aux: attention sinks (H,) as in FlashAttention 3: logits in the softmax denominator that have no value.

    The other arguments and the errors are those of `sparge.varlen_attention`.

    Example:
        >>> import torch
        >>> from sparge.compat import flash_attn_varlen_func
        >>> q, k, v = (torch.randn(700, 2, 64) for _ in range(3))
        >>> bounds = torch.tensor([0, 200, 700], dtype=torch.int32)
        >>> out, lse, _ = flash_attn_varlen_func(q, k, v, bounds, bounds, 500, 500, causal=True, return_attn_probs=True)
        >>> out.shape, lse.shape
        (torch.Size([700, 2, 64]), torch.Size([2, 700]))
    """
    _check(q, alibi_slopes, deterministic, return_attn_probs, s_aux, block_table)
    longest = [None if isinstance(length, Tensor) else length for length in (max_seqlen_q, max_seqlen_k)]
    positional = (*longest, dropout_p, softmax_scale, causal, window_size, softcap)
    with_lse = return_attn_probs or s_aux is not None
    attention: Any = varlen.varlen_attention
    result = attention(q, k, v, cu_seqlens_q, cu_seqlens_k, *positional, return_lse=with_lse)
    return _in_published_form(result, s_aux, return_attn_probs)


def _in_published_form(result: Any, s_aux: Tensor | None, return_attn_probs: bool) -> Any:
    """Apply sinks to an output (..., tokens, H, D), and return the result in FlashAttention's form."""
    if s_aux is not None:
        output, lse = result
        return apply_sinks(output.transpose(-3, -2), lse, s_aux).transpose(-3, -2)
    return (*result, None) if return_attn_probs else result


def _check(
    query: Tensor, alibi_slopes: Any, deterministic: Any, return_attn_probs: Any, s_aux: Any, block_table: Any = None
) -> None:
    for name, value in (("alibi_slopes", alibi_slopes), ("block_table", block_table)):
        if value is not None:
            raise NotImplementedError(f"{name}: expected None, got {type(value).__name__}")
    checks.check_flag("deterministic", deterministic)
    checks.check_flag("return_attn_probs", return_attn_probs)
    if s_aux is None:
        return
    if not isinstance(s_aux, Tensor) or s_aux.shape != query.shape[-2:-1]:
        got = tuple(s_aux.shape) if isinstance(s_aux, Tensor) else type(s_aux).__name__
        raise ValueError(f"s_aux: expected a number for each head, {tuple(query.shape[-2:-1])}, got {got}")
    if return_attn_probs:
        raise NotImplementedError("return_attn_probs: expected False with s_aux, got True")
