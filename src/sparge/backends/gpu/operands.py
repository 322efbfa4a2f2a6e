"""What the stages hand to an attention kernel, and how such a kernel is launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparge.call import Call
from sparge.masks.block_mask import BlockMask


@dataclass(frozen=True)
class MeanOperands:
    """The means that stand for skipped blocks, as K and V: codes padded to whole tiles of 64, or 16-bit numbers.

    Attributes:
        key, value, key_scale: as in `Operands`, with a block for each token.
        exact_key: (B, Hkv, kv_blocks, D padded) float32, the means that ``key`` was rounded from.
        bias: (B * H * q_blocks, columns) float32, what scores of a row of blocks get besides, in octaves: log2 of
            how many keys a mean stands for, -inf where the row keeps the block or cannot have its mean, NaN where that
            is not finite. ``columns`` is a multiple of `BIAS_COLUMNS`.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor
    exact_key: Tensor
    bias: Tensor


BIAS_COLUMNS = 128
"""Means that an attention kernel takes at a time, at most."""


@dataclass(frozen=True)
class Operands:
    """What the attention kernel reads. Codes are padded to whole blocks; unquantised tensors are the caller's own.

    The scales and ``lse_shift`` of `quantize.QuerySummary` and `summary.KeyValueSummary` mean nothing when quantization
    is "none". ``key_scale`` is negative where a block holds a shared peak (`stages.peaks`). ``exact_query`` and
    ``exact_key`` are the caller's own Q and K, for scores that INT8 would round too far (`eight_bits.is_coarse`);
    ``largest_key_scale`` is that of `summary.KeyValueSummary`. ``dtype`` is the output's, and ``tokens_first`` says how
    it lies in memory (`layout`). ``keys_seen`` is `visibility.Visibility.keys`, None where all are. ``means`` is None
    where blocks are dropped. ``order`` is the order in which rows of blocks are best computed (`stages.budget`), None
    where any will do. ``kind`` is `mask_blocks.MaskBlocks.kind`, None where no mask was read.
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
    """The launcher of an attention kernel."""

    def __call__(
        self, operands: Operands, mask: BlockMask | None, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over a mask's blocks, or over all visible ones without a mask.

        Args:
            totals: int64 (3,), see `base.Backend.attend`. Needs a mask.

        Returns:
            Output (B, H, Sq, Dv) in ``operands.dtype`` and natural-log LSE (B, H, Sq) float32.
        """

    def __hash__(self) -> int:
        """Recordings (`replay`) are kept apart by their kernel."""
