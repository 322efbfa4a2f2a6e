"""Check that all ranks pass the same options: ranks with different options would return wrong results or hang.

The options of a call are compared once per group and kind of call, before any token is sent. Calls are of one kind if
all compared options except the values of tensors are equal, so all ranks skip the comparison of a repeated call. The
compared kinds are never evicted: a rank that compared one again would wait for the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from sparge.distributed.communicator import Communicator

_agreed: set[tuple[Any, ...]] = set()
"""Kinds of calls that were compared, each with the name of the group and this rank."""
TOKENS = "tokens"


def describe(value: Any, *, with_values: bool = False) -> str:
    """Return a text that is equal in all processes for equal options.

    Args:
        with_values: include the values of tensors, which waits for their device.
    """
    if value is None or isinstance(value, (str, bool)):
        return repr(value)
    if isinstance(value, Real):
        return repr(float(value)).removesuffix(".0")
    if isinstance(value, Tensor):
        values = f" of {value.tolist()}" if with_values else ""
        return f"{value.dtype} tensor {tuple(value.shape)}{values}"
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, (list, tuple)):
        return f"({', '.join([describe(item, with_values=with_values) for item in value])})"
    name = type(value).__name__
    if not is_dataclass(value):
        return name
    items = [f"{field.name}={describe(getattr(value, field.name), with_values=with_values)}" for field in fields(value)]
    return f"{name}({', '.join(items)})"


def check_same_options(
    ranks: Communicator, options: Mapping[str, Any], device: torch.device, outcome: str | Exception
) -> None:
    """Compare the options of a call with those of the other ranks. All ranks call it together.

    Args:
        options: by name, all that must be equal.
        device: device of the query.
        outcome: the resolved options of this rank, or the error that it will raise.

    Raises:
        ValueError: on every rank, if the options differ; on the ranks without an error, if others have one.
    """
    if ranks.size == 1:
        return
    kind = (ranks.name, ranks.rank, *[describe(value) for value in options.values()])
    if kind in _agreed:
        return
    described = {name: describe(value, with_values=True) for name, value in options.items()}
    described["resolved to"] = str(outcome) if isinstance(outcome, str) else f"{type(outcome).__name__}: {outcome}"
    digest = hashlib.blake2b(repr(described).encode(), digest_size=16).digest()
    words = [int.from_bytes(digest[start : start + 8], "little", signed=True) for start in (0, 8)]
    found = ranks.all_gather(torch.tensor(words, device=device)).tolist()
    if all(other == words for other in found):
        if isinstance(outcome, str):
            _agreed.add(kind)
        return
    by_rank = ranks.all_gather_objects(described)
    names = [name for name in described if any(other.get(name) != described[name] for other in by_rank)]
    if len(names) > 1:
        names = [name for name in names if name != "resolved to"]
    if names == ["resolved to"] and isinstance(outcome, Exception):
        return  # which the caller raises
    if names == [TOKENS]:
        counts = ", ".join(other[TOKENS] for other in by_rank)
        raise ValueError(f"lengths: expected the tokens of every rank where they differ, got None for {counts} tokens")
    differences = "; ".join(f"{name}: {_ranks_by_value([other.get(name) for other in by_rank])}" for name in names)
    raise ValueError(f"expected the same options on all {ranks.size} ranks of the group, got {differences}")


def _ranks_by_value(values: list[str | None]) -> str:
    """Return the values with their ranks, for example "0.5 on rank 0, 0.25 on ranks 1, 2"."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [str(rank) for rank, other in enumerate(values) if other == value]
        parts.append(f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    return ", ".join(parts)
