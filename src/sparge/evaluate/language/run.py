"""Run a language model dense and in several variants on the same tokens and questions. Runs are resumable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparge.evaluate.language import fidelity
from sparge.evaluate.language.answers import as_chat, ask, template_tokens
from sparge.evaluate.language.load import is_long_enough
from sparge.evaluate.language.tasks import Question, make_item
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
"""Default depths of the needles."""


def is_dense_model(row: Row) -> bool:
    """Return whether a row belongs to the dense model itself, and not to a variant with the label "dense"."""
    return row["policy"] == ""


@dataclass(frozen=True)
class Piece:
    """One window or question, which is run in every variant."""

    part: str  # `FIDELITY`, `NOISE`, or the task
    tokens: int
    number: int
    content: Tensor | Question  # window (1, tokens) of `FIDELITY` and `NOISE`, or question

    def runs(self, variants: Sequence[Variant]) -> Iterator[tuple[dict[str, Any], Variant | None]]:
        """Yield the key of each row of this piece, and the variant to run; None for the dense model itself."""
        chosen: Sequence[Variant | None] = variants
        if isinstance(self.content, Question):
            chosen = [None, *variants]
            question = self.content
            content = digest([question.prompt, question.reference, question.is_exact, question.max_new_tokens])
        else:
            content = digest(self.content.tolist())
        for variant in [NOISE_VARIANT] if self.part == NOISE else chosen:
            label, policy = (DENSE, "") if variant is None else (variant.label, variant.policy.to_json())
            values = (self.part, self.tokens, self.number, content, label, policy)
            yield dict(zip(KEY, values, strict=True)), variant


def pieces(
    tokenizer: Any,
    text: str,
    *,
    tokens: Sequence[int],
    windows: int = 4,
    tasks: Sequence[str] = ("needle",),
    items: int = 8,
    needles: int = 1,
    depths: Sequence[float] = DEPTHS,
    chat: bool = False,
    seed: int = 0,
    noise: bool = False,
) -> Iterator[Piece]:
    """Yield all windows and questions, in the order of their lengths.

    Args:
        tokens: lengths of windows and prompts.
        windows: number of windows of text per length, on which distributions are compared.
        tasks: names from `tasks.TASKS`.
        items: number of questions per task and length, except needles.
        needles: number of needles per depth and length.
        depths: depths of the needles, from 0 to 1.
        chat: put questions into the chat template of the tokenizer.
        seed: seed of the questions.
        noise: also compare the dense model with itself on another kernel of torch.

    Raises:
        ValueError: the text is too short, or the tokenizer has no chat template.
    """
    # Some tokenizers put a beginning-of-text token before every text.
    prefix = [token for token in tokenizer("").input_ids if token != tokenizer.eos_token_id]
    reserved = template_tokens(tokenizer) if chat else 0
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids if windows else [])
    for length in sorted(tokens):
        if windows:
            for number, window in enumerate(windows_of(ids, length - len(prefix), windows)):
                window = torch.cat([torch.tensor([prefix]).long(), window], 1)
                if noise and not number and length == min(tokens):
                    start = window[:, :NOISE_TOKENS]
                    yield Piece(NOISE, start.shape[1], 0, start)
                yield Piece(FIDELITY, length, number, window)
        for task in tasks:
            for number, depth in enumerate(list(depths) * needles if task == "needle" else [None] * items):
                question = make_item(task, tokenizer, length - reserved, number, text=text, depth=depth, seed=seed)
                yield Piece(task, length, number, as_chat(question, tokenizer) if chat else question)


def evaluate_model(
    model: Any,
    tokenizer: Any,
    variants: Sequence[Variant],
    work: Sequence[Piece],
    rows: Rows,
    progress: Progress | None = None,
) -> list[Row]:
    """Run the pieces that have no row yet, and return the rows of all pieces.

    Args:
        model: a causal language model of transformers, without sparse attention.
        work: the result of `pieces`.
        rows: rows with the key `KEY`.
        progress: called before each run of a variant.
    """
    evaluation = _Evaluation(model, tokenizer)
    runs = [
        (
            key,
            f"{piece.part}, {piece.tokens} tokens, {piece.number}: {key['variant']}",
            partial(evaluation.run, piece, variant),
        )
        for piece in work
        for key, variant in piece.runs(variants)
    ]
    return rows.complete(runs, progress)


class _Evaluation:
    """A model, with the output of the dense model on the last window."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.device = next(model.parameters()).device
        self.warm: set[tuple[str, int]] = set()  # variants and lengths whose kernels are compiled
        self.window: Tensor | None = None
        self.dense: tuple[fidelity.Readout, float] | None = None

    def run(self, piece: Piece, variant: Variant | None) -> Row:
        """Return the results of a variant, or of the dense model itself for None."""
        if self.window is not piece.content:
            self.window = self.dense = None  # frees the output before the next one is computed
        if isinstance(piece.content, Question):
            return self._answer(piece.content, piece.tokens, variant)
        assert variant is not None
        return self._compare(piece.content, variant)

    def _compare(self, window: Tensor, variant: Variant) -> Row:
        """Compare next-token distributions over one window."""
        if self.dense is None:
            self.window, self.dense = window, self._read(window, DENSE)
        dense, dense_seconds = self.dense
        with variant.applied(self.model):
            other, seconds = self._read(window, variant.label)
            ran = stats_of_run()
        result = fidelity.compare(window.to(self.device), dense, other)
        return {**asdict(result), "seconds": seconds, "dense_seconds": dense_seconds, **ran}

    def _read(self, window: Tensor, label: str) -> tuple[fidelity.Readout, float]:
        """Return the model's output for a window and its time. On a GPU, an untimed run compiles kernels first."""
        window = window.to(self.device)
        kind = label, window.shape[1]
        if self.device.type == "cuda" and kind not in self.warm:
            fidelity.read(self.model, window)
        self.warm.add(kind)
        start = synchronized_time(self.device)
        readout = fidelity.read(self.model, window)
        return readout, synchronized_time(self.device) - start

    def _answer(self, question: Question, tokens: int, variant: Variant | None) -> Row:
        """Ask one question. ``tokens`` is the requested length; prompts may be a few tokens shorter."""
        if variant is not None and is_long_enough(self.model, variant, tokens):
            variant = variant.forced(self.device)  # although the prompt itself may be below the crossover
        attention = nullcontext() if variant is None else variant.applied(self.model)
        answer = ask(self.model, self.tokenizer, question, attention)
        ran = {} if variant is None else stats_of_run()
        return {"depth": question.depth, "answers": list(question.answers), **asdict(answer), **ran}
