"""The interface of a backend, and the choice of a backend for a device.

A backend is the object ``sparge.backends.<name>.BACKEND``. It is imported on first use, so neither this module nor
``import sparge`` needs Triton. Callers use the object and never compare its name.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.output_layout import gapless_strides, is_tokens_first
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.ordering import TokenOrder, order_of
from sparge.numerics.budget_allocation import RankPool
from sparge.numerics.merge import merge
from sparge.options.common import BACKENDS

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Crossover:
    """Sizes below which dense attention is faster. A call below any of them runs dense.

    Attributes:
        keys: number of keys of a sequence.
        causal_keys: number of keys of a causal sequence with as many queries as keys. If there are more keys than
            queries, it is compared with twice the mean number of visible keys per query.
        queries: number of queries of a sequence.
        scores: number of scores over all heads and the batch.
    """

    keys: int
    causal_keys: int
    queries: int
    scores: int


ALWAYS = Crossover(keys=0, causal_keys=0, queries=0, scores=0)
"""The crossover of a backend that runs sparse at every size."""
NEVER = Crossover(keys=2**62, causal_keys=2**62, queries=0, scores=0)
"""The crossover where sparse attention was not measured, or was never faster: calls of every size run dense."""


NO_RANKS = "prediction over several ranks: expected another backend, got {!r}"


class KeptColumns(NamedTuple):
    """The blocks to keep in a part of the keys, for `Backend.attend_part`.

    Attributes:
        masks: block masks over all keys, one for each consecutive piece of the queries.
        columns: the key blocks of the part: ranges of the key blocks of the whole sequence, in ascending order.
    """

    masks: Sequence[BlockMask]
    columns: tuple[slice, ...]


class PartialResult(NamedTuple):
    """Attention over the parts of the keys that were merged so far, for `Backend.attend_part`.

    Attributes:
        output, lse: (B, H, Sq, Dv) and (B, H, Sq) float32, updated in place.
        is_first: whether no part was merged yet; ``output`` and ``lse`` are then uninitialized.
    """

    output: Tensor
    lse: Tensor
    is_first: bool


class RecordedAttention(Protocol):
    """A recorded `Backend.attention` call that can be repeated on other tensors with the same metadata."""

    def run(self, inputs: Sequence[int]) -> tuple[Tensor, ...]:
        """Repeat the call on the current device and stream, and return output and LSE.

        A packed call writes to its output and LSE, and returns an empty tuple.

        Args:
            inputs: addresses of query, key and value, followed by those that the call has: the mask, the totals, the
                three lists of a given block mask, and the output and LSE of a packed call. All addresses are distinct
                multiples of 16.
        """

    def run_without_lse(self, inputs: Sequence[int]) -> Tensor:
        """Repeat the call as `run` does, but return the output only."""


class Backend(ABC):
    """One implementation of sparse attention.

    A subclass must implement `unavailable_reason`, `crossover`, `predict` and `attend`. Other methods have defaults
    that call these. Prediction over several ranks also needs `summarize_keys`, `candidates` and `choose_together`.

    Attributes:
        name: the value of ``backend=``.
        summary: a description in a few words.
        quantizations: the quantizations that are supported on at least one device.
        packs: whether the backend supports packed calls, in which sequences of unequal lengths run together
            (`Call.segments`). Calls with a similarity threshold are never packed.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    quantizations: ClassVar[tuple[str, ...]]
    packs: ClassVar[bool] = False

    # Supported devices and calls

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """Return why the backend does not support a device, as "expected X, got Y"; None if the device is supported."""

    def why_not_auto(self, device: torch.device) -> str | None:
        """Return why "auto" never selects the backend on a device; None if "auto" may select it."""
        return self.unavailable_reason(device)

    def quantization_unavailable_reason(self, quantization: str, device: torch.device, *, has_mask: bool) -> str | None:  # noqa: ARG002
        """Return why the backend does not support a quantization on a supported device; None if it does."""
        if quantization in self.quantizations:
            return None
        supporting = [repr(name) for name in BACKENDS if quantization in get(name).quantizations]
        return f"expected backend {' or '.join(supporting)}, got {self.name!r}"

    def fastest_quantization(self, device: torch.device, *, has_mask: bool) -> str:  # noqa: ARG002
        """Return the quantization that "auto" selects on a device."""
        return "none"

    @abstractmethod
    def crossover(self, device_type: str, dtype: torch.dtype) -> Crossover:
        """Return the measured sizes from which sparse attention is faster than dense attention."""

    def crossover_under_mask(self, device_type: str) -> Crossover:  # noqa: ARG002
        """Return `crossover` for calls with a full bool mask; `NEVER` if it was not measured."""
        return NEVER

    def serving(self, call: Call, dtype: torch.dtype) -> Backend:  # noqa: ARG002
        """Return the backend that computes a call: this one, or another one to which it delegates the call."""
        return self

    def portable(self) -> Backend:
        """Return the backend for packs of short dense sequences, which are read in place without copies."""
        return self

    # The two stages

    @abstractmethod
    def predict(self, query: Tensor, key: Tensor, call: Call) -> BlockMask:
        """Predict which blocks of the attention map to compute."""

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute attention over the kept blocks.

        Args:
            totals: int64 (3,), counters to which the call adds: kept blocks, visible blocks, and halves of kept blocks
                (64 queries x 64 keys) whose P V the threshold skipped. If the second half of a query block has no
                queries, it counts as skipped whenever the first half is. Means are not counted.

        Returns:
            Output (B, H, Sq, Dv) in the query's dtype and natural-log LSE (B, H, Sq) float32.
        """

    # Whole calls

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        totals: Tensor | None = None,
        order: TokenOrder | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run `predict`, then `attend`. Backends override this to share passes over K between the two.

        Args:
            order: order in which attention is computed. The output is moved back to the original order, and is
                tokens-first in memory. The LSE stays in the new order.
        """
        if order is None:
            return self.attend(query, key, value, self.predict(query, key, call), call, totals=totals)
        tensors = order_of(order.grid, order.name, query.device)
        query, key, value = self.move_all((query, key, value), tensors.permutation, order.start)
        output, lse = self.attention(query, key, value, call, totals=totals)
        (output,) = self.move_all((output,), tensors.inverse, order.start, tokens_first=True)
        return output, lse

    def dense(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        with_lse: bool,  # noqa: ARG002
        may_use_torch: bool,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Compute attention over every visible block. The call is dense: it has no rule and no threshold.

        Args:
            with_lse: whether the caller uses the LSE, which may otherwise be undefined.
            may_use_torch: whether torch's own kernels may compute the call where they are faster, because the caller
                did not name a backend.
        """
        return self.attend(query, key, value, self.predict(query, key, call), call)

    def dense_is_sdpa(self, query: Tensor, call: Call) -> bool:  # noqa: ARG002
        """Return whether `dense` without an LSE passes the unchanged tensors to torch's SDPA."""
        return False

    def move_all(
        self, tensors: Sequence[Tensor], permutation: Tensor, start: int, *, tokens_first: bool | None = None
    ) -> tuple[Tensor, ...]:
        """Return copies of tensors (B, H, S, D) with their tokens from ``start`` on permuted.

        Args:
            tokens_first: whether the copies have tokens or heads first in memory; None keeps each tensor's layout.
        """
        stop = start + len(permutation)
        results = []
        for tokens in tensors:
            first = is_tokens_first(tokens) if tokens_first is None else tokens_first
            strides = gapless_strides(tokens.shape, tokens_first=first)
            moved = torch.empty_strided(tokens.shape, strides, dtype=tokens.dtype, device=tokens.device)
            moved[:, :, :start] = tokens[:, :, :start]
            moved[:, :, start:stop] = tokens[:, :, start:stop].index_select(2, permutation)
            moved[:, :, stop:] = tokens[:, :, stop:]
            results.append(moved)
        return tuple(results)

    # Repeated calls

    def recorded_attention(
        self,
        query: Tensor,  # noqa: ARG002
        key: Tensor,  # noqa: ARG002
        value: Tensor,  # noqa: ARG002
        call: Call,  # noqa: ARG002
        *,
        totals: Tensor | None,  # noqa: ARG002
        blocks: BlockMask | None = None,  # noqa: ARG002
        order: TokenOrder | None = None,  # noqa: ARG002
    ) -> RecordedAttention | None:
        """Return the recording of an earlier call with the same metadata; None if there is none.

        With ``blocks``, it is a recording of `attend`. For a dense call that torch did not compute, it is a recording
        of `dense`. Otherwise, it is a recording of `attention`.
        """
        return None

    def is_overridden(self) -> bool:
        """Return whether this thread overrides kernel configurations, so that recorded calls must not be repeated."""
        return False

    # Tokens on several ranks

    def summarize_keys(self, key: Tensor, call: Call) -> tuple[Tensor, ...]:
        """Compute the statistics of keys that prediction reads: tensors (B, Hkv, kv_blocks, width).

        If a sequence is split at block boundaries, the statistics of its parts can be concatenated along dimension 2.
        A similarity threshold needs the keys themselves.
        """
        raise NotImplementedError(NO_RANKS.format(self.name))

    def candidates(self, query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call) -> Any:
        """Return the inputs of `choose_together` for some or all query blocks of a call.

        Args:
            keys: K, or the result of `summarize_keys`.
        """
        raise NotImplementedError(NO_RANKS.format(self.name))

    def choose_together(self, candidates: Sequence[Any], kv_blocks: int, pool: RankPool) -> list[BlockMask]:
        """Select the blocks that this rank's query blocks keep. A `Budget` is shared by the query blocks of all ranks.

        Args:
            candidates: results of `candidates` for all pieces of the sequence on this rank, in the order in which a
                `Budget` counts them. A piece may see only the first key blocks of the whole sequence.
            kv_blocks: number of key blocks of the whole sequence, which determines the levels of a `Budget`.
            pool: the query blocks of all ranks.
        """
        raise NotImplementedError(NO_RANKS.format(self.name))

    def attend_part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kept: KeptColumns | None,
        call: Call,
        into: PartialResult,
        *,
        totals: Tensor | None = None,
    ) -> None:
        """Compute attention over a part of the keys and merge it into the result over other parts.

        Args:
            kept: the blocks to keep; None keeps all blocks.
            call: the call over the part, without a selection rule.
            into: the result over the parts that were merged so far.
            totals: see `attend`.
        """
        if kept is None:
            output, lse = self.dense(query, key, value, call, with_lse=True, may_use_torch=True)
        else:
            kv_blocks = max(mask.shape[3] for mask in kept.masks)
            whole = torch.cat([F.pad(mask.to_dense(), (0, kv_blocks - mask.shape[3])) for mask in kept.masks], 2)
            dense = torch.cat([whole[..., cut] for cut in kept.columns], 3)
            q_len, kv_len = call.shape.q_len, call.shape.kv_len
            mask = BlockMask.from_dense(dense, q_len=q_len, kv_len=kv_len, is_causal=call.is_causal)
            output, lse = self.attend(query, key, value, mask, call, totals=totals)
        if into.is_first:
            into.output.zero_()
            into.lse.fill_(-torch.inf)
        merge(into.output, into.lse, output, lse)


def add_to_totals(totals: Tensor | None, mask: BlockMask, pv_skipped: Tensor) -> None:
    """Add a mask's kept and visible blocks, and the skipped P V products, to the totals (see `Backend.attend`)."""
    if totals is not None:
        totals.add_(torch.stack([mask.kv_num_blocks.sum(), mask.visible_num_blocks.sum(), pv_skipped.sum()]))


def get(name: str) -> Backend:
    """Return the backend with this name.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in BACKENDS:
        listed = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend: expected one of {listed}, got {name!r}")
    backend = _LOADED.get(name)
    if backend is None:
        backend = _LOADED[name] = importlib.import_module(f".{name}", __package__).BACKEND
    return backend


_LOADED: dict[str, Backend] = {}


def resolve(name: str, device: torch.device) -> str:
    """Return ``name`` if that backend supports a device, or the fastest supported one for "auto".

    Raises:
        ValueError: the name is unknown.
        NotImplementedError: the backend does not support the device.
    """
    if name != "auto" and name not in BACKENDS:
        get(name)
    if device.type == "meta":
        raise NotImplementedError(f"backend {name!r}: expected a device that holds data, got 'meta'")
    if name == "auto":
        return _best_for(device)
    reason = _unavailable_reason(name, device)
    if reason is not None:
        raise NotImplementedError(f"backend {name!r}: {reason}")
    return name


def explain(device: torch.device) -> str:
    """Describe the backend that "auto" selects on a device, and why the next faster one is not selected."""
    best = resolve("auto", device)
    faster = BACKENDS[: BACKENDS.index(best)]
    reason = get(best).summary
    if faster and device.type != "cpu":
        reason += f"; not {faster[-1]!r}: {get(faster[-1]).why_not_auto(device)}"
    return reason


def resolve_quantization(quantization: str, name: str, device: torch.device, *, has_mask: bool = False) -> str:
    """Return ``quantization`` if a backend supports it on a device, or the fastest one for "auto".

    Raises:
        NotImplementedError: the backend does not support the quantization.
    """
    if quantization == "auto":
        return _fastest_quantization(name, device, has_mask)
    reason = _quantization_unavailable_reason(name, quantization, device, has_mask)
    if reason is not None:
        raise NotImplementedError(f"quantization {quantization!r}: {reason}")
    return quantization


def is_below(crossover: Crossover, heads: int, q_len: int, kv_len: int, is_causal: bool) -> bool:
    """Return whether a call is smaller than a crossover; ``heads`` is batch size times query heads.

    This is a function because torch.compile cannot trace methods of an object that a `constant` function returned.
    """
    if is_causal and 2 * kv_len - q_len < crossover.causal_keys:
        return True
    return kv_len < crossover.keys or q_len < crossover.queries or heads * q_len * kv_len < crossover.scores


def constant(function: Function) -> Function:
    """Make torch.compile call a function while tracing, and treat its result as a constant.

    The decorator of torch.compiler is not used, because it imports Triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def _unavailable_reason(name: str, device: torch.device) -> str | None:
    return get(name).unavailable_reason(device)


@constant
def _best_for(device: torch.device) -> str:
    best = _BEST_ON_GPUS.get(device)
    if best is None:
        best = next(name for name in BACKENDS if get(name).why_not_auto(device) is None)
        if device.type == "cuda":
            _BEST_ON_GPUS[device] = best
    return best


_BEST_ON_GPUS: dict[torch.device, str] = {}
"""Cached because querying every backend takes tens of microseconds, several times per call."""


@constant
def crossover_of(name: str, device_type: str, dtype: torch.dtype) -> Crossover:
    """Return `Backend.crossover` of a backend given by name."""
    return get(name).crossover(device_type, dtype)


@constant
def crossover_for(device: torch.device, dtype: torch.dtype) -> Crossover:
    """Return the crossover of the backend that "auto" selects on a device."""
    return crossover_of(_best_for(device), device.type, dtype)


@constant
def crossover_under_mask_for(device: torch.device) -> Crossover:
    """Return `Backend.crossover_under_mask` of the backend that "auto" selects on a device."""
    return get(_best_for(device)).crossover_under_mask(device.type)


@constant
def _fastest_quantization(name: str, device: torch.device, has_mask: bool) -> str:
    return get(name).fastest_quantization(device, has_mask=has_mask)


@constant
def _quantization_unavailable_reason(name: str, quantization: str, device: torch.device, has_mask: bool) -> str | None:
    return get(name).quantization_unavailable_reason(quantization, device, has_mask=has_mask)
