"""Convert the output of a pipeline to frames of bytes: PIL images, NumPy arrays or tensors, images or clips."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Frames:
    """An image or a clip.

    Attributes:
        pixels: (F, H, W, 3), bytes; F is 1 for an image.
        is_video: a clip.
        is_finite: no pixel was NaN or infinite; pixels that were are 0.
    """

    pixels: Pixels
    is_video: bool
    is_finite: bool = True


def frames_of(output: Any) -> Frames:
    """Return the one image (``.images``) or clip (``.frames``) of a pipeline's output.

    Raises:
        ValueError: there is none, or more than one.
    """
    is_video = getattr(output, "frames", None) is not None
    content = output.frames if is_video else getattr(output, "images", None)
    if content is None:
        raise ValueError(f"pipeline: expected an output with images or frames, got {type(output).__name__}")
    if len(content) != 1:
        raise ValueError(f"pipeline: expected one image or clip per call (take more seeds), got {len(content)}")
    first = content[0]
    frames = list(first) if is_video else [first]
    if not frames:
        raise ValueError("pipeline: expected a clip of one frame or more, got none")
    arrays = [_array(frame) for frame in frames]
    is_finite = all(bool(np.isfinite(array).all()) for array in arrays)
    return Frames(np.stack([_bytes(array) for array in arrays]), is_video, is_finite)


def _array(frame: Any) -> NDArray[Any]:
    """(H, W, 3), bytes or floats."""
    if isinstance(frame, torch.Tensor):
        frame = frame.detach().cpu()
        array = (frame if frame.dtype == torch.uint8 else frame.float()).numpy()
        array = np.moveaxis(array, 0, -1) if array.ndim == 3 else array
    elif isinstance(frame, np.ndarray):
        array = frame
    else:
        array = np.asarray(frame.convert("RGB"))
    array = array[..., None] if array.ndim == 2 else array
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"pipeline: expected frames of 1, 3 or 4 channels (no latents), got shape {array.shape}")
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array[..., :3]


def _bytes(array: NDArray[Any]) -> Pixels:
    if array.dtype == np.uint8:
        return array
    return (np.nan_to_num(array, posinf=1.0).clip(0, 1) * 255).round().astype(np.uint8)
