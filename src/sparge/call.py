"""One attention call as every stage receives it, built once from validated arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sparge.masks.geometry import Shape
from sparge.masks.segments import Segments
from sparge.masks.window import Window, first_seen_key, window_of, without_redundant_bounds
from sparge.options.common import PerHead
from sparge.options.rules import Dense, Selection, Sparsity
from sparge.options.scores import Moment, Score

_DENSE, _SCORE = Dense(), Moment()


@dataclass(frozen=True)
class Call:
    """The options of a call, without its tensors. They are validated before and not checked again.

    Attributes:
        shape: sizes of query, key and value, heads first.
        is_causal: query i sees keys up to i + kv_len - q_len; equivalent to ``window.right == 0``.
        scale: factor of the scores, above 0.
        sparsity: which blocks are kept; all visible ones, `Dense`, by default.
        score: predicts the importance of blocks; `Moment` by default.
        always_keep: key ranges [start, stop) whose blocks every query block keeps.
        quantization: "none", "int8_fp16", "int8_fp8" or "int8_fp8_fast"; "auto" is already resolved.
        pv_threshold: natural log, below 0: P V of 64 rows is skipped if all scores are further below the maximum.
        attn_mask: bool or additive, four dimensions, each 1 or the call's own.
        exact_queries: query ranges [start, stop) whose blocks keep all visible key blocks.
        skipped: "drop", or "mean": skipped blocks are replaced by their mean, one key of the softmax.
        window: how far a query sees.
        exact_lse: the LSE is used; otherwise it may have the output's accuracy.
        segments: the batch consists of segments of a pack, and the shape is that of the longest; None: no pack.
        recordings: state that a backend keeps for later runs of the same object, for example recorded launches.
    """

    shape: Shape
    is_causal: bool
    scale: float
    # torch.compile cannot trace defaults that are objects of this library, so None stands for them.
    sparsity: Sparsity = None  # type: ignore[assignment]
    score: Score = None  # type: ignore[assignment]
    always_keep: tuple[tuple[int, int], ...] = ()
    quantization: str = "none"
    pv_threshold: PerHead | None = None
    attn_mask: Tensor | None = None
    exact_queries: tuple[tuple[int, int], ...] = ()
    skipped: str = "drop"
    window: Window = None  # type: ignore[assignment]
    exact_lse: bool = True
    segments: Segments | None = None
    recordings: dict[Any, Any] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        window = window_of(self.is_causal, self.window)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "is_causal", window.right == 0)
        object.__setattr__(self, "recordings", {})
        if self.sparsity is None:
            object.__setattr__(self, "sparsity", _DENSE)
        if self.score is None:
            object.__setattr__(self, "score", _SCORE)

    @property
    def selection(self) -> Selection:
        """The rule of a call that is not dense."""
        assert not isinstance(self.sparsity, Dense)
        return self.sparsity

    @functools.cached_property
    def has_per_head_numbers(self) -> bool:
        """Whether an option is a tensor with one entry per head."""
        rule = self.sparsity
        return isinstance(self.pv_threshold, Tensor) or (not isinstance(rule, Dense) and rule.is_per_head)

    def with_tensors(self, *, attn_mask: Tensor | None = None, segments: Segments | None = None) -> Call:
        """Return a copy with another mask of the same shape and dtype, or with other result tensors of the same
        segments.

        The copy shares the recordings.
        """
        changed = object.__new__(Call)
        vars(changed).update(vars(self), attn_mask=attn_mask, segments=segments)
        return changed

    @property
    def replaces_skipped(self) -> bool:
        """Whether skipped blocks are replaced by their means."""
        return self.skipped == "mean"

    @property
    def is_quantized(self) -> bool:
        """Whether Q and K are quantized to INT8."""
        return self.quantization != "none"

    @property
    def has_fp8_values(self) -> bool:
        """Whether P V is computed in FP8."""
        return self.quantization in ("int8_fp8", "int8_fp8_fast")


def drop_unseen_keys(key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Call]:
    """Remove the keys before every query's window from a dense call. Blocks are counted from the first key left."""
    start = first_seen_key(call.window, call.shape)
    if start == 0:
        return key, value, call
    attn_mask = call.attn_mask
    if attn_mask is not None and attn_mask.shape[3] > 1:
        attn_mask = attn_mask[..., start:]
    shape = replace(call.shape, kv_len=call.shape.kv_len - start)
    window = without_redundant_bounds(call.window, shape.q_len, shape.kv_len)
    return key[:, :, start:], value[:, :, start:], replace(call, shape=shape, window=window, attn_mask=attn_mask)


MAX_CALLS = 256
"""Kinds of calls with recordings that are kept."""
_calls: dict[tuple[Call, Any], Call] = {}
"""Calls without their tensors (masks, segments). Keys include the properties of these tensors that recordings depend
on."""


_INTERNED = "is_interned"
"""Attribute of a call that `interned` returned, or of its copy with another mask, which needs no further lookup."""


def interned(call: Call) -> Call:
    """Return a call with this call's mask and segments that shares the recordings of the first equal call."""
    mask, segments = call.attn_mask, call.segments
    if call.has_per_head_numbers or _INTERNED in vars(call):
        return call
    if mask is None and segments is None:
        return _find_or_add(call, None)
    tensor_properties = (
        None if mask is None else (mask.shape, mask.dtype),
        None if segments is None else segments.group,
    )
    return _find_or_add(call.with_tensors(), tensor_properties).with_tensors(attn_mask=mask, segments=segments)


def _find_or_add(call: Call, tensor_properties: Any) -> Call:
    found = _calls.get((call, tensor_properties))
    if found is None:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        found = _calls.setdefault((call, tensor_properties), call)
        vars(found)[_INTERNED] = True
    return found


def forget_recordings() -> None:
    """Drop all recordings of calls."""
    _calls.clear()
