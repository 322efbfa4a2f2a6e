"""`Mesh`: the ranks of a call. Heads are exchanged along one dimension, keys and values are sent along the other."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparge.distributed.communicator import Communicator
from sparge.masks.geometry import ceil_div

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
"""One process group, or the two process groups of a mesh: (outer, ulysses)."""


class OneRank(Communicator):
    """The unused dimension of a one-dimensional mesh: a group of this rank alone, without communication."""

    size, rank, name = 1, 0, ""

    def __init__(self) -> None:
        pass


ONE_RANK = OneRank()


class Mesh(Communicator):
    """A mesh of ranks, numbered along ``ulysses`` first.

    Attributes:
        ulysses: the ranks with which this rank exchanges tokens for heads.
        outer: the ranks with which this rank gathers K and V or sends them around a ring.
        everyone: the group of all ranks, if there is one.
        has_equal_shards: every rank has the same number of tokens.
    """

    def __init__(
        self,
        ulysses: Communicator,
        outer: Communicator,
        everyone: Communicator | None = None,
        *,
        has_equal_shards: bool = True,
    ) -> None:
        self.ulysses, self.outer, self.everyone, self.has_equal_shards = ulysses, outer, everyone, has_equal_shards
        self.size = ulysses.size * outer.size
        self.rank = outer.rank * ulysses.size + ulysses.rank
        self._parts = (ulysses, outer) if everyone is None else (everyone,)

    @property
    def name(self) -> Any:
        return self.ulysses.name, self.outer.name

    def all_reduce(self, own: Tensor) -> Tensor:
        for part in self._parts:
            own = part.all_reduce(own)
        return own

    def all_gather(self, own: Tensor) -> Tensor:
        for part in self._parts:
            own = part.all_gather(own)
        return own.flatten(0, len(self._parts) - 1)

    def all_gather_objects(self, own: Any) -> list[Any]:
        found = [own]
        for part in self._parts:
            found = [item for items in part.all_gather_objects(found) for item in items]
        return found

    @property
    def ulysses_ranks(self) -> range:
        """The ranks of the mesh with which this rank exchanges heads, including itself."""
        return range(self.outer.rank * self.ulysses.size, (self.outer.rank + 1) * self.ulysses.size)

    def heads_by_rank(self, heads: int) -> tuple[range, ...]:
        """Return the heads of every rank. If heads do not divide evenly, the last ranks have fewer."""
        max_heads = ceil_div(heads, self.ulysses.size)
        along = [
            range(first, min(first + max_heads, heads)) for first in range(0, max_heads * self.ulysses.size, max_heads)
        ]
        return tuple(along * self.outer.size)

    def own_heads(self, heads: int) -> slice:
        """Return the heads of this rank."""
        own = self.heads_by_rank(heads)[self.rank]
        return slice(own.start, own.stop)


def resolve_mesh(group: Group | Communicator, mode: str) -> Mesh:
    """Return the mesh of one or two process groups."""
    if isinstance(group, DeviceMesh):
        groups = tuple(group.get_group(dim) for dim in range(group.ndim))
        group = groups[0] if len(groups) == 1 else groups  # type: ignore[assignment]
    if not isinstance(group, tuple):
        ranks = group if isinstance(group, Communicator) else Communicator(group)  # type: ignore[arg-type]
        return Mesh(ranks, ONE_RANK, ranks) if mode == "ulysses" else Mesh(ONE_RANK, ranks, ranks)
    if len(group) != 2 or mode == "ulysses":
        expected = 'one process group with mode="ulysses"' if mode == "ulysses" else "one or two process groups"
        raise ValueError(f"group: expected {expected}, got {len(group)}")
    outer, ulysses = (part if isinstance(part, Communicator) else Communicator(part) for part in group)
    common = outer.members & ulysses.members
    if len(common) != 1:
        raise ValueError(
            "group: expected a column and a row of a mesh with only this rank in common, got groups with ranks "
            f"{sorted(common)} in common"
        )
    return Mesh(ulysses, outer)
