"""`Policy`: rules that decide which attention calls of a model are sparse, and with which options.

A policy is a plain value that converts to and from JSON and does not depend on any framework. Integrations pass each
call to `dispatch.dense_rules.by_policy`. If that function returns a reason, the framework's own attention computes the
call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from sparge.masks.ordering import ORDERS, OrderName
from sparge.options import checks
from sparge.options.common import BACKENDS, OnUnsupported, Quantization, ScoreName, Skipped
from sparge.options.rules import ROUNDING_GUARD, SELECTIONS, Selection, TopCdf
from sparge.options.scores import SCORES

Range = tuple[int, int | None]
"""A range of tokens [start, stop) with the semantics of a slice: negative numbers count from the end, and a ``stop`` of
None is the end."""

DenseBits = Literal["16bit", "8bit"]
"""Precision of the steps and layers that a policy keeps dense."""

SPARSITIES: dict[str, type[Selection]] = {rule.__name__: rule for rule in SELECTIONS.values()}
"""Selection rules by their JSON names."""


@dataclass(frozen=True, eq=False)
class Policy:
    """Which attention calls of a model are sparse, and how they are computed.

    Args:
        topk: share of the visible blocks to keep, in (0, 1], as a `Budget` of each call. Default: 0.5.
        sparsity: a `Budget`, `TopK` (a share of every query block) or `TopCdf` in place of ``topk``. Rules also have
            thresholds.
        score: "moment", "spread" or the paper's "mean". "auto" (default) is "spread" if tokens are reordered and
            skipped blocks are replaced by their means, else "moment".
        quantization: as in `sparge.attention`; "auto" (default) quantizes on GPUs and not on CPUs.
        min_tokens: calls with fewer keys (outside language models, also queries) run dense. The measured crossover
            applies in any case, unless a backend is named.
        dense_first_steps: denoising steps at the start that run dense: a number of steps (int), or a fraction of the
            schedule (float in [0, 1], rounded up to whole steps).
        dense_last_steps: the same for steps at the end.
        dense_steps: indices of further steps that run dense; negative indices count from the end.
        dense_layers: indices of transformer blocks that run dense; negative indices count from the end.
        always_keep: key ranges ((start, stop), ...) whose blocks every query block keeps, as in slices: (-226, None)
            are the last 226 tokens. `enable` adds the text tokens of diffusion models.
        self_attention_only: run cross-attention dense. Unless the framework marks cross-attention, it is detected by
            different numbers of queries and keys (outside language models).
        on_unsupported: how unsupported calls are handled (gradients, dropout, head_dim outside 8..256, ...): "warn"
            (default) warns once per reason and runs them dense, "dense" runs them dense without a warning, and "raise"
            raises.
        backend: "auto" or the name of a backend. A named backend also disables the crossover.
        skipped: how skipped blocks are handled, as in `sparge.attention`: "auto", "mean" or "drop".
        order: the order of image and video tokens, see `sparge.masks.ordering`: "hilbert", "morton", "tile", or "row"
            for raster order. "auto" is "hilbert" if `enable` finds the grid.
        budgets: density of each layer, by its name in `sparge.stats`, in place of the density of ``topk`` or
            ``sparsity``; a layer with density 1 runs dense. `sparge.calibrate` measures budgets.
        dense: precision of the steps and layers that a rule of the policy keeps dense. "16bit" uses the framework's own
            attention. "8bit" uses this library's quantized attention over all blocks, on devices where that is faster.
            On a CPU, where quantization is simulated, "8bit" requires a named backend and a named quantization.

    Example:
        >>> policy = Policy(topk=0.3, min_tokens=4096, dense_first_steps=0.1, dense_layers=(0, -1))
        >>> Policy.from_json(policy.to_json()) == policy
        True
        >>> Policy(dense_first_steps=1.5)
        Traceback (most recent call last):
        ...
        ValueError: dense_first_steps: expected a number of steps (int) or a fraction in [0, 1], got 1.5
    """

    topk: float | None = None
    sparsity: Selection | None = None
    score: ScoreName | Literal["auto"] = "auto"
    quantization: Quantization = "auto"
    min_tokens: int = 0
    dense_first_steps: int | float = 0
    dense_last_steps: int | float = 0
    dense_steps: tuple[int, ...] = ()
    dense_layers: tuple[int, ...] = ()
    always_keep: tuple[Range, ...] = ()
    self_attention_only: bool = True
    on_unsupported: OnUnsupported = "warn"
    backend: str = "auto"
    skipped: Skipped = "auto"
    order: OrderName | Literal["auto"] = "auto"
    budgets: Mapping[str, float] | None = None
    dense: DenseBits = "16bit"

    def __post_init__(self) -> None:
        if isinstance(self.topk, Tensor):
            raise TypeError(
                "topk: expected a number or None, got a tensor (pass per-head shares as sparsity=TopK(...))"
            )
        if self.topk is not None and self.sparsity is not None:
            raise ValueError(f"expected topk or sparsity, got both: topk={self.topk!r} and sparsity={self.sparsity!r}")
        if self.sparsity is not None and not isinstance(self.sparsity, tuple(SELECTIONS.values())):
            kind = type(self.sparsity).__name__
            raise TypeError(f"sparsity: expected Budget(...), TopK(...) or TopCdf(...), got {kind}")
        if self.topk is not None:
            checks.rule_from_topk(self.topk)
        checks.check_choice("score", self.score, ("auto", *SCORES))
        object.__setattr__(self, "quantization", checks.resolve_quantization_name(self.quantization))
        checks.check_choice("order", self.order, ("auto", *ORDERS))
        checks.check_choice("skipped", self.skipped, checks.SKIPPED)
        checks.check_choice("on_unsupported", self.on_unsupported, checks.ON_UNSUPPORTED)
        checks.check_choice("dense", self.dense, get_args(DenseBits))
        if self.dense == "8bit" and self.quantization == "none":
            raise ValueError("dense: expected '16bit' with quantization='none', got '8bit'")
        checks.check_choice("backend", self.backend, ("auto", *BACKENDS))
        if not _is_int(self.min_tokens):
            raise TypeError(f"min_tokens: expected an int, got {type(self.min_tokens).__name__}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens: expected 0 or more, got {self.min_tokens}")
        checks.check_flag("self_attention_only", self.self_attention_only)
        _check_steps("dense_first_steps", self.dense_first_steps)
        _check_steps("dense_last_steps", self.dense_last_steps)
        object.__setattr__(self, "dense_steps", _indices("dense_steps", self.dense_steps))
        object.__setattr__(self, "dense_layers", _indices("dense_layers", self.dense_layers))
        object.__setattr__(self, "always_keep", _ranges(self.always_keep))
        if self.budgets is not None:
            object.__setattr__(self, "budgets", _budgets(self.budgets, self.selection))

    def __eq__(self, other: object) -> bool:
        return self.to_json() == other.to_json() if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.to_json())

    @property
    def selection(self) -> Selection:
        """Return the ``sparsity`` argument of `sparge.attention`."""
        return checks.rule_from_topk(self.topk) if self.sparsity is None else self.sparsity

    def of_layer(self, name: str) -> Policy:
        """Return the policy of a layer, with the layer's budget if there is one.

        Example:
            >>> Policy(topk=0.5, budgets={"layers.0": 0.2}).of_layer("layers.0").selection.amount
            0.2
        """
        if self.budgets is None:
            return self
        density = self.budgets.get(name)
        rule = self.selection
        if density is not None:
            rule = rule.with_amount(density)
        return replace(self, topk=None, sparsity=rule, budgets=None)

    def is_dense_by_budget(self, name: str) -> bool:
        """Return whether the budget of a layer is 1."""
        return self.budgets is not None and self.budgets.get(name) == 1.0

    def check_layers(self, names: Sequence[str]) -> None:
        """Raise ValueError if a budget names a layer that the model does not have."""
        unknown = sorted(set(self.budgets or ()) - set(names))
        if unknown:
            raise ValueError(f"budgets: expected layers of the model ({', '.join(names[:3])}, ...), got {unknown[0]!r}")

    def score_of(self, *, is_ordered: bool, is_causal: bool) -> ScoreName:
        """Return the ``score`` argument of `sparge.attention`; ``is_ordered``: the tokens are reordered."""
        if self.score != "auto":
            return self.score
        replaces = self.skipped == "mean" or (self.skipped == "auto" and not is_causal)
        return "spread" if is_ordered and replaces and not isinstance(self.selection, TopCdf) else "moment"

    @property
    def has_layer_rules(self) -> bool:
        """Whether some layers may run dense or have their own budget."""
        return bool(self.dense_layers or self.budgets)

    @property
    def has_step_rules(self) -> bool:
        """Whether some denoising steps run dense."""
        return bool(self.dense_first_steps or self.dense_last_steps or self.dense_steps)

    def is_dense_step(self, index: int, total: int) -> bool:
        """Return whether step ``index`` of ``total`` runs dense.

        Example:
            >>> policy = Policy(dense_first_steps=0.25, dense_last_steps=1)
            >>> [step for step in range(10) if policy.is_dense_step(step, 10)]
            [0, 1, 2, 9]
        """
        first, last = (_step_count(steps, total) for steps in (self.dense_first_steps, self.dense_last_steps))
        return index < first or index >= total - last or index in self.dense_steps or index - total in self.dense_steps

    def is_dense_layer(self, index: int, total: int) -> bool:
        """Return whether transformer block ``index`` of ``total`` runs dense."""
        return index in self.dense_layers or index - total in self.dense_layers

    def kept_ranges(self, kv_len: int) -> list[tuple[int, int]]:
        """Return the ranges of ``always_keep`` in a sequence of ``kv_len`` keys, without empty ranges.

        Example:
            >>> Policy(always_keep=[(0, 77), (-10, None)]).kept_ranges(50)
            [(0, 50), (40, 50)]
        """
        bounds = (slice(start, stop).indices(kv_len)[:2] for start, stop in self.always_keep)
        return [(start, stop) for start, stop in bounds if start < stop]

    def to_json(self) -> str:
        """Return the policy as a JSON object that omits default values."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sparsity"}
        plain = {name: value for name, value in plain.items() if value != type(self).__dataclass_fields__[name].default}
        if self.sparsity is not None:
            rules = {name: value for name, value in asdict(self.sparsity).items() if value is not None}
            plain["sparsity"] = {"kind": type(self.sparsity).__name__, **rules}
        return json.dumps(plain, default=lambda value: value.tolist())  # tensors and NumPy scalars

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """Return the policy that a JSON object describes. Missing fields have their defaults.

        Raises:
            TypeError, ValueError: a field is unknown, or its value has the wrong type or is out of range.
        """
        plain = json.loads(text)
        if not isinstance(plain, dict):
            raise TypeError(f"policy: expected a JSON object, got {type(plain).__name__}")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(plain) - known):
            raise ValueError(f"policy: expected fields among {', '.join(sorted(known))}, got {', '.join(unknown)}")
        if isinstance(plain.get("sparsity"), dict):
            plain["sparsity"] = _sparsity(dict(plain["sparsity"]))
        return cls(**plain)


def _budgets(values: Any, rule: Selection) -> dict[str, float]:
    if isinstance(rule, TopCdf):
        raise ValueError("budgets: expected a Budget or a TopK with them, got a TopCdf")
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise TypeError(f"budgets: expected densities by names of layers, got {values!r}")
    for name, density in values.items():
        if isinstance(density, bool) or not isinstance(density, Real) or not 0 < float(density) <= 1:
            raise ValueError(f"budgets: expected values in (0, 1], got {density!r} for {name!r}")
    return {name: float(values[name]) for name in sorted(values)}


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _check_steps(name: str, steps: float) -> None:
    if isinstance(steps, bool) or not isinstance(steps, Real):
        raise TypeError(f"{name}: expected a number of steps (int) or a fraction (float), got {type(steps).__name__}")
    if steps < 0 or (not _is_int(steps) and not steps <= 1):
        raise ValueError(f"{name}: expected a number of steps (int) or a fraction in [0, 1], got {steps}")


def _step_count(steps: float, total: int) -> int:
    """Convert a fraction to a number of steps: 0.1 of 30 is 3, although 0.1 * 30 > 3 in floating point."""
    return int(steps) if _is_int(steps) else math.ceil(steps * total * ROUNDING_GUARD)


def _indices(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, (list, tuple, range)) or not all(map(_is_int, values)):
        raise TypeError(f"{name}: expected a list of ints, got {values!r}")
    return tuple(map(int, values))


def _ranges(values: Any) -> tuple[Range, ...]:
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"always_keep: expected a list of (start, stop) pairs, got {values!r}")
    for entry in values:
        is_pair = isinstance(entry, (list, tuple)) and len(entry) == 2
        if not is_pair or not _is_int(entry[0]) or not (entry[1] is None or _is_int(entry[1])):
            raise TypeError(f"always_keep: expected (start, stop) pairs of ints, stop or None, got {entry!r}")
    return tuple((start, stop) for start, stop in values)


def _sparsity(plain: dict[str, Any]) -> Selection:
    kind = plain.pop("kind", None)
    checks.check_choice("sparsity.kind", kind, tuple(SPARSITIES))
    known = [field.name for field in fields(SPARSITIES[kind])]
    if unknown := sorted(set(plain) - set(known)):
        raise ValueError(f"sparsity: expected one of {', '.join(known)}, got {', '.join(unknown)}")
    rules: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return SPARSITIES[kind](**rules)
