"""What a forward pass of a transformers model says about its tokens: the grid of its pictures, where its text lies.

Attention modules are told neither. The parts of a model that take pictures get hooks which remember the pass under way;
layers ask when a call of theirs goes sparse. A wrong answer would cost accuracy, not correctness: it is about which
blocks are kept, and which tokens share one.
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

PICTURES = ("pixel_values", "pixel_values_videos")
"""What the forward of a part takes that makes tokens of pictures (B, C, H, W) or videos (B, T, C, H, W)."""

VISUAL = tuple(f"{kind}_token_{place}" for kind in ("image", "video", "audio") for place in ("id", "index"))
"""What configs call the ids of tokens that stand for something else than text."""

SPECIAL = 16
"""So many tokens before a picture's are its class token and registers; more are something else."""

RANGES = 8
"""Stretches of text that are told of: each costs whole blocks."""

LITTLE = 0.125
"""Of all tokens, what special ones may be, and of all blocks, what text may touch to be told apart."""

Ranges = Sequence[tuple[int, int]]


def takes_pictures(module: nn.Module) -> bool:
    """Whether a module is one that `Inputs` can follow."""
    return not set(parameters_of(type(module))).isdisjoint(PICTURES)


@dataclass
class _Pass:
    """A forward pass.

    Attributes:
        sizes: of its pictures: (H, W) or (T, H, W) in pixels; None: there are none, or they are cut up already.
        ids: tokens (B, S).
        mask: what of them is no padding (B, S).
        text: where text lies among them, once somebody has asked.
    """

    sizes: tuple[int, ...] | None = None
    ids: Tensor | None = None
    mask: Tensor | None = None
    text: Ranges | None = None


class Inputs:
    """What the forward pass under way was called with, for each thread.

    Compiled programs share one, whichever thread wrote it last: torch.compile up to torch 2.11 loses what is written
    to thread-local objects.

    Args:
        visual: ids of tokens that are no text.
        tubelet: frames that make one token.
    """

    def __init__(self, visual: tuple[int, ...] = (), tubelet: int = 1) -> None:
        self._visual = visual
        self._tubelet = tubelet
        self._local = threading.local()
        self._compiled = _Pass()

    @classmethod
    def of(cls, module: nn.Module) -> Inputs:
        """For a part of a model, by its config."""
        config = getattr(module, "config", None)
        ids = (getattr(config, name, None) for name in VISUAL)
        tubelet = getattr(config, "tubelet_size", 1)
        frames = tubelet[0] if isinstance(tubelet, (list, tuple)) else tubelet
        return cls(tuple(sorted({number for number in ids if isinstance(number, int)})), frames)

    def __reduce__(self) -> tuple[Any, ...]:
        return Inputs, (self._visual, self._tubelet)  # models are copied, what threads know is not

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember what is needed of the arguments; a forward pre-hook. Nothing is read from a device."""
        arguments = {**dict(zip(parameters_of(type(module)), args, strict=False)), **kwargs}
        pixels = next((arguments[name] for name in PICTURES if isinstance(arguments.get(name), Tensor)), None)
        sizes = None
        if pixels is not None and pixels.ndim in (4, 5):
            sizes = (*pixels.shape[1 : pixels.ndim - 3], *pixels.shape[-2:])
        self._compiled = _Pass(sizes)
        if not torch.compiler.is_compiling():
            ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
            mask = mask if isinstance(mask, Tensor) and isinstance(ids, Tensor) and mask.shape == ids.shape else None
            self._local.found = _Pass(sizes, ids if isinstance(ids, Tensor) and ids.ndim == 2 else None, mask)

    def forget(self, *_: Any) -> None:
        """The pass is over; a forward hook."""
        self._compiled = _Pass()
        if not torch.compiler.is_compiling():
            self._local.found = self._compiled

    def _now(self) -> _Pass:
        if torch.compiler.is_compiling():
            return self._compiled
        found: _Pass = getattr(self._local, "found", self._compiled)
        return found

    def grid(self, tokens: int) -> tuple[tuple[int, ...] | None, Ranges]:
        """The grid of a picture that so many tokens are, and the special tokens before it."""
        sizes = self._now().sizes
        return (None, ()) if sizes is None else grid_of(sizes, tokens, self._tubelet)

    def text(self, tokens: int) -> Ranges:
        """Where text lies in a prompt of so many tokens; nothing where there is much, or no telling.

        The ids are read when it is first asked for in a pass, which waits for the device.
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
    """The grid that so many tokens of a picture are in the order of a raster, and the special ones before it.

    The side of a square patch follows from their number. None where a grid of such patches does not come out.

    Args:
        sizes: (H, W) or (T, H, W) in pixels.
        tubelet: frames that make one token.

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
    if not 0 <= special <= min(SPECIAL, LITTLE * tokens):
        return None, ()
    grid = (frames, rows, columns) if time else (rows, columns)
    return grid, ((0, special),) if special else ()


def text_of(ids: Tensor, visual: Sequence[int], mask: Tensor | None = None) -> Ranges:
    """Ranges [start, stop) of text among visual tokens: the first, the last and the longest of the others.

    Nothing where text is all there is, or touches more than a small part of the blocks.

    Args:
        ids: tokens (B, S); what is text in one sequence counts as text.
        visual: ids of others.
        mask: 0 where there is padding (B, S).

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
    if len(ranges) > RANGES:
        longest = sorted(ranges[1:-1], key=lambda pair: pair[0] - pair[1])[: RANGES - 2]
        ranges = [ranges[0], *sorted(longest), ranges[-1]]
    touched = sum(ceil_div(stop, BLOCK_K) - start // BLOCK_K for start, stop in ranges)
    return tuple(ranges) if touched <= LITTLE * ceil_div(ids.shape[1], BLOCK_K) else ()
