"""The memory layout of outputs, which is the layout of the query.

Most models store the heads of a token together, as the projections produce them. If the output has the same layout, the
next operator does not copy it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_tokens_first(tensor: Tensor) -> bool:
    """Return whether the heads of a token are closer in memory than the tokens of a head, in (B, H, S, D).

    The result is False for one head that is expanded over all heads, which has stride 0.

    Example:
        >>> is_tokens_first(torch.empty(1, 5, 2, 8).transpose(1, 2)), is_tokens_first(torch.empty(1, 2, 5, 8))
        (True, False)
    """
    return bool(0 < tensor.stride(1) < tensor.stride(2))


def gapless_strides(sizes: Sequence[int], *, tokens_first: bool) -> tuple[int, int, int, int]:
    """Return strides of (B, H, S, D) without gaps.

    Example:
        >>> gapless_strides((1, 2, 5, 4), tokens_first=True), gapless_strides((1, 2, 5, 4), tokens_first=False)
        ((40, 4, 8, 1), (40, 20, 4, 1))
    """
    _, heads, tokens, width = sizes
    if tokens_first:
        return tokens * heads * width, width, heads * width, 1
    return heads * tokens * width, tokens * width, width, 1


def empty_like(query: Tensor, width: int) -> Tensor:
    """Allocate uninitialized memory for a result (B, H, S, width) in the query's layout."""
    batch, heads, tokens, _ = query.shape
    sizes = (batch, heads, tokens, width)
    strides = gapless_strides(sizes, tokens_first=is_tokens_first(query))
    return torch.empty_strided(sizes, strides, dtype=query.dtype, device=query.device)


def match_layout(output: Tensor, query: Tensor) -> Tensor:
    """Return the output in the query's layout, as a copy if its own layout differs.

    Example:
        >>> heads_first = torch.empty(1, 2, 5, 8)
        >>> match_layout(heads_first, torch.empty(1, 2, 5, 4)) is heads_first
        True
        >>> match_layout(heads_first, torch.empty(1, 5, 2, 4).transpose(1, 2)).stride()
        (80, 8, 16, 1)
    """
    batch, heads, tokens, width = output.shape
    strides = gapless_strides((batch, heads, tokens, width), tokens_first=is_tokens_first(query))
    dimensions = zip(output.shape, output.stride(), strides, strict=True)
    if all(actual == expected for size, actual, expected in dimensions if size > 1):  # size 1: any stride is equivalent
        return output
    return empty_like(query, width).copy_(output)
