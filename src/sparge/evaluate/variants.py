"""Variants that an evaluation compares with the dense model: policies, and references such as oracles.

topk=0.25                               a policy: fields separated by commas
rows=0.25                               keep a quarter of every query block (`TopK`) instead of a budget per call
cdf=0.95,score=mean,quantization=none   another rule, score and quantization
topk=0.25,oracle                        select blocks by their true attention mass: the upper bound for any score
dense,quantization=int8_fp8             compute all blocks, quantized
topk=0.25,dense_first_steps=5,dense=8bit   a policy whose dense steps are quantized
sdpa=math                               the dense model on another kernel of torch: rounding noise
policy.json                             a file written by Policy.to_json or Profile.save (per-layer budgets)
profile=profile.json,topk=0.25          per-layer budgets, allocated for another mean
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sparge import api, integrations
from sparge.backends import base
from sparge.evaluate.capture import true_mask
from sparge.integrations.calls import substituted
from sparge.options.rules import Budget, Dense, Selection, TopCdf, TopK
from sparge.policy import Policy
from sparge.stats import reset_stats, stats

Kind = Literal["policy", "oracle", "dense", "sdpa"]

Apply = Callable[[Any, Policy], AbstractContextManager[None]]
"""Applies a policy to a model within a context."""

SDPA_KERNELS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
"""torch's names of its SDPA kernels, keyed by their names in variants."""

RULES: dict[str, Callable[..., Selection]] = {"topk": Budget, "rows": TopK, "cdf": TopCdf}
"""Rules, keyed by the word that sets the amount of blocks they keep."""
RULE_FIELDS = frozenset(field.name for field in fields(Selection))
POLICY_FIELDS = frozenset(field.name for field in fields(Policy)) - {"sparsity"}


@dataclass(frozen=True)
class Variant:
    """One way to run a model's attention.

    Attributes:
        label: the text of the variant, or the path of its file; it identifies rows and curves.
        kind: "policy"; "oracle": the policy's rule on the true mass; "dense": `sparge.attention` over all blocks of the
            calls that the policy would run sparse; "sdpa": torch's attention on another kernel.
        kernel: the kernel of torch for "sdpa".
    """

    label: str
    kind: Kind
    policy: Policy
    kernel: str = ""

    @property
    def is_sparse(self) -> bool:
        """Whether blocks are skipped."""
        return self.kind in ("policy", "oracle")

    def forced(self, device: torch.device) -> Variant:
        """Return the variant without a crossover, so that calls of any length run sparse."""
        if self.kind == "sdpa" or self.policy.backend != "auto":
            return self
        return replace(self, policy=replace(self.policy, backend=base.resolve("auto", device)))

    @contextmanager
    def applied(self, model: Any, apply: Apply | None = None) -> Iterator[None]:
        """Run a model or pipeline as this variant within the context. The statistics are reset at the start.

        Args:
            apply: applies the policy to the model; `enabled` by default.
        """
        reset_stats()
        with ExitStack() as stack:
            if self.kind == "sdpa":
                from torch.nn.attention import SDPBackend, sdpa_kernel

                stack.enter_context(sdpa_kernel(getattr(SDPBackend, SDPA_KERNELS[self.kernel])))
            else:
                stack.enter_context((apply or enabled)(model, self.policy))
                if self.kind != "policy":
                    stack.enter_context(substituted(self.attend))
            try:
                yield
            except RuntimeError as error:
                if self.kind == "sdpa" and "No available kernel" in str(error):
                    message = f"variant {self.label!r}: expected a kernel of torch that supports this model, got none"
                    raise NotImplementedError(message) from error
                raise

    def attend(
        self, layer: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **call: Any
    ) -> Tensor:
        """Compute a call that the policy would run sparse; a `Substitute` for `sparge.attention`.

        An oracle selects blocks by their true mass, but computes all blocks of calls with a mask or a window. Variants
        of kind "dense" compute all blocks.
        """
        del layer
        if self.kind == "oracle" and attn_mask is None and call.get("window") is None:
            del call["score"]
            rules = {name: call.pop(name, None) for name in ("sparsity", "always_keep", "exact_queries")}
            mask = true_mask(query, key, is_causal=call.pop("is_causal"), scale=call["scale"], **rules)
            output = api.block_sparse_attention(query, key, value, mask, **call)
            assert isinstance(output, Tensor)
            return output
        if self.kind != "policy":
            call |= {"sparsity": Dense(), "always_keep": None}
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
        ValueError, TypeError: a word is unknown, or a value is invalid.

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
    words = words_of(text)
    if text.startswith("{") or (text.endswith(".json") and not any(word.startswith("profile=") for word in words)):
        from sparge.profile import policy_of_json

        return Variant(text, "policy", policy_of_json(text if text.startswith("{") else _read(text)))
    values: dict[str, Any] = {}
    flags: list[Any] = []

    def check(is_met: bool, message: str) -> None:
        if not is_met:
            raise ValueError(f"variant {text!r}: expected {message}")

    for word in words:
        name, equals, value = word.partition("=")
        known = {*RULES, "sdpa", "profile", *POLICY_FIELDS, *RULE_FIELDS} if equals else {"oracle", "dense"}
        listed = "cdf, dense, oracle, profile, rows, sdpa, topk"
        check(name in known, f"words among {listed} or fields of a policy, got {name!r}")
        check(name not in (values if equals else flags), f"{name} once, got it twice")
        if equals:
            values[name] = _value(value)
        else:
            flags.append(name)
    kinds = [*flags, *(["sdpa"] if "sdpa" in values else [])]
    kind: Kind = kinds[0] if kinds else "policy"
    amounts = [name for name in RULES if name in values]
    one = "one of topk=, rows=, cdf=, dense, sdpa=, or oracle with one of the first three"
    check(bool(kinds or amounts) and len(kinds) <= 1 and len(amounts) <= 1, one)
    with_profile = "topk= and policy fields together with profile="
    check("profile" not in values or (kind == "policy" and amounts == ["topk"]), with_profile)
    selects = kind in ("policy", "oracle")
    check(selects == bool(amounts), "an amount (topk=, rows= or cdf=) where blocks are selected, and only there")
    if kind == "sdpa":
        kernel = values.pop("sdpa")
        check(kernel in SDPA_KERNELS and not values, f"sdpa= alone, one of {', '.join(SDPA_KERNELS)}")
        return Variant(text, kind, Policy(), kernel)
    for name in ("pv_threshold", "similarity_threshold"):
        check(kind != "oracle" or name not in values, f"no {name} together with oracle, which selects only by mass")
    rule_values = {name: values.pop(name) for name in list(values) if name in RULE_FIELDS}
    if "profile" in values:
        from sparge.profile import Profile

        others = sorted({*rule_values, *({"budgets"} & set(values))})
        check(not others, f"{with_profile}, got {', '.join(others)}")
        profile = Profile.from_json(_read(str(values.pop("profile"))))
        allocated = profile.at(density=Policy(topk=values.pop("topk")).topk).policy
        return Variant(text, kind, replace(allocated, **values))
    if amounts and (rule_values or amounts != ["topk"]):
        values["sparsity"] = RULES[amounts[0]](values.pop(amounts[0]), **rule_values)
    return Variant(text, kind, Policy(**values))


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


def stats_of_run() -> dict[str, Any]:
    """Return the fields of `sparge.stats` that rows contain: density, and numbers of calls by decision."""
    run = stats()
    return {"density": run.density, "sparse": run.sparse, "dense": run.dense, "reasons": run.reasons}


def family_of(label: str) -> str:
    """Return the name of the curve of a variant: its label without the amount it keeps.

    Example:
        >>> family_of("topk=0.25,score=mean"), family_of("cdf=.9"), family_of("dense,quantization=int8_fp8")
        ('topk, score=mean', 'cdf', 'dense, quantization=int8_fp8')
    """
    words = (word.partition("=") for word in words_of(label))
    return ", ".join(name if name in RULES else f"{name}{equals}{value}" for name, equals, value in words)


def is_oracle(label: str) -> bool:
    """Return whether a label belongs to an oracle, whose time is meaningless: it computes all attention first."""
    return "oracle" in words_of(label)


def words_of(text: str) -> list[str]:
    """Split a text at commas outside of brackets.

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
    """Return a label with spaces between its words, so that lines can break there.

    Example:
        >>> spaced("topk=0.5,dense_layers=[0,-1]")
        'topk=0.5, dense_layers=[0,-1]'
    """
    return ", ".join(words_of(label))


def check_labels(variants: Sequence[Variant]) -> None:
    """Raise ValueError if there is no variant, or if two variants have the same label."""
    labels = [variant.label for variant in variants]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"variants: expected one or more with different labels, got {labels}")
