"""Error of a variant's attention against exact attention on the same inputs, by layer and denoising step.

The model continues with the variant's output, so the inputs are those of the variant's own run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparge import api
from sparge.evaluate.capture import followed_steps
from sparge.evaluate.pipeline.reach import denoisers, reached
from sparge.evaluate.variants import Variant
from sparge.integrations.calls import substituted
from sparge.options.rules import Dense


@dataclass(frozen=True)
class Errors:
    """Relative L1 errors, sum |output - exact| / sum |exact|.

    Attributes:
        layers: names as in `sparge.stats`; "call 1", ... of a pass where layers have no names.
        steps: from 0.
        values: (layers, steps); None where no call went sparse.
    """

    layers: list[str]
    steps: list[int]
    values: list[list[float | None]]


class ErrorRecorder:
    """Compares the calls of a variant with exact attention."""

    def __init__(self, variant: Variant) -> None:
        self._variant = variant
        self._step: Callable[[], int | None] = lambda: None
        self._calls = 0
        self._sums: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def recording(self, pipe: Any) -> Iterator[None]:
        """Run the pipeline as the variant within the context, several times slower."""
        with ExitStack() as stack:
            stack.enter_context(self._variant.applied(pipe, reached))
            stack.enter_context(substituted(self._attend))
            self._step = stack.enter_context(followed_steps(pipe))
            for model in denoisers(pipe):
                stack.callback(model.register_forward_pre_hook(self._begin_pass).remove)
            yield

    def _begin_pass(self, *_: Any) -> None:
        self._calls = 0

    def _attend(
        self, layer: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **call: Any
    ) -> Tensor:
        output = self._variant.attend(layer, query, key, value, attn_mask, **call)
        call |= {"sparsity": Dense(), "always_keep": None, "quantization": "none"}
        exact = api.attention(query, key, value, attn_mask, **call)
        self._calls += 1
        place = (layer or f"call {self._calls}", self._step() or 0)
        sums = torch.stack([_sum_of_sizes(output.float() - exact.float()), _sum_of_sizes(exact)])
        self._sums[place] = self._sums[place] + sums if place in self._sums else sums
        return output

    def errors(self) -> Errors:
        """Return the recorded errors; guidance passes and runs are added up."""
        layers = list(dict.fromkeys(layer for layer, _ in self._sums))
        steps = sorted({step for _, step in self._sums})
        pairs = {place: sums.tolist() for place, sums in self._sums.items()}

        def error(layer: str, step: int) -> float | None:
            difference, size = pairs.get((layer, step), (0.0, 0.0))
            return difference / size if size else None

        return Errors(layers, steps, [[error(layer, step) for step in steps] for layer in layers])


def _sum_of_sizes(tensor: Tensor) -> Tensor:
    return tensor.abs().sum(dtype=torch.float64)
