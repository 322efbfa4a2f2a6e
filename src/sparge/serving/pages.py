"""Read the keys and values of a request from vLLM's paged cache.

A cache consists of pages, each with the keys and values of some tokens. The block table has one row per request, which
lists the pages of the request in order. The layout of the cache depends on the version of vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Layout = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""(cache, head_dim) -> views of the keys and the values, (pages, page size, heads, head_dim) both."""


def _split_channels(kv_cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    pages = kv_cache.transpose(1, 2)
    return pages[..., :head_dim], pages[..., head_dim:]


_SIZES = {"num_blocks": 5, "block_size": 16, "num_kv_heads": 3, "head_size": 8}
_LAYOUTS: dict[tuple[int, ...], Layout] = {
    (2, 5, 16, 3, 8): lambda cache, _: (cache[0], cache[1]),  # vLLM 0.20 to 0.22
    (5, 2, 16, 3, 8): lambda cache, _: (cache[:, 0], cache[:, 1]),  # vLLM 0.24
    (5, 3, 16, 16): _split_channels,  # vLLM 0.26 and on
}
"""The layouts, keyed by the shape that vLLM gives a cache of `_SIZES`."""


def layout_of(shape_of: Callable[..., Any] | None) -> Layout | None:
    """Return the layout of an engine's caches; None if it is unknown.

    The shape of an actual cache is ambiguous if it has two pages, so the layout is derived from ``shape_of``.

    Args:
        shape_of: ``get_kv_cache_shape`` of the engine's backend. None in versions without it (0.33), which use the
            newest layout.
    """
    return _split_channels if shape_of is None else _LAYOUTS.get(tuple(shape_of(**_SIZES)))


def gather(pages: Tensor, block_table: Tensor, tokens: int) -> Tensor:
    """Return a copy of the first tokens of a request, (tokens, heads, head_dim).

    Args:
        pages: (pages, page size, heads, head_dim).
        block_table: the row of the request, (n,). Entries after its last page are not read.
        tokens: the number of tokens.
    """
    used = -(-tokens // pages.shape[1])
    return pages.index_select(0, block_table[:used]).flatten(0, 1)[:tokens]
