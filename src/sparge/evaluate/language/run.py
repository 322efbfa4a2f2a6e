"""A language model dense and in any number of variants, on the same tokens and questions; what is done stays done."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparge.evaluate.language import fidelity
from sparge.evaluate.language.answers import ask
from sparge.evaluate.language.chat import as_chat, template_tokens
from sparge.evaluate.language.collections import read_collection
from sparge.evaluate.language.tasks import TASKS, Item, make_item
from sparge.evaluate.language.texts import windows_of
from sparge.evaluate.rows import Row, Rows, digest
from sparge.evaluate.variants import Ran, Variant
from sparge.stats import stats

KEY = ("part", "tokens", "item", "content", "variant", "policy")
"""What tells rows apart. Part "fidelity" compares distributions, all others are tasks; ``content`` is a digest of the
window or the question, ``policy`` is "" for the model itself."""

FIDELITY = "fidelity"
DENSE = "dense"
"""What rows about the model itself are called."""


def is_stock(row: Row) -> bool:
    """Whether a row is about the model itself, whatever variants are called."""
    return row["policy"] == ""


DEPTHS = (0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        tokens: lengths of windows and prompts.
        windows: stretches of text for the fidelity of distributions, per length; 0 leaves it out.
        tasks: kinds of question, of `tasks.TASKS`.
        items: questions of each kind and length, besides needles.
        needles: needles at each depth and length.
        depths: where needles lie, from 0 to 1.
        data: files or names of further questions (`collections.read_collection`), asked at the longest length.
        chat: whether to ask in the template of the tokenizer.
        seed: of the questions.
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
    """Work on one window or question, in every variant.

    Attributes:
        part: "fidelity", or the kind of question.
        window: (1, tokens), for "fidelity".
        item: for questions.
    """

    part: str
    tokens: int
    number: int
    window: Tensor | None = None
    item: Item | None = None

    @cached_property
    def content(self) -> str:
        """What it is about, in twelve letters."""
        if self.item is not None:
            return digest([self.item.prompt, self.item.reference, self.item.metric, self.item.max_new_tokens])
        assert self.window is not None
        return digest(self.window.tolist())


def pieces(settings: Settings, tokenizer: Any, text: str) -> Iterator[Piece]:
    """All windows and questions, in the order of their length.

    Raises:
        ValueError: the text is too short, a source has nothing, or the tokenizer no template for a chat.
    """
    before = prefix_of(tokenizer)
    taken = template_tokens(tokenizer) if settings.chat else 0

    def asked(item: Item) -> Item:
        return as_chat(item, tokenizer) if settings.chat else item

    if settings.windows:
        ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    for tokens in sorted(settings.tokens):
        if settings.windows:
            for number, window in enumerate(windows_of(ids, tokens - len(before), settings.windows)):
                yield Piece(FIDELITY, tokens, number, window=torch.cat([torch.tensor([before]).long(), window], 1))
        for task in settings.tasks:
            for number, depth in _numbers(task, settings):
                item = make_item(task, tokenizer, tokens - taken, number, text=text, depth=depth, seed=settings.seed)
                yield Piece(task, tokens, number, item=asked(item))
    for source in settings.data:
        longest = max(settings.tokens)
        for item in read_collection(source, tokenizer, longest - taken, settings.items):
            part = f"{item.task} (file)" if item.task in (FIDELITY, *TASKS) else item.task
            yield Piece(part, longest, item.number, item=asked(item))


def prefix_of(tokenizer: Any) -> list[int]:
    """What a tokenizer puts before every text: the mark of its beginning, for models that were trained with one."""
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
    """Do what is not in ``rows`` yet, and add it there.

    Args:
        model: a causal language model of transformers, as it is without sparse attention.
        work: what `pieces` gives.
        rows: with the key `KEY`.
        progress: called with a line before each run of the model; as often as `runs` says.
    """
    for piece in work:
        wanted = [variant for variant in variants if not _is_done(rows, piece, variant)]
        if piece.window is not None and wanted:
            _compare(model, piece, wanted, rows, progress)
        elif piece.item is not None:
            _ask(model, tokenizer, piece, wanted, rows, progress)


def runs(variants: Sequence[Variant], work: Sequence[Piece], rows: Rows) -> int:
    """How many runs of the model are left to do."""
    total = 0
    for piece in work:
        left = sum(not _is_done(rows, piece, variant) for variant in variants)
        needs_dense = left > 0 if piece.window is not None else not _is_done(rows, piece, None)
        total += left + needs_dense
    return total


def rows_of(variants: Sequence[Variant], work: Sequence[Piece], rows: Rows) -> list[Row]:
    """The rows of this work alone, of all that are there."""
    wanted: list[Variant | None] = [None, *variants]
    places = (_place(piece, variant) for piece in work for variant in wanted)
    return [rows.get(**place) for place in places if rows.has(**place)]


def _is_done(rows: Rows, piece: Piece, variant: Variant | None) -> bool:
    return rows.has(**_place(piece, variant))


def _place(piece: Piece, variant: Variant | None) -> dict[str, Any]:
    """The key of a row; without a variant that of the model itself. A label may come to mean another policy."""
    label, policy = (DENSE, "") if variant is None else (variant.label, variant.policy.to_json())
    place = {"part": piece.part, "tokens": piece.tokens, "item": piece.number, "content": piece.content}
    return {**place, "variant": label, "policy": policy}


def _told(piece: Piece, variant: str) -> str:
    return f"{piece.part}, {piece.tokens} tokens, {piece.number}: {variant}"


def _compare(
    model: Any, piece: Piece, variants: Sequence[Variant], rows: Rows, progress: Callable[[str], None]
) -> None:
    assert piece.window is not None
    window = piece.window.to(next(model.parameters()).device)
    progress(_told(piece, DENSE))
    dense = fidelity.read(model, window)
    for variant in variants:
        progress(_told(piece, variant.label))
        with variant.applied(model):
            other = fidelity.read(model, window)
            ran = Ran.of(stats())
        found = fidelity.compare(window, dense, other)
        rows.add({**_place(piece, variant), **asdict(found), **asdict(ran)})


def _ask(
    model: Any, tokenizer: Any, piece: Piece, variants: Sequence[Variant], rows: Rows, progress: Callable[[str], None]
) -> None:
    item = piece.item
    assert item is not None
    common = {"depth": item.depth, "metric": item.metric, "answers": list(item.answers)}
    if not _is_done(rows, piece, None):
        progress(_told(piece, DENSE))
        answered = ask(model, tokenizer, item, nullcontext())
        rows.add({**_place(piece, None), **common, **asdict(answered)})
    for variant in variants:
        progress(_told(piece, variant.label))
        answered = ask(model, tokenizer, item, variant.applied(model))
        ran = Ran.of(stats())
        rows.add({**_place(piece, variant), **common, **asdict(answered), **asdict(ran)})
