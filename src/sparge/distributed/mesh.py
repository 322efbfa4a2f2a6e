"""`Mesh`: the ranks of a call. Heads are exchanged along one dimension, keys and values are sent along the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sparge.distributed.communicator import ONE_RANK, Communicator
from sparge.masks.geometry import ceil_div

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | tuple[dist.ProcessGroup, dist.ProcessGroup] | None
"""One process group, or the two process groups of a mesh: (outer, ulysses)."""


class Mesh(Communicator):
    """A mesh of ranks, numbered along ``ulysses`` first.

    Attributes:
        ulysses: the ranks with which this rank exchanges tokens for heads.
        outer: the ranks with which this rank gathers K and V or sends them around a ring.
        has_equal_shards: every rank has the same number of tokens.
    """

    def __init__(self, ulysses: Communicator, outer: Communicator, *, has_equal_shards: bool = True) -> None:
        self.ulysses, self.outer, self.has_equal_shards = ulysses, outer, has_equal_shards
        self.size = ulysses.size * outer.size
        self.rank = outer.rank * ulysses.size + ulysses.rank
        self.name = ulysses.name, outer.name

    def all_reduce(self, local: Tensor) -> Tensor:
        return self.outer.all_reduce(self.ulysses.all_reduce(local))

    def all_gather(self, local: Tensor) -> Tensor:
        return self.outer.all_gather(self.ulysses.all_gather(local)).flatten(0, 1)

    def all_gather_objects(self, local: Any) -> list[Any]:
        objects = [local]
        # Both dimensions nest objects equally, because ranks that disagree about the mode use different dimensions.
        for ranks in (self.ulysses, self.outer):
            objects = [item for items in ranks.all_gather_objects(objects) for item in items]
        return objects

    @property
    def ulysses_ranks(self) -> range:
        """The ranks of the mesh with which this rank exchanges heads, including itself."""
        return range(self.outer.rank * self.ulysses.size, (self.outer.rank + 1) * self.ulysses.size)

    def ulysses_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of tokens of `ulysses_ranks`, given those of all ranks."""
        return tuple([lengths[rank] for rank in self.ulysses_ranks])

    def outer_lengths(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the number of tokens of each outer rank, given those of all ranks."""
        each = self.ulysses.size
        return tuple([sum(lengths[first : first + each]) for first in range(0, self.size, each)])

    def heads_by_rank(self, heads: int) -> tuple[range, ...]:
        """Return the heads of every rank. If heads do not divide evenly, the last ranks have fewer."""
        most = ceil_div(heads, self.ulysses.size)
        starts = range(0, most * self.ulysses.size, most)
        return tuple([range(start, min(start + most, heads)) for start in starts]) * self.outer.size

    def heads_of_this_rank(self, heads: int) -> slice:
        part = self.heads_by_rank(heads)[self.rank]
        return slice(part.start, part.stop)


def resolve_mesh(group: Group | Communicator, mode: str) -> Mesh:
    """Return the mesh of one or two process groups."""
    groups: Any = group if isinstance(group, tuple) else (group,)
    if isinstance(group, DeviceMesh):
        groups = tuple(group.get_group(dim) for dim in range(group.ndim))
    if len(groups) not in ((1,) if mode == "ulysses" else (1, 2)):
        expected = 'one process group with mode="ulysses"' if mode == "ulysses" else "one or two process groups"
        raise ValueError(f"group: expected {expected}, got {len(groups)}")
    outer, *inner = (part if isinstance(part, Communicator) else Communicator(part) for part in groups)
    if not inner:
        return Mesh(outer, ONE_RANK) if mode == "ulysses" else Mesh(ONE_RANK, outer)
    (ulysses,) = inner
    common = outer.members & ulysses.members
    if len(common) != 1:
        raise ValueError(
            "group: expected a column and a row of a mesh with only this rank in common, got groups with ranks "
            f"{sorted(common)} in common"
        )
    return Mesh(ulysses, outer)
