"""`Call`: the validated options of one attention call, which every stage receives."""

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
    """The validated sizes and options of a call, without query, key and value.

    Attributes:
        shape: sizes of query, key and value, heads-first.
        is_causal: query i sees keys up to i + kv_len - q_len; equivalent to ``window.right == 0``.
        scale: factor on the scores, above 0.
        sparsity: the selection rule. Default: `Dense`, which keeps all visible blocks.
        score: predicts the importance of blocks. Default: `Moment`.
        always_keep: key ranges [start, stop) whose blocks every query block keeps.
        quantization: "none", "int8_fp16", "int8_fp8" or "int8_fp8_fast", never "auto".
        pv_threshold: skip the product P V of 64 queries if all of their scores are further than this below the running
            maximum (negative, natural log). None skips nothing.
        attn_mask: bool or additive mask with 4 dimensions, each either 1 or the size of the call.
        exact_queries: query ranges [start, stop) whose blocks keep all visible key blocks.
        skipped: "drop", or "mean": skipped blocks are replaced by their mean, one key of the softmax.
        window: the range of keys that each query sees.
        exact_lse: the caller uses the LSE, so it must be exact. Otherwise it may be only as accurate as the output.
        segments: the segments of a packed call, which form its batch; ``shape`` then has the lengths of the longest
            segment. None for calls that are not packed.
        recordings: state that a backend keeps between runs of this call, for example recorded kernel launches.
    """

    shape: Shape
    is_causal: bool
    scale: float
    # None stands for the default objects, because torch.compile cannot trace objects of this library as defaults.
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
        """The selection rule of a sparse call."""
        assert not isinstance(self.sparsity, Dense)
        return self.sparsity

    @functools.cached_property
    def has_per_head_numbers(self) -> bool:
        """Whether an option is a tensor with one entry per head."""
        rule = self.sparsity
        return isinstance(self.pv_threshold, Tensor) or (not isinstance(rule, Dense) and rule.is_per_head)

    def with_tensors(self, *, attn_mask: Tensor | None = None, segments: Segments | None = None) -> Call:
        """Return a copy of the call with these tensors, which shares its recordings.

        Args:
            attn_mask: a mask of the same shape and dtype, or None for no mask.
            segments: the same segments with other result tensors, or None for no segments.
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
    """Remove the leading keys that no query of a dense call sees. Blocks then start at the first remaining key."""
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
"""Maximum number of interned calls."""
_calls: dict[tuple[Call, Any, Any], Call] = {}
"""Interned calls, stored without their mask and segments. Each key also has the properties of the mask and the segments
that recordings depend on."""
_INTERNED = "is_interned"
"""Attribute of calls that `interned` returned, and of their copies. These calls are not looked up again."""


def interned(call: Call) -> Call:
    """Return a copy of the call that shares its recordings with all equal calls. It has the same mask and segments."""
    if call.has_per_head_numbers or _INTERNED in vars(call):
        return call
    mask, segments = call.attn_mask, call.segments
    has_tensors = mask is not None or segments is not None
    key = (
        call.with_tensors() if has_tensors else call,
        None if mask is None else (mask.shape, mask.dtype),
        None if segments is None else segments.group,
    )
    shared = _calls.get(key)
    if shared is None:
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        shared = _calls.setdefault(key, key[0])
        vars(shared)[_INTERNED] = True
    return shared.with_tensors(attn_mask=mask, segments=segments) if has_tensors else shared


def forget_recordings() -> None:
    """Drop the recordings of all calls."""
    _calls.clear()
