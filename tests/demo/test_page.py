"""The demo page is self-contained and well-formed, and shows the measured images and numbers."""

from __future__ import annotations

import base64
import dataclasses
import io
import sys
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from page_parser import Page
from sparge.demo.maps import map_figure
from sparge.demo.measure import Demo, InputResult, Row, Settings, table_cells
from sparge.demo.page import render_page
from sparge.evaluate.block_colors import DARK, LIGHT, block_image
from sparge.evaluate.inputs import Needle
from sparge.evaluate.machine import Gpu, Machine

MACHINE = Machine("Imagined <CPU> & sons", 3, "Linux test", "3.10.1", "2.9.9", "0.0.7", "abc1234")
TOKENS = 512
NEEDLE = Needle(key_start=64, key_stop=128, query_start=384, query_stop=512)


def make_row(score: str, needles: tuple[float, ...], **changes: float) -> Row:
    times: dict[str, Any] = {"rounds": 3, "dense_s": 3.21, "sparse_s": 1.07}
    quality = {"density": 0.4321, "recall": 0.8765, "error": 0.0654}
    return Row("text-like", score, TOKENS, needles=needles, **{**times, **quality, **changes})


@pytest.fixture(scope="module")
def demo() -> Demo:
    visible = torch.tensor([[1, 1] + [0] * 6, [1] * 4 + [0] * 4, [1] * 6 + [0] * 2, [1] * 8], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(4, 8, generator=generator) ** 8 * visible
    kept = torch.rand(4, 8, generator=generator) < 0.5
    maps = (kept & visible, ~kept & visible)
    rows = (make_row("moment", (1.0,)), make_row("mean", (0.25,), sparse_s=0.0951, recall=0.1234, error=1.5))
    result = InputResult("text-like", "One <input>.", TOKENS, rows, mass, visible, maps, (NEEDLE,))
    return Demo(Settings(topk=0.37, tokens=TOKENS, heads=2, seed=9), MACHINE, (result,))


@pytest.fixture(scope="module")
def page(demo: Demo) -> str:
    return render_page(demo)


@pytest.fixture(scope="module")
def parsed(page: str) -> Page:
    return Page(page)


def test_page_is_well_formed_and_self_contained(parsed: Page) -> None:
    parsed.check()


def test_page_shows_rows_machine_and_command(demo: Demo, parsed: Page) -> None:
    text = parsed.text
    for row in demo.rows:
        for _, cell in table_cells(row):
            assert cell in text
    for part in ("3.21 s", "1.07 s", "3.0x", "43.2%", "87.6%", "0.0654", "95 ms", "33.8x", "12.3%", "1.5000"):
        assert part in text
    for part in ("Imagined <CPU> & sons, 3 threads", "Python 3.10.1", "torch 2.9.9", "sparge 0.0.7 (abc1234)"):
        assert part in text
    assert "sparge demo --device cpu --topk 0.37 --tokens 512 --heads 2 --seed 9" in text
    assert "backend torch / float32, B 1, H 2, D 64" in text
    assert "1.07 s instead of 3.21 s (speed-up 3.0x), computing 43.2% of the blocks" in text
    assert "These contain 87.6% of the attention. The relative L1 error of the output is 6.54%" in text
    (result,) = demo.inputs
    for kept in result.kept:
        assert f"{100 * kept.sum() / 20:.1f}% of blocks" in text, "20 of 32 blocks are visible"
        assert f"of blocks, {100 * (result.mass * kept).sum() / result.mass.sum():.1f}% of mass" in text


def test_page_explains_its_terms(parsed: Page) -> None:
    text = parsed.text
    for word in ("The map", "The blocks", "The kept blocks", "density", "mass recall", "L1 error", "needles", "score"):
        assert word in text
    assert "blocks of 128 queries by 64 keys, here 4 x 8 blocks" in text
    assert "the best 37% of the blocks are kept (topk 0.37)" in text
    assert "Skipped blocks are approximated by their mean in non-causal attention" in text
    assert "the median of 3 interleaved rounds" in text


def test_page_of_a_gpu_names_it(demo: Demo) -> None:
    gpu = Gpu("NVIDIA H200", "9.0", "2.11.0", "3.6.0", "13.0", "0.1.0", "0123456789")
    settings = dataclasses.replace(demo.settings, device="cuda", head_dim=128, dtype="bfloat16")
    fast = dataclasses.replace(demo, settings=settings, gpu=gpu, backend="hopper", quantization="int8_fp8")
    text = Page(render_page(fast)).text
    assert "NVIDIA H200, CUDA 13.0 / backend hopper, int8_fp8 / bfloat16, B 1, H 2, D 128" in text
    assert "triton 3.6.0" in text
    assert "by CUDA events" in text
    assert "backend hopper and quantization int8_fp8" in text
    assert "sparge demo --device cuda" in text


def test_images_show_the_blocks_in_both_themes(demo: Demo, parsed: Page) -> None:
    (result,) = demo.inputs
    masks = [torch.ones_like(result.visible), *result.kept]
    images = [address for address in parsed.addresses if address.startswith("data:image/png;base64,")]
    expected = [(kept, theme) for kept in masks for theme in (LIGHT, DARK)]
    assert len(images) == len(expected)
    for address, (kept, theme) in zip(images, expected, strict=True):
        data = base64.b64decode(address.partition(",")[2])
        image = numpy.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
        colors = block_image(result.mass, kept, result.visible, theme)
        assert image.shape == colors.shape == (4, 8, 4)
        assert (image[..., 3] == colors[..., 3]).all()
        assert (image[colors[..., 3] > 0] == colors[colors[..., 3] > 0]).all()


def panel_of(demo: Demo, place: int | None) -> Any:
    """Return the axes of the map of the true mass, or of a score's kept blocks."""
    (result,) = demo.inputs
    (panel,) = map_figure(result, place).axes
    return panel


def test_needle_marks_are_on_their_blocks_and_show_lost_needles(demo: Demo) -> None:
    for place, is_lost in ((None, False), (0, False), (1, True)):
        panel = panel_of(demo, place)
        marks = [(line.get_marker(), *line.get_xydata()[0]) for line in panel.lines]
        assert marks == [("o", 96, 448), ("o", 96, 448)] + [("x", 96, 448)] * is_lost
        assert [(text.get_text(), text.xy) for text in panel.texts] == [("1", (96, 448))]


def test_future_is_hatched_above_the_staircase(demo: Demo) -> None:
    """Query block i sees 2 (i + 1) of 8 key blocks: each step of the outline is a quarter of the map."""
    (future,) = panel_of(demo, 0).patches
    quarter = TOKENS // 4
    steps = [((block + 1) * quarter, row * quarter) for block in range(4) for row in (block, block + 1)]
    assert [tuple(corner) for corner in future.get_xy()[:-1]] == [(TOKENS, 0), *steps, (TOKENS, TOKENS)]
    assert future.get_hatch()


def test_axes_name_tokens(demo: Demo, page: str) -> None:
    assert page.count(">key token<") == page.count(">query token<") == 3
    for tick in (0, 128, 256, 384, 512):
        assert page.count(f">{tick}</text>") == 6
    panel = panel_of(demo, None)
    assert (panel.get_xlim(), panel.get_ylim()) == ((0, TOKENS), (TOKENS, 0)), "queries go from top to bottom"
    assert {tuple(image.get_extent()) for image in panel.images} == {(0, TOKENS, TOKENS, 0)}


def test_page_without_matplotlib_has_notes_instead_of_maps(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = Page(render_page(demo))
    page.check()
    assert page.text.count("matplotlib is not installed") == 3 and "<svg" not in page.source
    assert "Kept by moment" in page.text
