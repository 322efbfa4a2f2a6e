"""Find the grid of image tokens and the positions of text tokens in the inputs of a transformers model.

Attention modules do not receive this information. Hooks of the parts of a model that take images keep the arguments of
the current forward pass, and layers read them when a call is sparse. A wrong result may cost accuracy: it changes which
blocks are kept and which tokens share a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparge.integrations.hooks import PassState, arguments_of, parameters_of
from sparge.masks.geometry import BLOCK_K, ceil_div

PIXELS = ("pixel_values", "pixel_values_videos")
"""Parameters of forward that take images (B, C, H, W) or videos (B, T, C, H, W)."""

VISUAL_IDS = tuple(f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index"))
"""Names of config entries with the ids of tokens that are not text."""

MAX_SPECIAL = 16
"""Maximum number of class tokens and registers before the tokens of an image."""

MAX_RANGES = 8
"""Maximum number of text ranges. Each range costs whole blocks."""

MAX_SHARE = 0.125
"""Maximum share of special tokens among all tokens, and of blocks with text among all blocks."""

Ranges = Sequence[tuple[int, int]]


def takes_images(module: nn.Module) -> bool:
    """Return whether `ImageInputs` can read the arguments of a module."""
    return not set(parameters_of(type(module))).isdisjoint(PIXELS)


@dataclass
class _Arguments:
    """Arguments of the current forward pass.

    Attributes:
        sizes: (H, W) or (T, H, W) of the images in pixels; None without images, or if they are already patches.
        ids: tokens (B, S).
        mask: nonzero for tokens that are not padding (B, S).
        text: ranges of text among the tokens; None until they are read.
    """

    sizes: tuple[int, ...] | None = None
    ids: Tensor | None = None
    mask: Tensor | None = None
    text: Ranges | None = None


class ImageInputs:
    """The images and the text in the current forward pass of each thread.

    Args:
        module: a part of a model, whose config contains the ids of tokens that are not text.
    """

    def __init__(self, module: nn.Module) -> None:
        config = getattr(module, "config", None)
        ids = (getattr(config, name, None) for name in VISUAL_IDS)
        self._visual = tuple(sorted({number for number in ids if isinstance(number, int)}))
        tubelet = getattr(config, "tubelet_size", 1)
        self._tubelet = tubelet[0] if isinstance(tubelet, (list, tuple)) else tubelet  # frames per token
        self._current = PassState(_Arguments())

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments; a forward pre-hook that reads no values from the device."""
        named = arguments_of(module, args, kwargs)
        pixels = next((named[name] for name in PIXELS if isinstance(named.get(name), Tensor)), None)
        current = _Arguments()
        if pixels is not None and pixels.ndim in (4, 5):
            current.sizes = (*pixels.shape[1 : pixels.ndim - 3], *pixels.shape[-2:])
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        if not torch.compiler.is_compiling() and isinstance(ids, Tensor) and ids.ndim == 2:
            current.ids = ids
            current.mask = mask if isinstance(mask, Tensor) and mask.shape == ids.shape else None
        self._current.set(current)

    def forget(self, *_: Any) -> None:
        """Drop the arguments; a forward hook."""
        self._current.set(_Arguments())

    def grid(self, tokens: int) -> tuple[tuple[int, ...] | None, Ranges]:
        """Return the grid of an image with this number of tokens, and the range of special tokens before it."""
        sizes = self._current.get(is_tracing=torch.compiler.is_compiling()).sizes
        return (None, ()) if sizes is None else grid_of(sizes, tokens, self._tubelet)

    def text(self, tokens: int) -> Ranges:
        """Return the ranges of text tokens in a prompt of ``tokens`` tokens; () if they are unknown.

        Also return () if text touches too many blocks (`text_of`). The first call of a forward pass reads the ids,
        which synchronizes with the device.
        """
        if torch.compiler.is_compiling():
            return ()
        current = self._current.get(is_tracing=False)
        ids = current.ids
        if ids is None or not self._visual or ids.shape[1] != tokens:
            return ()
        if current.text is None:
            if ids.is_cuda and torch.cuda.is_current_stream_capturing():
                return ()
            current.text = text_of(ids, self._visual, current.mask)
        return current.text


def grid_of(sizes: tuple[int, ...], tokens: int, tubelet: int = 1) -> tuple[tuple[int, ...] | None, Ranges]:
    """Return the grid of an image's tokens in raster order, and the range of special tokens before it.

    The side of a square patch follows from the number of tokens. The grid is None if no patch size fits.

    Args:
        sizes: (H, W) or (T, H, W) in pixels.
        tokens: the number of tokens, special ones included.
        tubelet: number of frames per token.

    Example:
        >>> grid_of((1024, 768), 5 + 64 * 48)
        ((64, 48), ((0, 5),))
        >>> grid_of((16, 256, 256), 8 * 16 * 16, tubelet=2)
        ((8, 16, 16), ())
        >>> grid_of((1024, 768), 3000)
        (None, ())
    """
    *time, height, width = sizes
    frames = max(time[0] // tubelet, 1) if time else 1
    patch = round(math.sqrt(frames * height * width / tokens))
    rows, columns = (height // patch, width // patch) if patch else (0, 0)
    special = tokens - frames * rows * columns
    if not 0 <= special <= min(MAX_SPECIAL, MAX_SHARE * tokens):
        return None, ()
    grid = (frames, rows, columns) if time else (rows, columns)
    return grid, ((0, special),) if special else ()


def text_of(ids: Tensor, visual: Sequence[int], mask: Tensor | None = None) -> Ranges:
    """Return up to `MAX_RANGES` ranges [start, stop) of text: the first, the last and the longest of the others.

    Return no ranges if all tokens are text, or if text touches more than `MAX_SHARE` of the blocks.

    Args:
        ids: tokens (B, S); a position counts as text if it is text in any sequence.
        visual: ids of tokens that are not text.
        mask: 0 for padding (B, S).

    Example:
        >>> text_of(torch.tensor([[5, 6] + [9] * 1020 + [7, 8]]), [9])
        ((0, 2), (1022, 1024))
    """
    is_text = torch.ones_like(ids, dtype=torch.bool)
    for number in visual:
        is_text &= ids != number
    if mask is not None:
        is_text &= mask.bool()
    edges = torch.nn.functional.pad(is_text.any(0).int(), (1, 1)).diff().nonzero()[:, 0].tolist()
    ranges = list(zip(edges[::2], edges[1::2], strict=True))
    if len(ranges) > MAX_RANGES:
        longest = sorted(ranges[1:-1], key=lambda pair: pair[0] - pair[1])[: MAX_RANGES - 2]
        ranges = [ranges[0], *sorted(longest), ranges[-1]]
    touched = sum(ceil_div(stop, BLOCK_K) - start // BLOCK_K for start, stop in ranges)
    return tuple(ranges) if touched <= MAX_SHARE * ceil_div(ids.shape[1], BLOCK_K) else ()
