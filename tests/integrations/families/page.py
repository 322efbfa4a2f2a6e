"""Write docs/families.md from the models that the tests run: `python -m families.page` in tests/integrations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparge
from families import FAMILIES, PARTS, WITHOUT, build
from families.family import Keys, Tiny
from sparge.integrations.calls import substituted

PAGE = Path(__file__).parents[3] / "docs" / "families.md"

POLICY = sparge.Policy(topk=1.0, backend="torch", min_tokens=64, on_unsupported="dense")
"""Keeps all blocks; calls with a few pixels or frames stay dense."""

TITLES = ("Images", "Videos", "U-Nets", "Control nets", "Audio and others")

HEAD = """# Model families

This page lists every class of diffusers {version} with a transformer, a U-Net or a control net. It is generated from tests. They run a tiny model of each supported class with all blocks kept, compare its output with that of the original model, and check the positions of its text tokens. Other classes are [probed](integrations.md#diffusers) when they first run.

- **Text** is the position of tokens that are not denoised (text, references, audio) among the keys of self-attention. These keys are always kept. "mixed" means several ranges. "cross-attention" means that text is used only in cross-attention, which runs dense.
- **Order** is "Hilbert" if the other tokens are put in [Hilbert order](concepts.md#skipped-blocks). For this, their grid must be known, and queries and keys must be the same tokens.
"""  # noqa: E501

Kind = tuple[str, str]
"""Position of the text tokens, and order of the other tokens."""
NAME = re.compile(r"`([^`]+)`(?: \(([^)]*)\))?")


def page(kinds: dict[str, Kind]) -> str:
    """Return the page, with each model listed under its kind."""
    import diffusers

    lines = [HEAD.format(version=".".join(diffusers.__version__.split(".")[:2]))]
    for title, part in zip(TITLES, PARTS, strict=True):
        lines += [f"## {title}", "", "| text | order | models |", "|---|---|---|"]
        for text, order in sorted({kinds[name] for name in part.FAMILIES}):
            names = [_title(name) for name in sorted(part.FAMILIES) if kinds[name] == (text, order)]
            lines.append(f"| {text} | {order} | {', '.join(names)} |")
        if part.WITHOUT:
            lines += ["", "| not changed by `enable` | reason |", "|---|---|"]
            for reason in sorted(set(part.WITHOUT.values())):
                names = [_title(name) for name in sorted(part.WITHOUT) if part.WITHOUT[name] == reason]
                lines.append(f"| {', '.join(names)} | {reason} |")
        lines.append("")
    return "\n".join(lines)


def parse_page(text: str) -> dict[str, Kind]:
    """Return the kind of each model that a page lists."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {
        ", ".join(filter(None, found.groups())): (row[0], row[1])
        for row in rows
        if len(row) == 3
        for found in NAME.finditer(row[2])
    }


def kind(tiny: Tiny, *, is_ordered: bool) -> Kind:
    """Return the position of a model's text tokens and the order of its other tokens."""
    return _text(tiny), "Hilbert" if is_ordered else "unchanged"


def is_ordered(tiny: Tiny) -> bool:
    """Return whether any call of a model has its tokens in Hilbert order."""
    scores = []

    def attention(_: str, query: Tensor, key: Tensor, value: Tensor, *__: Any, **options: Any) -> Tensor:
        del key
        scores.append(options["score"])
        return query.new_zeros(*query.shape[:3], value.shape[3])

    sparge.enable(tiny.model.eval(), POLICY)
    with torch.no_grad(), substituted(attention):
        tiny.model(**tiny.inputs)
    return "spread" in scores


def _title(name: str) -> str:
    model, _, variant = name.partition(", ")
    return f"`{model}` ({variant})" if variant else f"`{model}`"


def _text(tiny: Tiny) -> str:
    """Return the position of the text tokens over all layers, in the words of the page."""
    calls: list[Keys] = [key for keys in tiny.layers.values() for key in (keys if isinstance(keys, list) else [keys])]
    joint = [keys for keys in calls if isinstance(keys, tuple) and keys]
    if joint:
        places = {"first" if keys[0][0] == 0 else "last" for keys in joint if len(keys) == 1}
        words = sorted(places) + ["mixed"] * any(len(keys) > 1 for keys in joint)
        return " or ".join(words)
    return "cross-attention" if "cross" in calls else "none"


if __name__ == "__main__":
    tinies = {name: build(name) for name in FAMILIES}
    PAGE.write_text(page({name: kind(tiny, is_ordered=is_ordered(tiny)) for name, tiny in tinies.items()}))
    print(f"{PAGE}: {len(FAMILIES)} models, {len(WITHOUT)} without")  # noqa: T201
