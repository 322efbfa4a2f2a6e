"""Clips to train on: a camera moves over a photograph, and before it a textured shape moves.

Everything is drawn on the device, in batches, from seeds: photographs by sampling, shapes and patterns from their
formulas, edges smoothed over a pixel.
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

COLOURS = (
    (0.92, 0.12, 0.10),
    (0.15, 0.75, 0.20),
    (0.12, 0.30, 0.95),
    (0.98, 0.85, 0.10),
    (0.65, 0.20, 0.85),
    (0.97, 0.97, 0.97),
)
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
PAN = 0.11
"""How far the camera goes either way from the middle of the photograph, in its width."""
TRAVEL = 0.5
"""The same for the shape, in half the frame's width."""
ASIDE, RADIUS = 0.12, 0.46
"""How far from the middle of the frame a shape's way may lie, and how large a shape is, likewise."""
NEAR = 1.4
"""What counts as near a shape, in its radius: the corners of all shapes are nearer."""


class Scene(NamedTuple):
    """What happens in each clip: a row for each."""

    words: Tensor  # (B, slots): places of the words in SLOTS
    camera: Tensor  # (B, 3): offset of the middle (x, y), factor of the span
    shape: Tensor  # (B, 3): offset of the middle (x, y), place in the texture


@dataclass(frozen=True)
class Pictures:
    """Photographs (P, 3, S, S) in [-1, 1] and grey textures (T, 1, S, S) in [0, 1]."""

    photographs: Tensor
    textures: Tensor

    @classmethod
    def load(cls, path: str | Path, size: int, device: torch.device | str = "cpu") -> Pictures:
        """What photographs.py wrote, photographs scaled to `size` pixels."""
        with np.load(path) as arrays:
            photographs, textures = (torch.from_numpy(arrays[name]).float() for name in ("photographs", "textures"))
        photographs = (photographs / 127.5 - 1).permute(0, 3, 1, 2)
        photographs = F.interpolate(photographs, (size, size), mode="bicubic", antialias=True).clamp(-1, 1)
        textures = textures[:, None]
        low = textures.amin((2, 3), keepdim=True)
        textures = ((textures - low) / (textures.amax((2, 3), keepdim=True) - low)).clamp(0, 1)
        return cls(photographs.to(device), textures.to(device))

    @classmethod
    def noise(cls, size: int = 64, seed: int = 0) -> Pictures:
        """Smooth random pictures in place of photographs."""
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.rand(len(SLOTS["photograph"]), 3, 6, 6, generator=generator) * 2 - 1
        photographs = F.interpolate(coarse, (size, size), mode="bilinear")
        return cls(photographs, torch.rand(len(TEXTURE_PHOTOGRAPHS), 1, size, size, generator=generator))


def draw_scenes(count: int, generator: torch.Generator) -> Scene:
    """Random scenes, on the generator's device."""
    device = generator.device
    sizes = torch.tensor([len(words) for words in SLOTS.values()], device=device)
    uniform = torch.rand(count, len(sizes), generator=generator, device=device)
    words = torch.minimum((uniform * sizes).long(), sizes - 1)
    camera = torch.rand(count, 3, generator=generator, device=device) * 2 - 1
    shape = torch.rand(count, 3, generator=generator, device=device) * 2 - 1
    return Scene(words, camera, shape)


def captions(scene: Scene) -> list[str]:
    """What the scenes' captions say."""
    rows = scene.words.tolist()
    return [write_caption({slot: SLOTS[slot][word] for slot, word in zip(SLOTS, row, strict=True)}) for row in rows]


def clip_times(frames: int, device: torch.device | str = "cpu") -> Tensor:
    """Of the first frames of a clip, (1, F): 0 to 1 over CLIP_FRAMES."""
    return torch.arange(frames, device=device)[None] / (CLIP_FRAMES - 1)


def render(pictures: Pictures, scene: Scene, times: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Clips of the scenes at these times, (B, F) or (1, F) -> (B, 3, F, H, W) in [-1, 1], and where their shapes are.

    The second is 1 within a disc about the shape and 0 elsewhere, (B, 1, F, H, W).
    """
    device = scene.words.device
    times = times.expand(len(scene.words), -1)
    y, x = torch.meshgrid(
        *((torch.arange(size, device=device) + 0.5) / size * 2 - 1 for size in (height, width)), indexing="ij"
    )
    background = _seen_by_camera(pictures, scene, times, x, y)
    colour, cover, near = _shape(pictures, scene, times, x, y)
    return background + (colour * 2 - 1 - background) * cover[:, None], near[:, None]


def _seen_by_camera(pictures: Pictures, scene: Scene, times: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """(B, 3, F, H, W): the window of the photograph before the camera."""
    words = scene.words[:, list(SLOTS).index("camera")]
    path = _path(words, SLOTS["camera"], times) * PAN * 2
    zoom = torch.tensor(
        [{"zooms in": -1.0, "zooms out": 1.0}.get(word, 0.0) for word in SLOTS["camera"]], device=times.device
    )
    span = 0.68 * (1 + 0.06 * scene.camera[:, 2:]) * torch.exp(0.25 * zoom[words][:, None] * (2 * times - 1))
    middle = path + 0.06 * scene.camera[:, None, :2]
    grid = torch.stack(
        [middle[..., axis, None, None] + span[..., None, None] * place for axis, place in enumerate((x, y))], dim=-1
    )  # (B, F, H, W, 2), in [-1, 1] over the photograph
    photographs = pictures.photographs[scene.words[:, list(SLOTS).index("photograph")]]
    seen = F.grid_sample(photographs, grid.flatten(1, 2), padding_mode="reflection", align_corners=False)
    return seen.unflatten(2, (times.shape[1], -1))


def _shape(pictures: Pictures, scene: Scene, times: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Colour (B, 3, F, H, W) in [0, 1], how much of each pixel the shape covers, and what is near it, (B, F, H, W)."""
    places = {slot: scene.words[:, place] for place, slot in enumerate(SLOTS)}
    path = _path(places["motion"], SLOTS["motion"], times) * TRAVEL
    is_moving = path.abs().amax(1, keepdim=True) > 0
    middle = path + torch.where(is_moving, 0.0, ASIDE) * scene.shape[:, None, :2]
    u, v = ((place - middle[..., axis, None, None]) / RADIUS for axis, place in enumerate((x, y)))
    pixel = 2 / x.shape[-1] / RADIUS

    distance = _one_of(places["shape"], [_disc(u, v), _square(u, v), _triangle(u, v), _star(u, v)])
    cover = (0.5 - distance / pixel).clamp(0, 1)
    near = (u.square() + v.square() < NEAR**2).to(cover.dtype)
    light = _one_of(places["texture"], [*_patterns(u, v, pixel), *_photographed(pictures, scene, u, v)])
    colours = torch.tensor(COLOURS, device=x.device)[places["colour"]][:, :, None, None, None]
    return colours * (0.25 + 0.75 * light[:, None]), cover, near


def _path(words: Tensor, known: tuple[str, ...], times: Tensor) -> Tensor:
    """(B, F, 2): from -1 to 1 along the direction that the word names."""
    directions = [DIRECTIONS.get(word.split()[-1], (0, 0)) for word in known]
    along = torch.tensor(directions, device=times.device, dtype=times.dtype)[words]
    return along[:, None] * (2 * times[..., None] - 1)


def _one_of(index: Tensor, planes: list[Tensor]) -> Tensor:
    """For each row of the batch the plane that it asks for."""
    chosen = planes[0]
    for place, plane in enumerate(planes[1:], 1):
        chosen = torch.where((index == place)[:, None, None, None], plane, chosen)
    return chosen


def _disc(u: Tensor, v: Tensor) -> Tensor:
    return (u.square() + v.square()).sqrt() - 0.95


def _square(u: Tensor, v: Tensor) -> Tensor:
    return torch.maximum(u.abs(), v.abs()) - 0.82


def _triangle(u: Tensor, v: Tensor) -> Tensor:
    lean = math.sqrt(3) / 2
    return torch.maximum(v, lean * u.abs() - v / 2) - 0.62


def _star(u: Tensor, v: Tensor) -> Tensor:
    """Five points, one of them up: in half a point, the distance from the line between its tip and inner corner."""
    fifth = 2 * math.pi / 5
    angle = torch.remainder(torch.atan2(u, -v) + fifth / 2, fifth) - fifth / 2
    length = (u.square() + v.square()).sqrt()
    along, across = length * angle.cos(), length * angle.sin().abs()
    tip, inner = 1.15, 0.55
    corner = (inner * math.cos(fifth / 2), inner * math.sin(fifth / 2))
    edge = (corner[0] - tip, corner[1])
    return ((along - tip) * edge[1] - across * edge[0]) / math.hypot(*edge)


def _patterns(u: Tensor, v: Tensor, pixel: float) -> list[Tensor]:
    """Stripes, checks and dots, in [0, 1]; edges are as wide as a pixel."""
    period = 0.5
    turn = 2 * math.pi / period
    sharp = 1 / (turn * pixel)
    wave_u, wave_v = (turn * u).sin(), (turn * v).sin()
    dots = ((turn * u).cos() + (turn * v).cos()) / 2
    return [(0.5 + wave * sharp).clamp(0, 1) for wave in (wave_u, wave_u * wave_v, 0.4 - dots)]


def _photographed(pictures: Pictures, scene: Scene, u: Tensor, v: Tensor) -> list[Tensor]:
    """The grey textures, a part of them as large as the shape."""
    grid = torch.stack([u, v], dim=-1).flatten(1, 2) * 0.3 + 0.6 * scene.shape[:, 2, None, None, None]
    found = []
    for texture in pictures.textures:
        sampled = F.grid_sample(
            texture.expand(len(u), -1, -1, -1), grid, padding_mode="reflection", align_corners=False
        )
        found.append(sampled[:, 0].unflatten(1, (u.shape[1], -1)))
    return found
