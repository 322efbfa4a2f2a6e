"""The operands that `pipeline.prepare` passes to an attention kernel, and the interface of the kernel's launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparge.call import Call
from sparge.masks.block_mask import BlockMask


@dataclass(frozen=True)
class MeanOperands:
    """The means of key blocks as K and V: quantized and padded to whole tiles of 64, or in the dtype of K.

    Attributes:
        key, value, key_scale: as in `Operands`, with one token per key block.
        exact_key: (B, Hkv, kv_blocks, D padded) float32, the unquantized means.
        bias: (B * H * q_blocks, columns) float32, added to the logits of each query block, in log2 units. It is log2 of
            the number of keys that a mean represents; -inf if the block is kept or cannot be replaced by its mean; NaN
            if the mean is not finite. ``columns`` is a multiple of `BIAS_COLUMNS`.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor
    exact_key: Tensor
    bias: Tensor


BIAS_COLUMNS = 128
"""Maximum number of means that an attention kernel processes at a time."""


@dataclass(frozen=True)
class Operands:
    """Inputs of the attention kernel.

    Attributes:
        query, key, value: quantized values padded to whole blocks, or the caller's tensors if not quantized.
        query_scale, key_scale, value_scale, lse_shift: see `quantize.QuerySummary` and `summary.KeyValueSummary`;
            unused without quantization. ``key_scale`` is negative in blocks with a marked peak (`stages.peaks`).
        exact_query, exact_key: the caller's Q and K, for scores that INT8 would round too coarsely
            (`quantization.is_coarse`).
        largest_key_scale: see `summary.KeyValueSummary`.
        dtype: dtype of the output.
        tokens_first: the output's memory layout (`output_layout`).
        keys_seen: see `visibility.Visibility.keys`; None if all keys are visible.
        means: None if skipped blocks are dropped.
        order: the order in which to compute query blocks (`stages.budget`); None if it does not matter.
        kind: see `mask_blocks.MaskFacts`; None if `mask_blocks` did not run.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_scale: Tensor
    key_scale: Tensor
    value_scale: Tensor
    lse_shift: Tensor
    exact_query: Tensor
    exact_key: Tensor
    largest_key_scale: Tensor
    dtype: torch.dtype
    tokens_first: bool
    keys_seen: Tensor | None
    means: MeanOperands | None = None
    order: Tensor | None = None
    kind: Tensor | None = None


class AttentionLauncher(Protocol):
    """A function that launches an attention kernel."""

    def __call__(
        self, operands: Operands, mask: BlockMask | None, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute attention over a mask's blocks, or over all visible blocks without a mask.

        Args:
            totals: int64 (3,), see `base.Backend.attend`. Needs a mask.

        Returns:
            Output (B, H, Sq, Dv) in ``operands.dtype`` and natural-log LSE (B, H, Sq) float32.
        """

    def __hash__(self) -> int:
        """Return a hash: launchers are part of the keys of recordings (`replay`)."""
