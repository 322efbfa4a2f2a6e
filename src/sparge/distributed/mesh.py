"""Two process groups as one: Ulysses among neighbours, another mode between them."""

from __future__ import annotations

from torch import Tensor

from sparge.distributed.exchange import Exchange


class Mesh:
    """The ranks of a 2-D mesh, those of ``inner`` counted first; see `budget.Ranks`.

    Raises:
        ValueError: the groups are no row and column.
    """

    def __init__(self, outer: Exchange, inner: Exchange) -> None:
        common = outer.members & inner.members
        if len(common) != 1:
            raise ValueError(
                "ulysses_group, group: expected a row and a column of a mesh, which have this rank in common, got "
                f"groups with ranks {sorted(common)} in common"
            )
        self._outer, self._inner = outer, inner
        self.size = outer.size * inner.size
        self.rank = outer.rank * inner.size + inner.rank

    def total(self, own: Tensor) -> Tensor:
        return self._outer.total(self._inner.total(own))

    def stack(self, own: Tensor) -> Tensor:
        return self._outer.stack(self._inner.stack(own)).flatten(0, 1)
