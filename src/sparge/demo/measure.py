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

ABOUT = {
    "needles": "Causal and text-like, as in a language model: every query attends to the first token (the sink) and to "
    "recent tokens on the same topic. It contains six needles: short sentences to which only a few much later queries "
    "attend.",
    "video-like": "Not causal, as in a video model: a smooth field over {} frames of {} x {} positions. Every query "
    "attends to its neighborhood in space and time, which appears as stripes in row-major order.",
    "random": "Not causal: independent Gaussian noise. No block matters more than another, so nothing can be skipped "
    "without loss. This input shows that a speed-up alone means nothing.",
}
"""Descriptions of the inputs."""


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
    rounds: int
    dense_s: float
    sparse_s: float
    density: float  # kept blocks as a share of the visible blocks
    recall: float  # share of the attention mass in kept blocks
    error: float  # relative L1 error of the output against torch's dense attention
    needles: tuple[float, ...]  # share of each needle's mass in kept blocks, over all heads

    @property
    def speedup(self) -> float:
        return self.dense_s / self.sparse_s


@dataclass(frozen=True)
class InputResult:
    """All results of one input, and the block maps of its first head for the page."""

    name: str
    about: str
    tokens: int
    rows: tuple[Row, ...]  # one per score
    mass: Tensor  # (q_blocks, kv_blocks), share of each query block's attention in each key block
    visible: Tensor  # bool (q_blocks, kv_blocks)
    kept: tuple[Tensor, ...]  # bool (q_blocks, kv_blocks), the blocks that each score keeps
    needles: tuple[Needle, ...]


@dataclass(frozen=True)
class Demo:
    """A whole run. ``gpu`` is the measured device, None for the CPU."""

    settings: Settings
    machine: Machine
    inputs: tuple[InputResult, ...]
    backend: str = "torch"
    quantization: str = "none"
    gpu: Gpu | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for result in self.inputs for row in result.rows)

    def to_json(self) -> dict[str, Any]:
        """Return settings, machine, GPU and rows as plain values."""
        return {
            "settings": asdict(self.settings),
            "machine": asdict(self.machine),
            "gpu": self.gpu and asdict(self.gpu),
            "backend": self.backend,
            "quantization": self.quantization,
            "rows": [{**asdict(row), "speedup": row.speedup} for row in self.rows],
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
    needles = row.needles and f"{100 * statistics.fmean(row.needles):.0f} / {100 * min(row.needles):.0f}%"
    yield "needles mean / min", needles or ""


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
    makers = {"needles": text_with_needles, "video-like": video_like, "random": random_like}
    total, done = len(makers) * (4 + ROUNDS[settings.device] * (1 + len(SCORES))), itertools.count()
    sizes = {name: getattr(settings, name) for name in ("heads", "head_dim", "seed", "device")}
    results = []
    for name, make in makers.items():

        def report(doing: str, name: str = name) -> None:
            on_step(f"{name}: {doing}", next(done), total)

        report("making the input")
        tokens = settings.tokens
        if name == "video-like":
            tokens -= tokens % FRAME_TOKENS
        about = ABOUT[name].format(*frame_grid(tokens) if name == "video-like" else ())
        results.append(_measure(make(tokens, **sizes), about, settings, report))
    on_step("done", total, total)
    device = torch.device(settings.device)
    backend = base.resolve("auto", device)
    return Demo(
        settings,
        describe_machine(),
        tuple(results),
        backend=backend,
        quantization=base.resolve_quantization("auto", backend, device),
        gpu=describe_gpu() if settings.device == "cuda" else None,
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
    masks = {score: api.predict(query, key, score=score, **common) for score in SCORES}
    rows = [
        Row(
            input=sample.name,
            score=score,
            tokens=query.shape[2],
            rounds=len(times[score]),
            dense_s=statistics.median(times["dense"]),
            sparse_s=statistics.median(times[score]),
            density=mask.density(),
            recall=mass_recall(mask, mass),
            error=relative_l1(outputs[score], outputs["dense"]),
            needles=tuple(needle_recall(mask, query, key, needle) for needle in sample.needles),
        )
        for score, mask in masks.items()
    ]
    kept = tuple(mask.to_dense()[0, 0].cpu() for mask in masks.values())
    visible = masks[SCORES[0]].visible_blocks()
    maps = mass[0, 0].cpu(), visible, kept
    return InputResult(sample.name, about, query.shape[2], tuple(rows), *maps, sample.needles)
