"""Frames kept without loss beside the rows, so that a run that goes on compares with the very same dense frames."""

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
        folder: where files go, made when the first is written; None keeps frames in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[str, Pixels] = {}

    def put(self, name: object, pixels: Pixels) -> None:
        """Keep frames; a file is whole or not there."""
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
        """The frames, or None where there are none, or none that can be read."""
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
    """What tells frames apart."""
    return hashlib.sha256(str(pixels.shape).encode() + np.ascontiguousarray(pixels).tobytes()).hexdigest()[:16]
