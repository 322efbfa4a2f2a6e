"""The output of a pipeline as 8-bit frames, and a store of frames."""

from __future__ import annotations

import hashlib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Frames:
    """An image or a clip."""

    pixels: Pixels  # [F, H, W, 3], F is 1 for an image
    is_video: bool
    is_finite: bool = True  # no pixel was NaN or infinite


def frames_of(output: Any) -> Frames:
    """Return the only image (``.images``) or clip (``.frames``) of a pipeline's output: PIL images, arrays or tensors.

    Raises:
        ValueError: the output has no image or clip, or more than one.
    """
    is_video = getattr(output, "frames", None) is not None
    content = output.frames if is_video else getattr(output, "images", None)
    if content is None:
        raise ValueError(f"pipeline: expected an output with images or frames, got {type(output).__name__}")
    if len(content) != 1:
        raise ValueError(f"pipeline: expected one image or clip per call (use more seeds instead), got {len(content)}")
    frames = list(content[0]) if is_video else [content[0]]
    if not frames:
        raise ValueError("pipeline: expected a clip of one frame or more, got none")
    arrays = [_array(frame) for frame in frames]
    is_finite = all(bool(np.isfinite(array).all()) for array in arrays)
    return Frames(np.stack([_bytes(array) for array in arrays]), is_video, is_finite)


def _array(frame: Any) -> NDArray[Any]:
    """Return an array (H, W, 3) of bytes or floats."""
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


def digest_of(array: NDArray[Any]) -> str:
    """Return a digest that identifies frames."""
    return hashlib.sha256(str(array.shape).encode() + np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


class FrameStore:
    """Stores frames without loss, by their digest, so that a resumed run compares with the same dense frames.

    Args:
        folder: created when the first file is written; None keeps frames in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[str, Pixels] = {}

    def put(self, pixels: Pixels) -> None:
        """Store frames. A file is written atomically."""
        digest = digest_of(pixels)
        if self._folder is None:
            self._memory[digest] = pixels
            return
        self._folder.mkdir(exist_ok=True)
        part = self._folder / f"{digest}.{os.getpid()}.part"
        with part.open("wb") as file:
            np.savez_compressed(file, frames=pixels)
        part.replace(self._folder / f"{digest}.npz")

    def has(self, digest: str) -> bool:
        """Return whether frames are stored and can be read."""
        try:
            self.get(digest)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            return False
        return True

    def get(self, digest: str) -> Pixels:
        """Return stored frames."""
        if self._folder is None:
            return self._memory[digest]
        with np.load(self._folder / f"{digest}.npz") as file:
            pixels: Pixels = file["frames"]
            return pixels
