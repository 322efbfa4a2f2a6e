"""Variants that an evaluation compares with the dense model: policies, and references such as oracles.

topk=0.25                               a policy, as fields separated by commas
rows=0.25                               the same share for every query block (`TopK`) instead of one budget per call
cdf=0.95,score=mean,quantization=none   another rule, score and quantization
topk=0.25,oracle                        the same rule on the true attention mass: the best that a score can do
dense,quantization=int8_fp8             all blocks, quantized
topk=0.25,dense_first_steps=5,dense=8bit   a policy whose dense steps are quantized
sdpa=math                               the dense model on another kernel of torch: rounding noise
policy.json                             a file written by Policy.to_json or Profile.save (budgets by layer)
profile=profile.json,topk=0.25          budgets by layer, allocated for another mean
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from sparge import api, integrations
from sparge.backends import base
from sparge.dispatch.reasons import POLICY_RULES, describe
from sparge.evaluate.capture import true_mask
from sparge.integrations.calls import substituted
from sparge.options.rules import Budget, Dense, Selection, TopCdf, TopK
from sparge.policy import Policy
from sparge.stats import Stats, reset_stats

Kind = Literal["policy", "oracle", "dense", "sdpa"]

Reach = Callable[[Any, Policy], AbstractContextManager[None]]
"""Applies a policy to a model within a context."""

SDPA_KERNELS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
"""torch's kernels by their names in variants."""

AMOUNTS: dict[str, Callable[..., Selection]] = {"topk": Budget, "rows": TopK, "cdf": TopCdf}
"""Rules by the words that set how much they keep."""
SELECTION_FIELDS = frozenset(field.name for field in fields(Selection))
POLICY_FIELDS = frozenset(field.name for field in fields(Policy)) - {"sparsity"}


@dataclass(frozen=True)
class Variant:
    """One way to run a model's attention.

    Attributes:
        label: the words as written, or the path of a file; it names rows and curves.
        kind: "policy"; "oracle": the policy's rule on the true mass; "dense": `sparge.attention` over all blocks, where
            the policy would go sparse; "sdpa": torch's attention on another kernel.
        policy: the policy.
        kernel: of torch, for "sdpa".
        is_forced: the policy names a backend only to make short calls go sparse.
    """

    label: str
    kind: Kind
    policy: Policy
    kernel: str = ""
    is_forced: bool = False

    @property
    def asked(self) -> Policy:
        """The policy as written."""
        return replace(self.policy, backend="auto") if self.is_forced else self.policy

    @property
    def is_sparse(self) -> bool:
        """Whether blocks are skipped."""
        return self.kind in ("policy", "oracle")

    def forced(self, device: torch.device) -> Variant:
        """Return the same variant without a crossover: calls of any length go sparse."""
        if self.kind == "sdpa" or self.policy.backend != "auto":
            return self
        return replace(self, policy=replace(self.policy, backend=base.resolve("auto", device)), is_forced=True)

    @contextmanager
    def applied(self, model: Any, reach: Reach | None = None) -> Iterator[None]:
        """Run a model or pipeline this way within the context. The statistics are reset at its start.

        Args:
            reach: applies the policy to the model; `enabled` by default.
        """
        reset_stats()
        with ExitStack() as stack:
            if self.kind == "sdpa":
                from torch.nn.attention import SDPBackend, sdpa_kernel

                stack.enter_context(sdpa_kernel(getattr(SDPBackend, SDPA_KERNELS[self.kernel])))
            else:
                stack.enter_context((reach or enabled)(model, self.policy))
                if self.kind != "policy":
                    stack.enter_context(substituted(self.attend))
            try:
                yield
            except RuntimeError as error:
                if self.kind == "sdpa" and "No available kernel" in str(error):
                    message = f"variant {self.label!r}: expected a kernel of torch for this model, got none here"
                    raise NotImplementedError(message) from error
                raise

    def attend(
        self, layer: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **call: Any
    ) -> Tensor:
        """Compute the attention of this variant for sparse calls; a `Substitute` of `sparge.attention`."""
        if self.kind == "oracle":
            return _attend_by_true_mass(layer, query, key, value, attn_mask, **call)
        if self.kind == "dense":
            return _attend_to_all(layer, query, key, value, attn_mask, **call)
        return api.attention(query, key, value, attn_mask, **call)


@contextmanager
def enabled(model: Any, policy: Policy) -> Iterator[None]:
    """Apply `sparge.enable` within the context."""
    integrations.enable(model, policy)
    try:
        yield
    finally:
        integrations.disable(model)


def parse_variant(text: str) -> Variant:
    """Parse a variant given on the command line, in the syntax described at the top of this module.

    Raises:
        ValueError, TypeError: a word or a value is not among the expected ones.

    Example:
        >>> parse_variant("topk=0.25,score=mean,dense_first_steps=0.1").policy.to_json()
        '{"topk": 0.25, "score": "mean", "dense_first_steps": 0.1}'
        >>> parse_variant("dense,quantization=int8_fp8").kind
        'dense'
        >>> parse_variant("top=1")
        Traceback (most recent call last):
        ...
        ValueError: variant 'top=1': expected words among cdf, dense, oracle, profile, rows, sdpa, topk or ...
    """
    text = text.strip()
    is_profile = any(word.startswith("profile=") for word in words_of(text))
    if text.startswith("{") or (text.endswith(".json") and not is_profile):
        from sparge.profile import policy_of_json

        return Variant(text, "policy", policy_of_json(text if text.startswith("{") else _read(text)))
    bare: list[Kind] = []
    values: dict[str, Any] = {}
    for word in words_of(text):
        name, equals, value = word.partition("=")
        known = name in ("oracle", "dense") if not equals else name in (*AMOUNTS, "sdpa", "profile", *_settable())
        if not known:
            raise ValueError(
                f"variant {text!r}: expected words among cdf, dense, oracle, profile, rows, sdpa, topk or fields of a "
                f"policy, got {name!r}"
            )
        if name in (values if equals else bare):
            raise ValueError(f"variant {text!r}: expected {name} once, got it twice")
        if equals:
            values[name] = _value(value)
        else:
            bare.append(cast(Kind, name))
    return _of_words(text, bare, values)


def _settable() -> frozenset[str]:
    return POLICY_FIELDS | SELECTION_FIELDS


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"variant {path!r}: expected a file that can be read, got {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return float(text) if re.fullmatch(r"-?\.\d+", text) else text  # .5 is not JSON


def _of_words(text: str, bare: list[Kind], values: dict[str, Any]) -> Variant:
    """Return the variant of words without and with a value."""
    kinds: list[Kind] = [*bare, "sdpa"] if "sdpa" in values else bare
    amounts = [name for name in AMOUNTS if name in values]
    if len(kinds) + len(amounts) == 0 or len(kinds) > 1 or len(amounts) > 1:
        raise ValueError(
            f"variant {text!r}: expected one of topk=, rows=, cdf=, dense, sdpa=, or oracle with one of the first three"
        )
    kind: Kind = kinds[0] if kinds else "policy"
    if "profile" in values and (kind != "policy" or amounts != ["topk"]):
        raise ValueError(f"variant {text!r}: expected topk= and fields of a policy beside profile=")
    if (kind in ("dense", "sdpa") and amounts) or (kind == "oracle" and not amounts):
        raise ValueError(
            f"variant {text!r}: expected an amount (topk=, rows= or cdf=) where blocks are chosen, and only there"
        )
    if kind == "sdpa":
        kernel = values.pop("sdpa")
        if kernel not in SDPA_KERNELS or values:
            raise ValueError(f"variant {text!r}: expected sdpa= alone, one of {', '.join(SDPA_KERNELS)}")
        return Variant(text, kind, Policy(), kernel)
    unused = sorted({"similarity_threshold", "pv_threshold"} & set(values)) if kind == "oracle" else []
    if unused:
        raise ValueError(f"variant {text!r}: expected no {unused[0]} beside oracle, which chooses by mass alone")
    if "profile" in values:
        return Variant(text, "policy", _of_profile(text, values))
    rules = {name: values.pop(name) for name in list(values) if name in SELECTION_FIELDS}
    if amounts and (rules or amounts != ["topk"]):
        values["sparsity"] = AMOUNTS[amounts[0]](values.pop(amounts[0]), **rules)
    return Variant(text, kind, Policy(**values))


def _of_profile(text: str, values: dict[str, Any]) -> Policy:
    """Return the policy of a profile with a mean density of ``topk``; other words are fields of a policy."""
    from sparge.profile import Profile

    profile = Profile.from_json(_read(str(values.pop("profile"))))
    others = sorted(set(values) & (SELECTION_FIELDS | {"budgets"}))
    if others:
        raise ValueError(f"variant {text!r}: expected topk= and fields of a policy beside profile=, got {others[0]}")
    allocated = profile.at(density=Policy(topk=values.pop("topk")).topk).policy
    return replace(allocated, **values)


def _attend_by_true_mass(
    layer: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **call: Any
) -> Tensor:
    """Run `sparge.attention` on the blocks that hold most attention; with a mask or a window, on all blocks."""
    if attn_mask is not None or call.get("window") is not None:
        return _attend_to_all(layer, query, key, value, attn_mask, **call)
    del call["score"]
    rules = {name: call.pop(name, None) for name in ("sparsity", "always_keep", "exact_queries")}
    mask = true_mask(query, key, is_causal=call.pop("is_causal"), scale=call["scale"], **rules)
    output = api.block_sparse_attention(query, key, value, mask, **call)
    assert isinstance(output, Tensor)
    return output


def _attend_to_all(
    layer: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **call: Any
) -> Tensor:
    """Run `sparge.attention` over all blocks, in the quantization of the call."""
    del layer
    call |= {"sparsity": Dense(), "always_keep": None}
    return api.attention(query, key, value, attn_mask, **call)


@dataclass(frozen=True)
class Ran:
    """Counts of a variant's sparse and dense attention calls.

    Attributes:
        density: kept blocks as a share of the visible ones over all sparse calls; None without sparse calls.
        sparse, dense: numbers of calls.
        reasons: numbers of calls by decision.
    """

    density: float | None
    sparse: int
    dense: int
    reasons: dict[str, int]

    @classmethod
    def of(cls, stats: Stats) -> Ran:
        return cls(stats.density, stats.sparse, stats.dense, stats.reasons)


def share_computed(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the share of the visible blocks that was computed in runs with the fields of `Ran`.

    Calls that rules about steps and layers keep dense count in full. Other dense calls (too short, cross-attention) do
    not count. The share is None if no call counts.
    """
    sparse = sum(row["sparse"] for row in rows)
    words = [describe(reason, is_quantized=bits) for reason in POLICY_RULES for bits in (False, True)]
    by_rule = sum(row["reasons"].get(word, 0) for row in rows for word in words)
    if not sparse + by_rule:
        return None
    kept = sum(row["density"] * row["sparse"] for row in rows if row["density"] is not None)
    return float((kept + by_rule) / (sparse + by_rule))


def kept_everything(density: float | None) -> str:
    """Return a remark about a sparse variant that skipped no block; "" for others.

    Example:
        >>> kept_everything(0.5)
        ''
    """
    if density is None or density < 0.9995:
        return ""
    return (
        "every block was kept, so its figures do not show the effect of sparsity: a query block keeps at least "
        "min_blocks, with rows= and cdf= 16 by default, which are 1024 tokens"
    )


def family_of(label: str) -> str:
    """Return the name of the curve of a variant: its label without the amount it keeps.

    Example:
        >>> family_of("topk=0.25,score=mean"), family_of("cdf=.9"), family_of("dense,quantization=int8_fp8")
        ('topk, score=mean', 'cdf', 'dense, quantization=int8_fp8')
    """
    words = (word.partition("=") for word in words_of(label))
    return ", ".join(name if name in AMOUNTS else f"{name}{equals}{value}" for name, equals, value in words)


def is_oracle(label: str) -> bool:
    """Return whether a label names an oracle. Its time is meaningless, because it first computes all attention."""
    return "oracle" in words_of(label)


def words_of(text: str) -> list[str]:
    """Return the words between commas outside of brackets.

    Example:
        >>> words_of("topk=0.5, dense_layers=[0,-1]")
        ['topk=0.5', 'dense_layers=[0,-1]']
    """
    words, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words if word.strip()]


def spaced(label: str) -> str:
    """Return a label that can be broken between its words.

    Example:
        >>> spaced("topk=0.5,dense_layers=[0,-1]")
        'topk=0.5, dense_layers=[0,-1]'
    """
    return ", ".join(words_of(label))


def check_labels(variants: Sequence[Variant]) -> None:
    """Raise unless there is a variant, and all have different labels."""
    labels = [variant.label for variant in variants]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"variants: expected one or more, with different names, got {labels}")
