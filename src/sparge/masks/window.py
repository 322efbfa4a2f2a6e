"""`Window`: the range of keys that a query sees, relative to its position. Causal attention is one kind of window."""

from __future__ import annotations

from typing import NamedTuple

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div


class Window(NamedTuple):
    """A window: query i is at key position p = i + S_k - S_q and sees keys p - left .. p + right.

    None means no bound. Causal attention has ``right = 0``. FlashAttention defines windows in the same way.
    """

    left: int | None = None
    right: int | None = None


def window_of(is_causal: bool, window: tuple[int | None, int | None] | None = None) -> Window:
    """Combine a window and causality into one `Window`; ``window=None`` means no window."""
    left, right = (None, None) if window is None else window
    return Window(left, 0 if is_causal else right)


def without_redundant_bounds(window: Window, q_len: int, kv_len: int) -> Window:
    """Remove bounds that exclude no key. Causal attention stays causal."""
    left, right = window
    if left is not None and left >= kv_len - 1:
        left = None
    if right is not None and right > 0 and right >= q_len - 1:
        right = None
    return Window(left, right)


def first_offset(window: Window, shape: Shape) -> int | None:
    """Return the offset such that query i sees no key before i + offset; None if it may see the first key."""
    return None if window.left is None else shape.causal_offset - window.left


def last_offset(window: Window, shape: Shape) -> int | None:
    """Return the offset such that query i sees no key after i + offset; None if it may see the last key."""
    return None if window.right is None else shape.causal_offset + window.right


def first_seen_key(window: Window, shape: Shape) -> int:
    """Return the first key that some query sees. No query sees the start of a prefix that is longer than the window."""
    return 0 if window.left is None else max(shape.causal_offset - window.left, 0)


def first_seeing_query(window: Window, shape: Shape) -> int:
    """Return the first query that sees a key. With more queries than keys, the first queries may see no key."""
    return 0 if window.right is None else max(-shape.causal_offset - window.right, 0)


def keys_of_query(window: Window, kv_len: int) -> int:
    """Return the maximum number of keys that a query sees."""
    if window.left is None or window.right is None:
        return kv_len
    return min(kv_len, window.left + window.right + 1)


def max_blocks_per_q_block(window: Window, shape: Shape) -> int:
    """Return the maximum number of key blocks that a query block sees."""
    keys = keys_of_query(window, shape.kv_len) + BLOCK_Q - 1  # keys seen by any query of the block
    return min(shape.kv_blocks, ceil_div(keys - 1, BLOCK_K) + 1)
