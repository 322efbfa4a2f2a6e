"""The page: self-contained, well-formed, and every picture and number is the one that was measured."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
from html.parser import HTMLParser

import numpy
import pytest
import torch
from PIL import Image

from sparge.demo.maps import LEFT, SIDE, TOP
from sparge.demo.measure import Demo, InputResult, Prediction, Row, Settings, table_cells
from sparge.demo.page import render_page
from sparge.evaluate.inputs import Needle
from sparge.evaluate.machine import Gpu, Machine
from sparge.masks.plot import DARK, LIGHT, paint_blocks, palette

MACHINE = Machine("Imagined <CPU> & sons", 3, "Linux test", "3.10.1", "2.9.9", "0.0.7", "abc1234")
TOKENS = 512
NEEDLE = Needle(key_start=64, key_stop=128, query_start=384, query_stop=512)


def make_row(score: str, needles: tuple[float, ...], **changes: float) -> Row:
    row = Row(
        input="text-like",
        score=score,
        tokens=TOKENS,
        heads=2,
        head_dim=64,
        is_causal=True,
        topk=0.37,
        rounds=3,
        dense_s=3.21,
        sparse_s=1.07,
        density=0.4321,
        recall=0.8765,
        error=0.0654,
        needles=needles,
    )
    return dataclasses.replace(row, **changes)


@pytest.fixture(scope="module")
def demo() -> Demo:
    visible = torch.tensor([[1, 1] + [0] * 6, [1] * 4 + [0] * 4, [1] * 6 + [0] * 2, [1] * 8], dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(4, 8, generator=generator) ** 8 * visible
    kept = torch.rand(4, 8, generator=generator) < 0.5
    predictions = (
        Prediction("moment", kept & visible, 0.5, 0.91, (1.0,)),
        Prediction("mean", ~kept & visible, 0.51, 0.17, (0.0,)),
    )
    rows = (make_row("moment", (1.0,)), make_row("mean", (0.25,), sparse_s=0.0951, recall=0.1234, error=1.5))
    result = InputResult("text-like", "One <input>.", TOKENS, rows, mass, visible, predictions, (NEEDLE,))
    return Demo(Settings(topk=0.37, tokens=TOKENS, heads=2, seed=9), MACHINE, (result,))


@pytest.fixture(scope="module")
def page(demo: Demo) -> str:
    return render_page(demo)


class _Balance(HTMLParser):
    """Fails on an element that is closed out of order; collects addresses and text."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def parsed(page: str) -> _Balance:
    parser = _Balance()
    parser.feed(page)
    parser.close()
    return parser


def test_page_is_well_formed(parsed: _Balance) -> None:
    assert parsed.open == []


def test_page_loads_nothing(page: str, parsed: _Balance) -> None:
    assert "http" not in page
    assert not parsed.tags & {"script", "link", "iframe", "object", "embed"}
    assert all(address.startswith("data:image/png;base64,") for address in parsed.addresses)
    assert set(re.findall(r"url\([^)]*\)", page)) == {"url(#hatch)"}
    assert "@import" not in page


def test_page_tells_rows_machine_and_command(demo: Demo, parsed: _Balance) -> None:
    text = " ".join(" ".join(parsed.words).split())
    for row in demo.rows:
        for _, cell in table_cells(row):
            assert cell in text
    for part in ("3.21 s", "1.07 s", "3.0x", "43.2%", "87.6%", "0.0654", "95 ms", "33.8x", "12.3%", "1.5000"):
        assert part in text
    for part in ("Imagined <CPU> & sons, 3 threads", "Python 3.10.1", "torch 2.9.9", "sparge 0.0.7 (abc1234)"):
        assert part in text
    assert "sparge demo --device cpu --topk 0.37 --tokens 512 --heads 2 --seed 9" in text
    assert "backend torch / float32, B 1, H 2, D 64" in text
    assert "3.21 s became 1.07 s, 3.0x as fast, by computing 43.2% of the blocks" in text
    assert "They hold 87.6% of the attention, and the output is 6.54% off" in text
    assert "50.0% of blocks, 91.0% of mass" in text
    assert "51.0% of blocks, 17.0% of mass" in text


def test_page_explains_its_words(parsed: _Balance) -> None:
    text = " ".join(" ".join(parsed.words).split())
    for word in ("The map", "The blocks", "The kept", "density", "mass recall", "L1 error", "needles", "score"):
        assert word in text
    assert "blocks of 128 queries by 64 keys: 4 x 8 of them here" in text
    assert "the best 37% of the blocks are kept (topk 0.37)" in text
    assert "the median of 3 interleaved rounds" in text


def test_page_of_a_gpu_names_it(demo: Demo) -> None:
    gpu = Gpu("NVIDIA H200", "9.0", "2.11.0", "3.6.0", "13.0", "0.1.0", "0123456789")
    rows = tuple(
        dataclasses.replace(row, backend="hopper", quantization="int8_fp8", dtype="bfloat16") for row in demo.rows
    )
    settings = dataclasses.replace(demo.settings, device="cuda", head_dim=128, dtype="bfloat16")
    inputs = (dataclasses.replace(demo.inputs[0], rows=rows),)
    parser = _Balance()
    parser.feed(render_page(dataclasses.replace(demo, settings=settings, inputs=inputs, gpu=gpu)))
    text = " ".join(" ".join(parser.words).split())
    assert "NVIDIA H200, CUDA 13.0 / backend hopper, int8_fp8 / bfloat16, B 1, H 2, D 128" in text
    assert "triton 3.6.0" in text
    assert "by CUDA events" in text
    assert "backend hopper, with Q K in 8-bit integers and P V in 8-bit floating point" in text
    assert "sparge demo --device cuda" in text


def test_pictures_are_the_painted_blocks_in_both_themes(demo: Demo, parsed: _Balance) -> None:
    (result,) = demo.inputs
    masks = [torch.ones_like(result.visible), *(prediction.kept for prediction in result.predictions)]
    assert len(parsed.addresses) == 2 * len(masks)
    expected = [(kept, theme) for kept in masks for theme in (LIGHT, DARK)]
    for address, (kept, theme) in zip(parsed.addresses, expected, strict=True):
        data = base64.b64decode(address.partition(",")[2])
        picture = numpy.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))
        entries = paint_blocks(result.mass, kept, result.visible)
        colours = torch.tensor(palette(theme), dtype=torch.uint8)[entries.long()]
        assert picture.shape == (4, 8, 4)
        assert ((picture[..., 3] == 0) == (entries == 0).numpy()).all()
        shown = (entries != 0).numpy()
        assert (picture[shown][:, :3] == colours.numpy()[shown]).all()


def test_needle_marks_stand_on_the_block_and_tell_its_fate(page: str) -> None:
    marks = re.findall(r"class='mark (\w+)' transform='translate\(([\d.]+) ([\d.]+)\)'><title>([^<]*)<", page)
    x, y = f"{96 / TOKENS * SIDE:.1f}", f"{448 / TOKENS * SIDE:.1f}"
    assert marks == [
        ("found", x, y, "needle 1"),
        ("found", x, y, "needle 1: 100% kept"),
        ("lost", x, y, "needle 1: 0% kept"),
    ]


def test_future_is_hatched_above_the_staircase(page: str) -> None:
    """Row i sees 2 (i + 1) of 8 blocks: the outline steps down and to the right by a quarter of the side."""
    quarter = SIDE / 4
    steps = "".join(f"V{row * quarter:.2f}H{(row + 1) * quarter:.2f}" for row in range(4))
    assert page.count(f"class='future' d='M{SIDE} 0{steps}V{SIDE}H{SIDE}z'") == 3


def test_axes_name_tokens(page: str) -> None:
    assert page.count("key token") == page.count("query token") == 3
    for tick in (0, 128, 256, 384, 512):
        assert page.count(f">{tick}</text>") == 6
    assert page.count(f"translate({LEFT} {TOP})") == 3
