"""Generate questions about a long text with known answers, from a seed, for any tokenizer and length.

    needle        one fact hidden in real text at a given depth; the answer is read from the logits
    single        one fact in meaningless filler
    multikey      one fact among many of the same form
    multivalue    several facts about one thing
    tracking      a chain of assignments; the names that have the first value
    aggregation   the most frequent words of a list

They follow the question types of RULER with text written for this library, so compare scores with the dense model's
scores, not with published scores.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

PLACES = (
    *("lighthouse", "bakery", "observatory", "harbour", "library", "windmill", "museum", "orchard", "station"),
    *("chapel", "garden", "workshop", "tavern", "bridge", "market", "theatre", "quarry", "vineyard", "castle"),
    *("archive", "hospital", "school", "foundry", "stable", "temple", "airport", "arena", "brewery", "cinema"),
)
COLORS = ("amber", "azure", "crimson", "ivory", "jade", "scarlet", "silver", "teal", "violet", "golden")
FILLER = (
    "The rain fell on the roofs and ran along the street.",
    "A cart went by, and after it another one.",
    "Nobody spoke for a while, and then everyone did.",
    "The hills beyond the river were grey in the morning.",
    "Someone had left the gate open again.",
    "It was neither late nor early, as far as one could tell.",
)
WORDS = (
    *("apple", "basket", "candle", "drawer", "engine", "feather", "guitar", "hammer", "island", "jacket", "kettle"),
    *("ladder", "mirror", "needle", "orange", "pencil", "quartz", "ribbon", "saddle", "ticket", "umbrella", "velvet"),
    *("wallet", "yellow", "zipper", "anchor", "button", "copper", "donkey", "ember", "fossil", "goblin", "helmet"),
    *("insect", "jungle", "kitten", "lemon", "marble", "napkin", "oyster", "parrot", "rocket", "shovel", "tunnel"),
)
ANSWER = "Answer:"
"""Text between a question and its answer."""
VALUES, CHAIN, FREQUENT_WORDS = 4, 4, 3
"""Number of values in "multivalue", of names in the chain of "tracking", and of frequent words in "aggregation"."""
MAX_SHIFT = 0.02
"""Maximum distance by which a fact is moved to the end of a sentence or word, as a share of the text."""
TRIES = 12
"""Maximum number of attempts to fit a text to a number of tokens. Usually 3 or 4 are enough."""


@dataclass(frozen=True)
class Question:
    """A question with its correct answers."""

    prompt: str  # the whole text up to the answer
    answer_start: str  # the beginning of the answer, which is the end of the prompt
    answers: tuple[str, ...]  # strings that a correct answer contains
    depth: float | None = None  # position of a needle, from 0 (start) to 1 (end)
    is_exact: bool = False  # whether a correct answer has only tokens of the reference, each the most likely one
    max_new_tokens: int = 32
    is_chat: bool = False  # whether the prompt contains the special tokens of a chat (`as_chat`)

    @property
    def reference(self) -> str:
        """A correct answer as the continuation of the prompt."""
        return f" {', '.join(self.answers)}"


def make_item(
    task: str, tokenizer: Any, tokens: int, number: int, *, text: str, depth: float | None = None, seed: int = 0
) -> Question:
    """Return the ``number``-th question of a task; the same arguments give the same question.

    Args:
        text: real text to hide facts in.
        depth: depth of a needle.

    Raises:
        ValueError: there are too few tokens for the facts.
    """
    draw = random.Random(f"{seed} {task} {tokens} {number} {depth}")
    return TASKS[task](_Maker(task, tokenizer, tokens, number, text, depth, draw))


@dataclass(frozen=True)
class _Maker:
    """The arguments of one question, and its random generator."""

    task: str
    tokenizer: Any
    tokens: int
    number: int
    text: str
    depth: float | None
    draw: random.Random

    def code(self) -> str:
        return str(self.draw.randrange(10**5, 10**6))

    def count(self, text: str) -> int:
        return len(self.tokenizer(text).input_ids)

    def with_facts(
        self,
        facts: Sequence[str],
        depths: Sequence[float],
        question: str,
        answer_start: str,
        answers: Sequence[str],
        **fields: Any,
    ) -> Question:
        """Return a question about facts that are hidden at the given depths (0 to 1) of a text.

        The prompt has just below ``tokens`` tokens. The text starts at a random position and wraps around at its end.
        """
        hay = self.text
        if self.task != "needle":  # no sentence has fewer than 6 tokens
            hay = " ".join(self.draw.choice(FILLER) for _ in range(self.tokens // 6 + 8))
        end = _question_text(question, answer_start)
        needed = self.count(" ".join([*facts, end]))
        room = self.tokens - needed - 8
        if room < 16:
            raise ValueError(f"tokens: expected room for facts and question, {needed + 24} or more, got {self.tokens}")
        start = hay.find(". ", int(self.draw.random() * len(hay)))
        around = hay[start + 2 :] + " " + hay if start >= 0 else hay
        length, best = 4 * room, ""  # characters, at first
        for _ in range(TRIES):
            while len(around) < length:
                around += " " + hay
            prompt = _with_facts(around[:length], facts, depths) + end
            surplus = self.count(prompt) - self.tokens
            if surplus <= 0 and len(prompt) > len(best):
                best = prompt
            if -8 <= surplus <= 0:
                break
            length = max(length - round(surplus * length / (room + surplus)) - (surplus > 0), 0)
        if not best:
            raise ValueError(f"tokens: expected a text that fits into {self.tokens} tokens, got none")
        return Question(best, answer_start, tuple(answers), **fields)

    def code_of_place(
        self, codes: dict[str, str], depths: Sequence[float], place: str, depth: float, **fields: Any
    ) -> Question:
        """Return the question for the code of one of several places."""
        facts = [f"The pass code of the {name} is {code}." for name, code in codes.items()]
        question, answer_start = f"What is the pass code of the {place}?", f"The pass code of the {place} is"
        return self.with_facts(facts, depths, question, answer_start, [codes[place]], depth=depth, **fields)


def _question_text(question: str, answer_start: str) -> str:
    return f"\n\nQuestion: {question}\n{ANSWER} {answer_start}"


def _with_facts(hay: str, facts: Sequence[str], depths: Sequence[float]) -> str:
    """Insert facts at the ends of sentences. Facts of equal depth keep their order."""
    breaks = [[match.end() for match in re.finditer(pattern, hay)] for pattern in (r"\. |\n", r"\s")]
    pieces, before = [], 0
    for depth, fact in sorted(zip(depths, facts, strict=True), key=lambda pair: pair[0]):
        target = round(depth * len(hay))
        near = (min([0, len(hay), *ends], key=lambda end: abs(end - target)) for ends in breaks)
        position = next((end for end in near if abs(end - target) <= MAX_SHIFT * len(hay)), target)
        position = max(position, before)
        pieces += [hay[before:position], fact + " "]
        before = position
    return "".join([*pieces, hay[before:]])


def _one_fact(make: _Maker, **fields: Any) -> Question:
    (place,), code = make.draw.sample(PLACES, 1), make.code()
    depth = make.draw.random() if make.depth is None else make.depth
    return make.code_of_place({place: code}, [depth], place, depth, **fields)


def _multikey(make: _Maker) -> Question:
    places = [f"{color} {place}" for color in make.draw.sample(COLORS, 4) for place in make.draw.sample(PLACES, 4)]
    codes = {place: make.code() for place in places}
    place = make.draw.choice(places)
    depths = [make.draw.random() for _ in places]
    return make.code_of_place(codes, depths, place, depths[places.index(place)], max_new_tokens=16)


def _multivalue(make: _Maker) -> Question:
    (place,), codes = make.draw.sample(PLACES, 1), [make.code() for _ in range(VALUES)]
    facts = [f"One of the pass codes of the {place} is {code}." for code in codes]
    question, answer_start = f"What are all {VALUES} pass codes of the {place}?", f"The pass codes of the {place} are"
    depths = sorted(make.draw.random() for _ in codes)
    return make.with_facts(facts, depths, question, answer_start, codes, max_new_tokens=48)


def _tracking(make: _Maker) -> Question:
    names = make.draw.sample([first + second for first in "BCDFGHJKLM" for second in "NPQRSTVWXZ"], 2 * CHAIN)
    chain, others = names[:CHAIN], names[CHAIN:]
    value, other = make.code(), make.code()
    facts = [f"Set {chain[0]} = {value}.", f"Set {others[0]} = {other}."]
    facts += [f"Set {name} = {before}." for line in (chain, others) for before, name in itertools.pairwise(line)]
    first, second = (sorted(make.draw.random() for _ in line) for line in (chain, others))
    depths = [first[0], second[0], *first[1:], *second[1:]]
    question = f"Names were set to numbers and to other names. Which {CHAIN} names hold {value}?"
    return make.with_facts(facts, depths, question, f"The names that hold {value} are", chain, max_new_tokens=32)


def _aggregation(make: _Maker) -> Question:
    words = make.draw.sample(WORDS, len(WORDS))
    frequent, rare = words[:FREQUENT_WORDS], words[FREQUENT_WORDS:]
    answer_start = f"The {FREQUENT_WORDS} most frequent words are"
    question = _question_text(f"Which {FREQUENT_WORDS} words are most frequent in the list?", answer_start)

    def prompt(repeats: int) -> str:
        listed = frequent * (4 * repeats) + rare * repeats
        random.Random(make.number).shuffle(listed)
        return f"A list of words: {' '.join(listed)}." + question

    def is_too_long(repeats: int) -> bool:
        return make.count(prompt(repeats)) > make.tokens

    repeats = bisect.bisect_left(range(make.tokens // len(WORDS) + 2), True, lo=1, key=is_too_long) - 1
    if not repeats:
        raise ValueError(f"tokens: expected room for a list of words, got {make.tokens}")
    return Question(prompt(repeats), answer_start, tuple(frequent), max_new_tokens=24)


TASKS: dict[str, Callable[[_Maker], Question]] = {
    "needle": partial(_one_fact, is_exact=True),
    "single": partial(_one_fact, max_new_tokens=16),
    "multikey": _multikey,
    "multivalue": _multivalue,
    "tracking": _tracking,
    "aggregation": _aggregation,
}
