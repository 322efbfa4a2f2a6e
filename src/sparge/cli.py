"""The ``sparge`` command: ``demo`` shows it on this machine, ``eval`` judges it on a model, ``bench`` measures it on a
GPU, ``doctor`` says what the machine offers, ``lm-eval`` runs the lm-evaluation-harness with it, ``sweep`` derives
launch configurations."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparge._version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from sparge.bench import cases as bench_cases
    from sparge.evaluate.variants import Variant
    from sparge.policy import Policy

MIN_TOKENS = 256
MAX_SEED = 2**63 - 1

# The base of every wrong-command-line error. typer vendors click since 0.2x and imports it before, so the class has no
# name that all versions share.
_UsageError: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "UsageError")

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
evaluation = typer.Typer(no_args_is_help=True)
app.add_typer(evaluation, name="eval", help="Judge sparse attention on your own model: quality beside density.")


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0, or 2 with one line on stderr for a wrong command line."""
    try:
        sys.exit(app(args=arguments, prog_name="sparge", standalone_mode=False))
    except _UsageError as error:
        message = " ".join(error.format_message().split())
        if not message:  # no arguments: the help was printed
            sys.exit(0)
        typer.echo(f"sparge: error: {message}", err=True)
        sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"sparge {__version__}")
        raise typer.Exit


@app.callback()
def sparge(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Training-free sparse and quantised attention for PyTorch."""


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = float("nan")
    if not 0 < share <= 1:
        raise typer.BadParameter(f"expected a number in (0, 1], got {text}")
    return share


def _integer(text: str, low: int, high: int, expected: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if not low <= number <= high:
        raise typer.BadParameter(f"expected {expected}, got {text}")
    return number


def _tokens(text: str) -> int:
    return _integer(text, MIN_TOKENS, sys.maxsize, f"an integer of at least {MIN_TOKENS}")


def _count(text: str) -> int:
    return _integer(text, 1, sys.maxsize, "an integer of at least 1")


def _seed(text: str) -> int:
    return _integer(text, 0, MAX_SEED, "an integer in [0, 2**63)")


def _device(text: str) -> str:
    if text not in ("auto", "cuda", "cpu"):
        raise typer.BadParameter(f"expected auto, cuda or cpu, got {text}")
    if text == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise typer.BadParameter(f"expected a CUDA device, got none (torch {torch.__version__}); see sparge doctor")
    return text


def _writable(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise typer.BadParameter(f"expected a file to write, got the directory {text}")
    if not path.exists() and not path.parent.is_dir():
        raise typer.BadParameter(f"expected a file in a directory that exists, got {text}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"expected a file that can be written, got {text}")
    return path


@app.command()
def demo(
    topk: Annotated[
        float, typer.Option(parser=_share, metavar="SHARE", help="Share of the visible blocks to keep.")
    ] = 0.25,
    tokens: Annotated[
        int | None,
        typer.Option(parser=_tokens, metavar="N", help="Sequence length: 8192 on a CPU, 32768 on a GPU by default."),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Heads: 8 on a CPU, 16 on a GPU by default.")
    ] = None,
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Seed of the inputs.")] = 0,
    device: Annotated[
        str, typer.Option(parser=_device, metavar="NAME", help="auto, cuda or cpu. auto: cuda where there is one.")
    ] = "auto",
    output: Annotated[Path, typer.Option(parser=_writable, metavar="PATH", help="Where to write the page.")] = Path(
        "sparge-demo.html"
    ),
    json_path: Annotated[
        Path | None, typer.Option("--json", parser=_writable, metavar="PATH", help="Also write the numbers as JSON.")
    ] = None,
) -> None:
    """Dense against sparse attention on this machine: a table, and a page with the predicted masks."""
    import torch
    from rich.console import Console

    from sparge.demo.measure import DEFAULTS, best_device
    from sparge.demo.page import render_page
    from sparge.demo.terminal import print_results, run_with_progress

    if json_path is not None and json_path.resolve() == output.resolve():
        raise typer.BadParameter(f"expected different files for --output and --json, got {output} for both")
    console = Console()
    settings = DEFAULTS[best_device() if device == "auto" else device]
    tokens, heads = tokens or settings.tokens, heads or settings.heads
    try:
        result = run_with_progress(replace(settings, topk=topk, tokens=tokens, heads=heads, seed=seed))
    except torch.OutOfMemoryError as error:
        raise _UsageError(f"demo: expected memory for {tokens} tokens, got none; take fewer with --tokens") from error
    output.write_text(render_page(result), encoding="utf-8")
    if json_path is not None:
        json_path.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    print_results(console, result)
    for path in filter(None, (output, json_path)):
        console.print(f"Wrote {path}", soft_wrap=True, highlight=False, markup=False)


def _suite(text: str) -> str:
    from sparge.bench.cases import SUITES

    if text not in SUITES:
        raise typer.BadParameter(f"expected one of {', '.join(SUITES)}, got {text}")
    return text


@app.command()
def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            parser=_suite,
            metavar="NAME",
            help="end_to_end, kernel, error, memory, crossover, hopper or numerics; may be repeated. The first four by "
            "default.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", parser=_writable, metavar="PATH", help="Append the rows as JSON lines.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One case of each suite, fewer turns.")] = False,
) -> None:
    """Sparge against its rivals on this machine's CUDA GPU: speed, density, error and memory."""
    import torch
    from rich.console import Console

    from sparge.backends import base
    from sparge.bench.cases import DEFAULT_SUITES

    if not torch.cuda.is_available():
        raise _UsageError(f"bench: expected a CUDA device, got none (torch {torch.__version__}); see sparge doctor")
    missing = base.get("triton").missing(torch.device("cuda", torch.cuda.current_device()))
    if missing is not None:
        raise _UsageError(f"bench: {missing}")
    from sparge.bench.run import run_bench
    from sparge.bench.table import one_line
    from sparge.evaluate.machine import describe_gpu

    console = Console()
    console.print(str(describe_gpu()), highlight=False, markup=False, soft_wrap=True)
    suites = tuple(dict.fromkeys(suite or DEFAULT_SUITES))
    rows = []
    with nullcontext() if json_path is None else json_path.open("a", encoding="utf-8") as lines:
        for row in run_bench(suites, quick):
            rows.append(row)
            if lines is not None:
                lines.write(json.dumps(row) + "\n")
                lines.flush()  # a run that is cut short keeps what it measured
            typer.echo(one_line(row), err=True)
    _print_bench(console, rows)
    if json_path is not None:
        console.print(f"Rows appended to {json_path}", soft_wrap=True, highlight=False, markup=False)


def _print_bench(console: Console, rows: Sequence[bench_cases.Row]) -> None:
    """One table for every view of the suites that ran, and why cells are missing."""
    from sparge.bench.table import TERMINAL_VIEWS, problem_notes
    from sparge.console import empty_table, print_fitting

    for view in TERMINAL_VIEWS:
        shown = [list(view.cells(row)) for row in rows if row["suite"] == view.suite]
        if shown:
            table = empty_table(
                [column for column, _ in shown[0]], left=("family", "backend", "kernel", "quantization"), padding=0
            )
            for cells in shown:
                table.add_row(*(text for _, text in cells))
            console.print()
            console.print(view.title, style="bold")
            print_fitting(console, table, shown)
    for note in problem_notes(rows):
        console.print(f"n/a: {note}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def sweep(
    cases: Annotated[
        list[str],
        typer.Argument(metavar="CASE...", help="KERNEL[:QUANTIZATION][:HEAD_DIM][:VARIANT], e.g. triton:int8_fp8:128."),
    ],
    tokens: Annotated[int, typer.Option(parser=_tokens, metavar="N", help="Sequence length.")] = 32768,
    heads: Annotated[int, typer.Option(parser=_count, metavar="N", help="Heads.")] = 16,
    distance: Annotated[
        int, typer.Option(parser=_count, metavar="N", help="Fields that may differ from the chosen row.")
    ] = 2,
    budget: Annotated[float | None, typer.Option(metavar="SECONDS", help="Stop by then, say what is missing.")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Longest that one candidate may take.")] = 60.0,
    jobs: Annotated[
        int | None, typer.Option(parser=_count, metavar="N", help="Processes that compile at a time.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", parser=_writable, metavar="PATH", help="Append the rows as JSON lines.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Skip what failed in the rows of --json.")] = False,
) -> None:
    """Derive rows of the tables of launch configurations on this machine's CUDA GPU (docs/configurations.md)."""
    from dataclasses import asdict

    from sparge.bench.run import stamp
    from sparge.bench.sweep.cases import parse_case
    from sparge.bench.sweep.results import json_rows, table_text
    from sparge.bench.sweep.run import missing_device, sweep_here
    from sparge.evaluate.machine import describe_gpu

    if resume and json_path is None:
        raise _UsageError("sweep: expected --json with --resume, got none")
    try:
        parsed = [parse_case(text, tokens, heads) for text in cases]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    missing = missing_device(parsed)
    if missing is not None:
        raise _UsageError(f"sweep: {missing}")
    gpu = describe_gpu()
    typer.echo(str(gpu))
    options = {"budget_s": budget, "timeout_s": timeout, "distance": distance, "resume": json_path if resume else None}
    for found in sweep_here(
        parsed, machine=asdict(gpu), places=jobs, say=lambda line: typer.echo(line, err=True), **options
    ):
        typer.echo("\n" + table_text(found))
        if json_path is not None:
            with json_path.open("a", encoding="utf-8") as lines:
                lines.writelines(json.dumps({**row, **stamp(gpu)}) + "\n" for row in json_rows(found))


def _policy(text: str) -> Policy:
    from sparge.policy import Policy

    try:
        return Policy.from_json(Path(text).read_text())
    except (OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"expected a JSON file of a policy, got {text!r} ({error})") from error


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
    return _integer(text, 0, sys.maxsize, "an integer of 0 or more")


DTYPES = ("float32", "bfloat16", "float16")


def _dtype(text: str) -> str:
    if text not in ("auto", *DTYPES):
        raise typer.BadParameter(f"expected auto, {', '.join(DTYPES)}, got {text}")
    return text


def _device_and_dtype(device: str, dtype: str) -> tuple[str, Any]:
    """auto: a GPU where there is one, bfloat16 there and float32 on CPUs."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return device, getattr(torch, dtype)


VARIANT_HELP = (
    "What to compare with dense attention; may be repeated. topk=0.25 keeps a quarter of the blocks; cdf=0.95 as many "
    "as hold that share of the attention; further words with commas: score=mean, quantization=none (16 bits), "
    "dense_layers=..., oracle (blocks chosen by the attention they really hold: the best a score could do). "
    "dense,quantization=int8_fp8 is dense in 8 bits. sdpa=math is torch's attention on another kernel: the noise. "
    "Or a file that Policy.to_json wrote."
)


@evaluation.command()
def llm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hub name, folder, or GGUF file.")],
    variant: Annotated[
        list[Any] | None, typer.Option(parser=_variant, metavar="WORDS", help=VARIANT_HELP, show_default=False)
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(parser=_tokens, metavar="N", help="Length of windows and prompts; may be repeated. 4096, 8192."),
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
    items: Annotated[int, typer.Option(parser=_count, metavar="N", help="Questions of each kind and length.")] = 8,
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
    force: Annotated[
        bool,
        typer.Option("--force", help="Go sparse also where it does not pay: below the measured crossover."),
    ] = False,
    device: Annotated[
        str, typer.Option(parser=_device, metavar="NAME", help="auto, cuda or cpu. auto: cuda where there is one.")
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(parser=_dtype, metavar="NAME", help="auto: bfloat16 on a GPU, float32 on a CPU.")
    ] = "auto",
    seed: Annotated[int, typer.Option(parser=_seed, metavar="N", help="Seed of the questions.")] = 0,
    output: Annotated[Path, typer.Option(parser=_writable, metavar="PATH", help="Where to write the page.")] = Path(
        "sparge-eval.html"
    ),
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            parser=_writable,
            metavar="PATH",
            help="Append a row for each result; the same command goes on where it was interrupted.",
        ),
    ] = None,
) -> None:
    """A language model, sparse against dense, on the same tokens: KL divergence, agreement, perplexity, needles, tasks.

    sparge eval llm HuggingFaceTB/SmolLM2-135M --variant topk=0.5 --variant topk=0.25 --json rows.jsonl
    """
    from rich.console import Console

    from sparge.evaluate.language import command
    from sparge.evaluate.language.run import Settings
    from sparge.evaluate.language.tasks import TASKS
    from sparge.evaluate.variants import parse_variant

    tasks = list(dict.fromkeys(task or ["needle"]))
    tasks = list(TASKS) if "all" in tasks else tasks
    if not needles:
        tasks = [name for name in tasks if name != "needle"]
    chosen = variant or [parse_variant(words) for words in ("topk=0.5", "topk=0.25")]
    place, kind = _device_and_dtype(device, dtype)
    try:
        settings = Settings(
            tokens=tuple(tokens or (4096, 8192)),
            windows=windows,
            tasks=tuple(tasks),
            items=items,
            needles=needles,
            data=tuple(data or ()),
            seed=seed,
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
    except (ImportError, NotImplementedError, ValueError) as error:
        raise _UsageError(f"eval llm: {error}") from error


@app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lm_eval(
    context: typer.Context,
    topk: Annotated[
        float | None, typer.Option(parser=_share, metavar="SHARE", help="Share of the blocks to keep, 0.5 by default.")
    ] = None,
    policy: Annotated[Any, typer.Option(parser=_policy, metavar="FILE", help="JSON of a policy, instead.")] = None,
) -> None:
    """Run lm-evaluation-harness with sparse attention: sparge lm-eval --topk 0.4 -- ARGUMENTS OF lm_eval."""
    from sparge import Policy, stats
    from sparge.evaluate import lm_harness

    if topk is not None and policy is not None:
        raise _UsageError(f"lm-eval: expected --topk or --policy, got both: {topk:g} and {policy.to_json()}")
    try:
        lm_harness.run(policy or Policy(topk=topk), context.args)
    except (ImportError, ValueError) as error:
        typer.echo(f"sparge: error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(stats())


@app.command()
def doctor() -> None:
    """Versions, devices, the backend each device gets and why, and what is missing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def section(title: str, lines: Iterator[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in lines:
            table.add_row(f"  {name}", Text(text))  # Text: "sparge[plot]" is not markup
        console.print(title, style="bold")
        console.print(table)
        console.print()

    section("Versions", _versions())
    section("Devices", _devices())
    advice = list(_advice())
    if advice:
        section("To do", iter(advice))
    else:
        console.print("Nothing is missing.")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[tuple[str, str]]:
    import torch

    yield "sparge", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield "torch", f"{torch.__version__} ({build})"
    yield "triton", _installed("triton") or "missing (no GPU kernels)"
    yield "matplotlib", _installed("matplotlib") or "missing (no BlockMask.plot)"
    for name in ("transformers", "diffusers"):
        yield name, _installed(name) or "missing (needed for its models alone)"


def _devices() -> Iterator[tuple[str, str]]:
    import torch

    from sparge.backends import base

    found: list[tuple[str, str]] = [("cpu", f"{torch.get_num_threads()} threads, {_usable_cores()} cores")]
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        found.append((f"cuda:{index}", f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}"))
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple GPU"))
    for name, about in found:
        device = torch.device(name)
        backend = base.resolve("auto", device)
        quantization = base.resolve_quantization("auto", backend, device)
        kind = "" if quantization == "none" else f" in {quantization}"
        yield name, f"{about}\nbackend {backend!r}{kind}: {base.explain(device)}"


def _usable_cores() -> int:
    """Cores this process may run on; fewer than the machine's inside a container or under taskset."""
    affinity: Any = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _advice() -> Iterator[tuple[str, str]]:
    """What is missing, what it costs, and what to do about it."""
    import torch

    from sparge.backends import base

    if _installed("matplotlib") is None:
        yield "matplotlib", "BlockMask.plot() cannot draw, all else works: pip install 'sparge[plot]'"
    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        yield "cuda", f"{why}, though nvidia-smi is here: install torch for CUDA (pytorch.org), or check the driver"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if base.resolve("auto", device) == "torch":
            yield f"cuda:{index}", f"runs the slow torch backend: {base.explain(device)}"
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit and torch.get_num_threads() < _usable_cores():
        yield "threads", f"OMP_NUM_THREADS={limit} holds torch below {_usable_cores()} cores: unset it"


if __name__ == "__main__":
    main()
