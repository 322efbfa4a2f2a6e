"""Arrange the frames of all variants side by side, as data: URIs for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sparge.evaluate.pipeline.frames import Pixels
from sparge.evaluate.pipeline.run import SHOWN, Item, Result

WIDTH = 400
"""Maximum width of an image."""

COLUMNS = 5
"""Number of frames of a clip that are shown."""

MOVING_FRAMES, MOVING_WIDTH, FRAME_MS = 49, 240, 100
LOSSLESS_PIXELS = 128 * 128
"""Images with at most this many pixels are stored without loss."""

GAIN = 4
"""Factor by which differences are amplified."""


@dataclass(frozen=True)
class Strip:
    """Images of one variant as data: URIs; the dense pipeline has the variant ""."""

    variant: str
    quality: str  # PSNR of the shown clip or images; "" for the dense strip
    images: list[str]  # one for each column
    differences: list[str]  # amplified differences from the dense images
    moving: str  # the whole clip as an animation; "" except for the first clip


@dataclass(frozen=True)
class Gallery:
    """Columns side by side: frames of one clip, or images of several prompts and seeds."""

    title: str  # the prompt and seed of a clip
    columns: list[str]  # titles
    strips: list[Strip]  # the dense strip comes first
    ratio: float  # width over height


def galleries(result: Result) -> list[Gallery]:
    """Return the images of a result: one gallery for each of the first clips, or one for the first images."""
    dense = result.row("dense", result.items[0], None)
    items = result.items[:SHOWN]
    if not dense["is_video"]:
        return [_gallery(result, "", items, [_name(item) for item in items], [0], moving=False)]
    count = dense["shape"][0]
    places = sorted({round(place * (count - 1) / (COLUMNS - 1)) for place in range(COLUMNS)})
    titles = [f"frame {place + 1} of {count}" for place in places]
    return [_gallery(result, _name(item), [item], titles, places, moving=item == items[0]) for item in items]


def _gallery(
    result: Result, title: str, items: Sequence[Item], columns: list[str], places: Sequence[int], moving: bool
) -> Gallery:
    """Return a gallery with the frames at the given places of all clips or images."""
    strips: list[Strip] = []
    dense: list[Pixels] = []
    for variant in (None, *result.variants):
        clips = [result.frames(item, variant) for item in items]
        images = [clip[place] for clip in clips for place in places]
        dense = dense or images
        stills, animation = [still(image) for image in images], animated(clips[0]) if moving else ""
        if variant is None:
            strips.append(Strip("", "", stills, [], animation))
            continue
        quality = _quality([result.row("variant", item, variant)["psnr"] for item in items])
        differences = [still(difference(*pair)) for pair in zip(images, dense, strict=True)]
        strips.append(Strip(variant.label, quality, stills, differences, animation))
    height, width = dense[0].shape[:2]
    return Gallery(title, columns, strips, width / height)


def _quality(psnr: Sequence[float | None]) -> str:
    """Format the PSNR of a clip, or the range of PSNRs of several images; None stands for equal images."""
    values = [value for value in psnr if value is not None]
    if not values:
        return "equal"
    low, high = min(values), max(values)
    return f"PSNR {low:.1f} dB" if low == high else f"PSNR {low:.1f} to {high:.1f} dB"


def _name(item: Item) -> str:
    return f"seed {item.seed}" if item.prompt is None else f"{item.prompt}, seed {item.seed}"


def difference(frame: Pixels, exact: Pixels) -> Pixels:
    """Return |frame - exact|, amplified."""
    distance = np.abs(frame.astype(np.int16) - exact.astype(np.int16)) * GAIN
    return distance.clip(0, 255).astype(np.uint8)


def still(frame: Pixels) -> str:
    """Return an image as a data: URI. Small images are not enlarged."""
    image = _resized(frame, WIDTH)
    is_lossless = image.width * image.height <= LOSSLESS_PIXELS
    return _data_uri(image, quality=88, method=4, lossless=is_lossless)


def animated(clip: Pixels) -> str:
    """Return a clip as a looping animation. Long clips are subsampled."""
    stride = -(-len(clip) // MOVING_FRAMES)
    first, *others = [_resized(frame, MOVING_WIDTH) for frame in clip[::stride]]
    motion = {"save_all": True, "append_images": others, "duration": FRAME_MS * stride, "loop": 0}
    return _data_uri(first, quality=75, method=3, **motion)


def _resized(frame: Pixels, width: int) -> Image.Image:
    image = Image.fromarray(frame)
    if image.width <= width:
        return image
    return image.resize((width, max(1, round(image.height * width / image.width))), Image.Resampling.LANCZOS)


def _data_uri(image: Image.Image, **options: object) -> str:
    file = io.BytesIO()
    image.save(file, "WEBP", **options)
    return f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
