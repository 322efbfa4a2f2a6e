"""Launch arguments and compile-time values that several kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from sparge.backends.gpu.launch import buffer_like, output_buffer, seen_argument, segments_argument, window_offsets
from sparge.backends.gpu.operands import Operands
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.visibility import SeenTokens


class Sizes(NamedTuple):
    """Sizes of a call. Query i sees keys from i + first_offset to i + last_offset, as flagged in `WindowSpec`."""

    heads: Any
    group: Any  # query heads that share a head of K and V
    q_len: Any
    kv_len: Any
    first_offset: Any
    last_offset: Any
    q_blocks: Any
    kv_blocks: Any


@dataclass(frozen=True)
class WindowSpec:
    """Compile-time values of kernels whose results depend on the window."""

    has_first: bool  # query i sees no key before i + first_offset
    has_last: bool  # query i sees no key after i + last_offset
    packed: bool  # batch elements are segments of a pack with their own lengths


def sizes_of(call: Call) -> dict[str, int]:
    """Return the `Sizes` of a call as kernel arguments."""
    shape = call.shape
    return Sizes(
        heads=shape.heads,
        group=shape.group,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        **window_offsets(call),
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
    )._asdict()


def spec_of(call: Call) -> dict[str, bool]:
    """Return the fields of the call's `WindowSpec`."""
    return {
        "has_first": call.window.left is not None,
        "has_last": call.window.right is not None,
        "packed": call.segments is not None,
    }


def tensor_or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return a tensor; for None, return ``placeholder``, which kernels do not access."""
    return placeholder if tensor is None else tensor


def tensor_and_strides(tensor: Tensor | None, dimensions: int, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor and its first strides; for None, return ``placeholder`` and strides of 0."""
    return (placeholder, (0,) * dimensions) if tensor is None else (tensor, tensor.stride()[:dimensions])


def seen_keys(seen: SeenTokens | None, call: Call, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return the flags of visible keys, their strides, and whether there is a mask."""
    keys, shape = seen.keys if seen else None, call.shape
    return (*seen_argument(keys, (shape.batch, shape.kv_heads, shape.kv_len), placeholder), keys is not None)


def seen_queries(seen: SeenTokens | None, call: Call, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return the flags of queries that see a key, their strides, and whether there is a mask."""
    queries, shape = seen.queries if seen else None, call.shape
    return (*seen_argument(queries, (shape.batch, shape.heads, shape.q_len), placeholder), queries is not None)


class ListPointers(NamedTuple):
    """The key blocks that an attention kernel visits, and the order in which it computes query blocks."""

    kv_num_blocks: Any  # [B * H, q_blocks] int32, number of key blocks that each query block keeps
    kv_indices: Any  # [B * H, q_blocks, kv_blocks] int32, their indices
    visible_num_blocks: Any  # [B * H, q_blocks] int32, number of visible key blocks
    # [B * H * q_blocks] int32, query blocks of all heads in the order of computation (SPEC.ordered); a pack has no
    # entries for query blocks after the end of a segment
    order: Any
    segments: Any  # `Segments.table` (SPEC.packed)


def list_pointers(operands: Operands, mask: BlockMask | None, call: Call) -> ListPointers:
    """Return the `ListPointers` of a call, with placeholders for missing tensors."""
    placeholder = operands.query
    lists = (placeholder,) * 3
    if mask is not None:
        lists = (mask.kv_num_blocks.contiguous(), mask.kv_indices.contiguous(), mask.visible_num_blocks.contiguous())
    return ListPointers(*lists, tensor_or(operands.order, placeholder), segments_argument(call, placeholder))


def result_buffers(operands: Operands, call: Call) -> tuple[Tensor, Tensor, int]:
    """Return buffers for the output and the LSE of an attention kernel, and the number of query blocks to compute."""
    shape, segments = call.shape, call.segments
    if segments is not None:
        return segments.output, segments.lse, segments.order.numel()
    lse = buffer_like(operands.query, True, shape.batch, shape.heads, shape.q_len)
    return output_buffer(operands, shape), lse, shape.batch * shape.heads * shape.q_blocks
