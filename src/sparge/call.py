"""One attention call, as every stage sees it: built once by `api`, from validated arguments, and handed down."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from sparge.masks.geometry import Shape
from sparge.masks.segments import Segments
from sparge.masks.window import Window, first_seen_key, window_of, within
from sparge.options.common import PerHead
from sparge.options.rules import Dense, Selection, Sparsity
from sparge.options.scores import Moment, Score

_DENSE, _SCORE = Dense(), Moment()


@dataclass(frozen=True, init=False)
class Call:
    """What a call asks for, without its tensors. Nothing here is checked again.

    Attributes:
        shape: sizes of query, key and value, heads first.
        is_causal: query i sees keys up to i + kv_len - q_len; the window says so too, ``right = 0``.
        scale: factor on the scores, above 0.
        sparsity: which blocks are kept; by default all visible ones, `Dense`.
        score: how a block's worth is predicted; `Moment` by default.
        always_keep: key ranges [start, stop) whose blocks every row keeps.
        exact_queries: query ranges [start, stop) whose blocks keep all they see.
        quantization: "none", "int8_fp16", "int8_fp8" or "int8_fp8_fast"; "auto" was resolved before.
        pv_threshold: natural log, below 0: P V of 64 rows is skipped where all scores lie further below the maximum.
        attn_mask: bool or additive, four dimensions, each 1 or the call's own.
        skipped: "drop", or "mean": blocks that are not kept enter the softmax as one key, their mean.
        window: how far a query sees.
        exact_lse: the LSE is read; else it may be as rough as the output is.
        segments: the batch is segments of a pack, and the shape that of the longest; None: it is what it looks like.
        recordings: what a backend keeps for the next time the same object is run, such as recorded launches.
    """

    shape: Shape
    is_causal: bool
    scale: float
    sparsity: Sparsity
    score: Score
    always_keep: tuple[tuple[int, int], ...]
    exact_queries: tuple[tuple[int, int], ...]
    quantization: str
    pv_threshold: PerHead | None
    attn_mask: Tensor | None
    skipped: str
    window: Window
    exact_lse: bool
    segments: Segments | None
    recordings: dict[Any, Any] = field(init=False, compare=False, repr=False)

    def __init__(
        self,
        shape: Shape,
        is_causal: bool,
        scale: float,
        sparsity: Sparsity | None = None,
        score: Score | None = None,
        always_keep: tuple[tuple[int, int], ...] = (),
        quantization: str = "none",
        pv_threshold: PerHead | None = None,
        attn_mask: Tensor | None = None,
        exact_queries: tuple[tuple[int, int], ...] = (),
        skipped: str = "drop",
        window: tuple[int | None, int | None] | None = None,
        exact_lse: bool = True,
        segments: Segments | None = None,
    ) -> None:
        """Written out, because torch.compile traces no default that is an object of ours."""
        joined = window_of(is_causal, window)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "is_causal", joined.right == 0)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "sparsity", _DENSE if sparsity is None else sparsity)
        object.__setattr__(self, "score", _SCORE if score is None else score)
        object.__setattr__(self, "always_keep", always_keep)
        object.__setattr__(self, "exact_queries", exact_queries)
        object.__setattr__(self, "quantization", quantization)
        object.__setattr__(self, "pv_threshold", pv_threshold)
        object.__setattr__(self, "attn_mask", attn_mask)
        object.__setattr__(self, "skipped", skipped)
        object.__setattr__(self, "window", joined)
        object.__setattr__(self, "exact_lse", exact_lse)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "recordings", {})

    @property
    def selection(self) -> Selection:
        """The rules of a call that is not dense."""
        assert not isinstance(self.sparsity, Dense)
        return self.sparsity

    @functools.cached_property
    def has_per_head_numbers(self) -> bool:
        """Whether some option is a tensor with an entry for each head."""
        rule = self.sparsity
        return isinstance(self.pv_threshold, Tensor) or (not isinstance(rule, Dense) and rule.is_per_head)

    def of(self, *, attn_mask: Tensor | None = None, segments: Segments | None = None) -> Call:
        """Return the same call of another mask of the same shape and dtype, or of other results of the same segments.

        It shares the recordings.
        """
        changed = object.__new__(Call)
        vars(changed).update(vars(self), attn_mask=attn_mask, segments=segments)
        return changed

    @property
    def replaces_skipped(self) -> bool:
        """Whether blocks that are not kept enter the softmax as their means."""
        return self.skipped == "mean"

    @property
    def is_quantized(self) -> bool:
        """Whether Q and K are INT8 codes."""
        return self.quantization != "none"

    @property
    def has_fp8_values(self) -> bool:
        """Whether P V is computed in FP8."""
        return self.quantization in ("int8_fp8", "int8_fp8_fast")


def without_unseen(key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, Tensor, Call]:
    """A dense call without the keys that lie before every query's window: what is left has blocks of its own."""
    start = first_seen_key(call.window, call.shape)
    if start == 0:
        return key, value, call
    attn_mask = call.attn_mask
    if attn_mask is not None and attn_mask.shape[3] > 1:
        attn_mask = attn_mask[..., start:]
    shape = replace(call.shape, kv_len=call.shape.kv_len - start)
    window = within(call.window, shape.q_len, shape.kv_len)
    return key[:, :, start:], value[:, :, start:], replace(call, shape=shape, window=window, attn_mask=attn_mask)


MAX_CALLS = 256
"""Kinds of calls whose recordings are kept."""
_calls: dict[tuple[Call, Any], Call] = {}
"""Without masks and segments, which are tensors, but by what a recording depends on of them."""


_FIRST = "is_first"
"""The attribute of a call that `interned` returned, or of one with another mask: it need not be looked up again."""


def interned(call: Call) -> Call:
    """Return the first call that was equal to this one, with this one's mask: it holds the recordings of a backend."""
    mask, segments = call.attn_mask, call.segments
    if call.has_per_head_numbers or _FIRST in vars(call):
        return call
    if mask is None and segments is None:
        return _first(call, None)
    of_tensors = (None if mask is None else (mask.shape, mask.dtype), None if segments is None else segments.group)
    return _first(call.of(), of_tensors).of(attn_mask=mask, segments=segments)


def _first(call: Call, of_tensors: Any) -> Call:
    found = _calls.get((call, of_tensors))
    if found is None:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        found = _calls.setdefault((call, of_tensors), call)
        vars(found)[_FIRST] = True
    return found


def forget_recordings() -> None:
    """Drop all recordings of calls."""
    _calls.clear()
