"""One attention call, as every stage sees it: built once by `api`, from validated arguments, and handed down."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparge.config import Dense, Moment, PerHead, Score, Selection, Sparsity
from sparge.geometry import Shape

DENSE, DEFAULT_SCORE = Dense(), Moment()  # made here, since torch.compile does not trace a factory


@dataclass(frozen=True)
class Call:
    """What a call asks for, without its tensors. Nothing here is checked again.

    Attributes:
        shape: sizes of query, key and value, heads first.
        is_causal: query i sees keys up to i + kv_len - q_len.
        scale: factor on the scores, above 0.
        sparsity: which blocks are kept; `Dense` keeps every visible one.
        score: how a block's worth is predicted.
        always_keep: key ranges [start, stop) whose blocks every row keeps.
        quantization: "none", "int8_fp16", "int8_fp8" or "int8_fp8_fast"; "auto" was resolved before.
        pv_threshold: natural log, below 0: P V of 64 rows is skipped where all scores lie further below the maximum.
        attn_mask: bool or additive, four dimensions, each 1 or the call's own.
    """

    shape: Shape
    is_causal: bool
    scale: float
    sparsity: Sparsity = DENSE
    score: Score = DEFAULT_SCORE
    always_keep: tuple[tuple[int, int], ...] = ()
    quantization: str = "none"
    pv_threshold: PerHead | None = None
    attn_mask: Tensor | None = None

    @property
    def selection(self) -> Selection:
        """The rules of a call that is not dense."""
        assert not isinstance(self.sparsity, Dense)
        return self.sparsity

    @property
    def is_quantized(self) -> bool:
        """Whether Q and K are INT8 codes."""
        return self.quantization != "none"

    @property
    def has_fp8_values(self) -> bool:
        """Whether P V is computed in FP8."""
        return self.quantization in ("int8_fp8", "int8_fp8_fast")
