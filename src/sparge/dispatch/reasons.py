"""Reasons why calls run dense, and their labels in `sparge.stats`."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch

from sparge.stats import counters


class Reason(Enum):
    """Reasons to run a call dense.

    Attributes:
        label: the label in `sparge.stats`: "dense: " and the value.
    """

    def __init__(self, value: str) -> None:
        self.label = f"dense: {value}"

    REQUESTED = "sparsity=Dense()"
    CROSSOVER = "below the crossover"
    WINDOW = "inside the window"
    MASK = "costly mask"
    UNSUPPORTED = "unsupported"
    DECODE = "decode"
    CROSS_ATTENTION = "cross-attention"
    TEXT = "text alone"
    MIN_TOKENS = "fewer than min_tokens"
    LAYER = "dense layer"
    STEP = "dense step"
    UNKNOWN_SCHEDULE = "dense step, the schedule is unknown"
    NOTHING_VISIBLE = "nothing to see"
    INSIDE_MODULE = "inside nn.MultiheadAttention"
    OWN_ATTENTION = "the model's own attention"
    NOT_SDPA = "not through SDPA"


POLICY_RULES = (Reason.LAYER, Reason.STEP, Reason.UNKNOWN_SCHEDULE)
"""Reasons that are rules of a policy. Without the rule, these calls would be sparse."""
BY_SIZE = (Reason.CROSSOVER, Reason.WINDOW, Reason.MASK)
"""Reasons of calls that are faster dense. These calls run in 16 bits, whatever quantization is requested."""


def describe(reason: Reason, *, is_quantized: bool = False) -> str:
    """Return the label under which `sparge.stats` counts a dense call."""
    return f"dense in 8 bits: {reason.value}" if is_quantized else reason.label


def count(reason: Reason, layer: str | None = None, *, detail: str = "") -> None:
    """Count a dense call for a layer. Default: the current layer of this thread.

    Does nothing under torch.compile, which cannot trace locks. Operators (`ops`) count their calls when they run.
    """
    if not torch.compiler.is_compiling():
        counters.record(f"{reason.label} ({detail})" if detail else reason.label, layer)


class Obstacle(NamedTuple):
    """A property of a call that no sparse backend supports.

    Attributes:
        label: short description for `sparge.stats`.
        message: error message of the form "expected X, got Y".
    """

    label: str
    message: str
