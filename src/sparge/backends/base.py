"""What a backend is, which ones there are, and which one serves a call.

A backend is an object in the package of its name (``sparge.backends.<name>.BACKEND``), imported on first use: neither
this module nor ``import sparge`` needs Triton. It describes what it supports (`Backend.unavailable_reason`,
`quantizations`, `crossover`) and computes it (`predict`, `attend`, `attention`, `dense`). Callers use the object and
never compare its name.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.output_layout import gapless_strides, is_tokens_first
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape
from sparge.masks.ordering import TokenOrder, order_of
from sparge.numerics.budget_allocation import RankPool, share_out
from sparge.numerics.merge import merge
from sparge.options.common import BACKENDS
from sparge.options.rules import Selection

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Crossover:
    """Sizes below any of which dense attention is faster.

    Attributes:
        keys: of a sequence.
        causal_keys: of a causal one that has as many queries; behind a prefix, twice what a query sees on average.
        queries: of a sequence.
        scores: over all heads and the batch.
    """

    keys: int
    causal_keys: int
    queries: int
    scores: int


ALWAYS = Crossover(keys=0, causal_keys=0, queries=0, scores=0)
"""Sparse whatever the size."""
NEVER = Crossover(keys=2**62, causal_keys=2**62, queries=0, scores=0)
"""Dense whatever the size: nothing was measured, or nothing was gained."""


class Candidates(ABC):
    """Rows of blocks whose probabilities are known and of which nothing is chosen yet: some rows of a call, perhaps.

    A rule that looks at one row at a time chooses at once. Of a `Budget`, `kept_by_level` is what the rows ask for, and
    `sharing.share_out` says what they get.
    """

    @abstractmethod
    def kept_by_level(self, kv_blocks: int) -> tuple[Tensor, Tensor]:
        """Blocks that each row keeps of a budget that reaches down to each level, and those that all rows see.

        Args:
            kv_blocks: those of the whole call, of which these rows may see the first alone: levels go by them.

        Returns:
            (B, H, q_blocks, levels + 1) and (B,), ints.
        """

    @abstractmethod
    def choose(self, counts: Tensor | None) -> BlockMask:
        """The mask: of a budget so many blocks of each row, (B, H, q_blocks); by the call's rule without counts."""


class RecordedAttention(Protocol):
    """A call of `Backend.attention` that can be repeated on other tensors of the same kind."""

    def run(self, inputs: Sequence[int]) -> tuple[Tensor, ...]:
        """Return output and LSE of inputs at these addresses, which are multiples of 16 and of different tensors.

        They are query, key, value, and where there are any: mask, totals, lists of given blocks, and the output and LSE
        of a packed call, which are written to, so that nothing is returned. It runs on the current device and stream.
        """

    def run_without_lse(self, inputs: Sequence[int]) -> Tensor:
        """Return the output alone."""


class Backend(ABC):
    """One way to compute sparse attention.

    Attributes:
        name: what a caller passes as ``backend=``.
        summary: what it is, in a few words.
        quantizations: those it has on some device; the others are refused.
        packs: it takes segments of unequal lengths as one call (`Call.segments`), without a similarity threshold.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    quantizations: ClassVar[tuple[str, ...]]
    packs: ClassVar[bool] = False

    @abstractmethod
    def unavailable_reason(self, device: torch.device) -> str | None:
        """What keeps it from serving a device, as "expected X, got Y"; None when nothing does."""

    def why_not_auto(self, device: torch.device) -> str | None:
        """Why "auto" does not take it on a device, None when it does. A backend may serve more than it is best for."""
        return self.unavailable_reason(device)

    def quantization_unavailable_reason(self, quantization: str, device: torch.device, *, has_mask: bool) -> str | None:  # noqa: ARG002
        """What keeps it from a quantization on a device that it serves, as "expected X, got Y"."""
        if quantization in self.quantizations:
            return None
        able = [repr(name) for name in BACKENDS if quantization in get(name).quantizations]
        return f"expected backend {' or '.join(able)}, got {self.name!r}"

    def fastest_quantization(self, device: torch.device, *, has_mask: bool) -> str:  # noqa: ARG002
        """The quantization that "auto" stands for on a device."""
        return "none"

    @abstractmethod
    def crossover(self, device_type: str, dtype: torch.dtype) -> Crossover:
        """The sizes from which on sparse attention of inputs of a dtype pays on a kind of device, as measured."""

    def crossover_under_mask(self, device_type: str) -> Crossover:  # noqa: ARG002
        """Return the sizes from which on a full bool mask pays; `NEVER` if it does not or was not measured."""
        return NEVER

    def serving(self, call: Call, dtype: torch.dtype) -> Backend:  # noqa: ARG002
        """The backend that really computes a call: this one, or one that it leaves some calls to."""
        return self

    def portable(self) -> Backend:
        """Return the backend that packs short dense segments together: this one, or one whose kernel copies nothing."""
        return self

    @abstractmethod
    def predict(self, query: Tensor, key: Tensor, call: Call) -> BlockMask:
        """Predict which blocks of the attention map to compute."""

    def summarize_keys(self, key: Tensor, call: Call) -> tuple[Tensor, ...]:
        """What prediction reads of keys: tensors (B, Hkv, kv_blocks, width).

        Those of parts of a sequence that are cut between blocks join along dimension 2. A similarity threshold needs
        more than them.

        Raises:
            NotImplementedError: the backend predicts in one piece.
        """
        raise NotImplementedError(f"prediction over several ranks: expected another backend, got {self.name!r}")

    def candidates(self, query: Tensor, keys: tuple[Tensor, ...], call: Call) -> Candidates:
        """Prediction up to the choice, from what `summarize_keys` made.

        Raises:
            NotImplementedError: the backend predicts in one piece.
        """
        raise NotImplementedError(f"prediction over several ranks: expected another backend, got {self.name!r}")

    def candidates_of(self, query: Tensor, key: Tensor, call: Call) -> Candidates:
        """`candidates` of keys that are all here."""
        return self.candidates(query, self.summarize_keys(key, call), call)

    def choose_together(
        self, candidates: Sequence[Candidates], rule: Selection, kv_blocks: int, pool: RankPool
    ) -> list[BlockMask]:
        """The blocks that rows on this rank keep, by one rule for the rows of all ranks.

        Args:
            candidates: the rows of this rank, of which a `Budget` counts those of the first first.
            kv_blocks: of the whole sequence.
            pool: the rows of all ranks.
        """
        if not rule.is_call_wide:
            return [candidate.choose(None) for candidate in candidates]
        asked = [candidate.kept_by_level(kv_blocks) for candidate in candidates]
        kept = torch.cat([levels.flatten(1, 2) for levels, _ in asked], 1)
        visible = torch.stack([seen for _, seen in asked]).sum(0)
        assert not isinstance(rule.amount, Tensor)
        counts = share_out(kept, visible, rule.amount, pool)
        shares = counts.split([levels.shape[1] * levels.shape[2] for levels, _ in asked], 1)
        return [
            candidate.choose(share.unflatten(1, levels.shape[1:3]))
            for candidate, share, (levels, _) in zip(candidates, shares, asked, strict=True)
        ]

    def attend_part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: Sequence[BlockMask] | None,
        columns: tuple[slice, ...],
        call: Call,
        output: Tensor,
        lse: Tensor,
        *,
        is_first: bool,
        totals: Tensor | None = None,
    ) -> None:
        """Attention over a part of the keys, merged into that over others.

        Args:
            masks: of pieces of the queries over all keys, one piece behind the other; None keeps all blocks.
            columns: the key blocks of the whole sequence that the part's are, in rising order.
            call: of the part. It has no rules: it is dense, or over a mask.
            output, lse: (B, H, Sq, Dv) and (B, H, Sq) float32, which are changed.
            is_first: nothing was merged into them before, and they may hold anything.
            totals: see `attend`.
        """
        if masks is None:
            found = self.dense(query, key, value, call, with_lse=True, may_use_torch=True)
        else:
            kv_blocks = max(mask.shape[3] for mask in masks)
            kept = torch.cat([F.pad(mask.to_dense(), (0, kv_blocks - mask.shape[3])) for mask in masks], 2)
            dense = torch.cat([kept[..., cut] for cut in columns], 3)
            q_len, kv_len = call.shape.q_len, call.shape.kv_len
            mask = BlockMask.from_dense(dense, q_len=q_len, kv_len=kv_len, is_causal=call.is_causal)
            found = self.attend(query, key, value, mask, call, totals=totals)
        if is_first:
            output.zero_()
            lse.fill_(-torch.inf)
        merge(output, lse, *found)

    @abstractmethod
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over the kept blocks.

        Args:
            totals: int64 (3,), to which the numbers of kept and of visible blocks are added, and that of halves of kept
                blocks (64 queries by 64 keys) whose P V the threshold skipped. A half without queries is skipped with
                the other one; means are not counted.

        Returns:
            Output (B, H, Sq, Dv) in the query's dtype and natural-log LSE (B, H, Sq) float32.
        """

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Prediction and attention; a backend whose passes over K serve both does better than one after the other."""
        return self.attend(query, key, value, self.predict(query, key, call), call, totals=totals)

    def attention_in_order(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, order: TokenOrder, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reorder the tokens, compute `attention`, and restore the order of the output.

        Returns:
            The output, tokens first in memory, and an LSE in the given order.
        """
        found = order_of(order.grid, order.name, query.device)
        query, key, value = self.move_all((query, key, value), found.permutation, order.start)
        output, lse = self.attention(query, key, value, call, totals=totals)
        (output,) = self.move_all((output,), found.inverse, order.start, tokens_first=True)
        return output, lse

    def is_overridden(self) -> bool:
        """Return whether this thread changes the configuration of kernels now; recorded calls are not repeated then."""
        return False

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
        """Return what repeats an `attention` call that was made before, None where a backend records nothing.

        With ``blocks`` it is one of `attend`, with an ``order`` one of `attention_in_order`, else without sparsity one
        of `dense` that torch did not compute.
        """
        return None

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
        """Attention over every visible block. The call is dense: it has no rules and no threshold.

        Args:
            with_lse: the LSE is read; else it may be anything.
            may_use_torch: torch's own kernels may compute it where they are faster, since nobody named a backend.
        """
        return self.attend(query, key, value, self.predict(query, key, call), call)

    def dense_is_sdpa(self, query: Tensor, call: Call) -> bool:  # noqa: ARG002
        """Return whether `dense` without an LSE is torch's SDPA, given the same tensors."""
        return False

    def move(self, tokens: Tensor, permutation: Tensor, start: int, moved: Tensor) -> None:
        """Copy tokens (B, H, S, D) to ``moved``, of any strides: those from ``start`` on permuted, others in place."""
        stop = start + len(permutation)
        moved[:, :, :start] = tokens[:, :, :start]
        moved[:, :, start:stop] = tokens[:, :, start:stop].index_select(2, permutation)
        moved[:, :, stop:] = tokens[:, :, stop:]

    def move_all(
        self, tensors: Sequence[Tensor], permutation: Tensor, start: int, *, tokens_first: bool | None = None
    ) -> tuple[Tensor, ...]:
        """`move` tensors to new ones, which lie in memory tokens first, heads first, or by default as they did."""
        results = []
        for tokens in tensors:
            batch, heads, length, width = tokens.shape
            lies_so = is_tokens_first(tokens) if tokens_first is None else tokens_first
            sizes = (batch, heads, length, width)
            strides = gapless_strides(sizes, tokens_first=lies_so)
            moved = torch.empty_strided(sizes, strides, dtype=tokens.dtype, device=tokens.device)
            self.move(tokens, permutation, start, moved)
            results.append(moved)
        return tuple(results)


def add_to_totals(totals: Tensor | None, mask: BlockMask, pv_skipped: Tensor) -> None:
    """Count a mask's blocks, and the halves of them whose P V was skipped (see `Backend.attend`)."""
    if totals is not None:
        totals.add_(torch.stack([mask.kv_num_blocks.sum(), mask.visible_num_blocks.sum(), pv_skipped.sum()]))


def get(name: str) -> Backend:
    """The backend of a name.

    Raises:
        ValueError: there is none.
    """
    if name not in BACKENDS:
        listed = ", ".join(map(repr, ("auto", *BACKENDS)))
        raise ValueError(f"backend: expected one of {listed}, got {name!r}")
    found = _LOADED.get(name)
    if found is None:
        found = _LOADED[name] = importlib.import_module(f".{name}", __package__).BACKEND
    return found


_LOADED: dict[str, Backend] = {}


def resolve(name: str, device: torch.device) -> str:
    """The name of the backend that serves a device: the one that is named, or for "auto" the best.

    Raises:
        ValueError: unknown backend.
        NotImplementedError: the backend cannot serve the device.
    """
    if name != "auto" and name not in BACKENDS:
        get(name)
    if device.type == "meta":
        raise NotImplementedError(f"backend {name!r}: expected a device that holds data, got 'meta'")
    if name == "auto":
        return _best_for(device.type, device.index)
    missing = _missing_on(name, device.type, device.index)
    if missing is not None:
        raise NotImplementedError(f"backend {name!r}: {missing}")
    return name


def explain(device: torch.device) -> str:
    """Why "auto" takes the backend that it takes on a device: what it is, and why not the next better one."""
    best = resolve("auto", device)
    better = BACKENDS[: BACKENDS.index(best)]
    reason = get(best).summary
    if better and device.type != "cpu":
        reason += f"; not {better[-1]!r}: {get(better[-1]).why_not_auto(device)}"
    return reason


def resolve_quantization(quantization: str, name: str, device: torch.device, *, has_mask: bool = False) -> str:
    """ "auto" as the fastest quantization of a backend on a device, any other if the backend has it there.

    Raises:
        NotImplementedError: it has not.
    """
    if quantization == "auto":
        return _fastest_quantization(name, device.type, device.index, has_mask)
    missing = _quantization_missing(name, quantization, device.type, device.index, has_mask)
    if missing is not None:
        raise NotImplementedError(f"quantization {quantization!r}: {missing}")
    return quantization


def prefers_dense(
    shape: Shape, is_causal: bool, name: str, device: torch.device, dtype: torch.dtype, kv_len: int | None = None
) -> bool:
    """Whether prediction would cost more than it saves at these sizes; ``kv_len`` keys instead of all, if given."""
    kv_len = shape.kv_len if kv_len is None else kv_len
    crossover = crossover_of(name, device.type, dtype)
    return is_below(crossover, shape.batch * shape.heads, shape.q_len, kv_len, is_causal)


def is_below(crossover: Crossover, heads: int, q_len: int, kv_len: int, is_causal: bool) -> bool:
    """Whether a call is smaller than a crossover; ``heads`` are those of the whole batch.

    No method: torch.compile cannot trace one of an object that a `constant` function returned.
    """
    if is_causal and 2 * kv_len - q_len < crossover.causal_keys:
        return True
    return kv_len < crossover.keys or q_len < crossover.queries or heads * q_len * kv_len < crossover.scores


def constant(function: Function) -> Function:
    """Tell torch.compile that a function's result does not change: it is called, not traced.

    torch.compiler's own decorator imports Triton.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def _missing_on(name: str, device_type: str, index: int | None) -> str | None:
    return get(name).unavailable_reason(_device(device_type, index))


@constant
def _best_for(device_type: str, index: int | None) -> str:
    best = _BEST_ON_GPUS.get((device_type, index))
    if best is None:
        device = _device(device_type, index)
        best = next(name for name in BACKENDS if get(name).why_not_auto(device) is None)
        if device_type == "cuda":
            _BEST_ON_GPUS[device_type, index] = best
    return best


_BEST_ON_GPUS: dict[tuple[str, int | None], str] = {}
"""To ask every backend takes tens of microseconds there, and is done several times a call."""


@constant
def crossover_of(name: str, device_type: str, dtype: torch.dtype) -> Crossover:
    """`Backend.crossover` of a backend by its name."""
    return get(name).crossover(device_type, dtype)


@constant
def crossover_for(device_type: str, index: int | None, dtype: torch.dtype) -> Crossover:
    """The crossover of the backend that "auto" takes on a device, which is looked up once."""
    return crossover_of(_best_for(device_type, index), device_type, dtype)


@constant
def crossover_under_mask_for(device_type: str, index: int | None) -> Crossover:
    """`Backend.crossover_under_mask` of the backend that "auto" takes on a device."""
    return get(_best_for(device_type, index)).crossover_under_mask(device_type)


@constant
def _fastest_quantization(name: str, device_type: str, index: int | None, has_mask: bool) -> str:
    return get(name).fastest_quantization(_device(device_type, index), has_mask=has_mask)


@constant
def _quantization_missing(
    name: str, quantization: str, device_type: str, index: int | None, has_mask: bool
) -> str | None:
    return get(name).quantization_unavailable_reason(quantization, _device(device_type, index), has_mask=has_mask)


def _device(device_type: str, index: int | None) -> torch.device:
    return torch.device(device_type) if index is None else torch.device(device_type, index)
