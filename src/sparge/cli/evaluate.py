"""``sparge eval``: compare sparse with dense attention on a language model or a diffusers pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparge.cli import options

if TYPE_CHECKING:
    from sparge.evaluate.variants import Variant

app = typer.Typer(no_args_is_help=True)


def _variant(text: str) -> Variant:
    from sparge.evaluate.variants import parse_variant

    try:
        return parse_variant(text)
    except (TypeError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


def _one_of_tasks(text: str) -> str:
    from sparge.evaluate.language.tasks import TASKS

    if text != "all" and text not in TASKS:
        raise typer.BadParameter(f"expected all or one of {', '.join(TASKS)}, got {text}")
    return text


def _whole(text: str) -> int:
    return options.integer(text, 0, sys.maxsize, "an integer of 0 or more")


DTYPES = ("float32", "bfloat16", "float16")


def _dtype(text: str) -> str:
    if text not in ("auto", *DTYPES):
        raise typer.BadParameter(f"expected auto, {', '.join(DTYPES)}, got {text}")
    return text


def _device_and_dtype(device: str, dtype: str) -> tuple[str, Any]:
    """Resolve "auto": a GPU with bfloat16 if there is one, else the CPU with float32."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, getattr(torch, dtype)


@contextmanager
def _failures_told(command: str, advice: str, rows: Path | None) -> Iterator[None]:
    """Report errors of an evaluation as one line: invalid input, out of memory (with ``advice``), Ctrl-C."""
    import torch

    try:
        yield
    except (ImportError, NotImplementedError, ValueError) as error:
        raise options.UsageError(f"{command}: {error}") from error
    except torch.OutOfMemoryError as error:
        raise options.UsageError(f"{command}: expected memory for this size, got none; {advice}") from error
    except KeyboardInterrupt:
        done = f"what is done is in {rows}, and the same command goes on from there"
        typer.echo(f"Interrupted: {done if rows else 'nothing is kept without --json'}", err=True)
        raise typer.Exit(130) from None


VARIANT_HELP = (
    "What to compare with dense attention; may be repeated. topk=0.25 keeps a quarter of the blocks; cdf=0.95 as many "
    "as hold that share of the attention; further words with commas: score=mean, quantization=none (16 bits), "
    "dense_first_steps=0.2 (of a schedule), oracle (blocks chosen by the attention they really hold: the best a score "
    "could do). "
    "dense,quantization=int8_fp8 is dense in 8 bits. sdpa=math is torch's attention on another kernel: the noise. "
    "Or a file that Policy.to_json or Profile.save wrote; profile=FILE,topk=0.25 is a profile with another mean."
)


@app.command()
def llm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, folder, or GGUF file.")],
    variant: Annotated[
        list[Any] | None, typer.Option(parser=_variant, metavar="WORDS", help=VARIANT_HELP, show_default=False)
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(
            parser=options.tokens,
            metavar="N",
            help="Length of windows and prompts; may be repeated. 4096 and 8192 by default, or the crossover of causal "
            "attention on this device where it is longer.",
        ),
    ] = None,
    windows: Annotated[
        int, typer.Option(parser=_whole, metavar="N", help="Windows of text to compare distributions on; 0: none.")
    ] = 4,
    task: Annotated[
        list[str] | None,
        typer.Option(
            parser=_one_of_tasks,
            metavar="NAME",
            help="Questions: needle, single, multikey, multivalue, tracking, aggregation, or all; may be repeated. "
            "needle by default.",
        ),
    ] = None,
    items: Annotated[
        int, typer.Option(parser=options.count, metavar="N", help="Questions of each kind and length.")
    ] = 8,
    needles: Annotated[
        int, typer.Option(parser=_whole, metavar="N", help="Needles at each of eight depths; 0: none.")
    ] = 1,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="What to read: a file, a folder of .txt files, or wikitext (from the hub). By default Python's "
            "language reference, which needs no download.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="Questions of LongBench or InfiniteBench: a .jsonl file in their format, longbench:NAME or "
            "infinitebench:NAME (from the hub); may be repeated.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask questions in the tokenizer's chat template, for models tuned to it.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Go sparse also where it does not pay: below the measured crossover."),
    ] = False,
    device: Annotated[
        str,
        typer.Option(parser=options.device, metavar="NAME", help="auto, cuda or cpu. auto: cuda where there is one."),
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(parser=_dtype, metavar="NAME", help="auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    seed: Annotated[int, typer.Option(parser=options.seed, metavar="N", help="Seed of the questions.")] = 0,
    output: Annotated[
        Path, typer.Option(parser=options.writable, metavar="PATH", help="Where to write the page.")
    ] = Path("sparge-eval.html"),
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            parser=options.writable,
            metavar="PATH",
            help="Append a row for each result; the same command goes on where it was interrupted.",
        ),
    ] = None,
) -> None:
    """A language model, sparse against dense, on the same tokens: KL divergence, agreement, perplexity, needles, tasks.

    sparge eval llm HuggingFaceTB/SmolLM2-135M --variant topk=0.5 --variant topk=0.25 --json rows.jsonl
    """
    import torch
    from rich.console import Console

    from sparge.evaluate.language import command
    from sparge.evaluate.language.lengths import default_lengths
    from sparge.evaluate.language.run import Settings
    from sparge.evaluate.language.tasks import TASKS
    from sparge.evaluate.variants import parse_variant

    tasks = list(dict.fromkeys(task or ["needle"]))
    tasks = list(TASKS) if "all" in tasks else tasks
    if not needles:
        tasks = [name for name in tasks if name != "needle"]
    chosen = variant or [parse_variant(words) for words in ("topk=0.5", "topk=0.25")]
    place, kind = _device_and_dtype(device, dtype)
    with _failures_told("eval llm", "take fewer --tokens", json_path):
        settings = Settings(
            tokens=tuple(tokens) if tokens else default_lengths(torch.device(place), kind),
            windows=windows,
            tasks=tuple(tasks),
            items=items,
            needles=needles,
            data=tuple(data or ()),
            chat=chat,
            seed=seed,
            noise=True,
        )
        command.run(
            model,
            chosen,
            settings,
            text=text,
            device=place,
            dtype=kind,
            force=force,
            output=output,
            json_path=json_path,
            command=["sparge", *sys.argv[1:]],
            console=Console(),
        )


def _argument(text: str) -> tuple[str, Any]:
    from sparge.evaluate.pipeline.command import parse_argument

    try:
        return parse_argument(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


@app.command()
def pipeline(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PIPELINE",
            help="A diffusers pipeline: its name on the Hugging Face hub, or a folder with a model_index.json.",
        ),
    ],
    variant: Annotated[
        list[Any] | None, typer.Option(parser=_variant, metavar="WORDS", help=VARIANT_HELP, show_default=False)
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="What to generate; may be repeated. Two prompts of its own by default."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            parser=options.seed,
            metavar="N",
            help="Of the noise; may be repeated. 0, or 0 and 1 with fewer than two prompts.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(parser=options.count, metavar="N", help="Denoising steps; the pipeline's own by default."),
    ] = None,
    height: Annotated[
        int | None, typer.Option(parser=options.count, metavar="PIXELS", help="Height of a frame.")
    ] = None,
    width: Annotated[int | None, typer.Option(parser=options.count, metavar="PIXELS", help="Width of a frame.")] = None,
    frames: Annotated[int | None, typer.Option(parser=options.count, metavar="N", help="Frames of a clip.")] = None,
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
            "--errors", help="Also compare each attention call with exact attention, by layer and step: slow."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Go sparse also where it does not pay: below the measured crossover."),
    ] = False,
    output: Annotated[
        Path, typer.Option(parser=options.writable, metavar="PATH", help="Where to write the page.")
    ] = Path("sparge-pipeline.html"),
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            parser=options.writable,
            metavar="PATH",
            help="Where rows go as they are measured, and frames to a folder beside it; the same command goes on from "
            "there. Beside the page by default.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(parser=options.device, metavar="NAME", help="auto, cuda or cpu. auto: cuda where there is one."),
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(parser=_dtype, metavar="NAME", help="auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the weights.")
    ] = False,
    offload: Annotated[
        bool, typer.Option("--offload", help="Keep models in the host's memory while they are not needed.")
    ] = False,
) -> None:
    """A diffusers pipeline, sparse against dense, from the same noise: PSNR, SSIM, time, and frames side by side.

    sparge eval pipeline Wan-AI/Wan2.1-T2V-1.3B-Diffusers --variant topk=0.5 --variant topk=0.25,dense_first_steps=0.1
    """
    from rich.console import Console

    from sparge.evaluate.pipeline import command
    from sparge.evaluate.variants import parse_variant

    rows = json_path or output.with_suffix(".jsonl")
    if rows.resolve() == output.resolve():
        raise typer.BadParameter(f"expected different files for --output and --json, got {output} for both")
    place, kind = _device_and_dtype(device, dtype)
    if offload and place != "cuda":
        raise typer.BadParameter("expected a CUDA device for --offload, got none")
    named = {"num_inference_steps": steps, "height": height, "width": width, "num_frames": frames}
    with _failures_told("eval pipeline", "take --offload, or less with --height, --width or --frames", rows):
        command.run(
            name,
            variant or [parse_variant(words) for words in ("topk=0.5", "topk=0.25")],
            prompts=prompt or [],
            seeds=seed or [],
            arguments={key: value for key, value in named.items() if value is not None} | dict(argument or ()),
            device=place,
            dtype=kind,
            errors=errors,
            force=force,
            trust_remote_code=trust_remote_code,
            offload=offload,
            output=output,
            json_path=rows,
            command=["sparge", *sys.argv[1:]],
            console=Console(),
        )
