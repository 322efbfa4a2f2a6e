"""Reorder the tokens of a grid, or restore their order (`masks.ordering`): whole tokens are copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import launch, power_of_two, strided_buffer, strides_of
from sparge.backends.gpu.primitives import head_base
from sparge.backends.gpu.replay import replayed
from sparge.backends.output_layout import is_tokens_first
from sparge.masks.geometry import ceil_div

NUMBERS, MAX_CHANNELS, WARPS = 8192, 512, 4
"""Numbers that a program copies, and the most adjacent ones of a token."""
_MOVES: dict[Any, Any] = {}


@triton.jit(do_not_specialize=["length", "start", "count", "heads"])
def move_kernel(
    tokens_ptr,
    permutation_ptr,
    moved_ptr,
    tokens_strides,
    moved_strides,
    length,
    start,
    count,
    heads,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute moved[b, h, start + i] = tokens[b, h, start + permutation[i]]. Tokens outside of the grid stay in place.

    Grid: pieces of CHANNELS channels of groups of TOKENS tokens of every head, in one dimension. Pieces of a token are
    adjacent programs.

    Reads
        tokens         [B, H, length, WIDTH], with adjacent channels
        permutation    [count] int64
    Writes
        moved          [B, H, length, WIDTH]
    """
    pieces = tl.cdiv(WIDTH, CHANNELS)
    program = tl.program_id(0) // pieces
    groups = tl.cdiv(length, TOKENS)
    flat_head = (program // groups).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    places = program % groups * TOKENS + tl.arange(0, TOKENS)
    in_grid = (places >= start) & (places < start + count)
    sources = start + tl.load(permutation_ptr + places - start, mask=in_grid, other=0)
    sources = tl.where(in_grid, sources, places.to(tl.int64))
    channels = tl.program_id(0) % pieces * CHANNELS + tl.arange(0, CHANNELS)
    inside = (places < length)[:, None]
    if WIDTH % CHANNELS:
        inside = inside & (channels < WIDTH)[None, :]
    from_head = head_base(tokens_ptr, tokens_strides, batch, head)
    to_head = head_base(moved_ptr, moved_strides, batch, head)
    tokens = tl.load(
        from_head + (sources * tokens_strides[2])[:, None] + channels[None, :], mask=inside
    )  # [TOKENS, CHANNELS]
    tl.store(to_head + (places.to(tl.int64) * moved_strides[2])[:, None] + channels[None, :], tokens, mask=inside)


def move(tokens: Tensor, permutation: Tensor, start: int, moved: Tensor) -> None:
    """See `backends.base.Backend.move`. Both tensors have adjacent channels."""
    tokens, moved = _joined(tokens, moved)
    batch, heads, length, width = tokens.shape
    channels = min(power_of_two(width), MAX_CHANNELS)
    count_of_program = NUMBERS // channels
    launch(
        move_kernel,
        batch * heads * ceil_div(length, count_of_program) * ceil_div(width, channels),
        tokens_ptr=tokens,
        permutation_ptr=permutation,
        moved_ptr=moved,
        tokens_strides=strides_of(tokens),
        moved_strides=strides_of(moved),
        length=length,
        start=start,
        count=len(permutation),
        heads=heads,
        WIDTH=width,
        TOKENS=count_of_program,
        CHANNELS=channels,
        num_warps=WARPS,
    )


def moved_copy(tokens: Tensor, permutation: Tensor, start: int, *, tokens_first: bool) -> Tensor:
    """Return a copy of tokens (B, H, S, D), permuted from ``start`` on, with tokens or heads first in memory."""
    batch, heads, length, width = tokens.shape
    moved = strided_buffer(tokens, (batch, heads, length, width), tokens.dtype, tokens_first=tokens_first)
    move(tokens, permutation, start, moved)
    return moved


def move_all(
    tensors: Sequence[Tensor], permutation: Tensor, start: int, tokens_first: bool | None
) -> tuple[Tensor, ...]:
    """See `backends.base.Backend.move_all`. Channels are adjacent. Repeated calls are replayed."""

    def run() -> tuple[Tensor, ...]:
        first = [is_tokens_first(tokens) if tokens_first is None else tokens_first for tokens in tensors]
        pairs = zip(tensors, first, strict=True)
        return tuple([moved_copy(tokens, permutation, start, tokens_first=is_first) for tokens, is_first in pairs])

    kind = (start, tokens_first, len(permutation), *[tokens.shape for tokens in tensors])
    return replayed(_MOVES, kind, (*tensors, permutation), run)


def _joined(tokens: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors as one wide head, if the heads of a token are adjacent in both."""
    batch, heads, length, width = tokens.shape
    if tokens.stride(1) != width or moved.stride(1) != width:
        return tokens, moved
    wide = (batch, 1, length, heads * width)
    one, other = (x.as_strided(wide, (x.stride(0), 0, x.stride(2), 1)) for x in (tokens, moved))
    return one, other
