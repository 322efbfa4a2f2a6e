"""Launch arguments that several stages share."""

from __future__ import annotations

from torch import Tensor

from sparge.backends.gpu.launch import seen_argument, window_offsets
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.visibility import SeenTokens


def sizes_of(call: Call) -> dict[str, int]:
    """Return the sizes of a call and the bounds of its window, in the order of the kernels' arguments."""
    shape = call.shape
    return {
        "heads": shape.heads,
        "group": shape.group,
        "q_len": shape.q_len,
        "kv_len": shape.kv_len,
        **window_offsets(call),
        "q_blocks": shape.q_blocks,
        "kv_blocks": shape.kv_blocks,
    }


def spec_of(call: Call) -> dict[str, bool]:
    """Return compile-time fields: whether the window has a left and a right bound, and whether sequences are packed."""
    return {
        "has_first": call.window.left is not None,
        "has_last": call.window.right is not None,
        "packed": call.segments is not None,
    }


def tensor_and_strides(tensor: Tensor | None, dimensions: int, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a tensor and its first strides; for None, return ``placeholder`` and strides of 0."""
    return (placeholder, (0,) * dimensions) if tensor is None else (tensor, tensor.stride()[:dimensions])


def list_tensors(mask: BlockMask | None, placeholder: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tensors of a block mask, contiguous; for None, return three times ``placeholder``."""
    if mask is None:
        return placeholder, placeholder, placeholder
    return mask.kv_num_blocks.contiguous(), mask.kv_indices.contiguous(), mask.visible_num_blocks.contiguous()


def seen_keys(seen: SeenTokens | None, call: Call, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return the flags of visible keys, their strides, and whether there is a mask."""
    keys, shape = seen.keys if seen else None, call.shape
    return (*seen_argument(keys, (shape.batch, shape.kv_heads, shape.kv_len), placeholder), keys is not None)


def seen_queries(seen: SeenTokens | None, call: Call, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...], bool]:
    """Return the flags of queries that see a key, their strides, and whether there is a mask."""
    queries, shape = seen.queries if seen else None, call.shape
    return (*seen_argument(queries, (shape.batch, shape.heads, shape.q_len), placeholder), queries is not None)
