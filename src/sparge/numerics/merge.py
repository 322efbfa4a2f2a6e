"""Merge attention over disjoint sets of keys by their LSEs."""

from __future__ import annotations

import torch
from torch import Tensor


def merge(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over other keys into ``output`` (..., n, D) and ``lse`` (..., n), both float32, in place.

    A set of keys that a query does not see has LSE -inf and contributes nothing. A query that sees no key of either set
    keeps output 0 and LSE -inf: the difference of the LSEs is NaN, so the weight is set to 0. NaN and infinite outputs
    with a nonzero weight are preserved. `lerp` would not preserve infinities, because it subtracts one output from the
    other.
    """
    total = torch.logaddexp(lse, other_lse)
    share = torch.exp(other_lse - total).nan_to_num_(0.0)
    output.mul_((1.0 - share)[..., None]).addcmul_(other.float(), share[..., None])
    lse.copy_(total)
