"""vLLM's paged caches of keys and values: how they lie in memory, by what the engine's version says, and one request's.

A cache holds pages of some tokens; a request's row of the block table names its pages in order. Three layouts were
found, each of which is read by one function:

    vLLM 0.20 to 0.22   [2, pages, page size, heads, head_dim]      `planes_first`
    vLLM 0.24           [pages, 2, page size, heads, head_dim]      `planes_second`
    vLLM 0.26 and on    [pages, heads, page size, 2 * head_dim]     `side_by_side`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Layout = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(cache, head_dim) -> views of the keys and the values, (pages, page size, heads, head_dim) both."""


def planes_first(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """All keys, then all values."""
    del head_dim
    return kv_cache[0], kv_cache[1]


def planes_second(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """The keys of a page, then its values."""
    del head_dim
    return kv_cache[:, 0], kv_cache[:, 1]


def side_by_side(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """A token's key of one head, then its value."""
    pages = kv_cache.transpose(1, 2)
    return pages[..., :head_dim], pages[..., head_dim:]


_SIZES = {"num_blocks": 5, "block_size": 16, "num_kv_heads": 3, "head_size": 8}
_LAYOUTS: dict[tuple[int, ...], Layout] = {
    (2, 5, 16, 3, 8): planes_first,
    (5, 2, 16, 3, 8): planes_second,
    (5, 3, 16, 16): side_by_side,
}


def layout_of(shape_of: Callable[..., Any] | None) -> Layout | None:
    """The layout of an engine's caches; None for one that is not known.

    A cache does not tell by its shape, since it may have two pages.

    Args:
        shape_of: ``get_kv_cache_shape`` of its backend. Versions that have none (0.33) have the last layout.
    """
    return side_by_side if shape_of is None else _LAYOUTS.get(tuple(shape_of(**_SIZES)))


def gather(pages: Tensor, block_table: Tensor, tokens: int) -> Tensor:
    """The first tokens (tokens, heads, head_dim) of a request: a copy.

    Args:
        pages: (pages, page size, heads, head_dim).
        block_table: (n,), the request's row. Entries behind its last page are not read.
    """
    used = -(-tokens // pages.shape[1])
    return pages.index_select(0, block_table[:used]).flatten(0, 1)[:tokens]
