"""Questions about a long text with answers that are known, made from a seed for any tokenizer and length.

    needle        one fact hidden in real text at a given depth; the answer is read from the logits
    single        one fact in meaningless filler
    multikey      one fact asked among many of the same form
    multivalue    several facts about one thing, all asked
    tracking      a chain of assignments; which names hold the first value
    aggregation   the most frequent words of a list

They follow the kinds of question in RULER with text written for this library, so compare scores with those of the dense
model, not with published ones.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
ANSWER, SUMMARY = "Answer:", "Summary:"
"""Text between a question and its answer."""
MAX_FREQUENT = 3
VALUES = 4
CHAIN = 4
MISSED = 0.02
"""Largest distance of a fact from its depth, as a share of the text, to reach the end of a sentence or word."""
TRIES = 12
"""Attempts to reach a number of tokens by a number of characters; three or four are enough."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        task: its kind.
        tokens: the maximum length of the prompt.
        number: its number among those of its kind and length.
        prompt: the whole text up to the answer.
        answers: strings that a right answer contains.
        reference: a right answer as the continuation of the prompt.
        metric: a key of `scoring.METRICS`, or "exact": the reference is compared with the logits.
        depth: the position of a needle, from 0 (start) to 1 (end).
        begun: the beginning of the answer, which ends the prompt.
        max_new_tokens: maximum length of an answer.
        is_chat: whether the prompt contains the special tokens of a chat (`chat.as_chat`).
    """

    task: str
    tokens: int
    number: int
    prompt: str
    answers: tuple[str, ...]
    reference: str
    metric: str = "found"
    depth: float | None = None
    begun: str = ""
    max_new_tokens: int = 32
    is_chat: bool = False


def make_item(
    task: str, tokenizer: Any, tokens: int, number: int, *, text: str, depth: float | None = None, seed: int = 0
) -> Question:
    """Return the ``number``-th question of a kind; the same arguments give the same question.

    Args:
        text: real text to hide facts in.
        depth: for needles.

    Raises:
        ValueError: an unknown kind, or too few tokens for its facts.
    """
    if task not in TASKS:
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
    draw = random.Random(f"{seed} {task} {tokens} {number} {depth}")
    return TASKS[task](_Setting(tokenizer, tokens, number, text, depth, draw))


@dataclass(frozen=True)
class _Setting:
    tokenizer: Any
    tokens: int
    number: int
    text: str
    depth: float | None
    draw: random.Random

    def code(self) -> str:
        return str(self.draw.randrange(10**5, 10**6))

    def sample(self, words: Sequence[str], count: int) -> list[str]:
        return self.draw.sample(list(words), count)

    def item(
        self, task: str, facts: Sequence[str], depths: Sequence[float], question: str, begun: str, **fields: Any
    ) -> Question:
        """Return the text with facts at their depths and the question after it, at most ``tokens`` long."""
        hay = self.text if task == "needle" else _filler(self.draw, self.tokens)
        asked = _asked(question, begun)
        prompt = hide(self.tokenizer, hay, facts, depths, asked, self.tokens, offset=self.draw.random())
        return Question(task, self.tokens, self.number, prompt, begun=begun, **fields)


def _filler(draw: random.Random, tokens: int) -> str:
    return " ".join(draw.choice(FILLER) for _ in range(tokens // 6 + 8))  # no sentence has fewer than 6 tokens


def hide(
    tokenizer: Any,
    hay: str,
    facts: Sequence[str],
    depths: Sequence[float],
    question: str,
    tokens: int,
    offset: float = 0.0,
) -> str:
    """Return hay with facts between its sentences and a question after it, just below ``tokens`` tokens long.

    Args:
        depths: position of each fact, from 0 to 1.
        offset: where in the hay to begin, as a share of it; it wraps around at the end.
    """

    def count(text: str) -> int:
        return len(tokenizer(text).input_ids)

    needed = count(" ".join([*facts, question]))
    room = tokens - needed - 8
    if room < 16:
        raise ValueError(f"tokens: expected room for facts and question, {needed + 24} or more, got {tokens}")
    start = hay.find(". ", int(offset * len(hay)))
    around = hay[start + 2 :] + " " + hay if start >= 0 else hay
    length, best = 4 * room, ""  # characters, at first
    for _ in range(TRIES):
        while len(around) < length:
            around += " " + hay
        prompt = _with_facts(around[:length], facts, depths) + question
        surplus = count(prompt) - tokens
        if surplus <= 0 and len(prompt) > len(best):
            best = prompt
        if -8 <= surplus <= 0:
            break
        length = max(length - round(surplus * length / (room + surplus)) - (surplus > 0), 0)
    if not best:
        raise ValueError(f"tokens: expected to meet {tokens} tokens with this tokenizer, got none that fit")
    return best


def _with_facts(hay: str, facts: Sequence[str], depths: Sequence[float]) -> str:
    """Insert facts at the ends of sentences, in the given order where depths are equal."""
    breaks = [[found.end() for found in re.finditer(pattern, hay)] for pattern in (r"\. |\n", r"\s")]
    pieces, before = [], 0
    for depth, fact in sorted(zip(depths, facts, strict=True), key=lambda pair: pair[0]):
        wanted = round(depth * len(hay))
        near = (min([0, len(hay), *ends], key=lambda end: abs(end - wanted)) for ends in breaks)
        place = next((end for end in near if abs(end - wanted) <= MISSED * len(hay)), wanted)
        place = max(place, before)
        pieces += [hay[before:place], fact + " "]
        before = place
    return "".join([*pieces, hay[before:]])


def _fact(place: str, code: str) -> str:
    return f"The pass code of the {place} is {code}."


def _asked(question: str, begun: str) -> str:
    return f"\n\nQuestion: {question}\n{ANSWER} {begun}"


def _ask(place: str) -> tuple[str, str]:
    """Return a question and the beginning of its answer."""
    return f"What is the pass code of the {place}?", f"The pass code of the {place} is"


def _needle(setting: _Setting) -> Question:
    return _one_fact(setting, "needle", setting.depth, metric="exact")


def _single(setting: _Setting) -> Question:
    return _one_fact(setting, "single", None, max_new_tokens=16)


def _one_fact(setting: _Setting, task: str, depth: float | None, **fields: Any) -> Question:
    (place,), code = setting.sample(PLACES, 1), setting.code()
    depth = setting.draw.random() if depth is None else depth
    fields |= {"answers": (code,), "reference": f" {code}", "depth": depth}
    return setting.item(task, [_fact(place, code)], [depth], *_ask(place), **fields)


def _multikey(setting: _Setting) -> Question:
    places = [f"{color} {place}" for color in setting.sample(COLORS, 4) for place in setting.sample(PLACES, 4)]
    codes = {place: setting.code() for place in places}
    asked = setting.draw.choice(places)
    depths = [setting.draw.random() for _ in places]
    facts = [_fact(place, code) for place, code in codes.items()]
    fields: dict[str, Any] = {"answers": (codes[asked],), "reference": f" {codes[asked]}", "max_new_tokens": 16}
    return setting.item("multikey", facts, depths, *_ask(asked), depth=depths[places.index(asked)], **fields)


def _multivalue(setting: _Setting) -> Question:
    (place,), codes = setting.sample(PLACES, 1), [setting.code() for _ in range(VALUES)]
    facts = [f"One of the pass codes of the {place} is {code}." for code in codes]
    question, begun = f"What are all {VALUES} pass codes of the {place}?", f"The pass codes of the {place} are"
    depths = sorted(setting.draw.random() for _ in codes)
    reference = f" {', '.join(codes)}"
    return setting.item(
        "multivalue", facts, depths, question, begun, answers=tuple(codes), reference=reference, max_new_tokens=48
    )


def _tracking(setting: _Setting) -> Question:
    names = setting.sample([first + second for first in "BCDFGHJKLM" for second in "NPQRSTVWXZ"], 2 * CHAIN)
    chain, others = names[:CHAIN], names[CHAIN:]
    value, other = setting.code(), setting.code()
    facts = [f"Set {chain[0]} = {value}.", f"Set {others[0]} = {other}."]
    facts += [f"Set {name} = {before}." for line in (chain, others) for before, name in itertools.pairwise(line)]
    order = sorted(setting.draw.random() for _ in chain)
    second = sorted(setting.draw.random() for _ in others)
    depths = [order[0], second[0], *order[1:], *second[1:]]
    question = f"Names were set to numbers and to other names. Which {CHAIN} names hold {value}?"
    begun = f"The names that hold {value} are"
    reference = f" {', '.join(chain)}"
    return setting.item(
        "tracking", facts, depths, question, begun, answers=tuple(chain), reference=reference, max_new_tokens=32
    )


def _aggregation(setting: _Setting) -> Question:
    words = setting.sample(WORDS, len(WORDS))
    frequent, rare = words[:MAX_FREQUENT], words[MAX_FREQUENT:]
    begun = f"The {MAX_FREQUENT} most frequent words are"
    question = _asked(f"Which {MAX_FREQUENT} words are most frequent in the list?", begun)

    def prompt(repeats: int) -> str:
        listed = frequent * (4 * repeats) + rare * repeats
        random.Random(setting.number).shuffle(listed)
        return f"A list of words: {' '.join(listed)}." + question

    def fits(repeats: int) -> bool:
        return len(setting.tokenizer(prompt(repeats)).input_ids) <= setting.tokens

    if not fits(1):
        raise ValueError(f"tokens: expected room for a list of words, got {setting.tokens}")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Question(
        "aggregation",
        setting.tokens,
        setting.number,
        prompt(low),
        answers=tuple(frequent),
        reference=f" {', '.join(frequent)}",
        begun=begun,
        max_new_tokens=24,
    )


TASKS: dict[str, Callable[[_Setting], Question]] = {
    "needle": _needle,
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "tracking": _tracking,
    "aggregation": _aggregation,
}
