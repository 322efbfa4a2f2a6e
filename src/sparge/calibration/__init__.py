"""Find a budget for every layer of a model on a few inputs. `sparge.profile` stores and applies the budgets.

The enabled model runs on each input. Each sparse call is computed dense, for the model's output, and at several
densities, to measure their errors. In addition, the densities that are needed to keep certain shares of the predicted
attention are recorded.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparge import api
from sparge.evaluate.capture import exact_output
from sparge.evaluate.metrics import relative_l1
from sparge.evaluate.rows import Progress, Row, Rows, digest
from sparge.evaluate.variants import enabled
from sparge.integrations.calls import substituted
from sparge.options.rules import Selection, TopCdf
from sparge.policy import Policy
from sparge.profile import Curve, Needs, Profile, identity_of

DENSITIES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
"""Densities at which errors are measured. All of them together take three times as long as dense attention."""
SHARES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
"""Shares of the predicted attention. The density that is needed to keep each share is recorded."""
PREDICTION = ("score", "is_causal", "window", "scale", "enable_gqa", "always_keep", "exact_queries", "backend")
"""Arguments of a call that `sparge.predict` also accepts."""

__all__ = ["calibrate", "check"]


def calibrate(
    model: Any,
    inputs: Sequence[Any],
    *,
    max_error: float | None = None,
    density: float | None = None,
    policy: Policy | None = None,
    densities: Sequence[float] = DENSITIES,
    rows: str | Path | None = None,
    progress: Progress | None = None,
) -> Profile:
    """Find a budget for every layer of a model on a few inputs.

    Args:
        model: a transformers model, a diffusers pipeline or its transformer, as for `sparge.enable`. It is disabled
            afterward.
        inputs: a few typical inputs, as long as those in production: token ids (B, S), keyword arguments of the model
            or pipeline as a dict, a prompt, or a function that is called with the model.
        max_error: largest relative L1 error of any layer's attention on any input.
        density: the mean of the budgets, instead of ``max_error``. All layers then keep the same share of the predicted
            attention, and query blocks keep at least 8 blocks if inputs are long enough.
        policy: decides which calls are sparse; ``Policy()`` by default. Its rule must be a `Budget` or a `TopK`.
        densities: densities at which errors are measured, in increasing order.
        rows: a file to which each finished input is added; the same call with the same file resumes an interrupted
            calibration.
        progress: called before each input.

    Returns:
        A `Profile`, which `sparge.enable` takes in place of a policy.

    Raises:
        TypeError, ValueError: an argument is invalid, or no call of the inputs is sparse.
    """
    policy = Policy() if policy is None else policy
    model = getattr(model, "_orig_mod", model)  # calls inside compiled programs cannot be substituted
    _check(inputs, densities, policy)
    no_error, no_needs = Curve(tuple(densities), ((0.0,) * len(densities),)), Needs(SHARES, (SHARES,))
    # Check max_error and density before the model runs.
    Profile.chosen({}, Policy(), {"": no_error}, {"": no_needs}, tokens=0, max_error=max_error, density=density)
    about = identity_of(model)
    described = {**about, "policy": policy.to_json(), "torch": torch.__version__}
    described |= {"densities": list(densities), "shares": list(SHARES)}
    stored = Rows(None if rows is None else Path(rows), described, key=("input", "content"))

    def measure(entry: Any) -> Row:
        measured = _measure(model, entry, policy, densities)
        return {"errors": _means(measured.errors), "needs": _means(measured.needs), "tokens": measured.tokens}

    work = [
        ({"input": index, "content": _content(entry)}, f"input {index}", partial(measure, entry))
        for index, entry in enumerate(inputs)
    ]
    finished = stored.complete(work, progress)
    errors = _by_layer(row["errors"] for row in finished)
    needs = _by_layer(row["needs"] for row in finished)
    if not errors:
        raise ValueError(
            "inputs: expected sparse calls, got none (they may be too short: sparge.stats() reports the "
            "reason, and Policy(backend=...) disables the crossover)"
        )
    curves = {layer: Curve(tuple(densities), tuple(map(tuple, values))) for layer, values in errors.items()}
    needed = {layer: Needs(SHARES, tuple(map(tuple, values))) for layer, values in needs.items()}
    tokens = max(row["tokens"] for row in finished)
    return Profile.chosen(about, policy, curves, needed, tokens=tokens, max_error=max_error, density=density)


def check(
    model: Any, inputs: Sequence[Any], profile: Profile, *, progress: Progress | None = None
) -> dict[str, list[float]]:
    """Return the errors of every layer at its budget, one per input. Use inputs that were not used for calibration."""
    measured = []
    for index, entry in enumerate(inputs):
        if progress is not None:
            progress(f"held-out input {index}", index, len(inputs))
        measured.append(_means(_measure(model, entry, profile.policy, None).errors))
    return {layer: [error for (error,) in errors] for layer, errors in _by_layer(measured).items()}


@dataclass
class _Measured:
    """Measurements of the calls of each layer on one input."""

    errors: dict[str, list[list[float]]]  # per call, the error at each density, or the error under the policy
    needs: dict[str, list[list[float]]]  # per call, the density needed for each of `SHARES`
    tokens: int = 0  # largest number of keys of a call


def _measure(model: Any, entry: Any, policy: Policy, densities: Sequence[float] | None) -> _Measured:
    """Measure the errors of every call on one input at the given densities; if None, at the policy's own density."""
    result = _Measured({}, {})

    def attend(
        layer: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **call: Any
    ) -> Tensor:
        result.tokens = max(result.tokens, key.shape[2])
        rule: Selection = call["sparsity"]
        exact = exact_output(query, key, value, mask, call)
        rules = [rule] if densities is None else [rule.with_amount(each) for each in densities]
        outputs = (api.attention(query, key, value, mask, **{**call, "sparsity": each}) for each in rules)
        result.errors.setdefault(layer, []).append([relative_l1(output, exact) for output in outputs])
        if densities is not None:
            options = {name: call[name] for name in PREDICTION if name in call}
            rules = [TopCdf(share, min_blocks=1, sink=rule.sink, diagonal=rule.diagonal) for share in SHARES]
            masks = (api.predict(query, key, attn_mask=mask, **options, sparsity=each) for each in rules)
            result.needs.setdefault(layer, []).append([each.density() for each in masks])
        return exact

    with enabled(model, policy), substituted(attend), torch.no_grad():
        if callable(entry):
            entry(model)
        elif isinstance(entry, Mapping):
            model(**entry)
        else:
            model(entry)
    return result


def _means(calls: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Return the means over the calls of each layer."""
    return {layer: [statistics.fmean(of) for of in zip(*values, strict=True)] for layer, values in calls.items()}


def _by_layer(inputs: Iterable[Mapping[str, list[float]]]) -> dict[str, list[list[float]]]:
    """Return the values of each layer on all inputs."""
    layers: dict[str, list[list[float]]] = {}
    for measured in inputs:
        for layer, values in measured.items():
            layers.setdefault(layer, []).append(values)
    return layers


def _check(inputs: Sequence[Any], densities: Sequence[float], policy: Policy) -> None:
    if not isinstance(policy, Policy):
        raise TypeError(f"policy: expected a sparge.Policy, got {type(policy).__name__}")
    if isinstance(policy.selection, TopCdf) or policy.budgets is not None:
        got = "budgets" if policy.budgets is not None else "a TopCdf"
        raise ValueError(f"policy: expected a Budget or a TopK for all layers, got {got}")
    if not isinstance(inputs, (list, tuple)):
        raise TypeError(f"inputs: expected a list, got {type(inputs).__name__}")
    if not inputs:
        raise ValueError("inputs: expected one or more, got none")
    rising = all(low < high for low, high in itertools.pairwise(densities))
    if not densities or not rising or not 0 < densities[0] <= densities[-1] <= 1:
        raise ValueError(f"densities: expected increasing values in (0, 1], got {densities}")


def _content(entry: Any) -> str:
    """Return a digest of an input: of its values, or of the name of a function."""
    if isinstance(entry, Tensor):
        numbers = entry.detach().flatten().double().cpu()
        weights = torch.arange(1, len(numbers) + 1, dtype=torch.float64)
        return digest([list(entry.shape), float(numbers.sum()), float((numbers * weights).sum())])
    if isinstance(entry, Mapping):
        return digest({str(name): _content(value) for name, value in entry.items()})
    return digest(getattr(entry, "__qualname__", None) or str(entry))
