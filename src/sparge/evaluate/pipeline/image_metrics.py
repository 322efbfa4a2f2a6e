"""Distances between two images or clips: PSNR, SSIM, LPIPS and temporal difference.

All functions take two clips (F, H, W, 3) of equal shape: floats in [0, 1], or bytes. An image is a clip of one frame.
Frames are processed one at a time, so a long clip needs the memory of one frame.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WINDOW, SIGMA = 11, 1.5
"""Pixels on a side and standard deviation of the Gaussian window of SSIM."""

STABILIZERS = (0.01**2, 0.03**2)
"""Constants of SSIM, for values in [0, 1]."""

LPIPS_SIDE = 64
"""Smaller frames are enlarged for LPIPS, because its network halves them several times."""


def psnr(clip: Tensor, exact: Tensor) -> float:
    """Return the PSNR in dB, 10 log10(1 / mean squared error), over the whole clip; inf for equal clips.

    Example:
        >>> import torch
        >>> round(psnr(torch.full((1, 4, 4, 3), 0.6), torch.full((1, 4, 4, 3), 0.5)), 4)
        20.0
    """
    errors = [(one - other).square().mean(dtype=torch.float64) for one, other in _frames(clip, exact)]
    error = statistics.fmean(map(float, errors))
    return -10 * math.log10(error) if error > 0 else math.inf


def ssim(clip: Tensor, exact: Tensor) -> float:
    """Return the structural similarity (SSIM), 1 for equal clips: the mean over all frames and channels.

    The Gaussian window has 11 x 11 pixels. Only positions where the whole window is inside the image count, so frames
    need 11 x 11 pixels or more.
    """
    return statistics.fmean(_ssim_of_frame(*pair) for pair in _frames(clip, exact))


def temporal_difference(clip: Tensor, exact: Tensor) -> float:
    """Return the mean |(x[t+1] - x[t]) - (y[t+1] - y[t])|, a measure of differences in motion and flicker.

    Clips need two or more frames.
    """
    differences = (one - other for one, other in _frames(clip, exact))
    return statistics.fmean(float((after - before).abs().mean()) for before, after in pairwise(differences))


@functools.cache
def lpips_unavailable_reason() -> str | None:
    """Return why LPIPS cannot be measured here, or None. Its network is downloaded at first use."""
    if importlib.util.find_spec("lpips") is None:
        return "the package lpips is not installed (pip install lpips)"
    try:
        _lpips_network("cpu")
    except (ImportError, OSError, RuntimeError) as error:
        return f"the network of the package lpips could not be loaded ({error})"
    return None


@torch.no_grad()
def lpips(clip: Tensor, exact: Tensor) -> float:
    """Return LPIPS with AlexNet, 0 for equal clips: the mean over all frames. Requires the package ``lpips``."""
    network = _lpips_network(str(clip.device))
    return statistics.fmean(float(network(*map(_for_lpips, pair))) for pair in _frames(clip, exact))


def _for_lpips(frame: Tensor) -> Tensor:
    """Convert (H, W, 3) in [0, 1] to (1, 3, h, w) in [-1, 1]."""
    planes = frame.permute(2, 0, 1)[None] * 2 - 1
    shorter = min(planes.shape[2:])
    if shorter >= LPIPS_SIDE:
        return planes
    size = [math.ceil(side * LPIPS_SIDE / shorter) for side in planes.shape[2:]]
    return F.interpolate(planes, size=size, mode="bilinear", align_corners=False)


@functools.cache
def _lpips_network(device: str) -> Any:
    import lpips

    return lpips.LPIPS(net="alex", verbose=False).eval().to(device)


def _frames(clip: Tensor, exact: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of frames with values in [0, 1]."""
    for pair in zip(clip, exact, strict=True):
        one, other = (frame.float() / (255 if frame.dtype == torch.uint8 else 1) for frame in pair)
        yield one, other


def _ssim_of_frame(image: Tensor, exact: Tensor) -> float:
    x, y = (frame.permute(2, 0, 1)[:, None] for frame in (image, exact))  # [3, 1, H, W]
    mean_x, mean_y = _blurred(x), _blurred(y)
    variance_x = _blurred(x * x) - mean_x * mean_x
    variance_y = _blurred(y * y) - mean_y * mean_y
    covariance = _blurred(x * y) - mean_x * mean_y
    first, second = STABILIZERS
    similarity = (2 * mean_x * mean_y + first) * (2 * covariance + second)
    similarity /= (mean_x * mean_x + mean_y * mean_y + first) * (variance_x + variance_y + second)
    return float(similarity.mean())


def _blurred(planes: Tensor) -> Tensor:
    """Blur (N, 1, H, W) with the Gaussian window, without a border."""
    offsets = torch.arange(WINDOW, dtype=planes.dtype, device=planes.device) - WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    weights = weights / weights.sum()
    return F.conv2d(F.conv2d(planes, weights[None, None, :, None]), weights[None, None, None, :])
