"""Arrange the frames of all variants side by side, as data: URIs for a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sparge.evaluate.pipeline.frames import Pixels
from sparge.evaluate.pipeline.run import SHOWN_CLIPS, SHOWN_IMAGES, Item, Result

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
    images: list[str]  # one for each column
    differences: list[str]  # amplified differences from the dense images; empty for the dense strip
    moving: str = ""  # the whole clip as an animation; only for the first clip


@dataclass(frozen=True)
class Gallery:
    """Columns side by side: frames of one clip, or images of several prompts and seeds."""

    title: str  # the prompt and seed of a clip
    items: list[Item]  # prompt and seed of the clip, or of the image in each column
    columns: list[str]  # titles
    strips: list[Strip]  # the dense strip comes first
    ratio: float  # width over height


def galleries(result: Result) -> list[Gallery]:
    """Return the images of a result: one gallery for each of the first clips, or one for all images."""
    is_video = result.row("dense", result.items[0], None)["is_video"]
    labels = ["", *(variant.label for variant in result.variants)]
    shown: dict[Item, list[Pixels]] = {}  # the clips of each variant
    for item in result.items[: SHOWN_CLIPS if is_video else SHOWN_IMAGES]:
        found = [result.frames(item, variant) for variant in (None, *result.variants)]
        existing = [clip for clip in found if clip is not None]
        if len(existing) == len(found):  # false if files have been deleted
            shown[item] = existing
    if not is_video:
        frames = [[clips[number][0] for clips in shown.values()] for number in range(len(labels))]
        return [_gallery("", list(shown), [_name(item) for item in shown], labels, frames, [])] if shown else []
    made = []
    for number, (item, clips) in enumerate(shown.items()):
        count = len(clips[0])
        places = sorted({round(place * (count - 1) / (COLUMNS - 1)) for place in range(COLUMNS)})
        columns = [f"frame {place + 1} of {count}" for place in places]
        frames = [[clip[place] for place in places] for clip in clips]
        made.append(_gallery(_name(item), [item], columns, labels, frames, [] if number else clips))
    return made


def _gallery(
    title: str,
    items: list[Item],
    columns: list[str],
    labels: Sequence[str],
    frames: Sequence[Sequence[Pixels]],
    clips: Sequence[Pixels],
) -> Gallery:
    """Return a gallery.

    Args:
        frames: the frames of each variant, dense first.
        clips: the whole clip of each variant, to show as an animation; empty for none.
    """
    strips = []
    for number, label in enumerate(labels):
        pairs = zip(frames[number], frames[0], strict=True) if number else ()
        images = [still(frame) for frame in frames[number]]
        differences = [still(difference(*pair)) for pair in pairs]
        strips.append(Strip(label, images, differences, animated(clips[number]) if clips else ""))
    height, width = frames[0][0].shape[:2]
    return Gallery(title, items, columns, strips, width / height)


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
