"""docs/families.md, from the models that the tests run: `python -m families.page` in tests/integrations writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sparge
from families import FAMILIES, PARTS, WITHOUT, class_of
from families.tiny import Keys, Tiny
from sparge.integrations.calls import substituted
from sparge.integrations.diffusers.models import KNOWN

PAGE = Path(__file__).parents[3] / "docs" / "families.md"

POLICY = sparge.Policy(topk=1.0, backend="torch", min_tokens=64, on_unsupported="dense")
"""Everything is kept of what is no more than a few pixels or frames."""

TITLES = ("Pictures", "Videos", "U-Nets", "Control nets", "Sound and others")

HEAD = """# Model families

Every class of diffusers {version} with a transformer, a U-Net or a control net. `sparge.enable` takes all those in the first table of each section; a test runs a tiny one of each, with everything kept against the stock model, and its text where its code has it. This page is written from those tests.

- **Text**: where the tokens that are not denoised (text, references, sound) lie among the keys of self-attention. They are kept in every row. "apart" comes by cross-attention, which runs dense.
- **Found by**: a row of the library's table, or a probe. The probe runs the model twice without attention when it first sees a kind of input, the second time on other latents: keys that do not change are not the picture's. A class that is not on this page is probed, too, so that a new family works without a release of this library. A compiled model takes what the latest pass before its compilation found.
- **Order**: whether its tokens are taken along [Hilbert's curve](integrations.md): the sizes of the picture must be known, and queries and keys be the same tokens.
"""  # noqa: E501


def page(rows: dict[str, str]) -> str:
    """The page with a row for each model."""
    import diffusers

    lines = [HEAD.format(version=".".join(diffusers.__version__.split(".")[:2]))]
    for title, part in zip(TITLES, PARTS, strict=True):
        lines += [f"## {title}", "", "| class | text | found by | order |", "|---|---|---|---|"]
        lines += [rows[name] for name in sorted(part.FAMILIES)]
        if part.WITHOUT:
            lines += ["", "| runs as it was | why |", "|---|---|"]
            lines += [f"| {_named(name)} | {reason} |" for name, reason in sorted(part.WITHOUT.items())]
        lines.append("")
    return "\n".join(lines)


def row(name: str, tiny: Tiny, *, is_ordered: bool) -> str:
    """What the page says of a model."""
    found = "table" if class_of(name) in KNOWN else "probe"
    return f"| {_named(name)} | {_text(tiny)} | {found} | {'Hilbert' if is_ordered else 'as it comes'} |"


def is_ordered(tiny: Tiny) -> bool:
    """Whether any call of a model has its tokens in an order."""
    scores = []

    def attention(_: str, query: Tensor, key: Tensor, value: Tensor, *__: Any, **options: Any) -> Tensor:
        del key
        scores.append(options["score"])
        return query.new_zeros(*query.shape[:3], value.shape[3])

    sparge.enable(tiny.model.eval(), POLICY)
    with torch.no_grad(), substituted(attention):
        tiny.model(**tiny.inputs)
    return "spread" in scores


def _named(name: str) -> str:
    kind, comma, variant = name.partition(",")
    return f"`{kind}`{comma}{variant}"


def _text(tiny: Tiny) -> str:
    """Where other tokens lie, in words, over all layers."""
    calls: list[Keys] = [key for keys in tiny.layers.values() for key in (keys if isinstance(keys, list) else [keys])]
    joint = [keys for keys in calls if isinstance(keys, tuple) and keys]
    if joint:
        places = {"first" if keys[0][0] == 0 else "last" for keys in joint if len(keys) == 1}
        words = sorted(places) + ["in several places"] * any(len(keys) > 1 for keys in joint)
        return " or ".join(words)
    return "apart" if "cross" in calls else "none"


if __name__ == "__main__":
    tinies = {name: build() for name, build in FAMILIES.items()}
    PAGE.write_text(page({name: row(name, tiny, is_ordered=is_ordered(tiny)) for name, tiny in tinies.items()}))
    print(f"{PAGE}: {len(FAMILIES)} models, {len(WITHOUT)} without")  # noqa: T201
