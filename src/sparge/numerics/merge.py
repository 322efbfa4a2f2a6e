"""Attention over parts of the keys, put together by their LSEs."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Make of attention over some keys, (..., n, D) with its LSE (..., n), float32, that over these and others.

    A query that sees nothing of a set has an LSE of -inf there, and takes nothing from it; one that sees nothing of
    either keeps its output of 0 and LSE of -inf, whose difference is no number, and stands for no share. What is NaN
    because an output is, stays so: nothing times NaN is NaN. What is infinite stays so where it has a share, which
    `lerp` would not do: it takes one output off the other.
    """
    total = torch.logaddexp(lse, other_lse)
    share = torch.exp(other_lse - total).nan_to_num_(0.0)
    output.mul_((1.0 - share)[..., None]).addcmul_(other.float(), share[..., None])
    lse.copy_(total)
