"""Measure the error of a variant's attention against exact attention on the same inputs, by layer and denoising step.

The model continues with the variant's output, so all inputs come from the variant's own run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from sparge.evaluate.capture import exact_output, tracked_schedule
from sparge.evaluate.pipeline.apply import applied_to_pipeline, denoisers
from sparge.evaluate.variants import Variant
from sparge.integrations.calls import substituted
from sparge.integrations.layers import Steps
from sparge.policy import Policy


class ErrorRecorder:
    """Compares the calls of a variant with exact attention."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._steps = Steps(Policy())
        self._calls = 0  # of the current forward pass
        self._sums: dict[tuple[str, int], Tensor] = {}  # sums of |output - exact| and |exact|

    @contextmanager
    def recording(self, pipe: Any) -> Iterator[None]:
        """Run the pipeline as the variant within the context. It is several times slower."""
        with ExitStack() as stack:
            stack.enter_context(self._variant.applied(pipe, applied_to_pipeline))
            stack.enter_context(substituted(self._attend))
            stack.enter_context(tracked_schedule(pipe, self._steps))
            for model in denoisers(pipe):
                stack.callback(model.register_forward_pre_hook(self._begin_pass).remove)
            yield

    def _begin_pass(self, *_: Any) -> None:
        self._calls = 0

    def _attend(
        self, layer: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **call: Any
    ) -> Tensor:
        output = self._variant.attend(layer, query, key, value, attn_mask, **call)
        exact = exact_output(query, key, value, attn_mask, call)
        self._calls += 1
        cell = (layer or f"call {self._calls}", self._steps.index)
        sums = [tensor.abs().sum(dtype=torch.float64) for tensor in (output.float() - exact.float(), exact)]
        self._sums[cell] = self._sums.get(cell, 0) + torch.stack(sums)
        return output

    def errors(self) -> dict[str, Any]:
        """Return the relative L1 errors, sum |output - exact| / sum |exact|, over guidance passes and runs.

        "values" are lists by layer and step, None where no call was sparse. "layers" are names as in `sparge.stats`, or
        "call 1", "call 2", ... within a forward pass if layers have no names. "steps" start from 0.
        """
        layers = list(dict.fromkeys(layer for layer, _ in self._sums))
        steps = sorted({step for _, step in self._sums})
        pairs = {cell: sums.tolist() for cell, sums in self._sums.items()}

        def error(layer: str, step: int) -> float | None:
            difference, size = pairs.get((layer, step), (0.0, 0.0))
            return difference / size if size else None

        return {
            "layers": layers,
            "steps": steps,
            "values": [[error(layer, step) for step in steps] for layer in layers],
        }
