"""Scores of answers, from 0 to 1."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

ARTICLES = frozenset(("a", "an", "the"))


def found(answer: str, references: Sequence[str]) -> float:
    """Return the share of the references that the answer contains as whole words.

    Example:
        >>> found("They are 12 and 345.", ["12", "34"])
        0.5
    """
    patterns = (rf"(?<!\w){re.escape(reference)}(?!\w)" for reference in references)
    return sum(bool(re.search(pattern, answer, re.IGNORECASE)) for pattern in patterns) / len(references)


def f1(answer: str, references: Sequence[str]) -> float:
    """Return the best F1 score of shared words over all references, without articles and punctuation.

    Example:
        >>> f1("in the Paris", ["Paris", "London"])
        0.666...
    """
    return max(_overlap(_words(answer), _words(reference)) for reference in references)


def rouge(answer: str, references: Sequence[str]) -> float:
    """Return ROUGE-L: the best F-measure of the longest common subsequence of words.

    Example:
        >>> rouge("a b c d", ["a c d e"])
        0.75
    """
    return max(_subsequence(answer.lower().split(), reference.lower().split()) for reference in references)


def choice(answer: str, references: Sequence[str]) -> float:
    """Return 1.0 if the answer names one of the references, else 0.0.

    The first word or the first line must equal a reference, or the answer must contain a reference of several letters.

    Example:
        >>> choice(" B. the cat", ["B"]), choice("(C) the dog", ["B"])
        (1.0, 0.0)
    """
    first = answer.strip().splitlines()[0] if answer.strip() else ""
    words = re.findall(r"\w+", first) or [""]
    return float(
        any(reference in (words[0], first) or (len(reference) > 1 and reference in answer) for reference in references)
    )


def similar(answer: str, references: Sequence[str]) -> float:
    """Return the best similarity of the answer's first line of code to a reference."""
    lines = [line for line in answer.splitlines() if line.strip() and not line.lstrip().startswith(("#", "//", "`"))]
    first = lines[0] if lines else ""
    return max(difflib.SequenceMatcher(None, first.strip(), reference.strip()).ratio() for reference in references)


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "found": found,
    "f1": f1,
    "rouge": rouge,
    "choice": choice,
    "similar": similar,
}


def _words(text: str) -> list[str]:
    cleaned = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in cleaned.split() if word not in ARTICLES]


def _overlap(left: list[str], right: list[str]) -> float:
    common = sum((Counter(left) & Counter(right)).values())
    return 2 * common / (len(left) + len(right)) if common else 0.0


def _subsequence(left: list[str], right: list[str]) -> float:
    if not left or not right:
        return 0.0
    lengths = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for column, other in enumerate(right, start=1):
            above = lengths[column]
            lengths[column] = diagonal + 1 if word == other else max(above, lengths[column - 1])
            diagonal = above
    return 2 * lengths[-1] / (len(left) + len(right))
