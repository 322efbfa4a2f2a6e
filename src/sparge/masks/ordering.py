"""Orders of the tokens of a T x H x W grid in which spatial neighbors are neighbors in the sequence.

A key block is 64 consecutive tokens. In raster order, a block is a piece of a line. Along a space-filling curve, it is
a small box of similar tokens: the mean represents the block well, and attention concentrates on few blocks.

    row       raster order, the last coordinate fastest
    tile      boxes of 4 x 4 x 4 tokens, one after the other
    morton    the interleaved bits of the coordinates
    hilbert   the Hilbert curve through the enclosing power-of-two cube, without points outside the grid
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
"""Size of a tile along each axis. Three-dimensional tiles have 64 tokens, as many as a key block."""


class TokenOrder(NamedTuple):
    """An order of the tokens of a grid within a sequence. Tokens outside of the grid keep their positions.

    Attributes:
        grid: sizes of the axes, see `order_of`.
        name: "hilbert", "morton", "tile" or "row".
        start: position of the first token of the grid.
    """

    grid: tuple[int, ...]
    name: OrderName
    start: int


@dataclass(frozen=True, eq=False)
class Order:
    """A permutation of the tokens of a grid and its inverse; both int64 (tokens,).

    Example:
        >>> order = order_of((2, 2, 2), "hilbert")
        >>> tokens = torch.arange(8)[:, None]
        >>> ordered = order.apply(tokens, 0)
        >>> ordered.flatten().tolist()
        [0, 1, 3, 2, 6, 7, 5, 4]
        >>> torch.equal(order.undo(ordered, 0), tokens)
        True
    """

    permutation: Tensor
    inverse: Tensor

    def apply(self, tokens: Tensor, dim: int = 2, start: int = 0) -> Tensor:
        """Permute tokens into this order. Tokens before ``start`` and after the grid, for example text, do not move."""
        return _permuted(tokens, self.permutation, dim, start)

    def undo(self, tokens: Tensor, dim: int = 2, start: int = 0) -> Tensor:
        """Restore the original order of tokens that `apply` permuted."""
        return _permuted(tokens, self.inverse, dim, start)


def order_of(grid: tuple[int, ...], name: OrderName = "hilbert", device: torch.device | str = "cpu") -> Order:
    """Return the order of a grid. Orders are cached for each device.

    Args:
        grid: sizes of one to three axes, for example (T, H, W) of a video. The tokens are in raster order.
        name: "hilbert", "morton", "tile" or "row".
        device: device of the permutation.

    Raises:
        TypeError, ValueError: the grid or the name is invalid.

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


@functools.cache  # unbounded: a CUDA graph may hold the address of a permutation
def _order(grid: tuple[int, ...], name: str, device: str) -> Order:
    if device != "cpu":
        on_cpu = _order(grid, name, "cpu")
        return Order(on_cpu.permutation.to(device), on_cpu.inverse.to(device))
    if name == "row":
        permutation = torch.arange(prod(grid))
    else:
        axes = torch.meshgrid(*(torch.arange(size) for size in grid), indexing="ij")
        coordinates = torch.stack([axis.flatten() for axis in axes])  # [axes, tokens]
        bits = max(max(size - 1, 1).bit_length() for size in grid)
        permutation = SORT_KEYS[name](coordinates, bits).argsort(stable=True)
    return Order(permutation, permutation.argsort())


def _tile_key(coordinates: Tensor, bits: int) -> Tensor:
    """Return keys that sort by tile in raster order, then by token within the tile in raster order."""
    parts = [axis // TILE for axis in coordinates] + [axis % TILE for axis in coordinates]
    key = torch.zeros_like(coordinates[0])
    for part in parts:
        key = (key << bits) | part
    return key


def _morton_key(coordinates: Tensor, bits: int) -> Tensor:
    """Interleave the bits of the coordinates, highest bits first."""
    key = torch.zeros_like(coordinates[0])
    for bit in reversed(range(bits)):
        for axis in coordinates:
            key = (key << 1) | ((axis >> bit) & 1)
    return key


def _hilbert_key(coordinates: Tensor, bits: int) -> Tensor:
    """Return the position of each point on the Hilbert curve (Skilling, 2004).

    From the highest bit down, the lower bits of the coordinates are reflected or swapped, to undo the orientation
    of the curve in the subcube that contains the point. The interleaved bits are then the Gray code of the position.
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
    flips = torch.zeros_like(axes[-1])
    for bit in reversed(range(1, bits)):
        flips = torch.where((axes[-1] >> bit) & 1 == 1, flips ^ ((1 << bit) - 1), flips)
    return _morton_key(torch.stack([axis ^ flips for axis in axes]), bits)


SORT_KEYS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tile": _tile_key,
    "morton": _morton_key,
    "hilbert": _hilbert_key,
}
"""Functions that compute sort keys of tokens from coordinates (axes, tokens) and the number of bits per coordinate."""


def _permuted(tokens: Tensor, index: Tensor, dim: int, start: int) -> Tensor:
    length, count = tokens.shape[dim], len(index)
    if not 0 <= start <= length - count:
        raise ValueError(f"start: expected the {count} tokens of the grid to fit into {length}, got {start}")
    if count == length:
        return tokens.index_select(dim, index)
    before, inside, after = tokens.split([start, count, length - start - count], dim)
    return torch.cat([before, inside.index_select(dim, index), after], dim)
