"""Frames as data: URIs for a page, in total small enough to be sent by mail."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sparge.evaluate.pipeline.output import Pixels
from sparge.evaluate.pipeline.run import SHOWN_CLIPS, SHOWN_IMAGES, Item, Result

MAX_BYTES = 8 * 2**20
"""Limit on all images of a page, as text."""

WIDTHS = (400, 320, 240, 180, 120, 80)
"""Tried in this order until all images fit."""

COLUMNS = 5
"""Frames of a clip that are shown."""

MOVING_FRAMES, MOVING_WIDTH, FRAME_MS = 49, 240, 100
LOSSLESS_PIXELS = 128 * 128
"""Images up to this size are stored without loss."""

GAIN = 4
"""Factor by which differences are amplified."""


@dataclass(frozen=True)
class Strip:
    """Images of one variant, or of the dense pipeline, as data: URIs.

    Attributes:
        variant: "" for dense.
        images: one for each column.
        differences: from dense, amplified; empty for dense.
        moving: the whole clip, of the first clip only.
    """

    variant: str
    images: list[str]
    differences: list[str]
    moving: str = ""

    @property
    def size(self) -> int:
        return sum(map(len, (*self.images, *self.differences, self.moving)))


@dataclass(frozen=True)
class Gallery:
    """Columns side by side: frames of one clip, or images of several prompts and seeds.

    Attributes:
        title: the prompt and seed of a clip.
        items: the clip, or the image in each column.
        columns: the title of each column.
        strips: dense first.
        ratio: width over height.
    """

    title: str
    items: list[Item]
    columns: list[str]
    strips: list[Strip]
    ratio: float


@dataclass(frozen=True)
class _Chosen:
    """The content of a gallery: the frames of every strip, and the clips to show in motion."""

    title: str
    items: list[Item]
    columns: list[str]
    labels: list[str]
    frames: list[list[Pixels]]
    clips: list[Pixels]

    def drawn(self, width: int) -> Gallery:
        exact = self.frames[0]
        strips = []
        for number, (label, frames) in enumerate(zip(self.labels, self.frames, strict=True)):
            pairs = zip(frames, exact, strict=True) if number else ()
            strips.append(
                Strip(
                    label,
                    [still(frame, width) for frame in frames],
                    [still(difference(*pair), width) for pair in pairs],
                    animated(self.clips[number], min(width, MOVING_WIDTH)) if self.clips else "",
                )
            )
        height, across = exact[0].shape[:2]
        return Gallery(self.title, self.items, self.columns, strips, across / height)


def galleries(result: Result, max_bytes: int = MAX_BYTES) -> list[Gallery]:
    """Return the images of a result, in the largest width that fits."""
    chosen = list(_chosen(result))
    made: list[Gallery] = []
    for width in WIDTHS:
        made = [one.drawn(width) for one in chosen]
        if sum(strip.size for gallery in made for strip in gallery.strips) <= max_bytes:
            break
    return made


def _chosen(result: Result) -> Iterator[_Chosen]:
    is_video = result.row("dense", result.items[0], None)["is_video"]
    labels = ["", *(variant.label for variant in result.variants)]
    kept: dict[Item, list[Pixels]] = {}
    for item in result.items[: SHOWN_CLIPS if is_video else SHOWN_IMAGES]:
        clips = [result.frames(item, variant) for variant in (None, *result.variants)]
        found = [clip for clip in clips if clip is not None]
        if len(found) == len(clips):  # files may have been deleted
            kept[item] = found
    if not is_video and kept:
        images = [[found[number][0] for found in kept.values()] for number in range(len(labels))]
        yield _Chosen("", list(kept), [_name(item) for item in kept], labels, images, [])
    for number, (item, found) in enumerate(kept.items() if is_video else ()):
        count = len(found[0])
        shown = sorted({round(place * (count - 1) / (COLUMNS - 1)) for place in range(COLUMNS)})
        columns = [f"frame {frame + 1} of {count}" for frame in shown]
        frames = [[clip[frame] for frame in shown] for clip in found]
        yield _Chosen(_name(item), [item], columns, labels, frames, [] if number else found)


def _name(item: Item) -> str:
    return f"seed {item.seed}" if item.prompt is None else f"{item.prompt}, seed {item.seed}"


def difference(frame: Pixels, exact: Pixels) -> Pixels:
    """Return |frame - exact|, amplified."""
    distance = np.abs(frame.astype(np.int16) - exact.astype(np.int16)) * GAIN
    return distance.clip(0, 255).astype(np.uint8)


def still(frame: Pixels, width: int) -> str:
    """Return an image as a data: URI, never enlarged."""
    file = io.BytesIO()
    image = _resized(frame, width)
    image.save(file, "WEBP", quality=88, method=4, lossless=image.width * image.height <= LOSSLESS_PIXELS)
    return _uri(file)


def animated(clip: Pixels, width: int) -> str:
    """Return a clip that repeats, with some frames left out of a long one."""
    stride = -(-len(clip) // MOVING_FRAMES)
    first, *others = [_resized(frame, width) for frame in clip[::stride]]
    file = io.BytesIO()
    first.save(
        file, "WEBP", save_all=True, append_images=others, duration=FRAME_MS * stride, loop=0, quality=75, method=3
    )
    return _uri(file)


def _resized(frame: Pixels, width: int) -> Image.Image:
    image = Image.fromarray(frame)
    if image.width <= width:
        return image
    return image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)


def _uri(file: io.BytesIO) -> str:
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
