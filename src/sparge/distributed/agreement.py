"""Check that all ranks pass the same options. With different options, ranks would return wrong results or hang.

Options are compared once per process group and kind of call, before any token is sent. Calls are of the same kind if
their options are equal, except the values of tensors. All ranks therefore skip the comparison of repeated calls. The
compared kinds are never evicted: a rank that compared a kind again would wait for the other ranks forever.
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
"""Kinds of calls whose options were equal on all ranks, each with the name of the group and this rank."""
TOKENS = "tokens"
"""Name of the compared value that differs if ranks have different numbers of tokens and ``lengths`` is missing."""


def describe(value: Any, *, with_values: bool = False) -> str:
    """Return a description of an option, which is equal in all processes for equal options.

    Args:
        with_values: include the values of tensors, which synchronizes with their device.
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
    """Compare the options of a call across ranks. All ranks must call this function together.

    Args:
        options: the options that must be equal, by name.
        device: device of the compared values.
        outcome: the resolved options of this rank, or the error that this rank will raise.

    Raises:
        ValueError: the options differ between ranks, or other ranks have an error and this rank has none.
    """
    if ranks.size == 1:
        return
    kind = (ranks.name, ranks.rank, *[describe(value) for value in options.values()])
    if kind in _agreed:
        return
    described = {name: describe(value, with_values=True) for name, value in options.items()}
    described["resolved to"] = str(outcome) if isinstance(outcome, str) else f"{type(outcome).__name__}: {outcome}"
    digest = hashlib.blake2b(repr(described).encode(), digest_size=16).digest()
    digest_words = [int.from_bytes(digest[start : start + 8], "little", signed=True) for start in (0, 8)]
    words_by_rank = ranks.all_gather(torch.tensor(digest_words, device=device)).tolist()
    if all(words == digest_words for words in words_by_rank):
        if isinstance(outcome, str):
            _agreed.add(kind)
        return
    by_rank = ranks.all_gather_objects(described)
    names = [name for name in described if any(other.get(name) != described[name] for other in by_rank)]
    if len(names) > 1:
        names = [name for name in names if name != "resolved to"]
    if names == ["resolved to"] and isinstance(outcome, Exception):
        return  # the caller raises the error
    if names == [TOKENS]:
        counts = ", ".join(other[TOKENS] for other in by_rank)
        raise ValueError(
            f"lengths: expected the number of tokens on every rank, got None for ranks with {counts} tokens"
        )
    differences = "; ".join(f"{name}: {_ranks_by_value([other.get(name) for other in by_rank])}" for name in names)
    raise ValueError(f"expected the same options on all {ranks.size} ranks of the group, got {differences}")


def _ranks_by_value(values: list[str | None]) -> str:
    """List values with their ranks, for example "0.5 on rank 0, 0.25 on ranks 1, 2"."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [str(rank) for rank, other in enumerate(values) if other == value]
        parts.append(f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}")
    return ", ".join(parts)
