"""The HTML page of a pipeline evaluation, its images, and the command that writes it."""

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
from small_pipelines import FRAMES, SmallPipeline, small_pipeline, unknown_pipeline, wan_transformer

from page_parser import Page
from sparge.evaluate.pipeline import Result, evaluate_pipeline, gallery, load
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


def open_image(uri: str) -> Any:
    head, _, data = uri.partition(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_page_is_self_contained(page: str) -> None:
    Page(page).check()
    assert "<b>" not in page


def test_page_has_table_curves_frames_and_errors(page: str) -> None:
    for label in LABELS:
        assert f'<th scope="row">{label.replace(",", ", ")}' in page
    for title in ("PSNR against density", "PSNR against time", "SSIM against density"):
        assert title in page
    assert "LPIPS against density" not in page
    assert page.count('<table class="gallery"') == 3
    assert page.count('class="over ') == 3 * FRAMES * len(LABELS)
    assert page.count("difference x 4") == 3 * len(LABELS)
    assert page.count("The clip in motion") == 1
    assert page.count('<table class="heat">') == 3
    assert "a &lt;b&gt;bold&lt;/b&gt; prompt, seed 1" in page
    assert "sparge eval pipeline NAME --variant &#39;topk=0.34&#39;" in page


def test_images_equal_the_frames_of_the_run(result: Result) -> None:
    first, second, _ = gallery.galleries(result)
    assert [strip.variant for strip in first.strips] == ["", *LABELS]
    assert first.ratio == 1.0
    frames = result.frames(result.items[0], result.variants[0])
    dense = result.frames(result.items[0], None)
    assert np.array_equal(np.asarray(open_image(first.strips[1].images[2]).convert("RGB")), frames[2])
    assert open_image(first.strips[1].moving).n_frames == FRAMES
    assert second.strips[1].moving == ""
    expected = np.minimum(np.abs(frames.astype(int) - dense.astype(int)) * 4, 255)
    assert np.array_equal(gallery.difference(frames[0], dense[0]), expected[0])


def test_images_are_resized_to_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gallery, "WIDTH", 32)
    assert open_image(gallery.still(np.zeros((32, 64, 3), np.uint8))).size == (32, 16)
    assert open_image(gallery.still(np.zeros((10, 20, 3), np.uint8))).size == (20, 10), "images are never enlarged"


def test_images_of_several_seeds_are_columns() -> None:
    made = evaluate_pipeline(unknown_pipeline(), [parse_variant("topk=0.34").forced(CPU)], warm_up=False)
    (shown,) = gallery.galleries(made)
    assert shown.columns == ["seed 0", "seed 1"]
    text = render_page(made, "command")
    assert "sparge.replace_sdpa" in text
    assert "2 combinations of prompt and seed; images, " in text


def test_page_without_sparse_calls_has_a_reason_instead_of_charts() -> None:
    made = evaluate_pipeline(small_pipeline(), [parse_variant("topk=0.5")], prompts=["a"], seeds=[0], warm_up=False)
    text = render_page(made, "command")
    assert (
        "nothing ran sparse (dense: below the crossover)" in text and "There are no charts: nothing ran sparse" in text
    )
    assert '<figure class="chart">' not in text
    assert f"1 combination of prompt and seed; clips of {FRAMES} frames, " in text


def test_command_writes_a_page_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparge.cli.app import main

    pipe = small_pipeline()
    monkeypatch.setattr(load, "load", lambda *_: pipe)
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["eval", "pipeline", "owner/model", "--prompt", "a b", "--seed", "0", "--variant", LABELS[0], "--force"]
    arguments += ["--device", "cpu", "--output", str(tmp_path / "page.html"), "--json", str(tmp_path / "rows.jsonl")]
    arguments += ["--argument", "num_inference_steps=2"]
    monkeypatch.setattr("sys.argv", ["sparge", *arguments])

    def printed() -> str:
        with pytest.raises(SystemExit) as done:
            main(arguments)
        assert not done.value.code
        return capsys.readouterr().out

    first = printed()
    assert re.search(rf"{LABELS[0]}\s+sparse\s+0\.667", first) and "earlier run" not in first
    assert f"Wrote {tmp_path / 'page.html'}" in " ".join(first.split())
    assert "sparge eval pipeline owner/model --prompt &#39;a b&#39;" in (tmp_path / "page.html").read_text()
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["part"] for row in rows] == ["dense", "variant"]
    assert rows[0]["run"]["model"] == "owner/model"
    calls = len(pipe.calls)
    assert calls and "2 rows of an earlier run were reused" in printed() and len(pipe.calls) == calls


def test_nan_pixels_have_a_remark() -> None:
    class Broken(SmallPipeline):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            output.frames[0, 1] = np.nan
            return output

        __call__.__signature__ = inspect.signature(SmallPipeline.__call__)  # type: ignore[attr-defined]

    pipe = Broken(wan_transformer(), diffusers.FlowMatchEulerDiscreteScheduler())
    variant = parse_variant("topk=1.0").forced(CPU)
    made = evaluate_pipeline(pipe, [variant], prompts=["a"], seeds=[0], warm_up=False)
    assert "topk=1.0, seed 0: some pixels were NaN or infinite and were replaced." in render_page(made, "")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere/at/all"], "nowhere/at/all"),
        (["p", "--variant", "topk=2"], "topk: expected a value in (0, 1], got 2"),
        *((["p", "--argument", text], f"expected NAME=VALUE, got '{text}'") for text in ("steps", "=3", "a b=3")),
        (["p", "--output", "same.html", "--json", "same.html"], "expected different files for --output and --json"),
    ],
)
def test_invalid_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from sparge.cli.app import main

    with pytest.raises(SystemExit) as done:
        main(["eval", "pipeline", *arguments])
    assert done.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("sparge: error: ") and message in printed
    assert len(printed.splitlines()) == 1
