"""A call whose tokens are split over the ranks of a mesh, and the modes that compute it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparge.distributed.balance import HeadBalance
from sparge.distributed.heads import check_heads
from sparge.distributed.mesh import Mesh
from sparge.distributed.request import Request, Sizes
from sparge.distributed.sharding import TokenSharding, token_sharding
from sparge.masks.geometry import Shape

DEFAULTS: dict[str, Any] = {"balance": None, "kv_heads_at_once": None, "sharding": "contiguous", "attn_mask": None}
"""Arguments that only some modes accept, with the values that all accept."""


class Mode(NamedTuple):
    """A way to compute a call whose tokens are split.

    Attributes:
        name: the caller's value.
        attend: query, key, value (this rank's heads), the request, the split and the order of heads -> output and LSE.
        accepts: the names of `DEFAULTS` that it accepts.
        merges_by_lse: outputs of several parts are merged by their LSE.
        check_sharding: raises ValueError for shardings that it does not support.
    """

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, Request, TokenSplit, Tensor | None], tuple[Tensor, Tensor]]
    accepts: tuple[str, ...]
    merges_by_lse: bool = False
    check_sharding: Callable[[TokenSharding], None] = lambda _: None


class TokenSplit(NamedTuple):
    """The caller's description of how the tokens of a call are split.

    Attributes:
        lengths: tokens of every rank; None: equally many.
    """

    mode: Mode
    mesh: Mesh
    lengths: Any
    sharding: str
    kv_heads_at_once: int | None
    balance: HeadBalance | None

    @property
    def ranks(self) -> Mesh:
        return self.mesh

    @property
    def merges_by_lse(self) -> bool:
        return self.mode.merges_by_lse

    @property
    def key(self) -> Hashable:
        mesh, balance = self.mesh, None if self.balance is None else self.balance.permute
        return self.mode.name, mesh.name, mesh.rank, self.lengths, self.sharding, self.kv_heads_at_once, balance

    def compared(self, query: Tensor, key: Tensor, layout: str) -> Mapping[str, Any]:
        dim = 2 if layout == "NHD" else 1
        return {
            "mode": self.mode.name,
            "tokens": query.shape[3 - dim] if self.lengths is None else None,
            "lengths": self.lengths,
            "sharding": self.sharding,
            "kv_heads_at_once": self.kv_heads_at_once,
            "balance": None if self.balance is None else f"HeadBalance(permute={self.balance.permute})",
            "query heads": query.shape[dim],
            "key heads": key.shape[dim],
        }

    def sizes(self, local: Shape, attn_mask: Tensor | None) -> Sizes:
        """Return the sizes of the call.

        Raises:
            TypeError, ValueError: an argument is invalid.
            NotImplementedError: the mask is not one over keys, or the mode does not accept it.
        """
        for name, default in DEFAULTS.items():
            given = attn_mask if name == "attn_mask" else getattr(self, name)
            if given is not default and given != default and name not in self.mode.accepts:
                error = NotImplementedError if name == "attn_mask" else ValueError
                got = "a mask" if name == "attn_mask" else repr(given)
                raise error(f'{name}: expected {default!r} with mode="{self.mode.name}", got {got}')
        at_once = self.kv_heads_at_once
        if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
            raise ValueError(f"kv_heads_at_once: expected None or an int above 0, got {at_once!r}")
        if local.q_len != local.kv_len:
            raise ValueError(f"key: expected as many tokens as the query has, {local.q_len}, got {local.kv_len}")
        mesh, each = self.mesh, self.mesh.ulysses.size
        lengths = check_lengths(self.lengths, local.q_len, mesh.rank, mesh.size)
        outer = [sum(lengths[first : first + each]) for first in range(0, mesh.size, each)]
        sharding = token_sharding(outer, self.sharding)
        self.mode.check_sharding(sharding)
        check_heads(local.heads, local.kv_heads, each)
        check_key_mask(attn_mask, sharding.total)
        whole = replace(local, q_len=sharding.total, kv_len=sharding.total)
        kv_heads = max(local.kv_heads // each, 1)
        largest = replace(whole, heads=local.heads // each, kv_heads=kv_heads, q_len=max(outer))
        own = mesh.ulysses_ranks
        return Sizes(whole, largest, lengths[own.start : own.stop], sharding)


def check_key_mask(attn_mask: Any, total: int) -> None:
    """Raise unless a mask is None or a bool mask over keys, which means the same for the queries of every rank."""
    if attn_mask is not None and (
        not isinstance(attn_mask, Tensor)
        or attn_mask.dtype != torch.bool
        or attn_mask.ndim != 4
        or attn_mask.shape[1:3] != (1, 1)
    ):
        got = f"{attn_mask.dtype} {tuple(attn_mask.shape)}" if isinstance(attn_mask, Tensor) else type(attn_mask)
        raise NotImplementedError(
            f"attn_mask: expected None or a bool mask of all keys, (B, 1, 1, {total}), equal on all ranks, got {got}"
        )


def check_lengths(lengths: Sequence[int] | None, own: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the tokens of every rank, by default equally many.

    Raises:
        TypeError: a length is not an int.
        ValueError: the number of lengths is not that of the ranks, or this rank has another number of tokens.
    """
    if lengths is None:
        return (own,) * ranks
    try:
        found = tuple(operator.index(length) for length in lengths)
    except TypeError as error:
        raise TypeError(f"lengths: expected an int for each of {ranks} ranks, got {lengths!r}") from error
    if len(found) != ranks or min(found) < 1:
        raise ValueError(f"lengths: expected a number above 0 for each of {ranks} ranks, got {found}")
    if found[rank] != own:
        raise ValueError(f"lengths: expected {own} for rank {rank}, the number of its tokens, got {found[rank]}")
    return found
