"""Computation on one rank's tensors: masks of some query blocks, and attention over their key blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sparge.call import Call
from sparge.dispatch import ops
from sparge.distributed.request import Request
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, ceil_div
from sparge.numerics.budget_allocation import RankPool


class LocalQueries(NamedTuple):
    """Some queries of a call on this rank.

    Attributes:
        query: (B, H, n, D).
        keys: K, or the result of `base.Backend.summarize_keys`, of all keys that the queries may see.
        call: the call with the sizes of these queries and keys.
    """

    query: Tensor
    keys: Tensor | tuple[Tensor, ...]
    call: Call


def choose_masks(queries: Sequence[LocalQueries], request: Request, pool: RankPool) -> list[BlockMask]:
    """Return a mask for each of this rank's ``queries``, chosen by one rule for the query blocks of all ranks.

    Raises:
        NotImplementedError: the rule has a similarity threshold, which needs whole sequences.
    """
    if request.call.selection.similarity_threshold is not None:
        raise NotImplementedError(
            "similarity_threshold: expected None where ranks predict together (TopK and TopCdf accept it with "
            'mode="ulysses" and without a HeadBalance), got a threshold'
        )
    candidates = [ops.candidates(part.query, part.keys, part.call, request.backend) for part in queries]
    kv_blocks = ceil_div(request.call.shape.kv_len, BLOCK_K)
    return ops.choose_together(queries[0].query, candidates, kv_blocks, pool, request.backend)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, call: Call, request: Request
) -> tuple[Tensor, Tensor]:
    """Return output and LSE over the blocks of a mask, or dense; without ``return_lse`` the LSE may be empty."""
    if request.reason is not None:
        backend, with_lse = request.requested_backend, request.return_lse
        return ops.dense(query, key, value, call, backend, with_lse=with_lse, label=request.dense_label)
    assert mask is not None
    return ops.attend(query, key, value, mask, call, request.backend)
