"""Image and clip metrics against their definitions, and conversion of pipeline outputs to bytes."""

from __future__ import annotations

import math
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sparge.evaluate.pipeline import image_metrics
from sparge.evaluate.pipeline.frames import frames_of


def random_clip(frames: int = 3, height: int = 16, width: int = 14, seed: int = 0) -> Tensor:
    return torch.rand(frames, height, width, 3, generator=torch.Generator().manual_seed(seed))


def test_psnr_uses_the_mean_squared_error_of_all_frames() -> None:
    exact = torch.full((2, 8, 8, 3), 0.5)
    image = exact.clone()
    image[0] += 0.1
    assert image_metrics.psnr(image, exact) == pytest.approx(-10 * math.log10(0.01 / 2), abs=1e-4)
    assert image_metrics.psnr(image[:1], exact[:1]) == pytest.approx(20, abs=1e-4)


def test_bytes_are_scaled_by_255() -> None:
    one, other = (torch.randint(0, 256, (2, 12, 12, 3), dtype=torch.uint8) for _ in range(2))
    for metric in (image_metrics.psnr, image_metrics.ssim, image_metrics.temporal_difference):
        assert metric(one, other) == pytest.approx(metric(one.float() / 255, other.float() / 255), rel=1e-6)
    assert image_metrics.psnr(
        torch.full((1, 4, 4, 3), 8, dtype=torch.uint8), torch.full((1, 4, 4, 3), 7, dtype=torch.uint8)
    ) == (pytest.approx(48.13, abs=0.01))


def test_ssim_matches_its_definition() -> None:
    """The definition is computed window by window in NumPy."""
    one, other = (random_clip(1, seed=seed)[0].double().numpy() for seed in (0, 1))
    other = 0.7 * one + 0.3 * other
    offsets = np.arange(11) - 5
    gauss = np.exp(-(offsets**2) / (2 * 1.5**2))
    weights = np.outer(gauss, gauss) / gauss.sum() ** 2
    values = []
    for top in range(16 - 10):
        for left in range(14 - 10):
            for channel in range(3):
                x, y = (frame[top : top + 11, left : left + 11, channel] for frame in (one, other))
                mean_x, mean_y = (weights * x).sum(), (weights * y).sum()
                var_x, var_y = (weights * (x - mean_x) ** 2).sum(), (weights * (y - mean_y) ** 2).sum()
                both = (weights * (x - mean_x) * (y - mean_y)).sum()
                upper = (2 * mean_x * mean_y + 1e-4) * (2 * both + 9e-4)
                values.append(upper / ((mean_x**2 + mean_y**2 + 1e-4) * (var_x + var_y + 9e-4)))
    got = image_metrics.ssim(torch.from_numpy(one)[None], torch.from_numpy(other)[None])
    assert got == pytest.approx(np.mean(values), abs=1e-5)
    assert 0.5 < got < 0.99


def test_ssim_of_a_clip_is_the_mean_of_its_frames() -> None:
    one, other = random_clip(seed=0), random_clip(seed=1)
    frames = [image_metrics.ssim(x[None], y[None]) for x, y in zip(one, other, strict=True)]
    assert image_metrics.ssim(one, other) == pytest.approx(sum(frames) / 3)
    assert image_metrics.ssim(one, one) == 1.0


def test_temporal_difference_measures_change_only() -> None:
    one, other = random_clip(seed=0), random_clip(seed=1)
    expected = ((one[1:] - one[:-1]) - (other[1:] - other[:-1])).abs().mean()
    assert image_metrics.temporal_difference(one, other) == pytest.approx(float(expected), rel=1e-5)
    assert image_metrics.temporal_difference(one + 0.25, one) == pytest.approx(0, abs=1e-7)


def test_lpips_uses_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Network(torch.nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            seen.append(one)
            return (one - other).abs().mean()

    monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=lambda **_: Network()))
    image_metrics._lpips_network.cache_clear()
    one, other = torch.ones(2, 32, 48, 3), torch.full((2, 32, 48, 3), 0.5)
    assert image_metrics.lpips(one, other) == pytest.approx(1.0)
    assert seen[0].shape == (1, 3, 64, 96)
    assert seen[0].max() == 1.0
    image_metrics._lpips_network.cache_clear()


def test_missing_lpips_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise OSError("no network")

    for found, expected in ((None, "not installed"), (object(), r"could not be loaded \(no network\)")):
        image_metrics.lpips_unavailable_reason.cache_clear()
        monkeypatch.setattr("importlib.util.find_spec", lambda _, found=found: found)
        monkeypatch.setitem(sys.modules, "lpips", SimpleNamespace(LPIPS=fail))
        assert re.search(expected, image_metrics.lpips_unavailable_reason() or "")
    image_metrics.lpips_unavailable_reason.cache_clear()


PIXELS = (np.arange(2 * 4 * 5 * 3) * 2 % 256).astype(np.uint8).reshape(2, 4, 5, 3)
FLOATS = PIXELS.astype(np.float32) / 255


@pytest.mark.parametrize(
    "clip",
    [
        [[Image.fromarray(frame) for frame in PIXELS]],
        [[Image.fromarray(frame).convert("RGBA") for frame in PIXELS]],
        FLOATS[None],
        PIXELS[None],
        [list(FLOATS)],
        torch.from_numpy(FLOATS).permute(0, 3, 1, 2)[None],
        torch.from_numpy(FLOATS).permute(0, 3, 1, 2)[None].double(),
    ],
    ids=["pil", "rgba", "np", "bytes", "list", "pt", "double"],
)
def test_clips_become_bytes(clip: Any) -> None:
    frames = frames_of(SimpleNamespace(frames=clip))
    assert frames.is_video
    assert frames.is_finite
    assert np.array_equal(frames.pixels, PIXELS)


def test_images_become_bytes() -> None:
    frames = frames_of(SimpleNamespace(images=[Image.fromarray(PIXELS[0])]))
    assert not frames.is_video
    assert np.array_equal(frames.pixels, PIXELS[:1])
    gray = frames_of(SimpleNamespace(images=FLOATS[:1, ..., :1]))
    assert np.array_equal(gray.pixels, np.repeat(PIXELS[:1, ..., :1], 3, -1))


def test_nan_becomes_black_and_is_recorded() -> None:
    broken = FLOATS[None].copy()
    broken[0, 1] = np.nan
    frames = frames_of(SimpleNamespace(frames=broken))
    assert not frames.is_finite
    assert frames.pixels[1].max() == 0
    assert np.array_equal(frames.pixels[0], PIXELS[0])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (SimpleNamespace(audios=[]), "expected an output with images or frames, got SimpleNamespace"),
        (SimpleNamespace(images=[1, 2]), r"expected one image or clip per call \(use more seeds instead\), got 2"),
        (SimpleNamespace(frames=torch.zeros(1, 16, 5, 8, 8)), "expected frames of 1, 3 or 4 channels"),
        (SimpleNamespace(frames=[[]]), "expected a clip of one frame or more, got none"),
    ],
)
def test_other_outputs_raise(output: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frames_of(output)
