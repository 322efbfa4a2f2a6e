"""Tokens of a grid along an order of `ordering`, or back: whole rows are copied to other places."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import launch, power_of_two, strided_buffer, strides_of
from sparge.backends.gpu.replay import Recordings, replayed
from sparge.backends.output_layout import is_tokens_first
from sparge.masks.geometry import ceil_div

NUMBERS, MAX_CHANNELS, WARPS = 8192, 512, 4
"""That a program copies, and how many of them next to each other at most."""
_MOVES = Recordings()


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
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """moved[b, h, start + i] = tokens[b, h, start + permutation[i]] for the tokens of a grid; the others stay.

    Grid: CHANNELS of groups of ROWS tokens of every head, in one dimension; pieces of a token are neighbours.

    Reads
        tokens         [B, H, length, WIDTH], channels close together
        permutation    [count] int64
    Writes
        moved          [B, H, length, WIDTH]
    """
    pieces = tl.cdiv(WIDTH, CHANNELS)
    program = tl.program_id(0) // pieces
    groups = tl.cdiv(length, ROWS)
    flat_head = (program // groups).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    places = program % groups * ROWS + tl.arange(0, ROWS)
    in_grid = (places >= start) & (places < start + count)
    sources = start + tl.load(permutation_ptr + places - start, mask=in_grid, other=0)
    sources = tl.where(in_grid, sources, places.to(tl.int64))
    channels = tl.program_id(0) % pieces * CHANNELS + tl.arange(0, CHANNELS)
    inside = (places < length)[:, None]
    if WIDTH % CHANNELS:
        inside = inside & (channels < WIDTH)[None, :]
    from_head = tokens_ptr + batch * tokens_strides[0] + head * tokens_strides[1]
    to_head = moved_ptr + batch * moved_strides[0] + head * moved_strides[1]
    rows = tl.load(from_head + (sources * tokens_strides[2])[:, None] + channels[None, :], mask=inside)
    tl.store(to_head + (places.to(tl.int64) * moved_strides[2])[:, None] + channels[None, :], rows, mask=inside)


def move(tokens: Tensor, permutation: Tensor, start: int, moved: Tensor) -> None:
    """See `backends.base.Backend.move`; channels lie close together in both."""
    tokens, moved = _joined(tokens, moved)
    batch, heads, length, width = tokens.shape
    channels = min(power_of_two(width), MAX_CHANNELS)
    rows = NUMBERS // channels
    launch(
        move_kernel,
        batch * heads * ceil_div(length, rows) * ceil_div(width, channels),
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
        ROWS=rows,
        CHANNELS=channels,
        num_warps=WARPS,
    )


def moved_copy(tokens: Tensor, permutation: Tensor, start: int, *, tokens_first: bool) -> Tensor:
    """Return a copy of tokens (B, H, S, D) with those from ``start`` on permuted; it lies tokens or heads first."""
    batch, heads, length, width = tokens.shape
    moved = strided_buffer(tokens, (batch, heads, length, width), tokens.dtype, tokens_first=tokens_first)
    move(tokens, permutation, start, moved)
    return moved


def move_all(
    tensors: Sequence[Tensor], permutation: Tensor, start: int, tokens_first: bool | None
) -> tuple[Tensor, ...]:
    """See `backends.base.Backend.move_all`; channels lie close together. What is repeated is replayed."""

    def run() -> tuple[Tensor, ...]:
        first = [is_tokens_first(tokens) if tokens_first is None else tokens_first for tokens in tensors]
        pairs = zip(tensors, first, strict=True)
        return tuple([moved_copy(tokens, permutation, start, tokens_first=lies_so) for tokens, lies_so in pairs])

    kind = (start, tokens_first, len(permutation), *[tokens.shape for tokens in tensors])
    return replayed(_MOVES, kind, (*tensors, permutation), run)


def _joined(tokens: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Both as one wide head, where the heads of a token lie next to each other in both."""
    batch, heads, length, width = tokens.shape
    if tokens.stride(1) != width or moved.stride(1) != width:
        return tokens, moved
    wide = (batch, 1, length, heads * width)
    one, other = (x.as_strided(wide, (x.stride(0), 0, x.stride(2), 1)) for x in (tokens, moved))
    return one, other
