"""Images and text in the inputs of a transformers model: the grid of image tokens, and the positions of text tokens.

Attention modules do not receive this information. The parts of a model that take images get hooks that keep the
arguments of the current forward pass, and layers read them when a call goes sparse. A wrong result costs accuracy, not
correctness: it only affects which blocks are kept, and which tokens share a block.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparge.integrations.hooks import parameters_of
from sparge.masks.geometry import BLOCK_K, ceil_div

PIXELS = ("pixel_values", "pixel_values_videos")
"""Parameters of forward that take images (B, C, H, W) or videos (B, T, C, H, W)."""

VISUAL_IDS = tuple(f"{kind}_token_{place}" for kind in ("image", "video", "audio") for place in ("id", "index"))
"""Names of config entries with the ids of tokens that are not text."""

MAX_SPECIAL = 16
"""Maximum number of class tokens and registers before the tokens of an image."""

MAX_RANGES = 8
"""Maximum number of text ranges: each costs whole blocks."""

MAX_SHARE = 0.125
"""Maximum share of special tokens among all tokens, and of blocks with text among all blocks."""

Ranges = Sequence[tuple[int, int]]


def takes_images(module: nn.Module) -> bool:
    """Return whether `ImageInputs` can read the arguments of a module."""
    return not set(parameters_of(type(module))).isdisjoint(PIXELS)


@dataclass
class _Current:
    """The current forward pass.

    Attributes:
        sizes: (H, W) or (T, H, W) of its images in pixels; None without images, or if they are cut into patches.
        ids: tokens (B, S).
        mask: nonzero for tokens that are not padding (B, S).
        text: ranges of text among the tokens, once they were read.
    """

    sizes: tuple[int, ...] | None = None
    ids: Tensor | None = None
    mask: Tensor | None = None
    text: Ranges | None = None


class ImageInputs:
    """Keeps the arguments of the current forward pass of each thread.

    Compiled programs share one copy, written by the latest pass of any thread: torch.compile up to torch 2.11 loses
    writes to thread-local objects.

    Args:
        visual: ids of tokens that are not text.
        tubelet: number of frames per token.
    """

    def __init__(self, visual: tuple[int, ...] = (), tubelet: int = 1) -> None:
        self._visual = visual
        self._tubelet = tubelet
        self._local = threading.local()
        self._compiled = _Current()

    @classmethod
    def of(cls, module: nn.Module) -> ImageInputs:
        """Return the inputs of a part of a model, from its config."""
        config = getattr(module, "config", None)
        ids = (getattr(config, name, None) for name in VISUAL_IDS)
        tubelet = getattr(config, "tubelet_size", 1)
        frames = tubelet[0] if isinstance(tubelet, (list, tuple)) else tubelet
        return cls(tuple(sorted({number for number in ids if isinstance(number, int)})), frames)

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageInputs, (self._visual, self._tubelet)  # a copied model starts without state of threads

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments; a forward pre-hook. Reads nothing from a device."""
        arguments = {**dict(zip(parameters_of(type(module)), args, strict=False)), **kwargs}
        pixels = next((arguments[name] for name in PIXELS if isinstance(arguments.get(name), Tensor)), None)
        sizes = None
        if pixels is not None and pixels.ndim in (4, 5):
            sizes = (*pixels.shape[1 : pixels.ndim - 3], *pixels.shape[-2:])
        self._compiled = _Current(sizes)
        if not torch.compiler.is_compiling():
            ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
            mask = mask if isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape else None
            self._local.current = _Current(sizes, ids if isinstance(ids, Tensor) and ids.ndim == 2 else None, mask)

    def forget(self, *_: Any) -> None:
        """Drop the arguments; a forward hook."""
        self._compiled = _Current()
        if not torch.compiler.is_compiling():
            self._local.current = self._compiled

    def _now(self) -> _Current:
        if torch.compiler.is_compiling():
            return self._compiled
        current: _Current = getattr(self._local, "current", self._compiled)
        return current

    def grid(self, tokens: int) -> tuple[tuple[int, ...] | None, Ranges]:
        """Return the grid of an image with this number of tokens, and the range of special tokens before it."""
        sizes = self._now().sizes
        return (None, ()) if sizes is None else grid_of(sizes, tokens, self._tubelet)

    def text(self, tokens: int) -> Ranges:
        """Return the ranges of text in a prompt of this number of tokens; none if they are unknown or too many.

        The first call of a forward pass reads the ids, and waits for the device.
        """
        if torch.compiler.is_compiling():
            return ()
        now = self._now()
        if now.ids is None or not self._visual or now.ids.shape[1] != tokens:
            return ()
        if now.text is None:
            if now.ids.is_cuda and torch.cuda.is_current_stream_capturing():
                return ()
            now.text = text_of(now.ids, self._visual, now.mask)
        return now.text


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
    """Return ranges [start, stop) of text among visual tokens: the first, the last and the longest of the others.

    Return none if all tokens are text, or if text touches more than `MAX_SHARE` of the blocks.

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
