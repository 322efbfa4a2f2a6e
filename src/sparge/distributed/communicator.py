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

from sparge.masks.geometry import ceil_div

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name up to torch 2.12
Wait = Callable[[], Tensor]
"""A function that waits for a collective and returns its result."""


class Communicator:
    """The collectives of a process group.

    Args:
        group: a process group of torch.distributed with any backend; None is the default group.

    Attributes:
        name: the name of the group, which is unique within the process.

    Raises:
        TypeError: ``group`` is not a process group.
        RuntimeError: torch.distributed is not initialized, or this rank does not belong to the group.
    """

    size: int
    rank: int
    name: Any

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError("group: expected an initialized process group (torchrun, init_process_group), got none")
        if group is dist.GroupMember.NON_GROUP_MEMBER or (group is None and dist.get_rank() < 0):
            raise RuntimeError("group: expected a process group that this rank belongs to, got another")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "group: expected a ProcessGroup, a DeviceMesh, a pair (outer, ulysses) of process groups or None, got "
                f"{type(group).__name__}"
            )
        whole_world: Any = dist.group.WORLD
        self._group = whole_world if group is None else group
        self.size, self.rank, self.name = self._group.size(), self._group.rank(), self._group.group_name

    @property
    def members(self) -> frozenset[int]:
        """The global ranks of the group."""
        return frozenset(dist.get_process_group_ranks(self._group))

    def all_reduce(self, local: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        result = local.clone()
        dist.all_reduce(result, group=self._group)
        return result

    def all_gather(self, local: Tensor) -> Tensor:
        """Return the tensors of all ranks, (ranks, ...). Their shapes are equal and have at least one dimension."""
        local = local.contiguous()
        result = local.new_empty((self.size, *local.shape))
        _all_gather(result.flatten(0, 1), local, group=self._group)
        return result

    def all_gather_objects(self, local: Any) -> list[Any]:
        """Return the objects of all ranks, which are sent as pickles."""
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, local, group=self._group)
        return objects

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

    def exchange(self, tokens: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send consecutive tokens (n, ...) to the ranks, and return the received tokens in the order of the ranks.

        Args:
            sent, received: numbers of tokens sent to and received from each rank.
        """
        result = tokens.new_empty((sum(received), *tokens.shape[1:]))
        dist.all_to_all_single(result, tokens.contiguous(), list(received), list(sent), group=self._group)
        return result

    def exchange_tokens(self, tokens: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange tokens (B, H, n, D) as in `exchange`."""
        return self.exchange(tokens.permute(2, 0, 1, 3), sent, received).permute(1, 2, 0, 3)

    def to_heads(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Exchange this rank's tokens of all heads (B, H, n, D) for all tokens of its heads (B, H / ranks, S, D).

        Rank r gets heads r H / ranks to (r + 1) H / ranks - 1. If heads do not divide evenly, H is rounded up to a
        multiple of the ranks, and the last ranks get fewer heads. Tensors with the same head_dim share a message,
        because a message has more launch overhead than a copy.

        Args:
            lengths: number of tokens on each rank.
        """
        if self.size == 1:
            return list(tensors)
        batch, _, length, width = tensors[0].shape
        if any(tensor.shape[3] != width for tensor in tensors):
            return [self.to_heads([tensor], lengths)[0] for tensor in tensors]
        heads = [ceil_div(tensor.shape[1], self.size) for tensor in tensors]
        sent = tensors[0].new_empty((self.size, length, batch, sum(heads), width))
        for tensor, part in zip(tensors, sent.split(heads, 3), strict=True):
            part.copy_(_padded_heads(tensor, self.size).unflatten(1, (self.size, -1)).permute(1, 3, 0, 2, 4))
        parts = self.exchange(sent.flatten(0, 1), [length] * self.size, lengths).split(heads, 2)
        return [
            part[:, :, : tensor.shape[1] - self.rank * part.shape[2]].permute(1, 2, 0, 3)  # without padding
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def to_tokens(self, output: Tensor, lengths: Sequence[int], heads: int) -> Tensor:
        """Exchange all tokens of this rank's heads for its tokens of all ``heads``; the inverse of `to_heads`."""
        if self.size == 1:
            return output
        missing = ceil_div(heads, self.size) - output.shape[1]
        if missing:
            output = F.pad(output, (0, 0, 0, 0, 0, missing))
        length = lengths[self.rank]
        by_rank = self.exchange_tokens(output, lengths, [length] * self.size).unflatten(2, (self.size, length))
        return by_rank.transpose(1, 2).flatten(1, 2)[:, :heads]

    def start_ring_shift(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next rank and to receive tensors of ``shapes`` from the previous one."""
        following, previous = (dist.get_global_rank(self._group, (self.rank + step) % self.size) for step in (1, -1))
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


def _padded_heads(tensor: Tensor, ranks: int) -> Tensor:
    """Append heads until their number is a multiple of ``ranks``."""
    padding = -tensor.shape[1] % ranks
    return F.pad(tensor, (0, 0, 0, 0, 0, padding)) if padding else tensor


class OneRank(Communicator):
    """A group that consists of this rank alone. It needs no process group."""

    size, rank, name = 1, 0, ""

    def __init__(self) -> None:
        pass

    def all_reduce(self, local: Tensor) -> Tensor:
        return local

    def all_gather(self, local: Tensor) -> Tensor:
        return local[None]

    def all_gather_objects(self, local: Any) -> list[Any]:
        return [local]

    def start_gather_tokens(self, tokens: Tensor, lengths: Sequence[int]) -> Wait:  # noqa: ARG002
        return lambda: tokens


ONE_RANK = OneRank()
