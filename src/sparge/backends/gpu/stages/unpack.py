"""Copy the segments of a pack into a padded batch, for kernels that copy whole blocks (TMA).

A pack is (B, H, tokens of all segments, D) with a stride of 0 over the segments, which TMA does not support. Also,
the last block of a segment would include tokens of the next segment, and the first block of a window would include
unseen values; either may be NaN, and 0 times NaN is NaN. In the batch, padding and values that no query sees are 0.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from sparge.backends.gpu.launch import launch, power_of_two, strided_buffer, strides_of, window_offsets
from sparge.backends.gpu.primitives import kernel, segment_keys, segment_queries, segment_sizes
from sparge.call import Call
from sparge.masks.geometry import ceil_div

NUMBERS, WARPS = 8192, 4
"""Number of elements that a program copies."""


@kernel
def unpack_kernel(
    pack_ptr,
    segments_ptr,
    batch_ptr,
    pack_strides,
    heads,
    length,
    first_offset,
    last_offset,
    chunks,
    OF_KEYS: tl.constexpr,
    OF_VALUES: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy TOKENS tokens of a head of a segment.

    Grid: chunks of TOKENS tokens of every head of every segment, in one dimension.

    Reads
        pack        [1, H, tokens, WIDTH]
        segments    [B, columns] int32, `segments.Segments.table`
    Writes
        batch       [B, length, H, WIDTH]
    """
    chunk = tl.program_id(0) % chunks
    head = (tl.program_id(0) // chunks % heads).to(tl.int64)
    batch = (tl.program_id(0) // chunks // heads).to(tl.int64)
    if OF_KEYS:
        start, count = segment_keys(segments_ptr, batch)
    else:
        start, count = segment_queries(segments_ptr, batch)
    first = 0
    if OF_VALUES and HAS_FIRST:
        _, _, first, _ = segment_sizes(segments_ptr, batch, first_offset, last_offset)
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
        _unpacked(query, call, shape.q_len, of_keys=False, of_values=False),
        _unpacked(key, call, shape.kv_len, of_keys=True, of_values=False),
        _unpacked(value, call, shape.kv_len, of_keys=True, of_values=True),
    )


def _unpacked(pack: Tensor, call: Call, length: int, *, of_keys: bool, of_values: bool) -> Tensor:
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
        **window_offsets(call),
        chunks=chunks,
        OF_KEYS=of_keys,
        OF_VALUES=of_values,
        HAS_FIRST=call.window.left is not None,
        WIDTH=width,
        WIDTH_PADDED=padded,
        TOKENS=tokens,
        num_warps=WARPS,
    )
    return batch
