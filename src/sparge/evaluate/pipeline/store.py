"""Frames stored without loss beside the rows, so that a resumed run compares with the same dense frames."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path

import numpy as np

from sparge.evaluate.pipeline.output import Pixels


class FrameStore:
    """Frames by name.

    Args:
        folder: created when the first file is written; None keeps frames in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[str, Pixels] = {}

    def put(self, name: object, pixels: Pixels) -> None:
        """Store frames; a file is complete or does not exist."""
        if self._folder is None:
            self._memory[_hashed(name)] = pixels
            return
        self._folder.mkdir(exist_ok=True)
        path = self._path(name)
        part = path.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            np.savez_compressed(file, frames=pixels)
        part.replace(path)

    def get(self, name: object) -> Pixels | None:
        """Return the frames, or None if there are none that can be read."""
        if self._folder is None:
            return self._memory.get(_hashed(name))
        try:
            with np.load(self._path(name)) as file:
                pixels: Pixels = file["frames"]
                return pixels
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            return None

    def _path(self, name: object) -> Path:
        assert self._folder is not None
        return self._folder / f"{_hashed(name)}.npz"


def _hashed(name: object) -> str:
    return hashlib.sha256(json.dumps(name).encode()).hexdigest()[:20]


def digest_of(pixels: Pixels) -> str:
    """Return a digest that identifies frames."""
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()[:16]
