"""Read questions of LongBench and InfiniteBench, from local files in their format or from the hub.

The prompts are written for this library, so compare scores with the dense model's scores, not with published scores. If
a context is too long, its middle is removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparge.evaluate.language.tasks import ANSWER, SUMMARY, Question
from sparge.evaluate.language.texts import from_hub

HUB = {"longbench": "zai-org/LongBench", "infinitebench": "xinrongzhang2022/InfiniteBench"}

SUMMARIES = ("gov_report", "qmsum", "multi_news", "vcsum", "samsum", "longbook_sum")
CHOICES = ("trec", "lsht", "longbook_choice", "code_debug")
RETRIEVAL = ("passage_retrieval", "passage_count", "passkey", "number_string", "kv_retrieval", "math_find", "code_run")
CODE = ("lcc", "repobench")


def read_collection(source: str, tokenizer: Any, tokens: int, count: int) -> list[Question]:
    """Return up to ``count`` questions.

    Args:
        source: a file of JSON lines in the format of either collection, or "longbench:NAME" or
            "infinitebench:NAME" for the hub.
        tokens: maximum length of a prompt.

    Raises:
        ValueError: the source has no questions, or another format.
    """
    family, colon, name = source.partition(":")
    if colon and family in HUB:
        subset = (name,) if family == "longbench" else ()
        lines: Iterator[Any] = iter(from_hub(HUB[family], *subset, split="test" if subset else name))
    else:
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"data: expected a file, longbench:NAME or infinitebench:NAME, got {source!r}")
        name = path.stem
        lines = (json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    items = []
    for number, row in zip(range(count), lines, strict=False):
        items.append(_item(row, name, number, tokenizer, tokens))
    if not items:
        raise ValueError(f"data: expected questions in {source!r}, got none")
    return items


def _item(row: Mapping[str, Any], name: str, number: int, tokenizer: Any, tokens: int) -> Question:
    answers = row.get("answers", row.get("answer"))
    if "context" not in row or "input" not in row or answers is None:
        raise ValueError(
            f"data {name!r}: expected fields context, input and answers (LongBench) or answer (InfiniteBench), got "
            f"{', '.join(sorted(row))}"
        )
    answers = [str(answer) for answer in (answers if isinstance(answers, list) else [answers])]
    if not answers:
        raise ValueError(f"data {name!r}, question {number}: expected answers, got none")
    name = row.get("dataset") or name
    metric, max_new_tokens = metric_of(name)
    options = row.get("options") or row.get("all_classes") or []
    question = f"\n\n{row['input']}" if row["input"] else ""
    if options and metric == "choice":
        letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        if row.get("options"):
            listed = "\n".join(f"{letter}. {option}" for letter, option in zip(letters, options, strict=False))
            answers += [letters[index] for index, option in enumerate(options) if option in answers]
        else:
            listed = "One of: " + ", ".join(options)
        question += f"\n{listed}"
    question += f"\n\n{SUMMARY}" if metric == "rouge" else "\n" if metric == "similar" else f"\n\n{ANSWER}"
    prompt = _without_middle(tokenizer, row["context"], question, tokens)
    reference = answers[0] if metric == "similar" else f" {answers[0]}"
    return Question(name, tokens, number, prompt, tuple(answers), reference, metric, max_new_tokens=max_new_tokens)


def metric_of(name: str) -> tuple[str, int]:
    """Return the metric for answers of a data set (a key of `scoring.METRICS`), and their maximum number of tokens.

    Example:
        >>> metric_of("gov_report"), metric_of("hotpotqa"), metric_of("passkey")
        (('rouge', 256), ('f1', 32), ('found', 32))
    """
    for names, metric, length in (
        (SUMMARIES, "rouge", 256),
        (CHOICES, "choice", 16),
        (RETRIEVAL, "found", 32),
        (CODE, "similar", 48),
    ):
        if name.startswith(names):
            return metric, length
    return "f1", 32


def _without_middle(tokenizer: Any, context: str, question: str, tokens: int) -> str:
    ids = tokenizer(context, add_special_tokens=False).input_ids
    room = tokens - len(tokenizer(question).input_ids) - 8
    if room < 16:
        raise ValueError(f"tokens: expected {tokens - room + 16} or more for this question, got {tokens}")
    if len(ids) <= room:
        return context + question
    head = tokenizer.decode(ids[: room // 2], skip_special_tokens=True)
    tail = tokenizer.decode(ids[-(room - room // 2) :], skip_special_tokens=True)
    return head + tail + question
