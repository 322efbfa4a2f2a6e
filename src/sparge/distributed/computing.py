"""What a rank computes once it has its tensors: some queries of some heads, over keys that are all here."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparge.call import Call
from sparge.dispatch import ops
from sparge.distributed.budget import Rows, choose
from sparge.distributed.request import Request
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, ceil_div
from sparge.numerics.budget_allocation import RankPool


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, call: Call, asked: Request, *, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Attention over a mask's blocks, or over all where the request is dense; the LSE may be empty unless asked for."""
    if asked.reason is not None:
        return ops.dense(query, key, value, call, asked.asked, with_lse=with_lse, words=asked.words)
    assert mask is not None
    return ops.attend(query, key, value, mask, call, asked.backend)


def choose_rows(rows: Sequence[Rows], asked: Request, pool: RankPool) -> list[BlockMask]:
    """`budget.choose` for rows of a request.

    Raises:
        NotImplementedError: a similarity threshold, which looks at whole sequences.
    """
    if asked.call.selection.similarity_threshold is not None:
        raise NotImplementedError(
            "similarity_threshold: expected None where ranks predict together (TopK and TopCdf take one in "
            "ulysses_attention without a HeadBalance), got one"
        )
    return choose(rows, ceil_div(asked.call.shape.kv_len, BLOCK_K), pool, asked.backend)
