"""The ``sparge`` command: ``demo`` compares sparse with dense attention, ``eval`` measures the quality of a model,
``calibrate`` derives budgets for its layers, ``bench`` measures on a GPU, ``doctor`` reports devices and backends,
``lm-eval`` runs lm-evaluation-harness with sparse attention."""

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
from sparge.cli import calibrate, evaluate, options
from sparge.options.extras import install_command

if TYPE_CHECKING:
    from rich.console import Console

    from sparge.bench import cases as bench_cases
    from sparge.demo.measure import Demo
    from sparge.policy import Policy

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(calibrate.calibrate)
app.add_typer(evaluate.app, name="eval", help="Measure the quality of your own model with sparse attention.")


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit. For a wrong command line, print one line to stderr and exit with status 2."""
    try:
        sys.exit(app(args=arguments, prog_name="sparge", standalone_mode=False))
    except options.UsageError as error:
        message = " ".join(error.format_message().split())
        if not message:  # no arguments: the help was printed
            sys.exit(0)
        typer.echo(f"sparge: error: {message}", err=True)
        sys.exit(2)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"sparge {__version__}")
        raise typer.Exit


@app.callback()
def sparge(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Training-free sparse and quantized attention for PyTorch."""


@app.command()
def demo(
    topk: Annotated[
        float, typer.Option(parser=options.share, metavar="SHARE", help="Share of the visible blocks to keep.")
    ] = 0.25,
    tokens: Annotated[
        int | None,
        typer.Option(
            parser=options.tokens, metavar="N", help="Sequence length: 8192 on a CPU, 32768 on a GPU by default."
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(parser=options.count, metavar="N", help="Heads: 8 on a CPU, 16 on a GPU by default.")
    ] = None,
    seed: Annotated[int, typer.Option(parser=options.seed, metavar="N", help="Seed of the inputs.")] = 0,
    device: Annotated[
        str,
        typer.Option(parser=options.device, metavar="NAME", help="auto, cuda or cpu. auto is cuda if available."),
    ] = "auto",
    output: Annotated[
        Path, typer.Option(parser=options.writable, metavar="PATH", help="Where to write the page.")
    ] = Path("sparge-demo.html"),
    json_path: Annotated[
        Path | None,
        typer.Option("--json", parser=options.writable, metavar="PATH", help="Also write the numbers as JSON."),
    ] = None,
) -> None:
    """Compare sparse with dense attention on this machine: print a table, and write a page with the predicted masks."""
    import torch
    from rich.console import Console

    from sparge.console import show_progress
    from sparge.demo import measure
    from sparge.demo.page import render_page

    if json_path is not None and json_path.resolve() == output.resolve():
        raise typer.BadParameter(f"expected different files for --output and --json, got {output} for both")
    console = Console()
    best = "cuda" if torch.cuda.is_available() else "cpu"
    settings = measure.DEFAULTS[best if device == "auto" else device]
    tokens, heads = tokens or settings.tokens, heads or settings.heads
    settings = replace(settings, topk=topk, tokens=tokens, heads=heads, seed=seed)
    try:
        with show_progress(Console(stderr=True)) as progress:
            result = measure.run_demo(settings, progress)
    except torch.OutOfMemoryError as error:
        raise options.UsageError(
            f"demo: expected enough memory for {tokens} tokens, got out of memory; use a smaller --tokens"
        ) from error
    output.write_text(render_page(result), encoding="utf-8")
    if json_path is not None:
        json_path.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    _print_demo(console, result)
    for path in filter(None, (output, json_path)):
        console.print(f"Wrote {path}", soft_wrap=True, highlight=False, markup=False)


def _print_demo(console: Console, result: Demo) -> None:
    """Print the machine, and a line for each input and score."""
    from sparge.console import empty_table, print_fitting
    from sparge.demo.measure import table_cells
    from sparge.demo.page import machine_parts

    console.print(f"topk {result.settings.topk:g}; {'; '.join(machine_parts(result))}", highlight=False, markup=False)
    rows = [list(table_cells(row)) for row in result.rows]
    table = empty_table([column for column, _ in rows[0]], left=("input", "score"))
    previous = None
    for (_, name), *cells in rows:
        if previous not in (None, name):
            table.add_row()
        table.add_row("" if name == previous else name, *(text for _, text in cells))
        previous = name
    print_fitting(console, table, rows)


def _suite(text: str) -> str:
    from sparge.bench.cases import SUITE_NAMES

    if text not in SUITE_NAMES:
        raise typer.BadParameter(f"expected one of {', '.join(SUITE_NAMES)}, got {text}")
    return text


@app.command()
def bench(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            parser=_suite,
            metavar="NAME",
            help="end_to_end, kernel, memory, crossover or host; may be repeated. The first three are the default. "
            "host also runs on a CPU.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", parser=options.writable, metavar="PATH", help="Append the rows as JSON lines."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run one case of each suite, with fewer turns.")] = False,
) -> None:
    """Compare sparge with dense attention on this machine's CUDA GPU: speed, density, error, memory, overhead."""
    import torch
    from rich.console import Console

    from sparge.backends import base
    from sparge.bench.cases import DEFAULT_SUITES

    suites = tuple(dict.fromkeys(suite or DEFAULT_SUITES))
    has_cuda = torch.cuda.is_available()
    if not has_cuda and suites != ("host",):
        raise options.UsageError(
            f"bench: expected a CUDA device, got none (torch {torch.__version__}); see sparge doctor"
        )
    reason = (
        base.get("triton").unavailable_reason(torch.device("cuda", torch.cuda.current_device())) if has_cuda else None
    )
    if reason is not None:
        raise options.UsageError(f"bench: {reason}")
    from sparge.bench.rivals import describe_fa4
    from sparge.bench.run import run_bench
    from sparge.bench.table import one_line
    from sparge.evaluate.machine import describe_gpu, describe_machine

    console = Console()
    lines_before = (
        [str(describe_gpu()), f"FlashAttention-4: {describe_fa4()}"] if has_cuda else [str(describe_machine())]
    )
    for line in lines_before:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    rows = []
    with nullcontext() if json_path is None else json_path.open("a", encoding="utf-8") as lines:
        for row in run_bench(suites, quick):
            rows.append(row)
            if lines is not None:
                lines.write(json.dumps(row) + "\n")
                lines.flush()  # an interrupted run keeps its results
            typer.echo(one_line(row), err=True)
    _print_bench(console, rows)
    if json_path is not None:
        console.print(f"Rows appended to {json_path}", soft_wrap=True, highlight=False, markup=False)


def _print_bench(console: Console, rows: Sequence[bench_cases.Row]) -> None:
    """Print one table for every view of the suites that ran, and the reasons for missing cells."""
    from sparge.bench.table import VIEWS, problem_notes
    from sparge.console import empty_table, print_fitting

    for view in VIEWS.values():
        shown = [view.cells(row) for row in rows if row["suite"] == view.suite]
        if shown:
            table = empty_table(view.columns, left=("kernel", "call"), padding=0)
            for cells in shown:
                table.add_row(*cells.values())
            console.print()
            console.print(view.title, style="bold")
            print_fitting(console, table, [list(cells.items()) for cells in shown])
    for note in problem_notes(rows):
        console.print(f"n/a: {note}", highlight=False, markup=False, soft_wrap=True)


def _policy(text: str) -> Policy:
    from sparge.policy import Policy

    try:
        return Policy.from_json(Path(text).read_text(encoding="utf-8"))
    except (OSError, TypeError, ValueError) as error:
        raise typer.BadParameter(f"expected a JSON file with a policy, got {text!r} ({error})") from error


@app.command("lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lm_eval(
    context: typer.Context,
    topk: Annotated[
        float | None,
        typer.Option(parser=options.share, metavar="SHARE", help="Share of the blocks to keep, 0.5 by default."),
    ] = None,
    policy: Annotated[
        Any, typer.Option(parser=_policy, metavar="FILE", help="JSON file with a policy, instead of --topk.")
    ] = None,
) -> None:
    """Run lm-evaluation-harness with sparse attention: sparge lm-eval --topk 0.4 -- ARGUMENTS OF lm_eval."""
    from sparge.evaluate import lm_harness
    from sparge.policy import Policy
    from sparge.stats import stats

    if topk is not None and policy is not None:
        raise options.UsageError(f"lm-eval: expected --topk or --policy, got both: {topk:g} and {policy.to_json()}")
    try:
        lm_harness.run(policy or Policy(topk=topk), context.args)
    except (ImportError, ValueError) as error:
        typer.echo(f"sparge: error: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(stats())


@app.command()
def doctor() -> None:
    """Print versions, devices, the backend of each device with the reason, and missing packages."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()

    def section(title: str, lines: Iterator[tuple[str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in lines:
            table.add_row(f"  {name}", Text(text))  # Text, because ".[plot]" would be parsed as markup
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

    from sparge.bench.rivals import FA4_PACKAGE, describe_fa4

    yield "sparge", __version__
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield "torch", f"{torch.__version__} ({build})"
    yield "triton", _installed("triton") or "missing (no GPU kernels)"
    yield "matplotlib", _installed("matplotlib") or "missing (no BlockMask.plot)"
    for name in ("transformers", "diffusers"):
        yield name, _installed(name) or "missing (needed only for its models)"
    yield FA4_PACKAGE, describe_fa4()


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
    """Return the number of cores that this process may use. A container or taskset may restrict it."""
    affinity: Any = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _advice() -> Iterator[tuple[str, str]]:
    """Yield missing features, with their effects and how to enable them."""
    import torch

    from sparge.backends import base

    if _installed("matplotlib") is None:
        yield "matplotlib", f"BlockMask.plot() cannot draw, and pages have no charts: {install_command('plot')}"
    if not torch.cuda.is_available() and shutil.which("nvidia-smi"):
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        yield "cuda", f"{why}, although nvidia-smi exists: install torch for CUDA (pytorch.org), or check the driver"
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if base.resolve("auto", device) == "torch":
            yield f"cuda:{index}", f"runs the slow torch backend: {base.explain(device)}"
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit and torch.get_num_threads() < _usable_cores():
        yield "threads", f"OMP_NUM_THREADS={limit} limits torch to fewer than {_usable_cores()} cores: unset it"


if __name__ == "__main__":
    main()
