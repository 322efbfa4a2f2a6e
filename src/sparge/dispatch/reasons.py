"""Reasons why a call runs dense, and how `sparge.stats` counts them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from sparge.stats import counters


class Reason(Enum):
    """Reasons to run a call dense. `sparge.stats` shows "dense: " and the value.

    Attributes:
        label: "dense: " and the value.
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
"""Reasons that come from a rule of the policy; without the rule these calls would be sparse."""
BY_SIZE = (Reason.CROSSOVER, Reason.WINDOW, Reason.MASK)
"""Reasons of calls that are faster dense. They run in 16 bits whatever the quantization."""


def describe(reason: Reason, *, is_quantized: bool = False) -> str:
    """Return the label under which `sparge.stats` counts a dense call."""
    return f"dense in 8 bits: {reason.value}" if is_quantized else reason.label


def count(reason: Reason, layer: str | None = None, *, detail: str = "") -> None:
    """Count a dense call for the named layer, or for the layer that this thread is within.

    Does nothing while torch.compile traces, which cannot trace a lock; `ops` counts the calls that become operators.
    """
    if not torch.compiler.is_compiling():
        counters.record(f"{reason.label} ({detail})" if detail else reason.label, layer)


@dataclass(frozen=True)
class Obstacle:
    """A property of a call that no sparse backend supports.

    Attributes:
        label: for `sparge.stats`.
        message: for errors, as "expected X, got Y".
    """

    label: str
    message: str
