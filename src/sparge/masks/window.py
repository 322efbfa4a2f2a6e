"""Which keys a query may see by its place: those around its own position, causality among them."""

from __future__ import annotations

from typing import NamedTuple

from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape, ceil_div


class Window(NamedTuple):
    """How far a query sees: query i stands at key p = i + S_k - S_q and sees keys p - left .. p + right.

    None is no bound. Causal attention is ``right = 0``. FlashAttention counts in the same way.
    """

    left: int | None = None
    right: int | None = None


def window_of(is_causal: bool, window: tuple[int | None, int | None] | None = None) -> Window:
    """A window and causality in one; None is no window."""
    left, right = (None, None) if window is None else window
    return Window(left, 0 if is_causal else right)


def within(window: Window, q_len: int, kv_len: int) -> Window:
    """The same window without bounds that bound nothing. Causal attention stays so."""
    left, right = window
    if left is not None and left >= kv_len - 1:
        left = None
    if right is not None and right > 0 and right >= q_len - 1:
        right = None
    return Window(left, right)


def first_offset(window: Window, shape: Shape) -> int | None:
    """Query i sees no key before i + this; None: it may see the first one."""
    return None if window.left is None else shape.causal_offset - window.left


def last_offset(window: Window, shape: Shape) -> int | None:
    """Query i sees no key behind i + this; None: it may see the last one."""
    return None if window.right is None else shape.causal_offset + window.right


def first_seen_key(window: Window, shape: Shape) -> int:
    """The first key that some query sees. With a prefix longer than the window, nobody sees the keys before it."""
    return 0 if window.left is None else max(shape.causal_offset - window.left, 0)


def first_seeing_query(window: Window, shape: Shape) -> int:
    """The first query that sees a key: with more queries than keys, the first ones may not."""
    return 0 if window.right is None else max(-shape.causal_offset - window.right, 0)


def keys_of_query(window: Window, kv_len: int) -> int:
    """How many keys a query sees at most."""
    if window.left is None or window.right is None:
        return kv_len
    return min(kv_len, window.left + window.right + 1)


def blocks_of_row(window: Window, shape: Shape) -> int:
    """How many key blocks a row of blocks sees at most."""
    keys = keys_of_query(window, shape.kv_len) + BLOCK_Q - 1  # of all its queries
    return min(shape.kv_blocks, ceil_div(keys - 1, BLOCK_K) + 1)
