"""Copy tokens: permute the tokens of a grid, or convert the segments of a pack to a padded batch.

A pack is (B, H, tokens of all segments, D) with a stride of 0 over the segments, which TMA does not support. Also, the
last block of a segment would include tokens of the next segment, and the first block of a window would include unseen
values. These may be NaN, and 0 times NaN is NaN. In the padded batch, padding and values that no query sees are 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import NO_BOUND, first_key, launch, power_of_two, strided_buffer, strides_of
from sparge.backends.gpu.primitives import head_base, kernel, key_span, query_span, split_program
from sparge.backends.gpu.replay import replayed
from sparge.backends.output_layout import is_tokens_first
from sparge.call import Call
from sparge.masks.geometry import ceil_div

NUMBERS, MAX_CHANNELS, WARPS = 8192, 512, 4
"""Elements that a program copies, maximum number of channels per program, warps."""
_MOVES: dict[Any, Any] = {}


@kernel
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
    group, _, batch, head = split_program(program, groups, heads)
    places = group * TOKENS + tl.arange(0, TOKENS)
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
    """Write permuted ``tokens`` to ``moved``: see `move_kernel`. Both tensors have adjacent channels."""
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
    """See `backends.base.Backend.move_all`. Channels must be adjacent. Repeated calls are replayed."""

    def run() -> tuple[Tensor, ...]:
        first = [is_tokens_first(tokens) if tokens_first is None else tokens_first for tokens in tensors]
        pairs = zip(tensors, first, strict=True)
        return tuple([moved_copy(tokens, permutation, start, tokens_first=is_first) for tokens, is_first in pairs])

    kind = (start, tokens_first, len(permutation), *[tokens.shape for tokens in tensors])
    return replayed(_MOVES, kind, (*tensors, permutation), run)


def _joined(tokens: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of both tensors with one wide head, if the heads of a token are adjacent in both."""
    batch, heads, length, width = tokens.shape
    if tokens.stride(1) != width or moved.stride(1) != width:
        return tokens, moved
    wide = (batch, 1, length, heads * width)
    one, other = (x.as_strided(wide, (x.stride(0), 0, x.stride(2), 1)) for x in (tokens, moved))
    return one, other


@kernel
def unpack_kernel(
    pack_ptr,
    segments_ptr,
    batch_ptr,
    pack_strides,
    heads,
    length,
    first_token,
    chunks,
    OF_KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy TOKENS tokens of a head of a segment. Tokens before ``first_token`` plus the segment's shift become 0.

    Grid: chunks of TOKENS tokens of every head of every segment, in one dimension.

    Reads
        pack        [1, H, tokens, WIDTH]
        segments    [B, columns] int32, `segments.Segments.table`
    Writes
        batch       [B, length, H, WIDTH]
    """
    chunk, _, batch, head = split_program(tl.program_id(0), chunks, heads)
    if OF_KEYS:
        start, first, count = key_span(segments_ptr, batch, first_token, length, True)
    else:
        start, first, count = query_span(segments_ptr, batch, first_token, length, True)
    positions = chunk * TOKENS + tl.arange(0, TOKENS)
    channels = tl.arange(0, WIDTH_PADDED)
    is_channel = (channels < WIDTH)[None, :]
    is_token = ((positions >= first) & (positions < count))[:, None]
    sources = pack_ptr + head * pack_strides[1] + ((start + positions) * pack_strides[2])[:, None] + channels[None, :]
    tokens = tl.load(sources, mask=is_token & is_channel, other=0.0)  # [TOKENS, WIDTH]
    targets = batch_ptr + ((batch * length + positions) * heads + head)[:, None] * WIDTH + channels[None, :]
    tl.store(targets, tokens, mask=(positions < length)[:, None] & is_channel)


def unpack(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V of a packed call as padded batches, (B, H, longest, D), with tokens first in memory."""
    shape = call.shape
    return (
        _unpacked(query, call, shape.q_len, NO_BOUND, of_keys=False),
        _unpacked(key, call, shape.kv_len, NO_BOUND, of_keys=True),
        _unpacked(value, call, shape.kv_len, first_key(call), of_keys=True),
    )


def _unpacked(pack: Tensor, call: Call, length: int, first_token: int, *, of_keys: bool) -> Tensor:
    assert call.segments is not None
    segments, heads, _, width = pack.shape
    batch = strided_buffer(pack, (segments, heads, length, width), pack.dtype, tokens_first=True)
    padded = power_of_two(width)
    tokens = max(NUMBERS // padded, 1)
    chunks = ceil_div(length, tokens)
    launch(
        unpack_kernel,
        chunks * heads * segments,
        pack_ptr=pack,
        segments_ptr=call.segments.table,
        batch_ptr=batch,
        pack_strides=strides_of(pack),
        heads=heads,
        length=length,
        first_token=first_token,
        chunks=chunks,
        OF_KEYS=of_keys,
        WIDTH=width,
        WIDTH_PADDED=padded,
        TOKENS=tokens,
        num_warps=WARPS,
    )
    return batch
