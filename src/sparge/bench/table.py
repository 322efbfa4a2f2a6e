"""Format rows of ``sparge bench`` as tables for the terminal and for Markdown pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from sparge.bench.cases import IDENTITY, Row
from sparge.bench.rivals import RIVALS, fastest
from sparge.options.common import RENAMED_QUANTIZATIONS

Cells = Iterator[tuple[str, str]]

NOT_MEASURED = "n/a"
FIRST_BACKEND = "triton"
KERNELS = {
    "int8_fp8_fast": "INT8 + FP8, no exponentials",
    "int8_fp8": "INT8 + FP8",
    "int8_fp16": "INT8 + FP16",
    "none": "16 bits",
    "twin int8_fp8": "INT8 + FP8, Triton",
    "flex": "FlexAttention bf16",
    **{name: f"{rival.title} bf16" for name, rival in RIVALS.items()},
}


@dataclass(frozen=True)
class View:
    """One table: the suite its rows come from, its title, and a row's cells as (column, text).

    A page shows only rows with the values in ``cases``; a terminal shows all rows. ``page`` returns the cells of a
    page, which has room for more columns than a terminal of 80 characters.
    """

    suite: str
    title: str
    cells: Callable[[Row], Cells]
    cases: Row = field(default_factory=dict)
    page: Callable[[Row], Cells] | None = None

    @property
    def page_cells(self) -> Callable[[Row], Cells]:
        return self.page or self.cells

    def on_page(self, row: Row) -> bool:
        return all(_field(row, name) == value for name, value in self.cases.items())


def _field(row: Row, name: str) -> object:
    """Return a field of a row. Rows older than the Hopper kernel are Triton's with one segment; kernels have present
    names."""
    if name == "kernel":
        return kernel_name(row)
    return row.get(name, {"backend": FIRST_BACKEND, "segments": 1, "unequal": False}.get(name))


def kernel_name(row: Row) -> str:
    """Return the present name of a row's kernel."""
    name: str = row.get("kernel", "")
    return RENAMED_QUANTIZATIONS.get(name, name)


def _end_to_end(row: Row) -> Cells:
    yield from _problem(row)
    yield "topk", _topk(row)
    yield from _fastest(row)
    yield "sparge ms", _ms(row, "sparge_ms")
    yield "TFLOP/s", _number(row, "sparge_tflops", ".0f")
    yield "speed-up", _times(row, "speedup")
    yield "density", _number(row, "density", ".3f")
    yield "rel. L1", _number(row, "relative_l1", ".4f")


def _prepare(row: Row) -> Cells:
    yield from _problem(row)
    yield "topk", _topk(row)
    yield "prepare ms", _ms(row, "prepare_ms")
    yield "floor ms", _ms(row, "floor_ms")
    yield "attend ms", _ms(row, "attend_ms")
    yield "call ms", _ms(row, "sparge_graph_ms")
    yield "call with launches ms", _ms(row, "sparge_ms")


def _kernel(row: Row) -> Cells:
    yield "N", _plain(row, "tokens")
    yield "H", _plain(row, "heads")
    yield "D", _plain(row, "head_dim")
    yield "density", _number(row, "asked_density", "g")
    yield "kernel", KERNELS.get(kernel_name(row), NOT_MEASURED)
    timed = "ms" if row.get("graph_ms") is None else "graph_ms"
    yield "ms", _ms(row, timed)
    yield "TOPS executed", _number(row, "executed_tops", ".0f")
    yield "rel. L1", _number(row, "relative_l1", ".4f")


def _hopper(row: Row) -> Cells:
    for column, text in _kernel(row):
        if column == "density":
            yield "causal", _causal(row)
        yield column, text


def _errors(row: Row) -> Cells:
    yield from _problem(row)
    yield "quantization", KERNELS.get(kernel_name(row), NOT_MEASURED)
    yield "rel. L1", _number(row, "relative_l1", ".4f")
    target = row.get("target")
    yield "target", "" if target is None else f"<= {target:g}"


def _numerics(row: Row) -> Cells:
    """Return the cells that fit 80 columns. The rows also hold the limits, the worst LSE and cuDNN's error."""
    yield "family", _plain(row, "family")
    yield "N", _plain(row, "tokens")
    yield "D", _plain(row, "head_dim")
    yield "causal", _causal(row)
    yield "backend", _plain(row, "backend")
    yield "kernel", row.get("kernel", NOT_MEASURED).removeprefix("int8_")
    yield "rel. L1", _number(row, "relative_l1", ".4f")
    yield "LSE mean", _number(row, "lse_mean", ".4f")
    yield "ok", "yes" if row.get("passes") else "NO"


def _memory(row: Row) -> Cells:
    yield from _problem(row)
    yield "topk", _topk(row)
    yield "q + k + v", _mebibytes(row, "input_bytes")
    yield "output", _mebibytes(row, "output_bytes")
    yield "peak extra", _mebibytes(row, "extra_bytes")
    yield "of q + k + v", _times(row, "extra_share")


def _crossover(row: Row) -> Cells:
    yield "queries", _plain(row, "queries")
    yield "keys", _plain(row, "tokens")
    yield "H", _plain(row, "heads")
    yield "D", _plain(row, "head_dim")
    yield "causal", _causal(row)
    yield "topk", _topk(row)
    yield from _fastest(row)
    yield "sparge ms", _ms(row, "sparge_ms")
    yield "speed-up", _times(row, "speedup")
    yield "by graph", _times(row, "graph_speedup")
    yield "density", _number(row, "density", ".3f")


def _packed(row: Row) -> Cells:
    yield "segments", _plain(row, "segments")
    yield "N", f"{row['tokens'] // 2} to {row['tokens']}" if row.get("unequal") else _plain(row, "tokens")
    yield "H", _plain(row, "heads")
    yield "causal", _causal(row)
    yield "topk", _topk(row)
    yield from _fastest(row)
    yield "sparge ms", _ms(row, "sparge_ms")
    yield "speed-up", _times(row, "speedup")
    yield "of loop", _times(row, "loop_speedup")
    yield "density", _number(row, "density", ".3f")
    yield "rel. L1", _number(row, "relative_l1", ".4f")


def _masks(row: Row) -> Cells:
    yield "mask", _plain(row, "mask")
    yield "N", _plain(row, "tokens")
    yield "H", _plain(row, "heads")
    yield "topk", _topk(row)
    yield "SDPA ms", _ms(row, "sdpa_ms")
    yield "sparge ms", _ms(row, "sparge_ms")
    yield "prepare ms", _ms(row, "prepare_ms")
    yield "attend ms", _ms(row, "attend_ms")
    yield "speed-up", _times(row, "speedup")
    yield "density", _number(row, "density", ".3f")
    yield "rel. L1", _number(row, "relative_l1", ".4f")


def _fastest(row: Row) -> Cells:
    """Return the fastest dense kernel of the run and its time."""
    name = fastest(row)
    yield "dense", RIVALS[name].column if name else NOT_MEASURED
    yield "dense ms", _ms(row, f"{name}_ms")


def _with_rivals(cells: Callable[[Row], Cells], row: Row) -> Cells:
    """Return the same cells with the times of every rival and of a loop of sparse calls."""
    for column, text in cells(row):
        if column == "dense":
            for name, rival in RIVALS.items():
                yield f"{rival.column} ms", _ms(row, f"{name}_ms")
            yield "fastest dense", text
        elif column != "dense ms":
            yield column, text
        elif "loop_ms" in row:
            yield "loop ms", _ms(row, "loop_ms")


def _host(row: Row) -> Cells:
    yield "call", _plain(row, "call")
    yield "us", _us(row, "total_us")
    for part in ("API", "decision", "launch"):
        yield part, _us(row, f"{part.lower()}_us")
    yield "over SDPA", _us(row, "over_sdpa_us")
    yield "launches", _number(row, "launches", "d")


END_TO_END = "Whole calls against the fastest dense kernel, prediction and quantization included"
STAGES = "Where the time of one call goes, by graph replay"
RANDOM_BLOCKS = "Attention over random blocks, the kernel alone"
VIEWS = {
    "end_to_end": View(
        "end_to_end", END_TO_END, _end_to_end, {"backend": "hopper"}, partial(_with_rivals, _end_to_end)
    ),
    "end_to_end_triton": View(
        "end_to_end", END_TO_END, _end_to_end, {"backend": "triton"}, partial(_with_rivals, _end_to_end)
    ),
    "prepare": View("end_to_end", STAGES, _prepare, {"backend": "hopper", "topk": 0.5}),
    "prepare_triton": View("end_to_end", STAGES, _prepare, {"backend": "triton", "topk": 0.5}),
    "kernel": View("kernel", RANDOM_BLOCKS, _kernel, {"backend": "triton"}),
    "hopper": View("hopper", "Hopper's kernel beside its Triton twin, over random blocks", _hopper),
    "error": View("error", "Dense attention, error by quantization", _errors),
    "numerics": View("numerics", "Dense attention on families of inputs, errors and limits", _numerics),
    "memory": View("memory", "Peak device memory beyond inputs and output", _memory),
    "packed": View(
        "packed",
        "Packed segments against the fastest dense kernel, and against a loop of sparse calls",
        _packed,
        {},
        partial(_with_rivals, _packed),
    ),
    "masks": View("masks", "Full masks, against SDPA under the same mask", _masks),
    "crossover": View(
        "crossover",
        "Sparse INT8/FP8 attention against the fastest dense kernel, by size",
        _crossover,
        {"topk": 0.5, "head_dim": 128},
        partial(_with_rivals, _crossover),
    ),
    "host": View("host", "Launch overhead per call, microseconds", _host),
}
TERMINAL_VIEWS = [view for name, view in VIEWS.items() if not name.endswith("_triton")]
"""Views of the terminal, which shows the rows of one run for all backends."""


def newest(rows: Sequence[Row], suite: str) -> list[Row]:
    """Return the last row of every case of a suite on the GPU measured last, in the order of first measurement.

    Quick rows and rows of failed groups are ignored.
    """
    full = [row for row in rows if row["suite"] == suite and not row["quick"] and "case" not in row["problems"]]
    cases = {tuple(_field(row, field) for field in IDENTITY): row for row in full if row["gpu"] == full[-1]["gpu"]}
    return list(cases.values())


def problem_notes(rows: Sequence[Row]) -> list[str]:
    """Return the reasons of n/a cells, such as "cudnn: reason", each once."""
    return list(dict.fromkeys(f"{name}: {why}" for row in rows for name, why in row["problems"].items()))


def one_line(row: Row) -> str:
    """Return a row as one line of progress."""
    cells = next(view.cells(row) for view in VIEWS.values() if view.suite == row["suite"])
    return f"{row['suite']}: " + ", ".join(f"{column} {text}" for column, text in cells if text)


def _problem(row: Row) -> Cells:
    yield "N", _plain(row, "tokens")
    yield "H", _plain(row, "heads")
    yield "D", _plain(row, "head_dim")
    yield "causal", _causal(row)


def _plain(row: Row, name: str) -> str:
    return str(row[name])


def _causal(row: Row) -> str:
    return "yes" if row["is_causal"] else "no"


def _topk(row: Row) -> str:
    return "dense" if row.get("topk") == 1.0 else _number(row, "topk", "g")


def _number(row: Row, name: str, form: str) -> str:
    value = row.get(name)
    return NOT_MEASURED if value is None else format(value, form)


def _ms(row: Row, name: str) -> str:
    """Format milliseconds without an exponent, in the precision that repeated runs agree on."""
    value = row.get(name)
    if value is None:
        return NOT_MEASURED
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _us(row: Row, name: str) -> str:
    value = row.get(name)
    return NOT_MEASURED if value is None else f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def _times(row: Row, name: str) -> str:
    value = row.get(name)
    return NOT_MEASURED if value is None else f"{value:.2f}x"


def _mebibytes(row: Row, name: str) -> str:
    value = row.get(name)
    return NOT_MEASURED if value is None else f"{value / 2**20:.0f} MiB"
