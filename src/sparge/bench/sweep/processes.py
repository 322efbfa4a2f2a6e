"""Worker processes that answer one JSON line per request, so that a crash or hang affects one process only."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

LAST_ANSWER = "is_last"
"""Field of an answer after which the process accepts no more requests."""


class ProcessFailure(RuntimeError):
    """A process did not answer: it died, or was ended after a time-out."""


class ProcessTimeout(ProcessFailure):
    """The process exceeded its time-out."""


class AnsweringProcess:
    """A process that reads one request per line and answers with a line. The first request starts it.

    The next request restarts a process that died or was ended.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._errors: IO[str] | None = None

    def ask(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises:
            ProcessFailure: the process did not answer, and was ended.
        """
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self.end()
            raise ProcessTimeout(f"no answer within {timeout_s:.0f} s") from None
        except OSError:
            line = None
        if line is None:
            process.wait()
            said = self._last_words()
            self.end()
            raise ProcessFailure(f"the process ended with status {process.returncode}{said}")
        answer: dict[str, Any] = json.loads(line)
        if answer.pop(LAST_ANSWER, False):
            self.end()
        return answer

    def end(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self.end()
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
            self._answers = queue.Queue()
            threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        return self._process

    def _last_words(self) -> str:
        """Return the last line of the error output, if any."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f": {lines[-1][:160]}" if lines else ""


def _read(lines: IO[str], answers: queue.Queue[str | None]) -> None:
    """Put all lines into the queue, then None."""
    with lines:
        for line in lines:
            answers.put(line)
    answers.put(None)
