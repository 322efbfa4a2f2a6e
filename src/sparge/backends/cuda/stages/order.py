"""Tokens of a grid along an order of `ordering`, or back: whole rows are copied to other places."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparge.backends.cuda.launch import launch, power_of_two, strides_of
from sparge.geometry import ceil_div

ROWS, WARPS = 64, 4
"""Tokens that a program copies; bound by memory."""


@triton.jit(do_not_specialize=["length", "start", "count", "heads", "width"])
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
    width,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """moved[b, h, start + i] = tokens[b, h, start + permutation[i]] for the tokens of a grid; the others stay.

    Grid: groups of ROWS tokens of every head, in one dimension.

    Reads
        tokens         [B, H, length, width], channels close together
        permutation    [count] int64
    Writes
        moved          [B, H, length, width]
    """
    programs_of_head = tl.cdiv(length, ROWS)
    flat_head = (tl.program_id(0) // programs_of_head).to(tl.int64)
    batch = flat_head // heads
    head = flat_head % heads
    places = tl.program_id(0) % programs_of_head * ROWS + tl.arange(0, ROWS)
    in_grid = (places >= start) & (places < start + count)
    sources = start + tl.load(permutation_ptr + places - start, mask=in_grid, other=0)
    sources = tl.where(in_grid, sources, places.to(tl.int64))
    channels = tl.arange(0, WIDTH)
    inside = (places < length)[:, None] & (channels < width)[None, :]
    from_head = tokens_ptr + batch * tokens_strides[0] + head * tokens_strides[1]
    to_head = moved_ptr + batch * moved_strides[0] + head * moved_strides[1]
    rows = tl.load(from_head + (sources * tokens_strides[2])[:, None] + channels[None, :], mask=inside)
    tl.store(to_head + (places.to(tl.int64) * moved_strides[2])[:, None] + channels[None, :], rows, mask=inside)


def move(tokens: Tensor, permutation: Tensor, start: int, moved: Tensor) -> None:
    """See `backends.base.Backend.move`; channels lie close together in both."""
    batch, heads, length, width = tokens.shape
    launch(
        move_kernel,
        batch * heads * ceil_div(length, ROWS),
        tokens_ptr=tokens,
        permutation_ptr=permutation,
        moved_ptr=moved,
        tokens_strides=strides_of(tokens),
        moved_strides=strides_of(moved),
        length=length,
        start=start,
        count=len(permutation),
        heads=heads,
        width=width,
        ROWS=ROWS,
        WIDTH=power_of_two(width),
        num_warps=WARPS,
    )
