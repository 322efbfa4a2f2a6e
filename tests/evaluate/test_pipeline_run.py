"""Evaluation of pipelines: metrics, resuming, errors by layer and step, models without `sparge.enable`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from small_pipelines import FRAMES, LAYERS, STEPS, small_pipeline, unknown_pipeline

import sparge
from sparge.evaluate.pipeline import Result, evaluate_pipeline
from sparge.evaluate.pipeline.apply import applied_to_pipeline
from sparge.evaluate.pipeline.errors import ErrorRecorder
from sparge.evaluate.pipeline.generate import generate
from sparge.evaluate.pipeline.load import load
from sparge.evaluate.pipeline.run import Item
from sparge.evaluate.pipeline.summary import lines_of, remarks, table_of
from sparge.evaluate.variants import Variant, parse_variant

CPU = torch.device("cpu")
HALF = "rows=0.34,min_blocks=1"


def forced(*labels: str) -> list[Variant]:
    return [parse_variant(label).forced(CPU) for label in labels]


def evaluate(pipe: Any, variants: Sequence[Variant], **options: Any) -> Result:
    return evaluate_pipeline(pipe, variants, **{"prompts": ["a"], "seeds": [0], "warm_up": False, **options})


def table_by_variant(result: Result) -> dict[str, dict[str, str]]:
    lines = lines_of(result)
    return {line.variant: dict(cells) for line, cells in zip(lines, table_of(lines), strict=True)}


def test_run_without_skipped_blocks_has_a_remark() -> None:
    """Three blocks per query block are fewer than the minimum of 16; dense steps do not skip blocks either."""
    result = evaluate(small_pipeline(), forced("rows=0.34", f"{HALF},dense_first_steps={STEPS}", HALF))
    lines = lines_of(result)
    assert [line.density for line in lines[1:3]] == [1.0, 1.0]
    found = list(remarks(result, lines))
    assert sum("every block was kept" in remark for remark in found) == 1
    assert any(remark.startswith("rows=0.34: every block was kept") for remark in found)
    assert any("dense_first_steps" in remark and "nothing ran sparse (dense: dense step)" in remark for remark in found)
    assert not any(remark.startswith(f"{HALF}:") for remark in found)


def test_error_about_a_default_prompt_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("expected a word, got 'fox'")

    monkeypatch.setattr("sparge.evaluate.pipeline.run.generate", refuse)
    with pytest.raises(ValueError, match=r"got 'fox' \(this is a built-in prompt; use --prompt for your own\)"):
        evaluate(small_pipeline(), forced(HALF), prompts=None)
    with pytest.raises(ValueError, match=r"got 'fox'$"):
        evaluate(small_pipeline(), forced(HALF))


def test_metrics_of_each_variant() -> None:
    labels = (HALF, f"{HALF},dense_first_steps=1", "topk=1.0", "dense,quantization=int8_fp8", "sdpa=math")
    result = evaluate(small_pipeline(), forced(*labels), seeds=[0, 1])
    lines = {line.variant: line for line in lines_of(result)}
    assert lines[HALF].psnr is not None
    assert lines[HALF].psnr.values == 2
    assert lines[HALF].density == pytest.approx(2 / 3)  # 2 of 3 blocks per query block
    assert lines[HALF].ran == "sparse"
    later = lines[labels[1]]
    assert later.density == pytest.approx((1 + 2 * 2 / 3) / 3)  # one step of three is dense
    assert later.ran == "67% sparse; dense step"
    assert later.psnr is not None
    assert later.psnr.mean > lines[HALF].psnr.mean
    full = lines["topk=1.0"]
    assert full.psnr is None or full.psnr.mean > 70
    assert lines["dense,quantization=int8_fp8"].ran == "all blocks"
    assert lines["sdpa=math"].ran == "dense"
    assert all(line.seconds > 0 and line.step_seconds for line in lines.values())
    assert lines["dense"].speed_up.mean == 1.0
    row = result.row("variant", result.items[0], result.variants[0])
    frames, exact = (result.frames(result.items[0], one) for one in (result.variants[0], None))
    assert frames.shape[0] == FRAMES
    errors = np.square(frames / 255 - exact / 255)
    assert row["psnr"] == pytest.approx(-10 * math.log10(errors.mean()), rel=1e-4)
    assert len(row["all_step_seconds"]) == STEPS
    assert 0 < row["temporal_difference"] < 0.1
    json.dumps(result.rows, allow_nan=False)


def test_equal_clips_have_no_psnr() -> None:
    pipe = small_pipeline()
    result = evaluate(pipe, [parse_variant(HALF)])  # below the crossover: dense
    assert table_by_variant(result)[HALF]["PSNR dB"] == "equal"
    assert table_by_variant(result)[HALF]["ran"] == "dense: below the crossover"
    assert lines_of(result)[1].density is None
    found = list(remarks(result, lines_of(result)))
    assert any("nothing ran sparse (dense: below the crossover)" in text and "--force" in text for text in found)
    assert result.row("variant", result.items[0], result.variants[0])["psnr"] is None


def test_all_variants_get_the_same_seeds_and_prompts() -> None:
    pipe = small_pipeline()
    first = generate(pipe, "a", 7, {}).frames.pixels
    assert np.array_equal(generate(pipe, "a", 7, {}).frames.pixels, first)
    assert not np.array_equal(generate(pipe, "a", 8, {}).frames.pixels, first)
    pipe.calls.clear()
    result = evaluate(pipe, forced(HALF), prompts=None, seeds=None)
    assert len(result.items) == 2
    assert [prompt for prompt, _ in pipe.calls] == [item.prompt for item in result.items for _ in range(2)]
    state = torch.random.get_rng_state()
    generate(pipe, "a", 7, {})
    assert torch.equal(torch.random.get_rng_state(), state)


def test_each_variant_is_warmed_up_once_with_two_steps() -> None:
    pipe = small_pipeline()
    seen: list[tuple[int, int]] = []
    options: dict[str, Any] = {"seeds": [0, 1], "warm_up": True, "progress": lambda _, *count: seen.append(count)}
    evaluate(pipe, forced(f"{HALF},dense_first_steps=2"), **options)
    assert [steps for _, steps in pipe.calls] == [2, STEPS, 2, STEPS, STEPS, STEPS]
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4)]


class Stopped(BaseException):
    """Stands in for KeyboardInterrupt, which pytest handles."""


def test_interrupted_run_resumes(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    options: dict[str, Any] = {"rows": path, "seeds": [0, 1], "errors": True}
    variants = forced(HALF, "topk=1.0")
    pipe = small_pipeline()

    def stop_at_fifth(_: str, done: int, __: int) -> None:
        if done == 4:
            raise Stopped

    with pytest.raises(Stopped):
        evaluate(pipe, variants, progress=stop_at_fifth, **options)
    assert len(pipe.calls) == 4
    dense_files = sorted((tmp_path / "rows.frames").glob("*.npz"))

    again = small_pipeline()
    result = evaluate(again, variants, **options)
    assert len(again.calls) == 8 - 4
    assert set(dense_files) < set((tmp_path / "rows.frames").glob("*.npz"))
    whole = evaluate(small_pipeline(), variants, seeds=[0, 1], errors=True)
    for row, other in zip(result.rows, whole.rows, strict=True):
        for name in {*row} & {"psnr", "ssim", "density", "digest", "values"}:
            assert row[name] == other[name]

    third = small_pipeline()
    evaluate(third, variants, **options)
    assert third.calls == []
    evaluate(third, [*variants, *forced("topk=0.67,min_blocks=1")], **options)
    assert len(third.calls) == 3  # two seeds of the new variant, and its errors
    evaluate(third, variants, **{**options, "arguments": {"num_inference_steps": 2}})
    assert len(third.calls) == 3 + 8  # another run


def test_lost_frames_are_regenerated(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    pipe = small_pipeline()
    evaluate(pipe, forced(HALF), rows=path)
    for file in (tmp_path / "rows.frames").iterdir():
        file.write_bytes(b"cut off")
    pipe.calls.clear()
    evaluate(pipe, forced(HALF), rows=path)
    assert len(pipe.calls) == 2  # dense, and the variant that is compared with it
    pipe.transformer.proj_out.bias.data += 0.1
    pipe.calls.clear()
    evaluate(pipe, forced(HALF), rows=path)
    assert len(pipe.calls) == 2  # other weights make another run, although frames exist


def test_changed_policy_file_is_another_variant(tmp_path: Path) -> None:
    pipe = small_pipeline()
    policy = tmp_path / "policy.json"
    for topk, calls in ((0.5, 2), (0.5, 0), (0.25, 1)):
        policy.write_text(json.dumps({"topk": topk}))
        pipe.calls.clear()
        evaluate(pipe, [parse_variant(str(policy))], rows=tmp_path / "rows.jsonl")
        assert len(pipe.calls) == calls


def test_errors_by_layer_and_step() -> None:
    labels = (HALF, f"{HALF},oracle", "topk=1.0", "dense,quantization=int8_fp8", f"{HALF},dense_first_steps=1")
    result = evaluate(small_pipeline(), forced(*labels, "sdpa=math"), errors=True)
    rows = {row["variant"]: row for row in result.rows if row["part"] == "errors"}
    assert list(rows) == list(labels)
    for label in labels[:4]:
        assert rows[label]["layers"] == [f"transformer.blocks.{index}.attn1" for index in range(LAYERS)]
        assert rows[label]["steps"] == list(range(STEPS))
    assert rows[labels[4]]["steps"] == [1, 2]
    means = {label: np.mean(row["values"]) for label, row in rows.items()}
    assert means["topk=1.0"] < 1e-5 < means["dense,quantization=int8_fp8"] < 0.1 < means[HALF]
    assert means[labels[1]] < 1.1 * means[HALF]


@pytest.mark.parametrize("label", [HALF, f"{HALF},oracle", "dense,quantization=int8_fp8"])
def test_recording_errors_does_not_change_the_run(label: str) -> None:
    pipe, (variant,) = small_pipeline(), forced(label)
    with variant.applied(pipe, applied_to_pipeline):
        unrecorded = generate(pipe, "a", 0, {}).frames.pixels
    with ErrorRecorder(variant).recording(pipe):
        recorded = generate(pipe, "a", 0, {}).frames.pixels
    assert np.array_equal(unrecorded, recorded)
    assert not np.array_equal(unrecorded, generate(pipe, "a", 0, {}).frames.pixels)


def test_model_that_enable_does_not_support() -> None:
    pipe = unknown_pipeline()
    result = evaluate(pipe, forced(HALF, "topk=1.0"), prompts=None, seeds=None, errors=True)
    assert not result.is_supported
    assert result.items == (Item(None, 0), Item(None, 1))
    half, full = lines_of(result)[1:]
    assert half.ran == "sparse"
    assert half.psnr is not None
    assert full.psnr is None or full.psnr.mean > half.psnr.mean + 20
    assert any("does not support UnknownPipeline" in text for text in remarks(result, lines_of(result)))
    (errors, _) = [row for row in result.rows if row["part"] == "errors"]
    assert errors["layers"] == ["call 1"]
    assert errors["steps"] == list(range(STEPS))
    assert "forward" not in vars(pipe.transformer)
    assert half.temporal_difference is None  # images have no temporal difference


def test_pipeline_is_restored() -> None:
    pipe = small_pipeline()
    pipe.set_progress_bar_config(leave=False)
    before = pipe.transformer.state_dict().keys(), type(pipe.scheduler), dict(pipe._progress_bar_config)
    evaluate(pipe, forced(HALF), errors=True)
    assert (pipe.transformer.state_dict().keys(), type(pipe.scheduler), pipe._progress_bar_config) == before
    sparge.enable(pipe)
    with pytest.raises(ValueError, match="expected a dense pipeline, got an enabled one"):
        evaluate(pipe, forced(HALF))
    sparge.disable(pipe)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"arguments": {"frames": 3}},
            r"arguments: expected arguments of SmallPipeline \(num_inference_steps, .*'frames'",
        ),
        ({"arguments": {"prompt": "b"}}, "arguments: expected none that the evaluation sets itself, got 'prompt'"),
        ({"arguments": {"output_type": "pil"}}, "expected none that the evaluation sets itself, got 'output_type'"),
        ({"variants": []}, r"variants: expected one or more with different labels, got \[\]"),
        ({"variants": forced(HALF, HALF)}, "variants: expected one or more with different labels"),
        ({"variants": forced(f"{HALF},dense_layers=[9]")}, "dense_layers: "),
    ],
)
def test_wrong_input_raises_before_anything_runs(options: dict[str, Any], message: str) -> None:
    pipe = small_pipeline()
    with pytest.raises(ValueError, match=message):
        evaluate(pipe, **{"variants": forced(HALF), **options})
    assert pipe.calls == []


def test_rules_about_steps_raise_for_unsupported_models() -> None:
    pipe = unknown_pipeline()
    with pytest.raises(ValueError, match="UnknownPipeline: expected a policy without rules about steps or layers"):
        evaluate(pipe, forced(f"{HALF},dense_first_steps=1"), prompts=None)
    with pytest.raises(ValueError, match="prompts: expected none for UnknownPipeline, which takes no prompt, got 1"):
        evaluate(pipe, forced(HALF))


def unconditional_pipeline() -> Any:
    """Return a pipeline for images of 32 x 32 pixels with a U-Net that attends over 256 tokens."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        attention_head_dim=16,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())


def test_saved_unconditional_pipeline(tmp_path: Path) -> None:
    unconditional_pipeline().save_pretrained(tmp_path / "ddpm")
    pipe = load(str(tmp_path / "ddpm"), "cpu", torch.float32)
    assert type(pipe) is diffusers.DDPMPipeline
    result = evaluate(pipe, forced(HALF), prompts=None, arguments={"num_inference_steps": 2}, errors=True)
    (line,) = lines_of(result)[1:]
    assert line.ran == "sparse"
    assert line.step_seconds
    (errors,) = [row for row in result.rows if row["part"] == "errors"]
    assert len(errors["layers"]) == 4 and all(name.startswith("unet.") for name in errors["layers"])
    assert errors["steps"] == [0, 1]


def test_published_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "integrations")
    from tiny_pipelines import build_wan

    arguments = {"num_inference_steps": 2, "height": 96, "width": 96, "num_frames": 5, "guidance_scale": 5.0}
    result = evaluate(build_wan(), forced(HALF), prompts=["a cat"], arguments=arguments)
    (line,) = lines_of(result)[1:]
    assert line.ran == "sparse"
    assert line.psnr is not None
    assert line.temporal_difference is not None
    assert result.row("dense", result.items[0], None)["shape"] == [5, 96, 96, 3]


def test_invalid_names_raise(tmp_path: Path) -> None:
    for name, message in (
        ("./nothing", r"expected a hub name \(owner/name\) or a folder, got './nothing', which does not exist"),
        (str(tmp_path), r"expected a folder with a model_index\.json, got .* which has none"),
        (str(Path(__file__)), r"expected a hub name or a folder with a model_index\.json, got the file"),
    ):
        with pytest.raises(ValueError, match=message):
            load(name, "cpu", torch.float32)
    (tmp_path / "model_index.json").write_text('{"_class_name": "NoSuchPipeline", "_diffusers_version": "0.42.0"}')
    with pytest.raises(ValueError, match=r"expected a hub name or a folder of diffusers, got .*NoSuchPipeline"):
        load(str(tmp_path), "cpu", torch.float32)
