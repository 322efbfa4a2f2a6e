"""The demo's measurements: dense against sparse attention on three synthetic inputs, with speed, recall and error."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge import api
from sparge.backends import base
from sparge.evaluate.inputs import (
    FRAME_TOKENS,
    Needle,
    Sample,
    frame_grid,
    random_like,
    text_with_needles,
    video_like,
)
from sparge.evaluate.machine import Gpu, Machine, describe_gpu, describe_machine
from sparge.evaluate.metrics import block_mass, mass_recall, needle_recall, relative_l1
from sparge.evaluate.timing import device_seconds, host_seconds, take_turns
from sparge.options import scores

SCORES: tuple[Any, ...] = tuple(name for name in scores.SCORES if name != "spread")
ROUNDS = {"cpu": 3, "cuda": 10}
ROUND_BUDGET_S = 12.0
"""No further timing round of an input starts after this many seconds. It bounds the demo on slow machines."""
WARM_UP_TOKENS = 1024
"""Tokens of a warm-up on a CPU. On a GPU, the whole input is used, to compile and load the kernels for its length."""


@dataclass(frozen=True)
class Settings:
    """Options of a demo run. ``device`` is "cpu" or "cuda" and determines ``head_dim`` and ``dtype``."""

    topk: float = 0.25
    tokens: int = 8192
    heads: int = 8
    seed: int = 0
    device: str = "cpu"
    head_dim: int = 64
    dtype: str = "float32"


DEFAULTS = {
    "cpu": Settings(),
    "cuda": Settings(tokens=32768, heads=16, device="cuda", head_dim=128, dtype="bfloat16"),
}
"""Default settings of each device: sizes that show the speed-up within seconds."""


@dataclass(frozen=True)
class Row:
    """Results of one input with one score. Times are medians over ``rounds`` and include prediction."""

    input: str
    score: str
    tokens: int
    heads: int
    head_dim: int
    is_causal: bool
    topk: float
    rounds: int
    dense_s: float
    sparse_s: float
    density: float
    """Kept blocks as a share of the visible blocks."""
    recall: float
    """Share of the attention mass in kept blocks."""
    error: float
    """Relative L1 error of the output against torch's dense attention."""
    needles: tuple[float, ...]
    """Share of each needle's mass in kept blocks, over all heads."""
    backend: str = "torch"
    quantization: str = "none"
    dtype: str = "float32"

    @property
    def speedup(self) -> float:
        return self.dense_s / self.sparse_s

    @property
    def needle_mean(self) -> float | None:
        return statistics.fmean(self.needles) if self.needles else None

    @property
    def needle_min(self) -> float | None:
        return min(self.needles, default=None)


@dataclass(frozen=True)
class InputResult:
    """All results of one input, and the block maps of its first head for the page."""

    name: str
    about: str
    tokens: int
    rows: tuple[Row, ...]
    """One row per score."""
    mass: Tensor
    """Share of each query block's attention in each key block, (q_blocks, kv_blocks)."""
    visible: Tensor
    kept: tuple[Tensor, ...]
    """Blocks that each score keeps, bool (q_blocks, kv_blocks)."""
    needles: tuple[Needle, ...]


@dataclass(frozen=True)
class Demo:
    """A whole run. ``gpu`` is the measured device, None for the CPU."""

    settings: Settings
    machine: Machine
    inputs: tuple[InputResult, ...]
    gpu: Gpu | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for result in self.inputs for row in result.rows)

    def to_json(self) -> dict[str, Any]:
        """Return settings, machine, GPU and rows as plain values."""
        derived = ("speedup", "needle_mean", "needle_min")
        return {
            "settings": asdict(self.settings),
            "machine": asdict(self.machine),
            "gpu": None if self.gpu is None else asdict(self.gpu),
            "rows": [asdict(row) | {name: getattr(row, name) for name in derived} for row in self.rows],
        }


def table_cells(row: Row) -> Iterator[tuple[str, str]]:
    """Yield (column, text), for the terminal and the page."""
    yield "input", row.input
    yield "score", row.score
    yield "dense", _seconds(row.dense_s)
    yield "sparse", _seconds(row.sparse_s)
    yield "speed-up", f"{row.speedup:.1f}x"
    yield "density", f"{100 * row.density:.1f}%"
    yield "mass recall", f"{100 * row.recall:.1f}%"
    yield "L1 error", f"{row.error:.4f}"
    needles = "" if row.needle_mean is None else f"{100 * row.needle_mean:.0f} / {100 * (row.needle_min or 0):.0f}%"
    yield "needles mean / min", needles


def _seconds(time_s: float) -> str:
    """Format a time in at most 6 characters, so that a table fits 80 columns."""
    if time_s >= 0.1:
        return f"{time_s:.2f} s"
    return f"{1000 * time_s:.0f} ms" if time_s >= 0.01 else f"{1000 * time_s:.1f} ms"


def run_demo(settings: Settings, on_step: Callable[[str, int, int], None] = lambda *_: None) -> Demo:
    """Measure every input with every score.

    Args:
        on_step: called before each step with its name, the number of finished steps, and their total.
    """
    makers = _makers(settings)
    total, done = len(makers) * (4 + ROUNDS[settings.device] * (1 + len(SCORES))), itertools.count()
    results = []
    for name, about, make in makers:

        def report(doing: str, name: str = name) -> None:
            on_step(f"{name}: {doing}", next(done), total)

        report("making the input")
        results.append(_measure(make(), about, settings, report))
    on_step("done", total, total)
    gpu = describe_gpu() if settings.device == "cuda" else None
    return Demo(settings, describe_machine(), tuple(results), gpu)


def _makers(settings: Settings) -> tuple[tuple[str, str, Callable[[], Sample]], ...]:
    """Return name, description and maker of each input."""
    sizes = {name: getattr(settings, name) for name in ("heads", "head_dim", "seed", "device")}
    video_tokens = settings.tokens // FRAME_TOKENS * FRAME_TOKENS
    frames, height, width = frame_grid(video_tokens)
    return (
        (
            "needles",
            "Causal and text-like, as in a language model: every query attends to the first token (the sink) and to "
            "recent tokens on the same topic. It contains six needles: short sentences to which only a few much later "
            "queries attend.",
            partial(text_with_needles, settings.tokens, **sizes),
        ),
        (
            "video-like",
            f"Not causal, as in a video model: a smooth field over {frames} frames of {height} x {width} positions. "
            "Every query attends to its neighborhood in space and time, which appears as stripes in row-major order.",
            partial(video_like, video_tokens, **sizes),
        ),
        (
            "random",
            "Not causal: independent Gaussian noise. No block matters more than another, so nothing can be skipped "
            "without loss. This input shows that a speed-up alone means nothing.",
            partial(random_like, settings.tokens, **sizes),
        ),
    )


def _measure(sample: Sample, about: str, settings: Settings, report: Callable[[str], None]) -> InputResult:
    is_causal, is_cpu = sample.is_causal, settings.device == "cpu"
    dtype = getattr(torch, settings.dtype)
    query, key, value = (tensor.to(dtype) for tensor in (sample.query, sample.key, sample.value))
    backend = base.resolve("auto", query.device)
    common: dict[str, Any] = {"is_causal": is_causal, "topk": settings.topk, "backend": backend}
    calls: dict[str, Callable[..., Tensor]] = {"dense": partial(F.scaled_dot_product_attention, is_causal=is_causal)}
    calls |= {score: partial(api.attention, score=score, **common) for score in SCORES}

    report("warming up" if is_cpu else "compiling and loading kernels (the first time: a minute)")
    warm = WARM_UP_TOKENS if is_cpu else query.shape[2]
    for call in calls.values():
        call(*(tensor[:, :, :warm] for tensor in (query, key, value)))
    outputs: dict[str, Tensor] = {}

    def clock(name: str) -> float:
        report(f"timing {name} attention")

        def run() -> None:
            outputs[name] = calls[name](query, key, value)

        # An untimed call of the same kind comes first, because a GPU's clock rate depends on earlier work.
        return host_seconds(run) if is_cpu else device_seconds(run, untimed=1)

    clocks = {name: partial(clock, name) for name in calls}
    times = take_turns(clocks, ROUNDS[settings.device], discarded=0, budget_s=ROUND_BUDGET_S)

    report("computing the true map, for comparison")
    mass = block_mass(query, key, is_causal=is_causal)
    report("comparing")
    rows, kept = [], []
    for score in SCORES:
        mask = api.predict(query, key, score=score, **common)
        rows.append(
            Row(
                input=sample.name,
                score=score,
                tokens=query.shape[2],
                heads=query.shape[1],
                head_dim=query.shape[3],
                is_causal=is_causal,
                topk=settings.topk,
                rounds=len(times[score]),
                dense_s=statistics.median(times["dense"]),
                sparse_s=statistics.median(times[score]),
                density=mask.density(),
                recall=mass_recall(mask, mass),
                error=relative_l1(outputs[score], outputs["dense"]),
                needles=tuple(needle_recall(mask, query, key, needle) for needle in sample.needles),
                backend=backend,
                quantization=base.resolve_quantization("auto", backend, query.device),
                dtype=settings.dtype,
            )
        )
        kept.append(mask.to_dense()[0, 0].cpu())
    return InputResult(
        name=sample.name,
        about=about,
        tokens=query.shape[2],
        rows=tuple(rows),
        mass=mass[0, 0].cpu(),
        visible=mask.visible_blocks(),
        kept=tuple(kept),
        needles=sample.needles,
    )
