"""Orders of the tokens of a T x H x W grid in which neighbours in space are neighbours in the sequence.

Blocks of the attention map are 64 tokens in a row. In the order of a raster those are a piece of a line; along a space-
filling curve they are a small box, whose tokens resemble each other: a mean speaks for them, and few boxes matter.

    row       the raster itself, the last coordinate fastest
    tile      boxes of 4 x 4 x 4 tokens, one after the other
    morton    the bits of the coordinates interleaved
    hilbert   Hilbert's curve through the cube of a power of two around the grid, without what lies outside
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

OrderName = Literal["row", "tile", "morton", "hilbert"]
ORDERS: tuple[str, ...] = get_args(OrderName)
TILE = 4
"""Tokens of a tile along each axis: 64 of them fill a block of keys."""


class TokenOrder(NamedTuple):
    """An order for the tokens of a grid within a sequence. Tokens outside of the grid stay where they are.

    Attributes:
        grid: see `order_of`.
        name: "hilbert", "morton", "tile" or "row".
        start: the first token of the grid.
    """

    grid: tuple[int, ...]
    name: OrderName
    start: int


@dataclass(frozen=True, eq=False)
class Order:
    """A permutation of the tokens of a grid, and its inverse; both int64 (tokens,).

    Example:
        >>> order = order_of((2, 2, 2), "hilbert")
        >>> tokens = torch.arange(8)[:, None]
        >>> along = order.apply(tokens, 0)
        >>> along.flatten().tolist()
        [0, 1, 3, 2, 6, 7, 5, 4]
        >>> torch.equal(order.undo(along, 0), tokens)
        True
    """

    permutation: Tensor
    inverse: Tensor

    def apply(self, tokens: Tensor, dim: int = 2, start: int = 0) -> Tensor:
        """Tokens along the order. Only those from ``start`` on that belong to the grid move; text stays where it is."""
        return _moved(tokens, self.permutation, dim, start)

    def undo(self, tokens: Tensor, dim: int = 2, start: int = 0) -> Tensor:
        """Tokens where `apply` took them from."""
        return _moved(tokens, self.inverse, dim, start)


def order_of(grid: tuple[int, ...], name: OrderName = "hilbert", device: torch.device | str = "cpu") -> Order:
    """The order of a grid, made once for each device.

    Args:
        grid: sizes of one to three axes, (T, H, W) of a video; tokens are numbered as in a raster.
        name: "hilbert", "morton", "tile" or "row".
        device: where the permutation is wanted.

    Raises:
        TypeError, ValueError: the grid or the name is not what was expected.

    Example:
        >>> order_of((1, 4, 4), "tile").permutation.tolist()[:6]
        [0, 1, 2, 3, 4, 5]
        >>> order_of((3, 0, 5))
        Traceback (most recent call last):
        ...
        ValueError: grid: expected one to three sizes of 1 or more, got (3, 0, 5)
    """
    if name not in ORDERS:
        raise ValueError(f"order: expected one of {', '.join(map(repr, ORDERS))}, got {name!r}")
    if not isinstance(grid, (tuple, list)) or not all(isinstance(n, int) and not isinstance(n, bool) for n in grid):
        raise TypeError(f"grid: expected a tuple of ints, got {grid!r}")
    if not 1 <= len(grid) <= 3 or min(grid) < 1:
        raise ValueError(f"grid: expected one to three sizes of 1 or more, got {tuple(grid)}")
    return _order(tuple(grid), name, str(device))


@functools.cache  # none is forgotten: a CUDA graph may hold its address
def _order(grid: tuple[int, ...], name: str, device: str) -> Order:
    if device != "cpu":
        made = _order(grid, name, "cpu")
        return Order(made.permutation.to(device), made.inverse.to(device))
    if name == "row":
        permutation = torch.arange(prod(grid))
    else:
        axes = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
        coordinates = torch.stack([axis.flatten() for axis in axes])  # [axes, tokens]
        bits = max(max(size - 1, 1).bit_length() for size in grid)
        permutation = KEYS[name](coordinates, bits).argsort(stable=True)
    return Order(permutation, permutation.argsort())


def _by_tiles(coordinates: Tensor, bits: int) -> Tensor:
    """Tiles in the order of a raster, and the tokens of each in one."""
    parts = [axis // TILE for axis in coordinates] + [axis % TILE for axis in coordinates]
    key = torch.zeros_like(coordinates[0])
    for part in parts:
        key = (key << bits) | part
    return key


def _interleaved(coordinates: Tensor, bits: int) -> Tensor:
    """One number from the bits of the coordinates, the highest of each first."""
    key = torch.zeros_like(coordinates[0])
    for bit in reversed(range(bits)):
        for axis in coordinates:
            key = (key << 1) | ((axis >> bit) & 1)
    return key


def _along_hilbert(coordinates: Tensor, bits: int) -> Tensor:
    """How far along Hilbert's curve a point lies.

    From the highest bit down, the part of the cube that a point lies in is turned so that the curve through it begins
    where the one before ended; then the parts are numbered so that neighbours differ in one bit (Skilling, 2004).
    """
    axes = list(coordinates.clone())
    for bit in reversed(range(1, bits)):
        lower = (1 << bit) - 1
        for i, axis in enumerate(axes):
            is_upper = (axis >> bit) & 1 == 1
            swapped = torch.where(is_upper, 0, (axes[0] ^ axis) & lower)
            axes[0] = torch.where(is_upper, axes[0] ^ lower, axes[0] ^ swapped)
            if i > 0:
                axes[i] = axis ^ swapped
    for i in range(1, len(axes)):
        axes[i] = axes[i] ^ axes[i - 1]
    turned = torch.zeros_like(axes[-1])
    for bit in reversed(range(1, bits)):
        turned = torch.where((axes[-1] >> bit) & 1 == 1, turned ^ ((1 << bit) - 1), turned)
    return _interleaved(torch.stack([axis ^ turned for axis in axes]), bits)


KEYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tile": _by_tiles,
    "morton": _interleaved,
    "hilbert": _along_hilbert,
}
"""What tokens are sorted by, from their coordinates (axes, tokens) and the bits that those have."""


def _moved(tokens: Tensor, index: Tensor, dim: int, start: int) -> Tensor:
    length, count = tokens.shape[dim], len(index)
    if not 0 <= start <= length - count:
        raise ValueError(f"start: expected the {count} tokens of the grid to fit into {length}, got {start}")
    if count == length:
        return tokens.index_select(dim, index)
    before, inside, after = tokens.split([start, count, length - start - count], dim)
    return torch.cat([before, inside.index_select(dim, index), after], dim)
