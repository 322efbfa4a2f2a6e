"""The demo's measurements: dense against sparse attention on three synthetic inputs, speed beside recall and error.

`run_demo` returns plain frozen values; the terminal's table, the page and the JSON file are views of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sparge import api
from sparge.block_mask import BlockMask
from sparge.config import ScoreName
from sparge.evaluate.inputs import Needle, Sample, random_like, text_like, video_like
from sparge.evaluate.machine import Machine, describe_machine
from sparge.evaluate.metrics import block_mass, mass_recall, needle_recall, relative_l1
from sparge.evaluate.plots import causal_visibility

SCORES: tuple[ScoreName, ...] = ("moment", "mean")
HEAD_DIM = 64
ROUNDS = 3
ROUND_BUDGET_S = 12.0
"""No further timing round of an input starts after this many seconds, which bounds the demo on a slow machine."""


@dataclass(frozen=True)
class Settings:
    """What a demo run may vary."""

    topk: float = 0.25
    tokens: int = 8192
    heads: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Row:
    """One input with one score. Times are medians over ``rounds`` and include prediction.

    Attributes:
        density: kept blocks as a share of the visible ones.
        recall: share of the attention mass in kept blocks.
        error: relative L1 error of the output against torch's dense attention.
        needles: for each needle the share of its mass in kept blocks, all heads together; empty without needles.
    """

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
    recall: float
    error: float
    needles: tuple[float, ...]

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
class Prediction:
    """What one score keeps in the first head: the picture of a mask.

    Attributes:
        kept: bool (q_blocks, kv_blocks).
        density, recall: those of this head.
        needles: share of each needle's mass that this head keeps.
    """

    score: str
    kept: Tensor
    density: float
    recall: float
    needles: tuple[float, ...]


@dataclass(frozen=True)
class InputResult:
    """All that was measured on one input, and the first head's block maps for the page."""

    name: str
    about: str
    tokens: int
    rows: tuple[Row, ...]
    mass: Tensor
    visible: Tensor
    predictions: tuple[Prediction, ...]
    needles: tuple[Needle, ...]


@dataclass(frozen=True)
class Demo:
    """A whole run."""

    settings: Settings
    machine: Machine
    inputs: tuple[InputResult, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(row for result in self.inputs for row in result.rows)

    def to_json(self) -> dict[str, Any]:
        """Settings, machine and rows as plain values."""
        derived = ("speedup", "needle_mean", "needle_min")
        return {
            "settings": asdict(self.settings),
            "machine": asdict(self.machine),
            "rows": [asdict(row) | {name: getattr(row, name) for name in derived} for row in self.rows],
        }


def table_cells(row: Row) -> Iterator[tuple[str, str]]:
    """The row as people read it: (column, text), the same in the terminal and on the page."""
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
    if time_s >= 0.1:
        return f"{time_s:.2f} s"
    return f"{1000 * time_s:.0f} ms" if time_s >= 0.01 else f"{1000 * time_s:.1f} ms"


@dataclass(frozen=True)
class Step:
    """How far a run is: ``done`` of ``total`` steps, and what happens now."""

    done: int
    total: int
    doing: str


def run_demo(settings: Settings, on_step: Callable[[Step], None] = lambda _: None) -> Demo:
    """Measure every input with every score; ``on_step`` hears of each step before it starts."""
    makers = _makers(settings)
    per_input = ROUNDS * (1 + len(SCORES)) + 3
    results = []
    for index, (about, make) in enumerate(makers):

        def tell(done: int, doing: str, before: int = index * per_input) -> None:
            on_step(Step(before + done, len(makers) * per_input, doing))

        tell(0, "making inputs")
        results.append(_measure(make(), about, settings.topk, tell))
    on_step(Step(len(makers) * per_input, len(makers) * per_input, "done"))
    return Demo(settings, describe_machine(), tuple(results))


def video_grid(tokens: int) -> tuple[int, int, int]:
    """About eight square frames that together hold no more than ``tokens``."""
    side = max(int((tokens / 8) ** 0.5), 1)
    return max(tokens // (side * side), 1), side, side


def _makers(settings: Settings) -> tuple[tuple[str, Callable[[], Sample]], ...]:
    """What each input is like, in a sentence, and how to make it."""
    sizes = {"heads": settings.heads, "head_dim": HEAD_DIM, "seed": settings.seed}
    grid = video_grid(settings.tokens)
    frames, height, width = grid
    return (
        (
            "Causal. Every query attends to the first token (the sink) and to recent tokens on its topic; a few late "
            "questions look for short sentences far back, the needles.",
            partial(text_like, settings.tokens, **sizes),
        ),
        (
            f"Not causal. A smooth field over {frames} frames of {height} x {width} positions: every query attends to "
            "its neighbourhood in space and time, which row-major order spreads over stripes.",
            partial(video_like, grid, **sizes),
        ),
        (
            "Not causal. Independent Gaussian noise: no block matters more than another, so nothing can be skipped "
            "without loss. It is here to show that a speed-up alone means nothing.",
            partial(random_like, settings.tokens, **sizes),
        ),
    )


def _measure(sample: Sample, about: str, topk: float, tell: Callable[[int, str], None]) -> InputResult:
    query, key, value, is_causal = sample.query, sample.key, sample.value, sample.is_causal
    calls: dict[str, Callable[[], Tensor]] = {
        "dense": partial(F.scaled_dot_product_attention, query, key, value, is_causal=is_causal)
    }
    for score in SCORES:
        calls[score] = partial(
            api.attention, query, key, value, is_causal=is_causal, topk=topk, score=score, backend="torch"
        )
    _warm_up(sample)
    times, outputs = _time_interleaved(calls, lambda done, name: tell(1 + done, f"{sample.name}: {name} attention"))

    tell(1 + ROUNDS * len(calls), f"{sample.name}: true attention mass")
    mass = block_mass(query, key, is_causal=is_causal)
    tell(2 + ROUNDS * len(calls), f"{sample.name}: recall")
    rows, predictions = [], []
    for score in SCORES:
        mask = api.predict(query, key, is_causal=is_causal, topk=topk, score=score, backend="torch")
        rows.append(
            Row(
                input=sample.name,
                score=score,
                tokens=query.shape[2],
                heads=query.shape[1],
                head_dim=query.shape[3],
                is_causal=is_causal,
                topk=topk,
                rounds=len(times[score]),
                dense_s=statistics.median(times["dense"]),
                sparse_s=statistics.median(times[score]),
                density=mask.density(),
                recall=mass_recall(mask, mass),
                error=relative_l1(outputs[score], outputs["dense"]),
                needles=tuple(needle_recall(mask, query, key, needle) for needle in sample.needles),
            )
        )
        first = _first_head(mask)
        predictions.append(
            Prediction(
                score=score,
                kept=first.to_dense()[0, 0],
                density=first.density(),
                recall=mass_recall(first, mass[:, :1]),
                needles=tuple(needle_recall(first, query[:, :1], key[:, :1], needle) for needle in sample.needles),
            )
        )
    return InputResult(
        name=sample.name,
        about=about,
        tokens=query.shape[2],
        rows=tuple(rows),
        mass=mass[0, 0],
        visible=causal_visibility(mask),
        predictions=tuple(predictions),
        needles=sample.needles,
    )


def _time_interleaved(
    calls: dict[str, Callable[[], Tensor]], tell: Callable[[int, str], None]
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Seconds of every call in every round, and each call's output; rounds go through all calls in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    outputs: dict[str, Tensor] = {}
    begin = time.perf_counter()
    for turn in range(ROUNDS):
        if turn and time.perf_counter() - begin > ROUND_BUDGET_S:
            break
        for index, (name, call) in enumerate(calls.items()):
            tell(turn * len(calls) + index, name)
            start = time.perf_counter()
            outputs[name] = call()
            times[name].append(time.perf_counter() - start)
    return times, outputs


def _warm_up(sample: Sample) -> None:
    """Start threads and load kernels on a short piece, so that the first timed call does not pay for it."""
    query, key, value = (tensor[:, :, :1024] for tensor in (sample.query, sample.key, sample.value))
    F.scaled_dot_product_attention(query, key, value, is_causal=sample.is_causal)
    for score in SCORES:
        api.attention(query, key, value, is_causal=sample.is_causal, score=score, backend="torch")


def _first_head(mask: BlockMask) -> BlockMask:
    return BlockMask(
        mask.kv_num_blocks[:1, :1],
        mask.kv_indices[:1, :1],
        mask.visible_num_blocks[:1, :1],
        mask.q_len,
        mask.kv_len,
        mask.is_causal,
    )
