"""Merge attention over disjoint sets of keys by their LSEs."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over other keys into ``output`` (..., n, D) and ``lse`` (..., n), both float32, in place.

    A query that sees no key of a set has LSE -inf there, and that set contributes nothing. A query that sees no key at
    all keeps output 0 and LSE -inf; the difference of the two LSEs is NaN there, and its weight is set to 0. NaN and
    infinite outputs with a nonzero weight stay as they are. `lerp` would not preserve infinities, because it subtracts
    one output from the other.
    """
    total = torch.logaddexp(lse, other_lse)
    share = torch.exp(other_lse - total).nan_to_num_(0.0)
    output.mul_((1.0 - share)[..., None]).addcmul_(other.float(), share[..., None])
    lse.copy_(total)
