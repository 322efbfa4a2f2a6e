"""Run a language model dense and in several variants on the same tokens and questions. Runs are resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparge.evaluate.language import fidelity
from sparge.evaluate.language.answers import as_chat, ask, template_tokens
from sparge.evaluate.language.collections import read_collection
from sparge.evaluate.language.load import is_long_enough
from sparge.evaluate.language.tasks import TASKS, Question, make_item
from sparge.evaluate.language.texts import windows_of
from sparge.evaluate.rows import Progress, Row, Rows, digest
from sparge.evaluate.timing import synchronized_time
from sparge.evaluate.variants import Variant, parse_variant, stats_of_run

KEY = ("part", "tokens", "item", "content", "variant", "policy")
"""The fields that identify a row. ``part`` is `FIDELITY`, `NOISE` or a task; ``content`` is a digest of the window or
question; ``policy`` is "" for the model itself."""

FIDELITY = "fidelity"
NOISE = "noise"
"""The part that compares the dense model with itself on another kernel of torch, which shows the rounding noise."""
NOISE_VARIANT = parse_variant("sdpa=math")
NOISE_TOKENS = 2048
"""Maximum number of tokens for `NOISE`, because this kernel stores all scores."""

DENSE = "dense"
"""The variant in rows of the dense model itself."""

DEPTHS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)


def is_dense_model(row: Row) -> bool:
    """Return whether a row belongs to the dense model itself. Labels of variants cannot decide that."""
    return row["policy"] == ""


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement."""

    tokens: tuple[int, ...] = (4096, 8192)  # lengths of windows and prompts
    windows: int = 4  # number of windows of text per length, on which distributions are compared
    tasks: tuple[str, ...] = ("needle",)  # names from `tasks.TASKS`
    items: int = 8  # number of questions per task and length, except needles
    needles: int = 1  # number of needles per depth and length
    depths: tuple[float, ...] = DEPTHS  # depths of the needles, from 0 to 1
    data: tuple[str, ...] = ()  # sources of more questions (`read_collection`), asked at the longest length
    chat: bool = False  # put questions into the chat template of the tokenizer
    seed: int = 0  # seed of the questions
    noise: bool = False  # also compare the dense model with itself on another kernel of torch

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 64:
            raise ValueError(f"tokens: expected lengths of 64 or more, got {self.tokens}")
        if not (self.windows or self.data or any(task != "needle" or self.needles for task in self.tasks)):
            raise ValueError("settings: expected windows, needles, tasks or data, got none of them")
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise ValueError(f"tasks: expected some of {', '.join(TASKS)}, got {', '.join(unknown)}")


@dataclass(frozen=True)
class Piece:
    """One window or question, which is run in every variant."""

    part: str  # `FIDELITY`, `NOISE`, or the task
    tokens: int
    number: int
    window: Tensor | None = None  # [1, tokens], for fidelity and noise
    question: Question | None = None

    @cached_property
    def content(self) -> str:
        """A digest of the window or question."""
        question = self.question
        if question is not None:
            return digest([question.prompt, question.reference, question.metric, question.max_new_tokens])
        assert self.window is not None
        return digest(self.window.tolist())

    def variants(self, variants: Sequence[Variant]) -> Sequence[Variant]:
        """Return the variants that this piece is run in."""
        return (NOISE_VARIANT,) if self.part == NOISE else variants

    def key(self, variant: Variant | None) -> dict[str, Any]:
        """Return the key of a variant's row; without a variant, the key of the dense model's row."""
        label, policy = (DENSE, "") if variant is None else (variant.label, variant.policy.to_json())
        values = (self.part, self.tokens, self.number, self.content, label, policy)
        return dict(zip(KEY, values, strict=True))


def pieces(settings: Settings, tokenizer: Any, text: str) -> Iterator[Piece]:
    """Yield all windows and questions, in the order of their lengths.

    Raises:
        ValueError: the text is too short, a source has no questions, or the tokenizer has no chat template.
    """
    prefix = start_tokens(tokenizer)
    reserved = template_tokens(tokenizer) if settings.chat else 0

    def piece(part: str, tokens: int, question: Question) -> Piece:
        prompted = as_chat(question, tokenizer) if settings.chat else question
        return Piece(part, tokens, question.number, question=prompted)

    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids if settings.windows else [])
    for tokens in sorted(settings.tokens):
        if settings.windows:
            for number, window in enumerate(windows_of(ids, tokens - len(prefix), settings.windows)):
                window = torch.cat([torch.tensor([prefix]).long(), window], 1)
                if settings.noise and not number and tokens == min(settings.tokens):
                    start = window[:, :NOISE_TOKENS]
                    yield Piece(NOISE, start.shape[1], 0, window=start)
                yield Piece(FIDELITY, tokens, number, window=window)
        for task in settings.tasks:
            depths = list(settings.depths) * settings.needles if task == "needle" else [None] * settings.items
            for number, depth in enumerate(depths):
                options: dict[str, Any] = {"text": text, "depth": depth, "seed": settings.seed}
                yield piece(task, tokens, make_item(task, tokenizer, tokens - reserved, number, **options))
    longest = max(settings.tokens)
    for source in settings.data:
        for question in read_collection(source, tokenizer, longest - reserved, settings.items):
            is_name_used = question.task in (FIDELITY, NOISE, *TASKS)
            yield piece(f"{question.task} (file)" if is_name_used else question.task, longest, question)


def start_tokens(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text: the beginning-of-text token of some models."""
    return [token for token in tokenizer("").input_ids if token != tokenizer.eos_token_id]


def evaluate_model(
    model: Any,
    tokenizer: Any,
    variants: Sequence[Variant],
    work: Sequence[Piece],
    rows: Rows,
    progress: Progress = lambda *_: None,
) -> None:
    """Run all pieces that have no row yet, and add their rows.

    Args:
        model: a causal language model of transformers, without sparse attention.
        work: the result of `pieces`.
        rows: rows with the key `KEY`.
        progress: called before each run of the model.
    """
    total = runs(variants, work, rows)
    evaluation = _Evaluation(model, tokenizer, rows, lambda doing, done: progress(doing, done, total))
    for piece in work:
        left = [variant for variant in piece.variants(variants) if rows.get(**piece.key(variant)) is None]
        if piece.window is not None and left:
            evaluation.compare(piece, piece.window, left)
        elif piece.question is not None:
            evaluation.answer(piece, piece.question, left)


def runs(variants: Sequence[Variant], work: Sequence[Piece], rows: Rows) -> int:
    """Return the number of remaining runs of the model."""
    total = 0
    for piece in work:
        left = sum(rows.get(**piece.key(variant)) is None for variant in piece.variants(variants))
        needs_dense = left > 0 if piece.window is not None else rows.get(**piece.key(None)) is None
        total += left + needs_dense
    return total


def rows_of(variants: Sequence[Variant], work: Sequence[Piece], rows: Rows) -> list[Row]:
    """Return the rows of these pieces and variants."""
    found = (rows.get(**piece.key(variant)) for piece in work for variant in (None, *piece.variants(variants)))
    return [row for row in found if row is not None]


@dataclass
class _Evaluation:
    """A model, and the `Rows` to which its results are added."""

    model: Any
    tokenizer: Any
    rows: Rows
    progress: Callable[[str, int], None]
    done: int = 0
    warm: set[tuple[str, int]] = field(default_factory=set)

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    def compare(self, piece: Piece, window: Tensor, variants: Sequence[Variant]) -> None:
        """Compare next-token distributions over one window."""
        window = window.to(self.device)
        dense, dense_seconds = self._read(piece, window, DENSE)
        for variant in variants:
            with variant.applied(self.model):
                other, seconds = self._read(piece, window, variant.label)
                ran = stats_of_run()
            found = asdict(fidelity.compare(window, dense, other))
            times = {"seconds": seconds, "dense_seconds": dense_seconds}
            self.rows.add({**piece.key(variant), **found, **times, **ran})

    def _read(self, piece: Piece, window: Tensor, label: str) -> tuple[fidelity.Readout, float]:
        """Return the model's output for a window and its time. On a GPU, an untimed run compiles kernels first."""
        self._report(piece, label)
        kind = label, window.shape[1]
        if self.device.type == "cuda" and kind not in self.warm:
            fidelity.read(self.model, window)
        self.warm.add(kind)
        start = synchronized_time(self.device)
        readout = fidelity.read(self.model, window)
        return readout, synchronized_time(self.device) - start

    def answer(self, piece: Piece, question: Question, variants: Sequence[Variant]) -> None:
        """Ask one question, dense and in all variants."""
        common = {"depth": question.depth, "metric": question.metric, "answers": list(question.answers)}
        if self.rows.get(**piece.key(None)) is None:
            self._report(piece, DENSE)
            answer = ask(self.model, self.tokenizer, question, nullcontext())
            self.rows.add({**piece.key(None), **common, **asdict(answer)})
        for variant in variants:
            self._report(piece, variant.label)
            applied = variant
            if piece.part in TASKS and is_long_enough(self.model, variant, piece.tokens):
                applied = variant.forced(self.device)  # prompts are a few tokens shorter, maybe below the crossover
            answer = ask(self.model, self.tokenizer, question, applied.applied(self.model))
            self.rows.add({**piece.key(variant), **common, **asdict(answer), **stats_of_run()})

    def _report(self, piece: Piece, variant: str) -> None:
        self.progress(f"{piece.part}, {piece.tokens} tokens, {piece.number}: {variant}", self.done)
        self.done += 1
