"""Attention over parts of the keys, put together by their LSEs."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(output: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: outputs (..., n, D) and LSEs (..., n), in float32.

    A query that sees nothing of a set has an LSE of -inf there, and takes nothing from it; one that sees nothing of
    either has output 0 and LSE -inf. No finite stand-in is needed: the largest LSE is taken off before anything is
    exponentiated, unless it is -inf itself.
    """
    top = torch.maximum(lse, other_lse)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight, other_weight = (lse - top).exp(), (other_lse - top).exp()
    total = weight + other_weight
    share = (other_weight / torch.where(total == 0, 1.0, total))[..., None]
    output = output.float()
    return torch.lerp(output, other.float(), share), top + total.log()
