"""`Profile`: the result of a calibration, with measurements of every layer of a model and budgets chosen from them.

A calibration measures two curves per layer: the error at several densities (`Curve`), and the density at which the kept
blocks contain a given share of the predicted attention (`Needs`). Budgets for a maximum error are chosen from the
errors. Budgets for a mean density are chosen from the shares, because errors of different layers are not comparable:
layers add different amounts to the residual stream.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sparge.masks.geometry import BLOCK_K
from sparge.options.rules import Budget
from sparge.policy import Policy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERSION = 3
"""Version of the file format."""
MIN_BUDGET = 0.01
"""Lowest budget of a layer when a mean density is allocated."""
MIN_BLOCKS = 8
"""Guaranteed blocks per query block when a mean density is allocated, because some layers get small budgets. The number
is lower for short inputs. With 4 blocks, the KL divergence of SmolLM2 was 16 % higher (4096 tokens, density 0.5)."""
TRANSFORMERS = ("transformer", "transformer_2")
"""Names of the transformers of a diffusers pipeline."""
PRESETS = {"llm": 0.08, "image": 0.07, "video": 0.05}
"""Error limits of the paper: "llm" for Llama 3.1, "image" for SD 3.5 and Flux, "video" for CogVideoX and Mochi."""


@dataclass(frozen=True)
class Curve:
    """Relative L1 errors of the attention output of one layer, for each input and increasing densities.

    Attributes:
        densities: the measured densities, in ascending order.
        errors: for each input, the error at each density.

    Example:
        >>> curve = Curve((0.1, 0.4), ((0.2, 0.05), (0.1, 0.02)))
        >>> curve.worst()
        (0.2, 0.05)
        >>> round(curve.density_for(0.1), 3)
        0.3
    """

    densities: tuple[float, ...]
    errors: tuple[tuple[float, ...], ...]

    def worst(self) -> tuple[float, ...]:
        """Return for each density the largest error of all inputs at this or any higher density; NaN counts as inf."""
        by_density = [
            max(math.inf if math.isnan(error) else error for error in errors)
            for errors in zip(*self.errors, strict=True)
        ]
        return tuple(itertools.accumulate(reversed(by_density), max))[::-1]

    def density_for(self, max_error: float) -> float:
        """Return the lowest density at which the error of every input is at most ``max_error``.

        Errors are interpolated linearly, which overestimates a convex curve. The result is 1 (dense) if the error is
        too high even at the highest measured density, because quantization causes an error at any density.
        """
        points = list(zip(self.densities, self.worst(), strict=True))
        if points[0][1] <= max_error:
            return self.densities[0]
        for (low, upper), (high, lower) in itertools.pairwise(points):
            if lower <= max_error:
                return high if upper == math.inf else low + (high - low) * (upper - max_error) / (upper - lower)
        return 1.0


@dataclass(frozen=True)
class Needs:
    """Densities at which the kept blocks of one layer contain given shares of the predicted attention, for each input.

    Attributes:
        shares: shares of the predicted attention, in ascending order.
        densities: for each input, the density that each share needs.

    Example:
        >>> needs = Needs((0.5, 0.9), ((0.1, 0.3), (0.3, 0.5)))
        >>> round(needs.density_for(0.7), 3), needs.density_for(1.0)
        (0.3, 1.0)
    """

    shares: tuple[float, ...]
    densities: tuple[tuple[float, ...], ...]

    def density_for(self, share: float) -> float:
        """Return the density that a share needs, as the mean over inputs, with linear interpolation."""
        means = [statistics.fmean(by_input) for by_input in zip(*self.densities, strict=True)]
        points = [(0.0, 0.0), *zip(self.shares, means, strict=True), (1.0, 1.0)]
        for (left, low), (right, high) in itertools.pairwise(points):
            if share <= right:
                return low + (high - low) * (share - left) / (right - left)
        return 1.0


@dataclass(frozen=True)
class Profile:
    """Budgets of every layer of a model, and the measurements that they were chosen from.

    Attributes:
        model: the class, the number of layers and a fingerprint of the weights, see `identity_of`.
        measured: the policy that was measured.
        policy: the measured policy with the chosen ``budgets``.
        max_error: the error that no layer exceeds on the inputs; None if budgets were chosen for a mean density.
        share: the share of the predicted attention that every layer keeps; None if budgets were chosen for a maximum
            error.
        curves, needs: measurements by layer.
        tokens: number of keys of the longest call.

    Example:
        >>> curves = {"layers.0": Curve((0.1, 0.4), ((0.2, 0.05),)), "layers.1": Curve((0.1, 0.4), ((0.02, 0.01),))}
        >>> needs = {"layers.0": Needs((0.5,), ((0.2,),)), "layers.1": Needs((0.5,), ((0.1,),))}
        >>> profile = Profile.chosen({"kind": "Tiny"}, Policy(), curves, needs, tokens=4096, max_error=0.1)
        >>> {name: round(budget, 2) for name, budget in profile.policy.budgets.items()}
        {'layers.0': 0.3, 'layers.1': 0.1}
        >>> {name: round(budget, 2) for name, budget in profile.at(density=0.15).policy.budgets.items()}
        {'layers.0': 0.2, 'layers.1': 0.1}
        >>> Profile.from_json(profile.to_json()) == profile
        True
    """

    model: Mapping[str, Any]
    measured: Policy
    policy: Policy
    max_error: float | None
    share: float | None
    curves: Mapping[str, Curve]
    needs: Mapping[str, Needs]
    tokens: int

    @classmethod
    def chosen(
        cls,
        model: Mapping[str, Any],
        policy: Policy,
        curves: Mapping[str, Curve],
        needs: Mapping[str, Needs],
        *,
        tokens: int,
        max_error: float | None = None,
        density: float | None = None,
    ) -> Profile:
        """Create a profile with budgets for a maximum error per layer, or for a mean density over all layers.

        With a mean density, all layers keep the same share of the predicted attention.

        Raises:
            ValueError: not exactly one of ``max_error`` and ``density`` is given, the value is out of range, or there
                are no curves.
        """
        if (max_error is None) == (density is None):
            raise ValueError(f"expected max_error or density, got max_error={max_error} and density={density}")
        if max_error is not None and not max_error > 0:
            raise ValueError(f"max_error: expected a value above 0, got {max_error}")
        if density is not None and not MIN_BUDGET <= density <= 1:
            raise ValueError(f"density: expected a value in [{MIN_BUDGET}, 1], got {density}")
        if not curves:
            raise ValueError("curves: expected one layer or more, got none")
        share, chosen = None, policy
        if max_error is not None:
            budgets = {name: curve.density_for(max_error) for name, curve in curves.items()}
        elif density is not None:
            share = _share_at(needs, density)
            budgets = _budgets(needs, share)
            chosen = _with_min_blocks(policy, density, tokens)
        chosen = replace(chosen, budgets=budgets)
        return cls(dict(model), policy, chosen, max_error, share, dict(curves), dict(needs), tokens)

    def check_model(self, model: Any) -> None:
        """Check that the profile was measured on this model, and warn if only the weights differ.

        Properties that the profile does not record are not checked.

        Raises:
            ValueError: the model has another class or another number of layers.
        """
        identity = identity_of(model)
        for name, what in (("kind", "the class"), ("layers", "the number of layers")):
            if name in self.model and self.model[name] != identity[name]:
                raise ValueError(
                    f"profile: expected the model it was measured on, with {what} {self.model[name]}, "
                    f"got {identity[name]}; calibrate again"
                )
        if identity["weights"] is not None and self.model.get("weights") not in (None, identity["weights"]):
            kind = identity["kind"]
            message = f"sparge: the profile was measured on a {kind} with other weights, so its errors may differ"
            warnings.warn(message, stacklevel=3)

    def by_layer(self) -> list[float]:
        """Return the budgets in the order of the layers."""
        budgets = self.policy.budgets or {}
        return [budgets[name] for name in self.curves]

    @property
    def density(self) -> float:
        """The mean of all budgets."""
        return statistics.fmean(self.by_layer())

    def at(self, *, max_error: float | None = None, density: float | None = None) -> Profile:
        """Choose other budgets from the same measurements; see `chosen`."""
        measurements = (self.model, self.measured, self.curves, self.needs)
        return Profile.chosen(*measurements, tokens=self.tokens, max_error=max_error, density=density)

    def to_json(self) -> str:
        """Return the profile as a JSON text that `from_json` reads."""
        policies = {name: json.loads(getattr(self, name).to_json()) for name in ("measured", "policy")}
        curves = {
            name: {layer: asdict(curve) for layer, curve in getattr(self, name).items()} for name in ("curves", "needs")
        }
        others = {name: getattr(self, name) for name in ("model", "max_error", "share", "tokens")}
        return json.dumps({"version": VERSION, **others, **policies, **curves}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile from a JSON text that `to_json` returned.

        Raises:
            ValueError: the text is not a profile, or has another version.
        """
        message = "profile: expected JSON from Profile.to_json, got other JSON"
        if not _is_profile(text):
            raise ValueError(message)
        plain = json.loads(text)
        version = plain.pop("version", None)
        if version != VERSION:
            raise ValueError(f"profile: expected version {VERSION}, got {version!r}; calibrate again")
        try:
            for name in ("measured", "policy"):
                plain[name] = Policy.from_json(json.dumps(plain[name]))
            for name, kind in (("curves", Curve), ("needs", Needs)):
                plain[name] = {layer: kind(**_as_tuples(curve)) for layer, curve in plain[name].items()}
            return cls(**plain)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"{message} ({error!r})") from error

    def save(self, path: str | Path) -> None:
        """Write the profile to a file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Load a profile from a file that `save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))

    def plot(self) -> Figure:
        """Plot the error curve and the budget of each layer."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        budgets = self.by_layer()
        colors = colormaps["Blues_r"]([0.7 * layer / len(budgets) for layer in range(len(budgets))])
        for color, curve in zip(colors, self.curves.values(), strict=True):
            left.loglog(curve.densities, curve.worst(), color=color, linewidth=1)
        if self.max_error is not None:
            left.axhline(self.max_error, color="#d5392c", linewidth=1)
        left.set(xlabel="density", ylabel="relative L1 error, worst input", title="Layers, the first darkest")
        right.bar(range(len(budgets)), budgets, color=colors)
        right.axhline(self.density, color="#333333", linewidth=1, linestyle=":")
        right.set(xlabel="layer", ylabel="budget", ylim=(0, 1), title=f"Budgets, mean {self.density:.2f}")
        return figure


def identity_of(model: Any) -> dict[str, Any]:
    """Return properties that identify a model, or the transformers of a pipeline.

    Returns:
        A dict with ``kind``, the class names; ``layers``, the length of the longest ``ModuleList``; and ``weights``, a
        `fingerprint`, or None if some weights are not in memory.
    """
    modules = _modules_of(model)
    lists = [len(part) for module in modules for part in module.modules() if isinstance(part, nn.ModuleList)]
    return {
        "kind": "+".join(type(module).__name__ for module in modules) or type(model).__name__,
        "layers": max(lists, default=0),
        "weights": fingerprint(modules),
    }


def fingerprint(modules: Sequence[nn.Module]) -> str | None:
    """Return a hash of a few values of each parameter, 12 hexadecimal digits; None if one is on the meta device."""
    numbers: list[float] = []
    for module in modules:
        for parameter in module.parameters():
            if parameter.is_meta:
                return None
            values = parameter.detach().flatten()
            sample = values[:: max(len(values) // 4, 1)][:5].to(torch.bfloat16)  # equal if loaded in bfloat16
            numbers += sample.double().cpu().tolist()
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:12]


def _modules_of(model: Any) -> list[nn.Module]:
    """Return the model, or the transformers of a pipeline, without the wrapper of torch.compile."""
    parts = [model] if isinstance(model, nn.Module) else [getattr(model, name, None) for name in TRANSFORMERS]
    return [getattr(part, "_orig_mod", part) for part in parts if isinstance(part, nn.Module)]


def policy_of_json(text: str) -> Policy:
    """Return the policy from the JSON text of a policy or a profile.

    Example:
        >>> policy_of_json('{"topk": 0.25}').topk
        0.25
    """
    return Profile.from_json(text).policy if _is_profile(text) else Policy.from_json(text)


def _is_profile(text: str) -> bool:
    plain = json.loads(text)
    return isinstance(plain, dict) and "curves" in plain


def _as_tuples(curve: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the fields of a curve with tuples in place of JSON's lists."""
    return {
        name: tuple(tuple(value) if isinstance(value, list) else value for value in values)
        for name, values in curve.items()
    }


def _budgets(needs: Mapping[str, Needs], share: float) -> dict[str, float]:
    return {name: max(layer_needs.density_for(share), MIN_BUDGET) for name, layer_needs in needs.items()}


def _share_at(needs: Mapping[str, Needs], density: float) -> float:
    """Return the highest share of predicted attention for which the mean budget does not exceed a density."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if statistics.fmean(_budgets(needs, middle).values()) > density:
            high = middle
        else:
            low = middle
    return low


def _with_min_blocks(policy: Policy, density: float, tokens: int) -> Policy:
    """Return a policy whose `Budget` has the given density and at least `MIN_BLOCKS` as ``min_blocks``.

    Policies with other rules do not change. For short inputs, the minimum is lower, so that it does not exceed the
    density of a causal query block, which sees half of the blocks on average.
    """
    rule = policy.selection
    if not isinstance(rule, Budget):
        return policy
    min_blocks = min(MIN_BLOCKS, int(density * tokens / BLOCK_K / 2))
    rule = replace(rule, density=density, min_blocks=max(rule.min_blocks, min_blocks))
    return replace(policy, topk=None, sparsity=rule)


def share_within(errors: Mapping[str, Sequence[float]], limit: float) -> float:
    """Return the share of layers whose error is at most ``limit`` on every input.

    Example:
        >>> share_within({"a": [0.1, 0.2], "b": [0.1, 0.1]}, 0.15)
        0.5
    """
    return sum(max(values) <= limit for values in errors.values()) / len(errors)
