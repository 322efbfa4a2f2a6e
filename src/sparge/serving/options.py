"""Read the policy of an engine process from the options of the engine or from the environment."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparge.integrations.layers import Layer
from sparge.options import checks
from sparge.policy import Policy
from sparge.profile import Profile

VARIABLE = "SPARGE_POLICY"
"""Environment variable with a policy in JSON, or the path of a file with a policy or a calibration profile."""


def policy_from(options: Any, source: str) -> Policy:
    """Return the policy from the options of an engine, else from the environment variable, else ``Policy()``.

    Args:
        options: fields of `Policy` as in JSON; None or empty if the engine has no such options.
        source: the name of the options, for error messages.

    Raises:
        TypeError, ValueError: a field is unknown, or its value has the wrong type or is out of range.

    Example:
        >>> policy_from({"topk": 0.4, "dense_layers": [0]}, "additional_config['sparge']").dense_layers
        (0,)
        >>> policy_from({"top_k": 0.4}, "additional_config['sparge']")
        Traceback (most recent call last):
        ...
        ValueError: additional_config['sparge']: policy: expected fields among always_keep, ..., got top_k
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"{source}: expected fields of a sparge.Policy, got {type(options).__name__}")
    if options:
        return _read(json.dumps(dict(options)), source)
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return Policy()
    if not text.startswith("{"):
        path = Path(text)
        if not path.is_file():
            raise ValueError(f"{VARIABLE}: expected a JSON object or the path of a file, got {text!r}")
        text = path.read_text()
    return _read(text, VARIABLE)


def _read(text: str, source: str) -> Policy:
    try:
        fields = json.loads(text)
        if isinstance(fields, dict) and "curves" in fields:
            return Profile.from_json(text).policy
        return Policy.from_json(text)
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # JSONDecodeError takes other arguments
        raise kind(f"{source}: {error}") from error


def check_served(policy: Policy, source: str, *, has_steps: bool, total: int | None) -> None:
    """Raise for rules that an engine cannot apply.

    Args:
        source: the name of the options, for error messages.
        has_steps: whether the engine has a denoising schedule.
        total: number of transformer blocks; None if unknown.

    Raises:
        ValueError: the policy has ``dense="8bit"``, step rules without a schedule, layers that do not exist, or
            negative layer numbers while ``total`` is unknown.
    """
    if policy.dense != "16bit":
        raise ValueError(f"{source}: expected dense='16bit' (the engine computes dense calls), got {policy.dense!r}")
    if policy.has_step_rules and not has_steps:
        raise ValueError(f"{source}: expected no rules about denoising steps, got {policy.to_json()}")
    if total is not None:
        checks.check_indices("dense_layers", policy.dense_layers, total)
    elif min(policy.dense_layers, default=0) < 0:
        raise ValueError(
            f"{source}: expected dense_layers counted from 0 (the number of layers is unknown), got "
            f"{min(policy.dense_layers)}"
        )


def index_of(name: str) -> int | None:
    """Return the index of a layer's transformer block: the first number in the layer's name.

    Example:
        >>> index_of("model.layers.11.self_attn"), index_of("vision.attn")
        (11, None)
    """
    number = re.search(r"(?:^|\.)(\d+)(?=\.|$)", name)
    return None if number is None else int(number.group(1))


def layer_of(name: str, policy: Policy, total: int | None) -> tuple[Layer, str | None]:
    """Return a layer, and the rule of the policy that cannot be applied to it, with the reason; None if all can.

    Args:
        name: the engine's name of the layer.
        total: number of transformer blocks; None if unknown. `check_served` has checked the policy for it.
    """
    index, dense, unsupported = index_of(name), policy.is_dense_by_budget(name), None
    if policy.dense_layers and index is None:
        unsupported = "dense_layers, but the layer has no number"
    elif policy.dense_layers and index is not None:
        dense = dense or policy.is_dense_layer(index, total or 0)
    return Layer(name, policy.of_layer(name), dense), unsupported
