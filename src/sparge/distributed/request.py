"""Resolve a call over several ranks: arguments -> `Request`, which is the same on every rank.

All ranks choose between dense and sparse by the sizes of the largest part. If each rank used its own sizes, ranks could
choose differently and hang.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from sparge.call import Call
from sparge.dispatch import call_cache, ops, reasons
from sparge.dispatch.gradients import needs_grad_of
from sparge.dispatch.reasons import Reason
from sparge.dispatch.resolve import Options, check_tensors
from sparge.dispatch.resolve import resolve as resolve_options
from sparge.distributed.agreement import check_same_options
from sparge.distributed.communicator import Communicator
from sparge.distributed.sharding import TokenSharding
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape
from sparge.options.common import RENAMED_QUANTIZATIONS, PerHead
from sparge.options.rules import Selection, make_unchecked

Made = TypeVar("Made")
COMPARED = "compared"
"""Cache entry of calls that cannot be cached, but whose options were already compared with the other ranks."""


class Sizes(NamedTuple):
    """Sizes of a call that is split over ranks.

    Attributes:
        whole: the sizes that the options refer to.
        largest: the sizes of the largest part that a rank computes.
        lengths: number of tokens on each rank that exchanges heads with this rank.
        sharding: the tokens of each rank that gathers or sends K and V.
    """

    whole: Shape
    largest: Shape
    lengths: tuple[int, ...] = ()
    sharding: TokenSharding | None = None


class Split(Protocol):
    """How a call is split over ranks.

    Attributes:
        ranks: the ranks of the call.
        merges_by_lse: whether outputs of several parts are merged by their LSE.
    """

    @property
    def ranks(self) -> Communicator: ...

    @property
    def merges_by_lse(self) -> bool: ...

    @property
    def key(self) -> Hashable:
        """Cache key of everything that a request depends on, except the options and this rank's tensors."""

    def compared(self, query: Tensor, key: Tensor, layout: str) -> Mapping[str, Any] | None:
        """Return the values, by name, that must be equal on all ranks besides the options; None: compare nothing."""

    def sizes(self, local: Shape, attn_mask: Tensor | None) -> Sizes:
        """Check the split, and return the sizes of the call."""


@dataclass(frozen=True)
class Request:
    """A resolved call over several ranks. Calls of the same kind share a request.

    Attributes:
        call: the call with the sizes ``Sizes.whole``. Its sparsity is `Dense` if it runs dense.
        reason: why the call runs dense; None if it is sparse.
        memo: results of `cached`.
    """

    call: Call
    reason: Reason | None
    backend: str
    requested_backend: str
    sizes: Sizes
    return_lse: bool
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the cached result for a key; ``make`` computes it in the first call."""
        if key not in self.memo:
            self.memo[key] = make()
        return cast(Made, self.memo[key])

    @property
    def sharding(self) -> TokenSharding:
        """The tokens of each rank that gathers or sends K and V."""
        assert self.sizes.sharding is not None
        return self.sizes.sharding

    @property
    def dense_label(self) -> str:
        """The label of a dense call in `sparge.stats`; empty for a sparse call."""
        return "" if self.reason is None else reasons.describe(self.reason)

    def for_heads(self, heads: Tensor | slice) -> Request:
        """Select heads of the per-head options. The shape does not change."""
        call = self.call
        if not call.has_per_head_numbers:
            return self
        rule = rule_for_heads(call.sparsity, heads) if isinstance(call.sparsity, Selection) else call.sparsity
        call = replace(call, sparsity=rule, pv_threshold=_for_heads(call.pv_threshold, heads))
        return replace(self, call=call, memo={})

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        """Return the output and the LSE of a part, dense without a mask. Unless requested, the LSE may be empty."""
        if mask is not None:
            return ops.attend(query, key, value, mask, call, self.backend)
        backend, with_lse = self.requested_backend, self.return_lse
        return ops.dense(query, key, value, call, backend, with_lse=with_lse, label=self.dense_label)


def resolve(
    query: Tensor, key: Tensor, value: Tensor, options: Options, split: Split, attn_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Request]:
    """Check a call that is split over ranks, and compare its options with those of the other ranks.

    Repeated calls are looked up instead.

    Args:
        query, key, value: the tensors of this rank.
        options: the options of the whole call.
        split: how the call is split over ranks.
        attn_mask: mask of the whole call.

    Returns:
        The heads-first tensors and the request.
    """
    known: Request | str | None
    kind, known = call_cache.find(query, key, value, attn_mask, options, split.key)
    if isinstance(known, Request):
        if options.layout == "NHD":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return query, key, value, known
    outcome: str | Exception
    try:
        if split.merges_by_lse:
            _check_mergeable(options.quantization)
        tensors = check_tensors(query, key, value, options)
        sizes = split.sizes(tensors.shape, attn_mask)
        whole = tensors._replace(shape=sizes.whole)
        resolved = resolve_options(whole, attn_mask, options, largest=sizes.largest)
        call = resolved.call
        if split.merges_by_lse:
            quantization = "int8_fp8" if call.quantization == "int8_fp8_fast" else call.quantization
            call = replace(call, quantization=quantization, exact_lse=True)
        request = Request(call, resolved.reason, resolved.backend, options.backend, sizes, options.return_lse)
        outcome = f"{request.backend}, {call.quantization}, {request.dense_label or 'sparse'}"
    except (TypeError, ValueError, NotImplementedError) as error:
        outcome = error
    if known is None and all(isinstance(tensor, Tensor) and tensor.ndim == 4 for tensor in (query, key, value)):
        compared = split.compared(query, key, options.layout)
        if compared is not None:
            compared = {**compared, **options._asdict(), **_traits(query, key, value, attn_mask)}
            check_same_options(split.ranks, compared, query.device, outcome)
    if isinstance(outcome, Exception):
        raise outcome
    if known is None:
        is_repeatable = resolved.is_repeatable and attn_mask is None and not call.has_per_head_numbers
        call_cache.remember(kind, request if is_repeatable else COMPARED)
    return tensors.query, tensors.key, tensors.value, request


def _check_mergeable(quantization: Any) -> None:
    """Raise NotImplementedError for a quantization whose LSE is too inaccurate for merging."""
    if quantization in ("int8_fp8_fast", *RENAMED_QUANTIZATIONS):
        raise NotImplementedError(
            "quantization: expected 'int8_fp8', 'int8_fp16' or 'none' if parts are merged by their LSE (it is "
            f"inaccurate if P is computed without exp2), got {quantization!r}"
        )


def _traits(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any) -> dict[str, Any]:
    """Return the properties of the tensors that must be equal on all ranks, by name."""
    traits: dict[str, Any] = {}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        traits[f"{name} dtype"], traits[f"{name} head_dim"] = str(tensor.dtype), tensor.shape[3]
        traits[f"{name} batch"], traits[f"{name} device"] = tensor.shape[0], tensor.device.type
    is_mask = isinstance(attn_mask, Tensor)
    traits["attn_mask"] = f"{attn_mask.dtype} {tuple(attn_mask.shape)}" if is_mask else type(attn_mask).__name__
    traits["gradients"] = needs_grad_of(query, key, value)
    return traits


def rule_for_heads(rule: Selection, heads: Tensor | slice) -> Selection:
    """Select heads of the per-head values of a rule."""
    names = (rule.amount_field, "similarity_threshold", "pv_threshold")
    common = {name: getattr(rule, name) for name in ("min_blocks", "sink", "diagonal")}
    return make_unchecked(type(rule), **common, **{name: _for_heads(getattr(rule, name), heads) for name in names})


def _for_heads(value: PerHead | None, heads: Tensor | slice) -> PerHead | None:
    if not isinstance(value, Tensor):
        return value
    if isinstance(heads, Tensor):
        value = value.to(heads.device)  # values may be on the host, but the order of heads is on the device
    return value.flatten()[heads]
