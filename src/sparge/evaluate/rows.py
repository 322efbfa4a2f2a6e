"""Store results of resumable runs: one JSON line per finished piece of work, which the next run reads."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparge.evaluate.machine import describe_gpu, describe_machine
from sparge.profile import fingerprint

Row = dict[str, Any]

Progress = Callable[[str, int, int], None]
"""Called with a description of the next piece of work, the number of earlier pieces, and their total number."""

Work = tuple[dict[str, Any], str, Callable[[], Row]]
"""One piece of work: its key, a description, and a function that returns the fields of the result."""


class Rows:
    """The rows of one run.

    Args:
        path: the file; None keeps rows in memory only.
        run: values that identify the run (model, dtype, device, ...). Rows of other runs stay in the file and are
            ignored.
        key: the fields that identify a piece of work.

    Example:
        >>> rows = Rows(None, {"model": "m"}, key=("task", "item"))
        >>> row = rows.add({"task": "needle", "item": 0, "found": 1.0})
        >>> rows.get(task="needle", item=0) == row, rows.get(task="needle", item=1)
        (True, None)
    """

    def __init__(self, path: Path | None, run: Mapping[str, Any], key: Sequence[str]) -> None:
        self.path = path
        self.run = dict(run)
        self._key = tuple(key)
        self.run_id = digest({"run": self.run, "key": self._key})
        self._rows: dict[tuple[Any, ...], Row] = {}
        if path is not None and path.exists():
            self._read(path)
        self.reused = len(self._rows)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # without the line that an interrupted run did not finish
        for number, line in enumerate(whole.decode().splitlines(), start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: expected JSON, got {line[:60]!r}") from error
            if row.get("run_id") == self.run_id:
                self._rows[self._key_of(row)] = row
        if len(whole) < len(content):
            os.truncate(path, len(whole))

    def _key_of(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self._key)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def complete(self, work: Sequence[Work], progress: Progress | None = None) -> list[Row]:
        """Run the pieces of work that have no row yet, in order, and return the rows of all pieces."""
        for done, (key, description, run) in enumerate(work):
            if self.get(**key) is None:
                if progress is not None:
                    progress(description, done, len(work))
                self.add({**key, **run()})
        return [self._rows[self._key_of(key)] for key, _, _ in work]

    def forget(self, **key: Any) -> None:
        """Remove the row of a piece of work, so that `complete` runs the work again."""
        self._rows.pop(self._key_of(key), None)

    def get(self, **key: Any) -> Row | None:
        """Return the row of a piece of work, or None if the work is not finished."""
        return self._rows.get(self._key_of(key))

    def add(self, row: Row) -> Row:
        """Add the fields that every row has (run, machine, time), write the row to the file, and return it."""
        row = {**row, "run": self.run, "run_id": self.run_id, **_machine()}
        row["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._rows[self._key_of(row)] = row
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        return row


def describe_run(
    name: str, modules: Sequence[nn.Module], dtype: torch.dtype, device: torch.device, **fields: Any
) -> dict[str, Any]:
    """Return the values that identify a run of a model, for `Rows`."""
    machine = describe_machine()
    cpu = f"{machine.processor}, {machine.threads} threads"
    return {
        "model": name,
        "weights": fingerprint(modules),
        "dtype": str(dtype).removeprefix("torch."),
        "device": f"{device.type}: {describe_gpu().gpu if device.type == 'cuda' else cpu}",
        "torch": machine.torch,
        "sparge": machine.sparge,
        **fields,
    }


def digest(value: Any) -> str:
    """Return a hash of a JSON value as 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@cache
def _machine() -> dict[str, Any]:
    """Return the machine, versions and commit. They are determined once per process."""
    gpu = asdict(describe_gpu()) if torch.cuda.is_available() else {}
    return {**asdict(describe_machine()), **gpu}
