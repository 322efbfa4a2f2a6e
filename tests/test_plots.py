"""Plots of masks and block maps: every block has the right color at the right position."""

from __future__ import annotations

import re
import sys

import matplotlib
import numpy
import pytest
import torch

import sparge
from sparge.evaluate.block_colors import DARK, LIGHT, MASS_FLOOR, Theme, block_image
from sparge.masks.plot import token_ticks
from sparge.options.extras import install_command


def rgb(color: str) -> list[int]:
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_block_colors_show_mass_and_kept_or_skipped(theme: Theme) -> None:
    mass = torch.tensor([[1.0, 1.0, 1.0], [0.0, MASS_FLOOR / 2, MASS_FLOOR]])
    kept = torch.tensor([[True, False, True], [True, False, False]])
    visible = torch.tensor([[True, True, False], [True, True, True]])
    image = block_image(mass, kept, visible, theme).tolist()
    assert image[0][:2] == [[*rgb(theme.kept[-1]), 255], [*rgb(theme.skipped[-1]), 255]]
    assert image[1][0] == [*rgb(theme.kept[0]), 255] and image[1][2] == [*rgb(theme.skipped[0]), 255]
    assert image[0][2] == image[1][1] == [0, 0, 0, 0], "invisible blocks, and skipped ones with little mass"


def test_block_colors_are_logarithmic() -> None:
    """The ramp has four anchors: each is a third of the four powers of ten from the last one."""
    mass = torch.tensor([[MASS_FLOOR ** (2 / 3), MASS_FLOOR ** (1 / 3)]])
    everything = torch.ones(1, 2, dtype=torch.bool)
    image = block_image(mass, everything, everything, LIGHT)[0, :, :3].astype(int)
    assert numpy.abs(image - [rgb(LIGHT.kept[1]), rgb(LIGHT.kept[2])]).max() <= 2


def test_color_ramps_are_monotonic() -> None:
    """Colors get darker with mass in the light theme and brighter in the dark theme, away from the background."""
    mass = torch.logspace(-4, 0, 100)[None]
    visible = torch.ones(1, 100, dtype=torch.bool)
    for theme, sign in ((LIGHT, -1), (DARK, 1)):
        for kept in (visible, ~visible):
            image = block_image(mass.clamp(min=MASS_FLOOR), kept, visible, theme)[0, :, :3]
            assert (sign * numpy.diff(image @ [0.2126, 0.7152, 0.0722]) > 0).all()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(8192, [0, 2048, 4096, 6144, 8192]), (300, [0, 128, 256]), (5, [0, 2, 4]), (1, [0, 1])],
)
def test_ticks_are_multiples_of_a_power_of_two(tokens: int, expected: list[int]) -> None:
    assert list(token_ticks(tokens)) == expected


def causal_mask() -> sparge.BlockMask:
    """Return a causal mask of 256 tokens and two heads. Head 0 keeps every visible block, head 1 only the first."""
    kept = torch.ones(1, 2, 2, 4, dtype=torch.bool)
    kept[:, 1, :, 1:] = False
    return sparge.BlockMask.from_dense(kept, q_len=256, kv_len=256, is_causal=True)


def test_plot_draws_every_block_at_its_position() -> None:
    figure = causal_mask().plot()
    figure.canvas.draw()
    image = numpy.asarray(figure.canvas.buffer_rgba())[..., :3].astype(int)
    dark, white = rgb("#1f3b63"), [255, 255, 255]

    def block(head: int, row: int, column: int) -> numpy.ndarray:
        """Return the pixels well inside a block, located with the coordinates of the axes."""
        to_pixels = figure.axes[head].transData.transform
        left, top = to_pixels((64 * column + 8, 128 * row + 16))
        right, bottom = to_pixels((64 * column + 56, 128 * row + 112))
        height = image.shape[0]
        return image[height - round(top) : height - round(bottom), round(left) : round(right)].reshape(-1, 3)

    seen = ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3))
    for row, column in seen:
        assert (block(0, row, column) == dark).all()
        assert (block(1, row, column) == (dark if column == 0 else white)).all()
    for head in (0, 1):
        for column in (2, 3):
            future = block(head, 0, column)
            assert future.min() > 150, "light"
            assert len(numpy.unique(future, axis=0)) > 1, "hatched"
            assert not (future == 255).all(1).any(), "differs from a skipped block"


def test_plot_labels_heads_and_axes() -> None:
    figure = causal_mask().plot()
    assert [panel.get_title() for panel in figure.axes] == ["head 0: 100.0% kept", "head 1: 33.3% kept"]
    panel = figure.axes[0]
    assert panel.get_xlim() == (0, 256)
    assert panel.get_ylim() == (256, 0), "queries run down"
    assert panel.get_xticks().tolist() == [0, 64, 128, 192, 256]
    assert figure.get_supxlabel() == "key token"
    assert figure.get_supylabel() == "query token"


def test_plot_crops_the_last_partial_blocks() -> None:
    kept = torch.ones(3, 1, 2, 3, dtype=torch.bool)
    panel = sparge.BlockMask.from_dense(kept, q_len=200, kv_len=130).plot(batch=2).axes[0]
    assert panel.get_xlim() == (0, 130)
    assert panel.get_ylim() == (200, 0)
    assert panel.images[0].get_extent() == [0, 192, 256, 0]


def test_plot_checks_batch_and_max_heads() -> None:
    mask = causal_mask()
    assert len(mask.plot(max_heads=1).axes) == 1
    with pytest.raises(ValueError, match=r"batch: expected a value in \[0, 1\), got 1"):
        mask.plot(batch=1)
    with pytest.raises(ValueError, match="max_heads: expected 1 or more, got 0"):
        mask.plot(max_heads=0)


def test_missing_matplotlib_error_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape(install_command("plot"))):
        causal_mask().plot()


def test_plot_does_not_import_pyplot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it raises
    monkeypatch.delattr(matplotlib, "pyplot", raising=False)
    causal_mask().plot().canvas.draw()
