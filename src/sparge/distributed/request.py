"""Resolve a call over several ranks: arguments -> `Request`, which is the same on every rank.

All ranks choose between dense and sparse by the sizes of the largest part. If each rank used its own sizes, ranks could
choose differently and hang.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from sparge.call import Call
from sparge.dispatch import call_cache, ops, reasons
from sparge.dispatch.gradients import needs_grad_of
from sparge.dispatch.reasons import Reason
from sparge.dispatch.resolve import Options, check_tensors
from sparge.dispatch.resolve import resolve as resolve_options
from sparge.distributed.agreement import TOKENS, check_same_options
from sparge.distributed.balance import HeadBalance
from sparge.distributed.mesh import Mesh
from sparge.distributed.sharding import SHARDINGS, TokenSharding, token_sharding
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_Q, Shape
from sparge.options.checks import check_choice
from sparge.options.rules import Selection, make_unchecked

Made = TypeVar("Made")
COMPARED = "compared"
"""Cache entry of calls that cannot be cached, but whose options were already compared with the other ranks."""
MODES_OF_ARGUMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "balance": (None, ("ulysses",)),
    "kv_heads_at_once": (None, ("gather",)),
    "sharding": ("contiguous", ("gather", "ring")),
}
"""For each argument that only some modes support, its default and these modes."""


class TokenSplit(NamedTuple):
    """How the tokens of a call are split over ranks: the arguments of `context_parallel_attention`.

    Attributes:
        lengths: number of tokens on every rank; None for equal numbers.
    """

    mode: str
    mesh: Mesh
    lengths: Any
    sharding: str
    kv_heads_at_once: int | None
    balance: HeadBalance | None

    @property
    def key(self) -> Hashable:
        """Cache key of everything that a request depends on, except the options and this rank's tensors."""
        mesh, has_balance = self.mesh, self.balance is not None
        return self.mode, mesh.name, mesh.rank, self.lengths, self.sharding, self.kv_heads_at_once, has_balance


@dataclass(frozen=True)
class Request:
    """A resolved call over several ranks. Calls of the same kind share a request.

    Attributes:
        call: the whole call. Its sparsity is `Dense` if it runs dense.
        reason: why the call runs dense; None if it is sparse.
        lengths: number of tokens on each rank that exchanges heads with this rank.
        sharding: the tokens of each outer rank.
        memo: results of `cached`.
    """

    call: Call
    reason: Reason | None
    backend: str
    requested_backend: str
    lengths: tuple[int, ...]
    sharding: TokenSharding
    return_lse: bool
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)

    def cached(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the cached result for a key; ``make`` computes it in the first call."""
        if key not in self.memo:
            self.memo[key] = make()
        return cast(Made, self.memo[key])

    @property
    def dense_label(self) -> str:
        """The label of a dense call in `sparge.stats`; empty for a sparse call."""
        return "" if self.reason is None else reasons.describe(self.reason)

    def for_heads(self, heads: Tensor | slice) -> Request:
        """Return the request with per-head options of some heads only. The shape of the call does not change."""
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
    query: Tensor, key: Tensor, value: Tensor, options: Options, split: TokenSplit, attn_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Request]:
    """Check a call that is split over ranks, and compare its options with those of the other ranks.

    Requests of repeated calls are cached. Options and mask are those of the whole call. Ranks compare options if the
    kind of call is new, so it must be new on all of them: tensors must also agree in ``requires_grad``, and calls in
    inference mode.

    Returns:
        The heads-first tensors of this rank, and the request.
    """
    known: Request | str | None
    kind, known = call_cache.find(query, key, value, attn_mask, options, split.key)
    if isinstance(known, Request):
        if options.layout == "NHD":
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return query, key, value, known
    outcome: str | Exception
    try:
        merges_by_lse = split.mode == "ring"
        if merges_by_lse and options.quantization == "int8_fp8_fast":
            raise NotImplementedError(
                "quantization: expected 'int8_fp8', 'int8_fp16' or 'none' if parts are merged by their LSE (it is "
                f"inaccurate if P is computed without exp2), got {options.quantization!r}"
            )
        tensors = check_tensors(query, key, value, options)
        lengths, sharding = _check_split(split, tensors.shape, attn_mask)
        whole = replace(tensors.shape, q_len=sharding.total, kv_len=sharding.total)
        ranks = split.mesh.ulysses.size
        largest = replace(
            whole, heads=whole.heads // ranks, kv_heads=max(whole.kv_heads // ranks, 1), q_len=max(sharding.lengths)
        )
        resolved = resolve_options(tensors._replace(shape=whole), attn_mask, options, largest=largest)
        call = resolved.call
        if merges_by_lse:
            quantization = "int8_fp8" if call.quantization == "int8_fp8_fast" else call.quantization
            call = replace(call, quantization=quantization, exact_lse=True)
        request = Request(
            call, resolved.reason, resolved.backend, options.backend, lengths, sharding, options.return_lse
        )
        outcome = f"{request.backend}, {call.quantization}, {request.dense_label or 'sparse'}"
    except (TypeError, ValueError, NotImplementedError) as error:
        outcome = error
    if known is None and all(isinstance(tensor, Tensor) and tensor.ndim == 4 for tensor in (query, key, value)):
        compared = {**_traits(query, key, value, attn_mask, options.layout, split), **options._asdict()}
        check_same_options(split.mesh, compared, query.device, outcome)
    if isinstance(outcome, Exception):
        raise outcome
    if known is None:
        is_repeatable = resolved.is_repeatable and attn_mask is None and not call.has_per_head_numbers
        call_cache.remember(kind, request if is_repeatable else COMPARED)
    return tensors.query, tensors.key, tensors.value, request


def _traits(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any, layout: str, split: TokenSplit
) -> dict[str, Any]:
    """Return the properties of the tensors and of their split that must be equal on all ranks, by name."""
    dim = 2 if layout == "NHD" else 1
    traits = {
        **split._asdict(),
        TOKENS: query.shape[3 - dim] if split.lengths is None else None,
        "query heads": query.shape[dim],
        "key heads": key.shape[dim],
    }
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        traits[f"{name} dtype"], traits[f"{name} head_dim"] = str(tensor.dtype), tensor.shape[3]
        traits[f"{name} batch"], traits[f"{name} device"] = tensor.shape[0], tensor.device.type
    is_mask = isinstance(attn_mask, Tensor)
    traits["attn_mask"] = f"{attn_mask.dtype} {tuple(attn_mask.shape)}" if is_mask else type(attn_mask).__name__
    traits["gradients"] = needs_grad_of(query, key, value)
    return traits


def _check_split(split: TokenSplit, local: Shape, attn_mask: Tensor | None) -> tuple[tuple[int, ...], TokenSharding]:
    """Check a split of tokens, and return ``lengths`` and ``sharding`` of the `Request`."""
    mode, mesh, at_once = split.mode, split.mesh, split.kv_heads_at_once
    for name, (default, modes) in MODES_OF_ARGUMENTS.items():
        value = getattr(split, name)
        if value != default and mode not in modes:
            raise ValueError(f'{name}: expected {default!r} with mode="{mode}", got {value!r}')
    if attn_mask is not None and mode == "ring":
        raise NotImplementedError('attn_mask: expected None with mode="ring", got a mask')
    if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1):
        raise ValueError(f"kv_heads_at_once: expected None or an int above 0, got {at_once!r}")
    if local.q_len != local.kv_len:
        raise ValueError(f"key: expected as many tokens as the query has, {local.q_len}, got {local.kv_len}")
    lengths = _check_lengths(split.lengths, local.q_len, mesh)
    check_choice("sharding", split.sharding, SHARDINGS)
    sharding = token_sharding(mesh.outer_lengths(lengths), split.sharding)
    if mode == "ring" and not sharding.has_whole_blocks:
        raise ValueError(
            f'mode="ring": expected a multiple of {BLOCK_Q} tokens on every rank but the last ({2 * BLOCK_Q} with '
            f'"head_tail"; use `split_lengths`, or mode="gather" for any lengths), got {sharding.lengths}'
        )
    heads, kv_heads, ranks = local.heads, local.kv_heads, mesh.ulysses.size
    if heads % ranks:
        raise ValueError(
            f"query: expected a multiple of {ranks} heads for {ranks} Ulysses ranks, got {heads} (gather and ring "
            "support any number of heads; in a mesh, only the Ulysses ranks divide heads)"
        )
    if kv_heads % ranks and ranks % kv_heads:  # several ranks may share a K/V head
        raise ValueError(f"key: expected a multiple or a divisor of {ranks} heads for {ranks} ranks, got {kv_heads}")
    _check_key_mask(attn_mask, sharding.total)
    return mesh.ulysses_lengths(lengths), sharding


def _check_lengths(lengths: Sequence[int] | None, tokens: int, mesh: Mesh) -> tuple[int, ...]:
    """Return the number of tokens on every rank. Default: equal numbers."""
    if lengths is None:
        return (tokens,) * mesh.size
    try:
        checked = tuple(operator.index(length) for length in lengths)
    except TypeError as error:
        raise TypeError(f"lengths: expected an int for each of {mesh.size} ranks, got {lengths!r}") from error
    if len(checked) != mesh.size or min(checked) < 1:
        raise ValueError(f"lengths: expected a number above 0 for each of {mesh.size} ranks, got {checked}")
    if checked[mesh.rank] != tokens:
        raise ValueError(
            f"lengths: expected {tokens} for rank {mesh.rank}, the number of its tokens, got {checked[mesh.rank]}"
        )
    return checked


def _check_key_mask(attn_mask: Any, total: int) -> None:
    """Raise unless a mask is None or a bool mask over keys, which is the same for the queries of every rank."""
    is_tensor = isinstance(attn_mask, Tensor)
    if attn_mask is None or (
        is_tensor and attn_mask.dtype == torch.bool and attn_mask.ndim == 4 and attn_mask.shape[1:3] == (1, 1)
    ):
        return
    got = f"{attn_mask.dtype} {tuple(attn_mask.shape)}" if is_tensor else type(attn_mask)
    raise NotImplementedError(
        f"attn_mask: expected None or a bool mask of all keys, (B, 1, 1, {total}), equal on all ranks, got {got}"
    )


def rule_for_heads(rule: Selection, heads: Tensor | slice) -> Selection:
    """Select heads of the per-head values of a rule."""
    values = {part.name: _for_heads(getattr(rule, part.name), heads) for part in fields(rule)}
    return make_unchecked(type(rule), **values)


def _for_heads(value: Any, heads: Tensor | slice) -> Any:
    """Select heads of a tensor; return any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(heads, Tensor):
        value = value.to(heads.device)  # values may be on the host, but the order of heads is on the device
    return value.flatten()[heads]
