"""Collectives of a process group for tensors of attention, (B, H, n, D).

Tokens are sent with the token dimension first, as (n, B, H, D), so that the parts of several ranks arrive in one
contiguous tensor, of which the result is a view. Every rank must call the same methods in the same order. If a rank
fails or exceeds the timeout of the group, torch.distributed raises its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name up to torch 2.12
Wait = Callable[[], Tensor]
"""A function that waits for a collective and returns its result."""


class Communicator:
    """The collectives of a process group.

    Args:
        group: a process group of torch.distributed with any backend; None is the default group.

    Raises:
        TypeError: ``group`` is not a process group.
        RuntimeError: torch.distributed is not initialized, or this rank does not belong to the group.
    """

    size: int
    rank: int

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("group: expected an initialized process group (torchrun, init_process_group), got none")
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise RuntimeError("group: expected a process group that this rank belongs to, got another")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group: expected a ProcessGroup, a DeviceMesh, a pair (outer, ulysses) of process groups or None, got "
                f"{type(group).__name__}"
            )
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise RuntimeError("group: expected a process group that this rank belongs to, got another")

    @property
    def members(self) -> frozenset[int]:
        """The global ranks of the group."""
        return frozenset(dist.get_process_group_ranks(self._group or dist.group.WORLD))

    @property
    def name(self) -> Any:
        """The name of the group, which is unique within the process."""
        group: Any = self._group or dist.group.WORLD
        return group.group_name

    def all_reduce(self, own: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        result = own.clone()
        dist.all_reduce(result, group=self._group)
        return result

    def all_gather(self, own: Tensor) -> Tensor:
        """Return the tensors of all ranks, (ranks, ...). Their shapes are equal and have at least one dimension."""
        own = own.contiguous()
        result = own.new_empty((self.size, *own.shape))
        _all_gather(result.flatten(0, 1), own, group=self._group)
        return result

    def all_gather_objects(self, own: Any) -> list[Any]:
        """Return the objects of all ranks, which are sent as pickles."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._group)
        return found

    def gather_tokens(self, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the tokens (B, H, n, D) of all ranks, concatenated in the order of the ranks."""
        return self.start_gather_tokens(tokens, lengths)()

    def start_gather_tokens(self, tokens: Tensor, lengths: Sequence[int]) -> Wait:
        """Start `gather_tokens` without waiting."""
        longest = max(lengths)
        sent = tokens.permute(2, 0, 1, 3)
        if len(sent) < longest:
            sent = F.pad(sent, (0, 0) * 3 + (0, longest - len(sent)))
        sent = sent.contiguous()
        result = sent.new_empty((self.size * longest, *sent.shape[1:]))
        work = _all_gather(result, sent, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            whole = result
            if min(lengths) != longest:
                parts = result.split(longest)
                whole = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
            return whole.permute(1, 2, 0, 3)

        return wait

    def start_to_heads(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> Callable[[], list[Tensor]]:
        """Start to exchange this rank's tokens of all heads for all tokens of this rank's heads, without waiting.

        (B, H, n, D) becomes (B, H / ranks, sum of n, D). Rank r gets heads r H / ranks to (r + 1) H / ranks - 1.
        Tensors with the same head_dim share a message, because a message has more launch overhead than a copy.
        """
        first = tensors[0]
        batch, _, length, width = first.shape
        if any(tensor.shape[3] != width for tensor in tensors):
            waits = [self.start_to_heads([tensor], lengths) for tensor in tensors]
            return lambda: [wait()[0] for wait in waits]
        heads = [tensor.shape[1] // self.size for tensor in tensors]
        sent = first.new_empty((self.size, length, batch, sum(heads), width))
        for tensor, part in zip(tensors, sent.split(heads, 3), strict=True):
            part.copy_(tensor.unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4))
        result = first.new_empty((sum(lengths), batch, sum(heads), width))
        work = dist.all_to_all_single(
            result, sent.flatten(0, 1), list(lengths), [length] * self.size, group=self._group, async_op=True
        )

        def wait() -> list[Tensor]:
            work.wait()
            return [part.permute(1, 2, 0, 3) for part in result.split(heads, 2)]

        return wait

    def to_tokens(self, heads: Tensor, lengths: Sequence[int]) -> Tensor:
        """Exchange all tokens of this rank's heads (B, H / ranks, S, D) for its tokens of all heads (B, H, n, D)."""
        batch, own_heads, _, width = heads.shape
        length = lengths[self.rank]
        result = heads.new_empty((self.size, length, batch, own_heads, width))
        sent = heads.permute(2, 0, 1, 3).contiguous()
        dist.all_to_all_single(result.flatten(0, 1), sent, [length] * self.size, list(lengths), group=self._group)
        return result.permute(2, 0, 3, 1, 4).flatten(1, 2)

    def exchange_tokens(self, tokens: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send consecutive tokens (B, H, n, D) to the ranks, and return the received tokens in the order of the ranks.

        Args:
            sent, received: numbers of tokens sent to and received from each rank.
        """
        first = tokens.permute(2, 0, 1, 3).contiguous()
        result = first.new_empty((sum(received), *first.shape[1:]))
        dist.all_to_all_single(result, first, list(received), list(sent), group=self._group)
        return result.permute(1, 2, 0, 3)

    def start_ring_shift(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next rank and to receive tensors of ``shapes`` from the previous one."""
        following, previous = (self._global((self.rank + step) % self.size) for step in (1, -1))
        sent = [tensor.contiguous() for tensor in tensors]
        received = [tensor.new_empty(tuple(shape)) for tensor, shape in zip(sent, shapes, strict=True)]
        operations = [dist.P2POp(dist.isend, tensor, following, group=self._group) for tensor in sent]
        operations += [dist.P2POp(dist.irecv, tensor, previous, group=self._group) for tensor in received]
        works: list[Any] = dist.batch_isend_irecv(operations)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            del sent[:]  # the tensors must stay alive until they are sent
            return received

        return wait

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)
