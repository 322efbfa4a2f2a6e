"""Run a language model dense and in several variants on the same tokens and questions; finished work is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparge.evaluate.language import fidelity
from sparge.evaluate.language.answers import ask
from sparge.evaluate.language.chat import as_chat, template_tokens
from sparge.evaluate.language.collections import read_collection
from sparge.evaluate.language.lengths import goes_sparse
from sparge.evaluate.language.tasks import TASKS, Question, make_item
from sparge.evaluate.language.texts import windows_of
from sparge.evaluate.rows import Row, Rows, digest
from sparge.evaluate.timing import now
from sparge.evaluate.variants import Ran, Variant, parse_variant
from sparge.stats import stats

KEY = ("part", "tokens", "item", "content", "variant", "policy")
"""The fields that identify a row. ``part`` is `FIDELITY`, `NOISE` or a task; ``content`` is a digest of the window or
question; ``policy`` is "" for the model itself."""

FIDELITY = "fidelity"
NOISE = "noise"
"""The dense model on two kernels of torch: how far rounding alone moves its distributions."""
NOISE_VARIANT = parse_variant("sdpa=math")
NOISE_TOKENS = 2048
"""At most: this kernel stores all scores."""

DENSE = "dense"
"""The variant in rows about the model itself."""

DEPTHS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)


def is_stock(row: Row) -> bool:
    """Return whether a row is about the model itself, whatever variants are called."""
    return row["policy"] == ""


@dataclass(frozen=True)
class Settings:
    """Settings of a measurement.

    Attributes:
        tokens: lengths of windows and prompts.
        windows: windows of text per length, on which distributions are compared; 0 leaves them out.
        tasks: kinds of question, of `tasks.TASKS`.
        items: questions of each kind and length, except needles.
        needles: needles at each depth and length.
        depths: depths of the needles, from 0 to 1.
        data: files or names of further questions (`collections.read_collection`), asked at the longest length.
        chat: whether questions use the chat template of the tokenizer.
        seed: seed of the questions.
        noise: whether the dense model is also compared with itself on another kernel of torch.
    """

    tokens: tuple[int, ...] = (4096, 8192)
    windows: int = 4
    tasks: tuple[str, ...] = ("needle",)
    items: int = 8
    needles: int = 1
    depths: tuple[float, ...] = DEPTHS
    data: tuple[str, ...] = ()
    chat: bool = False
    seed: int = 0
    noise: bool = False

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 64:
            raise ValueError(f"tokens: expected lengths of 64 or more, got {self.tokens}")
        if not (self.windows or self.data or any(task != "needle" or self.needles for task in self.tasks)):
            raise ValueError("settings: expected windows, needles, tasks or data to measure, got none of them")
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown:
            raise ValueError(f"tasks: expected some of {', '.join(TASKS)}, got {', '.join(unknown)}")


@dataclass(frozen=True)
class Piece:
    """One window or question, which is run in every variant.

    Attributes:
        part: `FIDELITY`, `NOISE`, or the kind of question.
        window: (1, tokens), for the first two.
        item: for questions.
    """

    part: str
    tokens: int
    number: int
    window: Tensor | None = None
    item: Question | None = None

    @cached_property
    def content(self) -> str:
        """A digest of the window or question."""
        if self.item is not None:
            return digest([self.item.prompt, self.item.reference, self.item.metric, self.item.max_new_tokens])
        assert self.window is not None
        return digest(self.window.tolist())

    def variants(self, variants: Sequence[Variant]) -> Sequence[Variant]:
        """Return the variants that this piece is run in."""
        return (NOISE_VARIANT,) if self.part == NOISE else variants

    def place(self, variant: Variant | None) -> dict[str, Any]:
        """Return the key of a row; without a variant, of the row about the model itself."""
        label, policy = (DENSE, "") if variant is None else (variant.label, variant.policy.to_json())
        values = (self.part, self.tokens, self.number, self.content, label, policy)
        return dict(zip(KEY, values, strict=True))


def pieces(settings: Settings, tokenizer: Any, text: str) -> Iterator[Piece]:
    """Yield all windows and questions, in the order of their length.

    Raises:
        ValueError: the text is too short, a source has nothing, or the tokenizer has no chat template.
    """
    before = prefix_of(tokenizer)
    taken = template_tokens(tokenizer) if settings.chat else 0

    def asked(item: Question) -> Question:
        return as_chat(item, tokenizer) if settings.chat else item

    if settings.windows:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    for tokens in sorted(settings.tokens):
        if settings.windows:
            for number, window in enumerate(windows_of(ids, tokens - len(before), settings.windows)):
                window = torch.cat([torch.tensor([before]).long(), window], 1)
                if settings.noise and not number and tokens == min(settings.tokens):
                    start = window[:, :NOISE_TOKENS]
                    yield Piece(NOISE, start.shape[1], 0, window=start)
                yield Piece(FIDELITY, tokens, number, window=window)
        for task in settings.tasks:
            for number, depth in _numbers(task, settings):
                item = make_item(task, tokenizer, tokens - taken, number, text=text, depth=depth, seed=settings.seed)
                yield Piece(task, tokens, number, item=asked(item))
    for source in settings.data:
        longest = max(settings.tokens)
        for item in read_collection(source, tokenizer, longest - taken, settings.items):
            part = f"{item.task} (file)" if item.task in (FIDELITY, NOISE, *TASKS) else item.task
            yield Piece(part, longest, item.number, item=asked(item))


def prefix_of(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer puts before every text: the beginning-of-text mark of some models."""
    return [token for token in tokenizer("").input_ids if token != tokenizer.eos_token_id]


def _numbers(task: str, settings: Settings) -> Iterator[tuple[int, float | None]]:
    if task != "needle":
        yield from ((number, None) for number in range(settings.items))
        return
    for repeat in range(settings.needles):
        for place, depth in enumerate(settings.depths):
            yield repeat * len(settings.depths) + place, depth


def evaluate_model(
    model: Any,
    tokenizer: Any,
    variants: Sequence[Variant],
    work: Sequence[Piece],
    rows: Rows,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run all pieces that have no row yet, and add their rows.

    Args:
        model: a causal language model of transformers, without sparse attention.
        work: the result of `pieces`.
        rows: rows with the key `KEY`.
        progress: called with a description before each run of the model, `runs` times in total.
    """
    evaluation = _Evaluation(model, tokenizer, rows, progress)
    for piece in work:
        left = [variant for variant in piece.variants(variants) if not rows.has(**piece.place(variant))]
        if piece.window is not None and left:
            evaluation.compare(piece, piece.window, left)
        elif piece.item is not None:
            evaluation.ask(piece, piece.item, left)


def runs(variants: Sequence[Variant], work: Sequence[Piece], rows: Rows) -> int:
    """Return the number of runs of the model that are left."""
    total = 0
    for piece in work:
        left = sum(not rows.has(**piece.place(variant)) for variant in piece.variants(variants))
        needs_dense = left > 0 if piece.window is not None else not rows.has(**piece.place(None))
        total += left + needs_dense
    return total


def rows_of(variants: Sequence[Variant], work: Sequence[Piece], rows: Rows) -> list[Row]:
    """Return the rows of these pieces, of all rows."""
    places = (piece.place(variant) for piece in work for variant in (None, *piece.variants(variants)))
    return [rows.get(**place) for place in places if rows.has(**place)]


@dataclass
class _Evaluation:
    """A model, and the `Rows` to which its results are added."""

    model: Any
    tokenizer: Any
    rows: Rows
    progress: Callable[[str], None]
    warm: set[tuple[str, int]] = field(default_factory=set)

    @property
    def device(self) -> torch.device:
        return torch.device(next(self.model.parameters()).device)

    def compare(self, piece: Piece, window: Tensor, variants: Sequence[Variant]) -> None:
        """Compare next-token distributions over one window."""
        window = window.to(self.device)
        self._report(piece, DENSE)
        dense, dense_seconds = self._read(window, DENSE)
        for variant in variants:
            self._report(piece, variant.label)
            with variant.applied(self.model):
                other, seconds = self._read(window, variant.label)
                ran = Ran.of(stats())
            found = asdict(fidelity.compare(window, dense, other))
            times = {"seconds": seconds, "dense_seconds": dense_seconds}
            self.rows.add({**piece.place(variant), **found, **times, **asdict(ran)})

    def _read(self, window: Tensor, label: str) -> tuple[fidelity.Readout, float]:
        """Return the model's reading of a window and its seconds. On a GPU, an untimed run compiles kernels first."""
        place = label, window.shape[1]
        if self.device.type == "cuda" and place not in self.warm:
            fidelity.read(self.model, window)
        self.warm.add(place)
        start = now(self.device)
        readout = fidelity.read(self.model, window)
        return readout, now(self.device) - start

    def ask(self, piece: Piece, item: Question, variants: Sequence[Variant]) -> None:
        """Ask one question, dense and in all variants."""
        common = {"depth": item.depth, "metric": item.metric, "answers": list(item.answers)}
        if not self.rows.has(**piece.place(None)):
            self._report(piece, DENSE)
            answered = ask(self.model, self.tokenizer, item, nullcontext())
            self.rows.add({**piece.place(None), **common, **asdict(answered)})
        for variant in variants:
            self._report(piece, variant.label)
            applied = variant
            if piece.part in TASKS and goes_sparse(self.model, variant, piece.tokens):
                applied = variant.forced(self.device)  # prompts are a few tokens shorter than the length
            answered = ask(self.model, self.tokenizer, item, applied.applied(self.model))
            self.rows.add({**piece.place(variant), **common, **asdict(answered), **asdict(Ran.of(stats()))})

    def _report(self, piece: Piece, variant: str) -> None:
        self.progress(f"{piece.part}, {piece.tokens} tokens, {piece.number}: {variant}")
