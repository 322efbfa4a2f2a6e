"""What ranks of a process group tell each other, in the shapes that attention has.

Tensors travel tokens first, so that what arrives from several ranks lies one behind the other and nothing is copied
after it: (B, H, n, D) is sent as (n, B, H, D), and read as a view of that. Every rank calls the same functions in the
same order. A rank that is gone, or waits for longer than the group's time-out, is torch.distributed's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name up to torch 2.12
_ALIKE: set[tuple[str | None, int]] = set()
"""Groups whose ranks all had so many tokens."""
Arrival = Callable[[], Tensor]
"""Waits for what was asked for, and returns it."""


def exchange_of(group: dist.ProcessGroup | Exchange | None) -> Exchange:
    """A process group as an `Exchange`, which it may be already."""
    return group if isinstance(group, Exchange) else Exchange(group)


class Exchange:
    """A process group as attention uses it.

    Args:
        group: of torch.distributed, whatever its backend; None is the default one.

    Raises:
        TypeError: it is no process group.
        RuntimeError: torch.distributed was not initialised, or this rank does not belong to the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("group: expected an initialised process group (torchrun, init_process_group), got none")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise RuntimeError("group: expected a process group that this rank belongs to, got another")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group: expected a ProcessGroup or None (of a DeviceMesh: mesh.get_group(name)), got "
                f"{type(group).__name__}"
            )
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise RuntimeError("group: expected a process group that this rank belongs to, got another")

    @property
    def members(self) -> frozenset[int]:
        """The ranks of the group, as the default group numbers them."""
        return frozenset(dist.get_process_group_ranks(self._group or dist.group.WORLD))

    def check_alike(self, tokens: int, device: torch.device) -> None:
        """Raise where ranks have different numbers of tokens: collectives of other sizes hang, or end the process.

        They are asked once for each number, which the host waits for. What is not asked again is found by nobody, if
        ranks agreed on it before.

        Raises:
            ValueError: on every rank.
        """
        known = (self._name, tokens)
        if self._name is not None and known in _ALIKE:
            return
        found = self.stack(torch.tensor([tokens], device=device)).flatten().tolist()
        if len(set(found)) > 1:
            raise ValueError(
                "lengths: expected the tokens of every rank where they differ, got None, and ranks that have "
                f"{', '.join(map(str, found))}"
            )
        _ALIKE.add(known)

    @property
    def _name(self) -> str | None:
        """What tells the group from others as long as the process lives."""
        group: Any = self._group or dist.group.WORLD
        return str(group.group_name)

    def total(self, own: Tensor) -> Tensor:
        """The sum over all ranks."""
        result = own.clone()
        dist.all_reduce(result, group=self._group)
        return result

    def stack(self, own: Tensor) -> Tensor:
        """The tensors of all ranks, (ranks, ...). They are of one shape, with one dimension or more."""
        own = own.contiguous()
        result = own.new_empty((self.size, *own.shape))
        _all_gather(result.flatten(0, 1), own, group=self._group)
        return result

    def gather(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Tokens (B, H, n, D) of all ranks, one rank's behind the other's."""
        return self.start_gather(tokens, lengths)()

    def start_gather(self, tokens: Tensor, lengths: Sequence[int]) -> Arrival:
        """`gather` that does not wait."""
        longest = max(lengths)
        first = tokens.permute(2, 0, 1, 3)
        if len(first) < longest:
            first = F.pad(first, (0, 0) * 3 + (0, longest - len(first)))
        first = first.contiguous()
        result = first.new_empty((self.size * longest, *first.shape[1:]))
        work = _all_gather(result, first, group=self._group, async_op=True)

        def arrive() -> Tensor:
            work.wait()
            whole = result
            if min(lengths) != longest:
                parts = result.split(longest)
                whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
            return whole.permute(1, 2, 0, 3)

        return arrive

    def start_to_heads(self, tokens: Tensor, lengths: Sequence[int]) -> Arrival:
        """Tokens (B, H, n, D) of all heads -> all tokens of some heads, (B, H / ranks, sum of n, D), without waiting.

        Rank r gets heads r H / ranks to (r + 1) H / ranks - 1.
        """
        batch, heads, length, width = tokens.shape
        sent = tokens.view(batch, self.size, heads // self.size, length, width).permute(1, 3, 0, 2, 4).contiguous()
        result = tokens.new_empty((sum(lengths), batch, heads // self.size, width))
        work = dist.all_to_all_single(
            result, sent.flatten(0, 1), list(lengths), [length] * self.size, group=self._group, async_op=True
        )

        def arrive() -> Tensor:
            work.wait()
            return result.permute(1, 2, 0, 3)

        return arrive

    def start_all_to_heads(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """`start_to_heads` of several tensors, in one message where they are of one width: a message costs the host
        more than a copy.
        """
        first = tensors[0]
        batch, _, length, width = first.shape
        if any(tensor.shape[3] != width or tensor.dtype != first.dtype for tensor in tensors):
            arrivals = [self.start_to_heads(tensor, lengths) for tensor in tensors]
            return lambda: [arrive() for arrive in arrivals]
        heads = [tensor.shape[1] // self.size for tensor in tensors]
        sent = first.new_empty((self.size, length, batch, sum(heads), width))
        for tensor, place in zip(tensors, sent.split(heads, 3), strict=True):
            place.copy_(tensor.unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4))
        result = first.new_empty((sum(lengths), batch, sum(heads), width))
        work = dist.all_to_all_single(
            result, sent.flatten(0, 1), list(lengths), [length] * self.size, group=self._group, async_op=True
        )

        def arrive() -> list[Tensor]:
            work.wait()
            return [part.permute(1, 2, 0, 3) for part in result.split(heads, 2)]

        return arrive

    def to_tokens(self, heads: Tensor, lengths: Sequence[int]) -> Tensor:
        """All tokens of some heads (B, H / ranks, S, D) -> this rank's of all heads, (B, H, n, D)."""
        batch, own_heads, _, width = heads.shape
        length = lengths[self.rank]
        result = heads.new_empty((self.size, length, batch, own_heads, width))
        sent = heads.permute(2, 0, 1, 3).contiguous()
        dist.all_to_all_single(result.flatten(0, 1), sent, [length] * self.size, list(lengths), group=self._group)
        return result.permute(2, 0, 3, 1, 4).flatten(1, 2)

    def move(self, tokens: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Tokens (B, H, n, D), so many to each rank one after another -> those that came, so many from each."""
        first = tokens.permute(2, 0, 1, 3).contiguous()
        result = first.new_empty((sum(received), *first.shape[1:]))
        dist.all_to_all_single(result, first, list(received), list(sent), group=self._group)
        return result.permute(1, 2, 0, 3)

    def start_pass(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Callable[[], list[Tensor]]:
        """Hand tensors to the next rank and take the previous one's, of these shapes, without waiting."""
        following, previous = (self._global((self.rank + step) % self.size) for step in (1, -1))
        given = [tensor.contiguous() for tensor in tensors]
        taken = [tensor.new_empty(tuple(shape)) for tensor, shape in zip(given, shapes, strict=True)]
        operations = [dist.P2POp(dist.isend, tensor, following, group=self._group) for tensor in given]
        operations += [dist.P2POp(dist.irecv, tensor, previous, group=self._group) for tensor in taken]
        works: list[Any] = dist.batch_isend_irecv(operations)

        def arrive() -> list[Tensor]:
            for work in works:
                work.wait()
            del given[:]  # kept until they were sent
            return taken

        return arrive

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)
