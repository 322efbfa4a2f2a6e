"""Distances between two images or clips: PSNR, SSIM, LPIPS and temporal difference.

All functions take two tensors of equal shape, images (H, W, 3) or clips (F, H, W, 3): floats in [0, 1], or bytes. They
work frame by frame, so a long clip needs the memory of one frame.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import statistics
from collections.abc import Iterator
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


def psnr(image: Tensor, exact: Tensor) -> float:
    """Return the PSNR in dB, 10 log10(1 / mean squared error), over the whole clip; inf for equal clips.

    Example:
        >>> import torch
        >>> round(psnr(torch.full((4, 4, 3), 0.6), torch.full((4, 4, 3), 0.5)), 4)
        20.0
    """
    pairs = _frames(image, exact)
    error = statistics.fmean(float((one - other).square().mean(dtype=torch.float64)) for one, other in pairs)
    return -10 * math.log10(error) if error > 0 else math.inf


def ssim(image: Tensor, exact: Tensor) -> float:
    """Return the structural similarity (SSIM), 1 for equal clips: the mean over all frames and channels.

    The Gaussian window has 11 x 11 pixels. Only positions where the whole window is inside the image count.

    Raises:
        ValueError: the frames are smaller than the window.
    """
    return statistics.fmean(_ssim_of_frame(*pair) for pair in _frames(image, exact))


def temporal_difference(image: Tensor, exact: Tensor) -> float:
    """Return the mean |(x[t+1] - x[t]) - (y[t+1] - y[t])|: motion and flicker that differ from the exact clip.

    Raises:
        ValueError: the inputs are not clips of two frames or more.
    """
    differences = (one - other for one, other in _frames(image, exact))
    before = next(differences)
    if image.ndim != 4 or len(image) < 2:
        raise ValueError(f"expected clips (F, H, W, 3) of two frames or more, got {tuple(image.shape)}")
    total = 0.0
    for now in differences:
        total += float((now - before).abs().mean())
        before = now
    return total / (len(image) - 1)


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
def lpips(image: Tensor, exact: Tensor) -> float:
    """Return LPIPS with AlexNet, 0 for equal clips: the mean over all frames. Requires the package ``lpips``."""
    network = _lpips_network(str(image.device))
    return statistics.fmean(float(network(*map(_for_lpips, pair))) for pair in _frames(image, exact))


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


def _frames(image: Tensor, exact: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of frames with values in [0, 1]."""
    if image.shape != exact.shape or image.ndim not in (3, 4) or image.shape[-1] != 3:
        raise ValueError(
            "expected two images (H, W, 3) or clips (F, H, W, 3) of one shape, "
            f"got {tuple(image.shape)} and {tuple(exact.shape)}"
        )
    for one, other in zip(image.reshape(-1, *image.shape[-3:]), exact.reshape(-1, *exact.shape[-3:]), strict=True):
        yield _in_unit_range(one), _in_unit_range(other)


def _in_unit_range(frame: Tensor) -> Tensor:
    return frame.float() / 255 if frame.dtype == torch.uint8 else frame.float()


def _ssim_of_frame(image: Tensor, exact: Tensor) -> float:
    if min(image.shape[:2]) < WINDOW:
        raise ValueError(f"SSIM: expected frames of {WINDOW} x {WINDOW} pixels or more, got {tuple(image.shape[:2])}")
    x, y = (frame.permute(2, 0, 1)[:, None] for frame in (image, exact))  # [3, 1, H, W]
    mean_x, mean_y = _blurred(x), _blurred(y)
    variance_x = _blurred(x * x) - mean_x * mean_x
    variance_y = _blurred(y * y) - mean_y * mean_y
    covariance = _blurred(x * y) - mean_x * mean_y
    first, second = STABILIZERS
    shares = (2 * mean_x * mean_y + first) * (2 * covariance + second)
    shares = shares / ((mean_x * mean_x + mean_y * mean_y + first) * (variance_x + variance_y + second))
    return float(shares.mean())


def _blurred(planes: Tensor) -> Tensor:
    """Blur (N, 1, H, W) with the Gaussian window, without a border."""
    offsets = torch.arange(WINDOW, dtype=planes.dtype, device=planes.device) - WINDOW // 2
    weights = torch.exp(-(offsets**2) / (2 * SIGMA**2))
    weights = weights / weights.sum()
    return F.conv2d(F.conv2d(planes, weights[None, None, :, None]), weights[None, None, None, :])
