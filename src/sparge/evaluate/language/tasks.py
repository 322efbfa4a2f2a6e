"""Questions about a long text with answers that are known, made from a seed for any tokenizer and length.

    needle        one fact hidden in real text at a given depth; the answer is read from the logits
    single        one fact in meaningless filler
    multikey      one fact asked among many of the same form
    multivalue    several facts about one thing, all asked
    tracking      a chain of assignments; which names hold the first value
    aggregation   the most frequent words of a list

They follow the kinds of question that RULER asks; the words are this library's own, so scores are to be compared with
the dense model beside them, not with published ones.
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
COLOURS = ("amber", "azure", "crimson", "ivory", "jade", "scarlet", "silver", "teal", "violet", "golden")
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
"""What stands between a question and its answer."""
MAX_FREQUENT = 3
VALUES = 4
CHAIN = 4
MISSED = 0.02
"""How far from its depth a fact may lie, for the end of a sentence or at least a word; else it is put right there."""
TRIES = 12
"""To meet a number of tokens with a number of characters; three or four do."""


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        task: its kind.
        tokens: the length that was asked for; the prompt has at most so many.
        number: which of its kind and length.
        prompt: all of it, up to where the answer begins.
        answers: what a right answer contains.
        reference: a right answer, as the prompt would go on.
        metric: how an answer is scored: see `scoring.METRICS`; "exact" asks for the reference, read from the logits.
        depth: where a needle lies, from 0 (start) to 1 (end).
        begun: how the answer begins: the end of the prompt.
        max_new_tokens: how long an answer may be.
        is_chat: whether the prompt has all marks of a chat in it (`chat.as_chat`).
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
) -> Item:
    """The ``number``-th question of a kind; the same arguments give the same question.

    Args:
        text: real text to hide things in.
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
    ) -> Item:
        """The text with facts at their depths and the question behind it, at most ``tokens`` long."""
        hay = self.text if task == "needle" else _filler(self.draw, self.tokens)
        asked = _asked(question, begun)
        prompt = hide(self.tokenizer, hay, facts, depths, asked, self.tokens, offset=self.draw.random())
        return Item(task, self.tokens, self.number, prompt, begun=begun, **fields)


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
    """Hay with facts between its sentences and a question behind it, of at most ``tokens`` tokens and little fewer.

    Args:
        depths: where each fact goes, from 0 to 1.
        offset: where in the hay to begin, as a share of it; its start follows its end.
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
    """Facts at the ends of sentences, the order of equal depths kept."""
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
    """A question and how its answer begins."""
    return f"What is the pass code of the {place}?", f"The pass code of the {place} is"


def _needle(setting: _Setting) -> Item:
    (place,), code = setting.sample(PLACES, 1), setting.code()
    depth = setting.draw.random() if setting.depth is None else setting.depth
    return setting.item(
        "needle",
        [_fact(place, code)],
        [depth],
        *_ask(place),
        answers=(code,),
        reference=f" {code}",
        metric="exact",
        depth=depth,
    )


def _single(setting: _Setting) -> Item:
    (place,), code = setting.sample(PLACES, 1), setting.code()
    depth = setting.draw.random()
    fields: dict[str, Any] = {"answers": (code,), "reference": f" {code}", "depth": depth, "max_new_tokens": 16}
    return setting.item("single", [_fact(place, code)], [depth], *_ask(place), **fields)


def _multikey(setting: _Setting) -> Item:
    places = [f"{colour} {place}" for colour in setting.sample(COLOURS, 4) for place in setting.sample(PLACES, 4)]
    codes = {place: setting.code() for place in places}
    asked = setting.draw.choice(places)
    depths = [setting.draw.random() for _ in places]
    facts = [_fact(place, code) for place, code in codes.items()]
    fields: dict[str, Any] = {"answers": (codes[asked],), "reference": f" {codes[asked]}", "max_new_tokens": 16}
    return setting.item("multikey", facts, depths, *_ask(asked), depth=depths[places.index(asked)], **fields)


def _multivalue(setting: _Setting) -> Item:
    (place,), codes = setting.sample(PLACES, 1), [setting.code() for _ in range(VALUES)]
    facts = [f"One of the pass codes of the {place} is {code}." for code in codes]
    question, begun = f"What are all {VALUES} pass codes of the {place}?", f"The pass codes of the {place} are"
    depths = sorted(setting.draw.random() for _ in codes)
    reference = f" {', '.join(codes)}"
    return setting.item(
        "multivalue", facts, depths, question, begun, answers=tuple(codes), reference=reference, max_new_tokens=48
    )


def _tracking(setting: _Setting) -> Item:
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


def _aggregation(setting: _Setting) -> Item:
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
    return Item(
        "aggregation",
        setting.tokens,
        setting.number,
        prompt(low),
        answers=tuple(frequent),
        reference=f" {', '.join(frequent)}",
        begun=begun,
        max_new_tokens=24,
    )


TASKS: dict[str, Callable[[_Setting], Item]] = {
    "needle": _needle,
    "single": _single,
    "multikey": _multikey,
    "multivalue": _multivalue,
    "tracking": _tracking,
    "aggregation": _aggregation,
}
