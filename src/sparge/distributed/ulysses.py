"""Mode "ulysses": ranks exchange tokens for heads, and each rank computes whole sequences of its heads.

In a mesh, the Ulysses ranks also exchange tokens for heads in this way before mode "gather" or "ring", and heads for
tokens after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.distributed import prediction
from sparge.distributed.communicator import Communicator
from sparge.distributed.request import Request, TokenSplit


def to_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ranks: Communicator,
    q_lengths: Sequence[int],
    kv_lengths: Sequence[int],
    order: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of this rank's heads, (B, H / ranks, S, D).

    Args:
        q_lengths, kv_lengths: number of queries and of keys on each rank.
        order: (H,), query heads in the order of ranks; None for the natural order.
    """
    group = query.shape[1] // key.shape[1]
    if order is not None:
        query = query.index_select(1, order)
        key, value = (tensor.index_select(1, order[::group] // group) for tensor in (key, value))
    if key.shape[1] < ranks.size:  # ranks that share a K/V head each get a copy
        copies = ranks.size // key.shape[1]
        key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    if q_lengths == kv_lengths:
        query, key, value = ranks.to_heads((query, key, value), q_lengths)
    else:
        query, key, value = *ranks.to_heads([query], q_lengths), *ranks.to_heads((key, value), kv_lengths)
    return query, key, value


def to_tokens(output: Tensor, ranks: Communicator, lengths: Sequence[int], heads: int, order: Tensor | None) -> Tensor:
    """Return this rank's tokens of all heads, the inverse of `to_heads` for outputs."""
    output = ranks.to_tokens(output, lengths, heads)
    return output if order is None else output.index_select(1, order.argsort())


def attend(
    query: Tensor, key: Tensor, value: Tensor, request: Request, split: TokenSplit, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the output and the LSE of whole sequences of this rank's heads, (B, H / ranks, S, D)."""
    heads = {"heads": query.shape[1], "kv_heads": key.shape[1]}

    def make() -> Call:
        return interned(replace(request.call, shape=replace(request.call.shape, **heads)))

    call, mask, balance = request.cached("local call", make), None, split.balance
    if request.reason is None:
        if balance is None and not call.selection.is_call_wide:
            return ops.attention(query, key, value, call, request.backend)
        pool = prediction.q_blocks_of(request, split.mesh, order, query.device)
        (mask,) = prediction.choose_masks(query, [key], [call], request.call, request.backend, pool)
        if balance is not None:
            balance.update(mask, request.call.shape.kv_heads, split.mesh)
    return request.attend(query, key, value, mask, call)
