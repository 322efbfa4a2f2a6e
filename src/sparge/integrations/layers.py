"""The layers that make attention calls, and the current step of the denoising schedule."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparge.dispatch.reasons import Reason, count
from sparge.options import checks
from sparge.policy import Policy


class Steps:
    """The current position in a denoising schedule.

    Attributes:
        dense: the reason why the policy runs the current step dense, or None. Calls read no other attribute, so a model
            is compiled at most twice, not once per step.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.index, self.total = 0, 0
        self.dense: Reason | None = Reason.UNKNOWN_SCHEDULE

    def start(self, total: int) -> None:
        """Start a schedule of ``total`` steps."""
        self.total = total
        self.go_to(0)
        warn_about_indices("dense_steps", self._policy.dense_steps, total)

    def advance(self) -> None:
        """Move on to the next step."""
        self.go_to(self.index + 1)

    def go_to(self, index: int) -> None:
        """Move to a step of the schedule."""
        self.index = index
        self.dense = Reason.STEP if self._policy.is_dense_step(index, self.total) else None


@dataclass
class Layer:
    """A layer whose attention calls go through sparge.

    Attributes:
        name: its name in `sparge.stats`; calls of a layer named "" are counted only in the totals.
        policy: decides which calls of the layer run sparse.
        dense: whether the policy's ``dense_layers`` name the layer.
        is_cross: whether the layer is known to be cross-attention.
        steps: the schedule, if the policy has rules about steps.
        last: cache key and result of the last decision. Most calls of a layer have equal sizes, and a lookup is faster
            than a decision.
        balance: the assignment of the layer's heads to ranks.
        compared: kinds of calls for which the ranks have compared their policies.
    """

    name: str
    policy: Policy
    dense: bool = False
    steps: Steps | None = None
    is_cross: bool = False
    last: tuple[Any, Reason | None] = field(default=(None, None), compare=False, repr=False)
    balance: Any = field(default=None, compare=False, repr=False)
    compared: set[Any] = field(default_factory=set, compare=False, repr=False)


_WARNED: set[str] = set()
_WARNED_LOCK = threading.Lock()


def refuse(layer: Layer, reason: str) -> None:
    """Raise for a call that cannot be sparse, or count it and warn once per reason, or only count it.

    The policy's ``on_unsupported`` selects one of them.
    """
    message = f"an attention call cannot be sparse: {reason}"
    if layer.policy.on_unsupported == "raise":
        raise NotImplementedError(f"{message} (on_unsupported='warn' or 'dense' runs it dense)")
    count(Reason.UNSUPPORTED, layer.name, detail=reason)
    if layer.policy.on_unsupported == "warn" and not torch.compiler.is_compiling():
        warn_once(reason, f"{message}; it runs dense", stacklevel=5)


def warn_about_indices(name: str, indices: Sequence[int], total: int) -> None:
    """Warn if a rule names layers or steps that this model or run does not have. Other models or runs may have them."""
    try:
        checks.check_indices(name, indices, total)
    except ValueError as error:
        warn_once(str(error), str(error), stacklevel=4)


def warn_if_training(module: nn.Module) -> None:
    """Warn once if a layer runs sparse in training mode. That happens if no gradient flows through the layer."""
    if not torch.compiler.is_compiling() and module.training and torch.is_grad_enabled():
        warn_once(
            "training",
            "attention runs sparse in training mode, because no gradient flows through it (frozen layers): call "
            "sparge.disable(model) to train on dense features, or model.eval() if the features should be sparse",
            stacklevel=4,
        )


def warn_once(reason: str, message: str, stacklevel: int) -> None:
    """Warn once per reason and process."""
    with _WARNED_LOCK:
        if reason in _WARNED:
            return
        _WARNED.add(reason)
    warnings.warn(f"sparge: {message}", stacklevel=stacklevel)
