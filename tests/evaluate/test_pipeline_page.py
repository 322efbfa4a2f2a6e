"""The page of an evaluation, its images, and the command that writes it."""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from small_pipelines import FRAMES, SmallPipeline, small_pipeline, unknown_pipeline, wan_transformer

from page_parser import Page
from sparge.evaluate.pipeline import Result, command, evaluate_pipeline, gallery
from sparge.evaluate.pipeline.page import render_page
from sparge.evaluate.variants import parse_variant

CPU = torch.device("cpu")
LABELS = ("rows=0.34,min_blocks=1", "topk=0.67,min_blocks=1", "topk=1.0", "sdpa=math")


@pytest.fixture(scope="module")
def result() -> Result:
    variants = [parse_variant(label).forced(CPU) for label in LABELS]
    options: dict[str, Any] = {"prompts": ["a <b>bold</b> prompt"], "seeds": [0, 1, 2], "errors": True}
    return evaluate_pipeline(small_pipeline(), variants, warm_up=False, **options)


@pytest.fixture(scope="module")
def page(result: Result) -> str:
    return render_page(result, "sparge eval pipeline NAME --variant 'topk=0.34'")


def opened(uri: str) -> Any:
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_the_page_loads_nothing(page: str) -> None:
    Page(page).check()
    assert "<b>" not in page


def test_the_page_has_table_curves_frames_and_errors(page: str) -> None:
    for label in LABELS:
        assert f'<th scope="row">{label.replace(",", ", ")}' in page
    for title in ("PSNR against density", "PSNR against time", "SSIM against density", "PSNR by frame"):
        assert title in page
    assert "LPIPS against density" not in page
    assert page.count('<table class="gallery"') == 2  # of three clips
    assert page.count('class="over ') == 2 * FRAMES * len(LABELS)
    assert page.count("difference x 4") == 2 * len(LABELS)
    assert page.count("The clip in motion") == 1
    assert page.count('<table class="heat">') == 3
    assert "a &lt;b&gt;bold&lt;/b&gt; prompt, seed 1" in page
    assert "sparge eval pipeline NAME --variant &#39;topk=0.34&#39;" in page
    assert "sparge.Policy.from_json(" in page and "&#34;backend&#34;" not in page  # --force is no advice


def test_images_are_those_of_the_run(result: Result) -> None:
    first, second = gallery.galleries(result)
    assert [strip.variant for strip in first.strips] == ["", *LABELS]
    assert first.ratio == 1.0
    frames = result.frames(result.items[0], result.variants[0])
    dense = result.frames(result.items[0], None)
    assert frames is not None
    assert dense is not None
    assert np.array_equal(np.asarray(opened(first.strips[1].images[2]).convert("RGB")), frames[2])
    assert opened(first.strips[1].moving).n_frames == FRAMES
    assert second.strips[1].moving == ""
    expected = np.minimum(np.abs(frames.astype(int) - dense.astype(int)) * 4, 255)
    assert np.array_equal(gallery.difference(frames[0], dense[0]), expected[0])


def test_images_are_made_smaller_until_they_fit(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "WIDTHS", (64, 32, 16))
    whole = sum(strip.size for one in gallery.galleries(result) for strip in one.strips)
    less = gallery.galleries(result, max_bytes=whole // 2)
    assert sum(strip.size for one in less for strip in one.strips) <= whole // 2
    assert opened(less[0].strips[0].images[0]).width in (32, 16)
    assert opened(gallery.still(np.zeros((20, 40, 3), np.uint8), 400)).size == (40, 20)


def test_images_of_several_seeds_stand_in_columns() -> None:
    made = evaluate_pipeline(unknown_pipeline(), [parse_variant("topk=0.34").forced(CPU)], warm_up=False)
    (shown,) = gallery.galleries(made)
    assert shown.columns == ["seed 0", "seed 1"]
    text = render_page(made, "command")
    assert "PSNR by frame" not in text
    assert "sparge.replace_sdpa(" in text


def test_a_run_without_sparse_calls_has_a_reason_in_place_of_charts() -> None:
    made = evaluate_pipeline(small_pipeline(), [parse_variant("topk=0.5")], prompts=["a"], seeds=[0], warm_up=False)
    text = render_page(made, "command")
    assert (
        "nothing ran sparse (dense: below the crossover)" in text and "There are no charts: nothing ran sparse" in text
    )
    assert '<figure class="chart">' not in text


def test_the_command_writes_a_page_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = small_pipeline()
    monkeypatch.setattr(command, "load", lambda *_: pipe)
    console = Console(file=io.StringIO(), width=160)
    options: dict[str, Any] = {
        "prompts": ["a"],
        "seeds": [0],
        "arguments": dict([command.parse_argument("num_inference_steps=2")]),
        "device": "cpu",
        "dtype": torch.float32,
        "errors": False,
        "force": True,
        "trust_remote_code": False,
        "output": tmp_path / "page.html",
        "json_path": tmp_path / "rows.jsonl",
        "command": ["sparge", "eval", "pipeline", "some name"],
        "console": console,
    }
    variants = [parse_variant(LABELS[0])]
    command.run("owner/model", variants, **options)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(rf"{LABELS[0]}\s+sparse\s+0\.667", printed)
    assert f"Wrote {tmp_path / 'page.html'}" in " ".join(printed.split())
    assert "sparge eval pipeline &#39;some name&#39;" in (tmp_path / "page.html").read_text()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["dense", "variant"]
    assert rows[0]["run"]["model"] == "owner/model"
    calls = len(pipe.calls)
    command.run("owner/model", variants, **options)
    assert len(pipe.calls) == calls


@pytest.mark.parametrize("text", ["steps", "=3", "a b=3"])
def test_arguments_have_a_name_and_a_value(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME=VALUE, got"):
        command.parse_argument(text)


def test_broken_pixels_have_a_remark() -> None:
    class Broken(SmallPipeline):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            output.frames[0, 1] = np.nan
            return output

        __call__.__signature__ = inspect.signature(SmallPipeline.__call__)  # type: ignore[attr-defined]

    pipe = Broken(wan_transformer(), diffusers.FlowMatchEulerDiscreteScheduler())
    variant = parse_variant("topk=1.0").forced(CPU)
    made = evaluate_pipeline(pipe, [variant], prompts=["a"], seeds=[0], warm_up=False)
    assert "topk=1.0, seed 0: pixels were NaN or infinite; they count as black." in render_page(made, "")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere/at/all"], "nowhere/at/all"),
        (["p", "--variant", "topk=2"], "topk: expected a value in (0, 1], got 2"),
        (["p", "--argument", "guidance"], "guidance"),
        (["p", "--output", "same.html", "--json", "same.html"], "expected different files for --output and --json"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from sparge.cli.app import main

    with pytest.raises(SystemExit) as done:
        main(["eval", "pipeline", *arguments])
    assert done.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sparge: error: ") and message in printed
    assert len(printed.splitlines()) == 1
