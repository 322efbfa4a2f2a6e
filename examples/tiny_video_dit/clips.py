"""Training clips: a camera moves over a photograph, and a textured shape moves in front of it.

Clips are rendered on the device in batches and depend only on a seed. Photographs are sampled, shapes and patterns are
computed from formulas, and edges are one pixel wide. Coordinates x and y are in [-1, 1] over a frame; u and v are
relative to the shape, in units of RADIUS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pipeline import CLIP_FRAMES, SLOTS, TEXTURE_PHOTOGRAPHS, write_caption
from torch import Tensor

COLORS = (
    (0.92, 0.12, 0.10),
    (0.15, 0.75, 0.20),
    (0.12, 0.30, 0.95),
    (0.98, 0.85, 0.10),
    (0.65, 0.20, 0.85),
    (0.97, 0.97, 0.97),
)
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
PAN = 0.11
"""Distance of the camera from the center of the photograph at the ends of a pan, as a fraction of its width."""
TRAVEL = 0.5
"""Distance of the shape from the center of the frame at the ends of its motion, as a fraction of half the width."""
OFFSET, RADIUS = 0.12, 0.46
"""Largest random offset of a shape that stays, and size of a shape, in the same unit."""
NEAR = 1.4
"""Radius of the region near a shape, as a multiple of RADIUS. It contains the corners of all shapes."""


class Scene(NamedTuple):
    """Random choices that define a batch of clips, one row per clip."""

    words: Tensor  # (B, slots): index of the word of each slot in SLOTS
    camera: Tensor  # (B, 3): offset of the center (x, y), change of the zoom; all in [-1, 1]
    shape: Tensor  # (B, 3): offset of the center (x, y), position in the texture; all in [-1, 1]


@dataclass(frozen=True)
class Images:
    """Photographs (P, 3, S, S) in [-1, 1] and gray textures (T, 1, S, S) in [0, 1]."""

    photographs: Tensor
    textures: Tensor

    @classmethod
    def load(cls, path: str | Path, size: int, device: torch.device | str = "cpu") -> Images:
        """Load the file that photographs.py wrote, with photographs scaled to `size` pixels."""
        with np.load(path) as arrays:
            photographs, textures = (torch.from_numpy(arrays[name]).float() for name in ("photographs", "textures"))
        photographs = (photographs / 127.5 - 1).permute(0, 3, 1, 2)
        photographs = F.interpolate(photographs, (size, size), mode="bicubic", antialias=True).clamp(-1, 1)
        textures = textures[:, None]
        low = textures.amin((2, 3), keepdim=True)
        textures = ((textures - low) / (textures.amax((2, 3), keepdim=True) - low)).clamp(0, 1)
        return cls(photographs.to(device), textures.to(device))

    @classmethod
    def noise(cls, size: int = 64, seed: int = 0) -> Images:
        """Return smooth random images in place of photographs."""
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.rand(len(SLOTS["photograph"]), 3, 6, 6, generator=generator) * 2 - 1
        photographs = F.interpolate(coarse, (size, size), mode="bilinear")
        return cls(photographs, torch.rand(len(TEXTURE_PHOTOGRAPHS), 1, size, size, generator=generator))


def draw_scenes(count: int, generator: torch.Generator) -> Scene:
    """Return random scenes on the generator's device."""
    device = generator.device
    sizes = torch.tensor([len(words) for words in SLOTS.values()], device=device)
    uniform = torch.rand(count, len(sizes), generator=generator, device=device)
    words = torch.minimum((uniform * sizes).long(), sizes - 1)
    camera = torch.rand(count, 3, generator=generator, device=device) * 2 - 1
    shape = torch.rand(count, 3, generator=generator, device=device) * 2 - 1
    return Scene(words, camera, shape)


def captions(scene: Scene) -> list[str]:
    """Return the caption of each scene."""
    rows = scene.words.tolist()
    return [write_caption({slot: SLOTS[slot][word] for slot, word in zip(SLOTS, row, strict=True)}) for row in rows]


def clip_times(frames: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the times of the first frames of a clip, (1, F): 0 to 1 over CLIP_FRAMES."""
    return torch.arange(frames, device=device)[None] / (CLIP_FRAMES - 1)


def render(images: Images, scene: Scene, times: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Render the scenes at these times, (B, F) or (1, F).

    Returns:
        clips: (B, 3, F, H, W) in [-1, 1].
        near: 1 in a disc around the shape and 0 elsewhere, (B, 1, F, H, W).
    """
    device = scene.words.device
    times = times.expand(len(scene.words), -1)
    y, x = torch.meshgrid(
        *((torch.arange(size, device=device) + 0.5) / size * 2 - 1 for size in (height, width)), indexing="ij"
    )
    background = _background(images, scene, times, x, y)
    color, cover, near = _shape(images, scene, times, x, y)
    return background + (color * 2 - 1 - background) * cover[:, None], near[:, None]


def _background(images: Images, scene: Scene, times: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the part of the photograph that the camera sees, (B, 3, F, H, W)."""
    words = scene.words[:, list(SLOTS).index("camera")]
    path = _path(words, SLOTS["camera"], times) * PAN * 2
    zoom = torch.tensor(
        [{"zooms in": -1.0, "zooms out": 1.0}.get(word, 0.0) for word in SLOTS["camera"]], device=times.device
    )
    span = 0.68 * (1 + 0.06 * scene.camera[:, 2:]) * torch.exp(0.25 * zoom[words][:, None] * (2 * times - 1))
    center = path + 0.06 * scene.camera[:, None, :2]
    grid = torch.stack(
        [center[..., axis, None, None] + span[..., None, None] * pixel for axis, pixel in enumerate((x, y))], dim=-1
    )  # (B, F, H, W, 2), in [-1, 1] over the photograph
    photographs = images.photographs[scene.words[:, list(SLOTS).index("photograph")]]
    seen = F.grid_sample(photographs, grid.flatten(1, 2), padding_mode="reflection", align_corners=False)
    return seen.unflatten(2, (times.shape[1], -1))


def _shape(images: Images, scene: Scene, times: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the color (B, 3, F, H, W) in [0, 1], the coverage of each pixel and the region near it, (B, F, H, W)."""
    words = {slot: scene.words[:, index] for index, slot in enumerate(SLOTS)}
    path = _path(words["motion"], SLOTS["motion"], times) * TRAVEL
    is_moving = path.abs().amax(1, keepdim=True) > 0
    center = path + torch.where(is_moving, 0.0, OFFSET) * scene.shape[:, None, :2]
    u, v = ((pixel - center[..., axis, None, None]) / RADIUS for axis, pixel in enumerate((x, y)))
    pixel = 2 / x.shape[-1] / RADIUS  # width of a pixel in u and v

    distance = _choose(words["shape"], [_disc(u, v), _square(u, v), _triangle(u, v), _star(u, v)])
    cover = (0.5 - distance / pixel).clamp(0, 1)
    near = (u.square() + v.square() < NEAR**2).to(cover.dtype)
    light = _choose(words["texture"], [*_patterns(u, v, pixel), *_photo_textures(images, scene, u, v)])
    colors = torch.tensor(COLORS, device=x.device)[words["color"]][:, :, None, None, None]
    return colors * (0.25 + 0.75 * light[:, None]), cover, near


def _path(words: Tensor, known: tuple[str, ...], times: Tensor) -> Tensor:
    """Return a path (B, F, 2) from -1 to 1 along the direction that the word names, or zeros."""
    directions = [DIRECTIONS.get(word.split()[-1], (0, 0)) for word in known]
    along = torch.tensor(directions, device=times.device, dtype=times.dtype)[words]
    return along[:, None] * (2 * times[..., None] - 1)


def _choose(index: Tensor, planes: list[Tensor]) -> Tensor:
    """Return row b of planes[index[b]] for each clip b."""
    return torch.stack(planes)[index, torch.arange(len(index), device=index.device)]


# Signed distances from the edge of a shape: negative inside.


def _disc(u: Tensor, v: Tensor) -> Tensor:
    return (u.square() + v.square()).sqrt() - 0.95


def _square(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs()) - 0.82


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(v, math.sqrt(3) / 2 * u.abs() - v / 2) - 0.62


def _star(u: Tensor, v: Tensor) -> Tensor:
    """Return the distance from a star with five tips, one of them up.

    By symmetry, the edge is the line from a tip to the next inner corner.
    """
    fifth = 2 * math.pi / 5
    angle = torch.remainder(torch.atan2(u, -v) + fifth / 2, fifth) - fifth / 2
    length = (u.square() + v.square()).sqrt()
    along, across = length * angle.cos(), length * angle.sin().abs()
    tip, inner = 1.15, 0.55
    corner = (inner * math.cos(fifth / 2), inner * math.sin(fifth / 2))
    edge = (corner[0] - tip, corner[1])
    return ((along - tip) * edge[1] - across * edge[0]) / math.hypot(*edge)


def _patterns(u: Tensor, v: Tensor, pixel: float) -> list[Tensor]:
    """Return stripes, checks and dots in [0, 1], with edges as wide as a pixel."""
    frequency = 2 * math.pi / 0.5
    slope = 1 / (frequency * pixel)
    wave_u, wave_v = (frequency * u).sin(), (frequency * v).sin()
    dots = ((frequency * u).cos() + (frequency * v).cos()) / 2
    return [(0.5 + wave * slope).clamp(0, 1) for wave in (wave_u, wave_u * wave_v, 0.4 - dots)]


def _photo_textures(images: Images, scene: Scene, u: Tensor, v: Tensor) -> list[Tensor]:
    """Return a part of each gray texture, as large as the shape."""
    grid = torch.stack([u, v], dim=-1).flatten(1, 2) * 0.3 + 0.6 * scene.shape[:, 2, None, None, None]
    sampled = (
        F.grid_sample(texture.expand(len(u), -1, -1, -1), grid, padding_mode="reflection", align_corners=False)
        for texture in images.textures
    )
    return [texture[:, 0].unflatten(1, (u.shape[1], -1)) for texture in sampled]
