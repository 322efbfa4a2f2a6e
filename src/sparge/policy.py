"""Which attention calls of a model go sparse: a plain value, JSON in and out.

A policy knows nothing of any framework. Integrations describe each call to `decide.by_policy`, which asks the policy,
and run the call dense, on the framework's own attention, when there is a reason to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_args

from torch import Tensor

from sparge.masks.ordering import ORDERS, OrderName
from sparge.options import checks
from sparge.options.common import BACKENDS, OnUnsupported, Quantization, ScoreName, Skipped
from sparge.options.rules import ROUNDING_GUARD, SELECTIONS, Selection, TopCdf
from sparge.options.scores import SCORES

Range = tuple[int, int | None]
"""Tokens [start, stop) as a slice has them: negative numbers count from the end, None is the end."""

DenseBits = Literal["16bit", "8bit"]
"""What dense steps and layers are computed in."""

SPARSITIES: dict[str, type[Selection]] = {rule.__name__: rule for rule in SELECTIONS.values()}
"""By the names that JSON has for them."""


@dataclass(frozen=True, eq=False)
class Policy:
    """What to compute sparsely in a model, and when not to.

    Args:
        topk: share of the visible blocks to keep, in (0, 1]; 0.5 by default. It is a `Budget`.
        sparsity: `Budget`, `TopK` (a share of every row) or `TopCdf` instead of ``topk``, with all their thresholds.
        score: "moment", "spread" or the paper's "mean". "auto" is "spread" where tokens are in an order and skipped
            blocks are replaced by their means, else "moment".
        quantization: as in `sparge.attention`; "auto" is 8 bits on GPUs and none on CPUs.
        min_tokens: calls with fewer keys or, outside language models, queries run dense. 0 leaves it to the measured
            crossover, which holds in any case unless a backend is named.
        dense_first_steps: denoising steps at the start that run dense: a number of steps (int), or a fraction of the
            schedule (float in [0, 1], rounded up to whole steps).
        dense_last_steps: the same at the end.
        dense_steps: indices of further steps that run dense; negative ones count from the end.
        dense_layers: indices of transformer blocks that run dense; negative ones count from the end.
        always_keep: key ranges ((start, stop), ...) whose blocks every row keeps, as in slices: (-226, None) are the
            last 226 tokens. `enable` adds the text tokens of diffusion models by itself.
        self_attention_only: attention between different sequences runs dense. It is told by its lengths where the
            framework does not say.
        on_unsupported: what becomes of calls that should be sparse and cannot be (gradients, dropout, head_dim outside
            8..256, ...): "warn" once for each reason and run dense, silently run "dense", or "raise".
        backend: "auto", or a backend's name, which also switches the crossover off.
        skipped: what becomes of blocks that are not kept, as in `sparge.attention`: "auto", "mean" or "drop".
        order: in which order of their grid the tokens of pictures and videos are taken, see `sparge.masks.ordering`:
            "hilbert", "morton", "tile", or "row" as they come. "auto" is "hilbert" where `enable` knows the grid.
        budgets: densities of layers, by the names that `sparge.stats` has for them, in place of that of ``topk`` or
            ``sparsity``; 1 runs dense. `sparge.calibrate` finds them.
        dense: in what the steps and layers that a rule keeps dense are computed: "16bit" is the framework's own
            attention, "8bit" this library's over all blocks, in its quantization, on devices where that is faster. On
            a CPU, where 8 bits are a simulation, it takes a named backend and quantization.

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
        object.__setattr__(self, "quantization", checks.resolve_quantization_name(self.quantization, stacklevel=4))
        checks.check_choice("order", self.order, ("auto", *ORDERS))
        checks.check_choice("skipped", self.skipped, checks.SKIPPED)
        checks.check_choice("on_unsupported", self.on_unsupported, checks.ON_UNSUPPORTED)
        checks.check_choice("dense", self.dense, get_args(DenseBits))
        if self.dense == "8bit" and self.quantization == "none":
            raise ValueError("dense: expected '16bit' beside quantization='none', got '8bit'")
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
        """What `sparge.attention` gets as ``sparsity``."""
        return checks.rule_from_topk(self.topk) if self.sparsity is None else self.sparsity

    def of_layer(self, name: str) -> Policy:
        """The policy of one layer: its own budget, if it has one.

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
        """Whether a layer's budget is all it sees."""
        return self.budgets is not None and self.budgets.get(name) == 1.0

    def check_layers(self, names: Sequence[str]) -> None:
        """Raise ValueError for budgets of layers that a model does not have: they are another model's."""
        unknown = sorted(set(self.budgets or ()) - set(names))
        if unknown:
            raise ValueError(f"budgets: expected layers of the model ({', '.join(names[:3])}, ...), got {unknown[0]!r}")

    def score_of(self, *, is_ordered: bool, is_causal: bool) -> ScoreName:
        """What `sparge.attention` gets as ``score`` for tokens in an order of their grid, or as they come."""
        if self.score != "auto":
            return self.score
        replaces = self.skipped == "mean" or (self.skipped == "auto" and not is_causal)
        return "spread" if is_ordered and replaces and not isinstance(self.selection, TopCdf) else "moment"

    @property
    def has_layer_rules(self) -> bool:
        """Whether it matters which layer a call belongs to."""
        return bool(self.dense_layers or self.budgets)

    @property
    def has_step_rules(self) -> bool:
        """Whether the place in a schedule matters."""
        return bool(self.dense_first_steps or self.dense_last_steps or self.dense_steps)

    def is_dense_step(self, index: int, total: int) -> bool:
        """Whether step ``index`` of ``total`` runs dense.

        Example:
            >>> policy = Policy(dense_first_steps=0.25, dense_last_steps=1)
            >>> [step for step in range(10) if policy.is_dense_step(step, 10)]
            [0, 1, 2, 9]
        """
        first, last = (_count(steps, total) for steps in (self.dense_first_steps, self.dense_last_steps))
        return index < first or index >= total - last or index in self.dense_steps or index - total in self.dense_steps

    def is_dense_layer(self, index: int, total: int) -> bool:
        """Whether transformer block ``index`` of ``total`` runs dense."""
        return index in self.dense_layers or index - total in self.dense_layers

    def kept_ranges(self, kv_len: int) -> list[tuple[int, int]]:
        """``always_keep`` on a number of keys: what lies outside is cut off, what is empty is left out.

        Example:
            >>> Policy(always_keep=[(0, 77), (-10, None)]).kept_ranges(50)
            [(0, 50), (40, 50)]
        """
        bounds = (slice(start, stop).indices(kv_len)[:2] for start, stop in self.always_keep)
        return [(start, stop) for start, stop in bounds if start < stop]

    def to_json(self) -> str:
        """The policy as a JSON object; fields with their default value are left out."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "sparsity"}
        plain = {name: value for name, value in plain.items() if value != type(self).__dataclass_fields__[name].default}
        if self.sparsity is not None:
            rules = {name: _plain(value) for name, value in asdict(self.sparsity).items() if value is not None}
            plain["sparsity"] = {"kind": type(self.sparsity).__name__, **rules}
        return json.dumps(plain, default=_number)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        """A policy from what `to_json` wrote, or from any JSON object with some of its fields.

        Raises:
            TypeError, ValueError: a field is unknown, or its value is not what was expected.
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
        raise ValueError("budgets: expected a Budget or a TopK beside them, got a TopCdf")
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


def _count(steps: float, total: int) -> int:
    """Whole steps; .1 of 30 is 3 although .1 * 30 is a little more."""
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


def _number(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    return value.item()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _sparsity(plain: dict[str, Any]) -> Selection:
    import torch

    kind = plain.pop("kind", None)
    checks.check_choice("sparsity.kind", kind, tuple(SPARSITIES))
    rules: dict[str, Any] = {
        name: torch.tensor(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return SPARSITIES[kind](**rules)
