"""`TokenSplit`: how the tokens of a call are split over the ranks of a mesh, and the checks of this split."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparge.distributed.balance import HeadBalance
from sparge.distributed.mesh import Mesh
from sparge.distributed.request import Sizes
from sparge.distributed.sharding import SHARDINGS, token_sharding
from sparge.masks.geometry import BLOCK_Q, Shape
from sparge.options.checks import check_choice

DEFAULTS: dict[str, Any] = {"balance": None, "kv_heads_at_once": None, "sharding": "contiguous", "attn_mask": None}
"""Arguments that only some modes support, with the default values that all modes support."""
ACCEPTED = {
    "ulysses": ("balance", "attn_mask"),
    "gather": ("kv_heads_at_once", "sharding", "attn_mask"),
    "ring": ("sharding",),
}
"""The arguments of `DEFAULTS` that each mode supports."""


class TokenSplit(NamedTuple):
    """How the tokens of a call are split over ranks: the arguments of `context_parallel_attention`.

    Attributes:
        lengths: number of tokens on every rank; None for equal numbers.
    """

    mode: str
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
        return self.mode == "ring"

    @property
    def key(self) -> Hashable:
        mesh, balance = self.mesh, None if self.balance is None else self.balance.permute
        return self.mode, mesh.name, mesh.rank, self.lengths, self.sharding, self.kv_heads_at_once, balance

    def compared(self, query: Tensor, key: Tensor, layout: str) -> Mapping[str, Any]:
        dim = 2 if layout == "NHD" else 1
        return {
            "mode": self.mode,
            "tokens": query.shape[3 - dim] if self.lengths is None else None,
            "lengths": self.lengths,
            "sharding": self.sharding,
            "kv_heads_at_once": self.kv_heads_at_once,
            "balance": None if self.balance is None else f"HeadBalance(permute={self.balance.permute})",
            "query heads": query.shape[dim],
            "key heads": key.shape[dim],
        }

    def sizes(self, local: Shape, attn_mask: Tensor | None) -> Sizes:
        """Check the split, and return the sizes of the call."""
        for name, default in DEFAULTS.items():
            given = attn_mask if name == "attn_mask" else getattr(self, name)
            if given is not default and given != default and name not in ACCEPTED[self.mode]:
                error = NotImplementedError if name == "attn_mask" else ValueError
                got = "a mask" if name == "attn_mask" else repr(given)
                raise error(f'{name}: expected {default!r} with mode="{self.mode}", got {got}')
        at_once = self.kv_heads_at_once
        if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
            raise ValueError(f"kv_heads_at_once: expected None or an int above 0, got {at_once!r}")
        if local.q_len != local.kv_len:
            raise ValueError(f"key: expected as many tokens as the query has, {local.q_len}, got {local.kv_len}")
        mesh, each = self.mesh, self.mesh.ulysses.size
        lengths = _check_lengths(self.lengths, local.q_len, mesh.rank, mesh.size)
        outer = tuple(sum(lengths[first : first + each]) for first in range(0, mesh.size, each))
        check_choice("sharding", self.sharding, SHARDINGS)
        sharding = token_sharding(outer, self.sharding)
        if self.mode == "ring" and not sharding.has_whole_blocks:
            raise ValueError(
                f'mode="ring": expected a multiple of {BLOCK_Q} tokens on every rank but the last ({2 * BLOCK_Q} with '
                f'"head_tail"; use `split_lengths`, or mode="gather" for any lengths), got {sharding.lengths}'
            )
        _check_heads(local.heads, local.kv_heads, each)
        _check_key_mask(attn_mask, sharding.total)
        whole = replace(local, q_len=sharding.total, kv_len=sharding.total)
        kv_heads = max(local.kv_heads // each, 1)
        largest = replace(whole, heads=local.heads // each, kv_heads=kv_heads, q_len=max(outer))
        own = mesh.ulysses_ranks
        return Sizes(whole, largest, lengths[own.start : own.stop], sharding)


def _check_lengths(lengths: Sequence[int] | None, own: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Return the number of tokens on every rank. Default: equal numbers."""
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


def _check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError unless heads divide evenly among Ulysses ranks. Several ranks may share a K/V head."""
    if heads % ranks:
        raise ValueError(
            f"query: expected a multiple of {ranks} heads for {ranks} Ulysses ranks, got {heads} (gather and ring "
            "support any number of heads; in a mesh, only the Ulysses ranks divide heads)"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"key: expected a multiple or a divisor of {ranks} heads for {ranks} ranks, got {kv_heads}")


def _check_key_mask(attn_mask: Any, total: int) -> None:
    """Raise unless a mask is None or a bool mask over keys, which is the same for the queries of every rank."""
    is_tensor = isinstance(attn_mask, Tensor)
    if attn_mask is None or (
        is_tensor and attn_mask.dtype == torch.bool and attn_mask.ndim == 4 and attn_mask.shape[1:3] == (1, 1)
    ):
        return
    got = f"{attn_mask.dtype} {tuple(attn_mask.shape)}" if is_tensor else type(attn_mask)
    raise NotImplementedError(
        f"attn_mask: expected None or a bool mask of all keys, (B, 1, 1, {total}), equal on all ranks, got {got}"
    )
