"""Run ranks as threads of one process. The threads take turns: each runs until it waits for the others."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparge.distributed.communicator import Communicator, Wait

TIMEOUT = 120.0
_NUMBERS = itertools.count()


class Meeting:
    """A group of threads that exchange objects. The running thread owns the lock ``turn``."""

    def __init__(self, size: int, turn: threading.Lock) -> None:
        self._barrier = threading.Barrier(size)
        self._objects: list[Any] = [None] * size
        self._turn = turn
        self.name = f"threads {next(_NUMBERS)}"

    def meet(self, rank: int, local: Any) -> list[Any]:
        """Wait for all ranks and return the objects of all ranks."""
        self._objects[rank] = local
        self._wait()
        objects = list(self._objects)
        self._wait()
        return objects

    def leave(self) -> None:
        """Release the other ranks after a failure."""
        self._barrier.abort()

    def _wait(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait(TIMEOUT)
        finally:
            self._turn.acquire()


class ThreadedCommunicator(Communicator):
    """A `Communicator` for ranks that are threads."""

    name = None

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self.name = meeting.name
        self.rank, self.size = rank, size

    @property
    def members(self) -> frozenset[int]:
        return frozenset(self._meeting.meet(self.rank, threading.get_ident()))

    def _all(self, local: Any) -> list[Any]:
        return self._meeting.meet(self.rank, local)

    def all_reduce(self, local: Tensor) -> Tensor:
        return torch.stack(self._all(local)).sum(0)

    def all_gather(self, local: Tensor) -> Tensor:
        return torch.stack(self._all(local))

    def all_gather_objects(self, local: Any) -> list[Any]:
        return self._all(local)

    def start_gather_tokens(self, tokens: Tensor, lengths: Sequence[int]) -> Wait:
        parts = self._all(tokens)
        assert [part.shape[2] for part in parts] == list(lengths)
        return lambda: torch.cat(parts, 2)

    def exchange(self, tokens: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        parts = [part.split(list(sizes))[self.rank] for part, sizes in self._all((tokens, sent))]
        assert list(map(len, parts)) == list(received)
        return torch.cat(parts)

    def start_ring_shift(
        self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]
    ) -> Callable[[], list[Tensor]]:
        previous = list(self._all(tensors)[self.rank - 1])
        assert [tuple(tensor.shape) for tensor in previous] == [tuple(shape) for shape in shapes]
        return lambda: previous


def on_ranks(size: int, work: Callable[..., Any], *, columns: int = 1) -> list[Any]:
    """Run ``work`` on every rank with a `ThreadedCommunicator` and return its results.

    With several columns, ``work`` receives two communicators: its row, with ``size / columns`` ranks, and its column.
    """
    turn = threading.Lock()
    rows = size // columns
    groups = [
        [ThreadedCommunicator(meeting, rank, rows) for rank in range(rows)]
        for meeting in [Meeting(rows, turn) for _ in range(columns)]
    ]
    across = [
        [ThreadedCommunicator(meeting, rank, columns) for rank in range(columns)]
        for meeting in [Meeting(columns, turn) for _ in range(rows)]
    ]
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        column, row = divmod(rank, rows)
        communicators = [groups[column][row], across[row][column]]
        with turn, torch.no_grad():
            try:
                results[rank] = work(*communicators[: 1 if columns == 1 else 2])
            except BaseException as error:
                failures.append(error)
                for communicator in (one for group in (*groups, *across) for one in group):
                    communicator._meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((error for error in failures if not isinstance(error, threading.BrokenBarrierError)), failures[0])
    return results
