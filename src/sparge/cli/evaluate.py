"""``sparge eval``: compare sparse with dense attention on a language model or a diffusers pipeline."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparge.cli import options

if TYPE_CHECKING:
    from sparge.evaluate.variants import Variant

app = typer.Typer(no_args_is_help=True)
DEFAULT_VARIANTS = ("topk=0.5", "topk=0.25")


def _variant(text: str) -> Variant:
    from sparge.evaluate.variants import parse_variant

    try:
        return parse_variant(text)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _task(text: str) -> str:
    from sparge.evaluate.language.tasks import TASKS

    if text != "all" and text not in TASKS:
        raise typer.BadParameter(f"expected all or one of {', '.join(TASKS)}, got {text}")
    return text


def _argument(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE. The value is parsed as JSON if possible."""
    name, equals, value = text.partition("=")
    if not name.isidentifier() or not equals:
        raise typer.BadParameter(f"expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _variants_to_compare(variants: list[Variant] | None, force: bool, device: str) -> list[Variant]:
    """Return the given variants, or the default ones; ``force`` disables their crossover."""
    import torch

    from sparge.evaluate.variants import check_labels

    chosen = variants or [_variant(words) for words in DEFAULT_VARIANTS]
    check_labels(chosen)
    return [variant.forced(torch.device(device)) for variant in chosen] if force else chosen


def _this_command() -> str:
    return shlex.join(["sparge", *sys.argv[1:]])


Variants = Annotated[
    list[Any] | None,
    typer.Option(
        "--variant",
        parser=_variant,
        metavar="WORDS",
        help="Attention to compare with the dense model; may be repeated. The default is topk=0.5 and topk=0.25. "
        "topk=0.25 keeps a quarter of the blocks, cdf=0.95 the fewest blocks with 95 % of the predicted attention "
        "mass. Options follow after commas: score=mean, quantization=none (16 bits), dense_first_steps=0.2 (share of "
        "the steps), oracle (select blocks by their true attention mass, the upper bound for any score). "
        "dense,quantization=int8_fp8 is dense and quantized. sdpa=math is dense attention on another kernel of torch, "
        "which shows the rounding noise. FILE.json is a file from Policy.to_json or Profile.save, and "
        "profile=FILE.json,topk=0.25 is a profile with another mean density.",
        show_default=False,
    ),
]
JsonRows = Annotated[
    Path | None,
    typer.Option(
        "--json",
        parser=options.writable,
        metavar="PATH",
        help="Append a row for each result; the same command resumes an interrupted run. eval pipeline always writes "
        "this file, by default next to the page, and a folder of frames next to it.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Run sparse at any length, also below the measured crossover.")]


@app.command()
def llm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, folder, or GGUF file.")],
    variant: Variants = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=options.MIN_TOKENS,
            help="Length of windows and prompts; may be repeated. The default is 4096 and 8192, or the crossover of "
            "causal attention on this device if that is longer.",
        ),
    ] = None,
    windows: Annotated[int, typer.Option(min=0, help="Windows of text on which distributions are compared.")] = 4,
    task: Annotated[
        list[str] | None,
        typer.Option(
            parser=_task,
            metavar="NAME",
            help="Task: needle, single, multikey, multivalue, tracking, aggregation, or all; may be repeated. "
            "The default is needle.",
        ),
    ] = None,
    items: Annotated[int, typer.Option(min=1, help="Questions of each task and length.")] = 8,
    needles: Annotated[int, typer.Option(min=0, help="Needles at each of eight depths.")] = 1,
    text: options.Text = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put questions into the tokenizer's chat template, for chat models.")
    ] = False,
    force: Force = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    seed: options.Seed = 0,
    output: options.Page = Path("sparge-eval.html"),
    json_path: JsonRows = None,
) -> None:
    """Compare sparse with dense attention in a language model: KL divergence, agreement, perplexity, needles, tasks.

    sparge eval llm HuggingFaceTB/SmolLM2-135M --variant topk=0.5 --variant topk=0.25 --json rows.jsonl
    """
    import torch

    from sparge.console import plain_console, show_progress
    from sparge.evaluate.language.load import check_lengths, default_lengths, load_model, load_tokenizer
    from sparge.evaluate.language.page import render_page
    from sparge.evaluate.language.run import KEY, evaluate_model, pieces
    from sparge.evaluate.language.summary import by_length, explanations, lines_of, remarks, table_of
    from sparge.evaluate.language.tasks import TASKS
    from sparge.evaluate.language.texts import describe_text, read_text
    from sparge.evaluate.report import print_report
    from sparge.evaluate.rows import Rows, describe_run

    tasks = list(dict.fromkeys(task or ["needle"]))
    tasks = list(TASKS) if "all" in tasks else tasks
    if not needles:
        tasks = [name for name in tasks if name != "needle"]
    device, torch_dtype = options.resolve_device_and_dtype(device, dtype)
    with options.errors_as_usage("eval llm", "use fewer --tokens", json_path):
        if not windows and not tasks:
            raise ValueError("expected windows, needles or tasks, got none of them")
        lengths = tokens or default_lengths(torch.device(device), torch_dtype)
        variants = _variants_to_compare(variant, force, device)
        content = read_text(text)
        tokenizer = load_tokenizer(model)
        chosen: dict[str, Any] = {"tasks": tasks, "items": items, "needles": needles, "chat": chat, "seed": seed}
        work = list(pieces(tokenizer, content, tokens=lengths, windows=windows, noise=True, **chosen))
        loaded = load_model(model, device, torch_dtype)
        check_lengths(loaded, variants, lengths)
        stored = Rows(json_path, describe_run(model, [loaded], torch_dtype, torch.device(device)), KEY)
        with show_progress(plain_console()) as progress:
            rows = evaluate_model(loaded, tokenizer, variants, work, stored, progress)
        lines, source = lines_of(rows), describe_text(text)
        output.write_text(render_page(rows, model, _this_command(), source), encoding="utf-8")
        tables = [(title, table_of(group)) for title, group in by_length(lines, source)]
        print_report(
            plain_console(), tables, [*remarks(lines), *explanations(rows)], (output, json_path), stored.reused
        )


@app.command()
def pipeline(
    name: Annotated[
        str,
        typer.Argument(metavar="PIPELINE", help="Diffusers pipeline: a hub name, or a folder with a model_index.json."),
    ],
    variant: Variants = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Prompt; may be repeated. By default, two built-in prompts."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            max=options.MAX_SEED,
            help="Seed of the noise; may be repeated. The default is 0, or 0 and 1 with fewer than two prompts.",
        ),
    ] = None,
    steps: options.Steps = None,
    height: Annotated[int | None, typer.Option(min=1, help="Height of a frame in pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of a frame in pixels.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of a clip.")] = None,
    argument: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_argument,
            metavar="NAME=VALUE",
            help="Any other argument of the pipeline's call, e.g. guidance_scale=5; may be repeated.",
        ),
    ] = None,
    errors: Annotated[
        bool,
        typer.Option(
            "--errors", help="Also compare each attention call with exact attention, by layer and step (slow)."
        ),
    ] = False,
    force: Force = False,
    output: options.Page = Path("sparge-pipeline.html"),
    json_path: JsonRows = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code from the repository of the weights.")
    ] = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep models in host memory while they are not needed.")
    ] = False,
) -> None:
    """Compare sparse with dense attention in a diffusers pipeline on the same noise: PSNR, SSIM, time, frames.

    sparge eval pipeline Wan-AI/Wan2.1-T2V-1.3B-Diffusers --variant topk=0.5 --variant topk=0.25,dense_first_steps=0.1
    """
    from sparge.console import plain_console, show_progress
    from sparge.evaluate.pipeline import evaluate_pipeline, load
    from sparge.evaluate.pipeline.page import render_page
    from sparge.evaluate.pipeline.summary import lines_of, remarks, table_of
    from sparge.evaluate.report import print_report

    rows = json_path or output.with_suffix(".jsonl")
    if rows.resolve() == output.resolve():
        raise typer.BadParameter(f"expected different files for --output and --json, got {output} for both")
    device, torch_dtype = options.resolve_device_and_dtype(device, dtype)
    if offload and device != "cuda":
        raise typer.BadParameter("expected a CUDA device for --offload, got none")
    named = {"num_inference_steps": steps, "height": height, "width": width, "num_frames": frames}
    advice = "use --offload, or smaller --height, --width or --frames"
    with options.errors_as_usage("eval pipeline", advice, rows):
        pipe = load.load(name, device, torch_dtype, trust_remote_code, offload)
        with show_progress(plain_console()) as progress:
            result = evaluate_pipeline(
                pipe,
                _variants_to_compare(variant, force, device),
                prompts=prompt,
                seeds=seed,
                arguments={key: value for key, value in named.items() if value is not None} | dict(argument or ()),
                name=name,
                rows=rows,
                errors=errors,
                progress=progress,
            )
        lines = lines_of(result)
        output.write_text(render_page(result, _this_command()), encoding="utf-8")
        print_report(plain_console(), [("", table_of(lines))], remarks(result, lines), (output, rows), result.reused)
