"""Ulysses: ranks exchange tokens for heads, and each computes whole sequences of its heads."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.distributed import local_attention
from sparge.distributed.local_attention import LocalQueries
from sparge.distributed.query_blocks import q_blocks_of
from sparge.distributed.request import Request
from sparge.distributed.token_split import Mode, TokenSplit


def attend(
    query: Tensor, key: Tensor, value: Tensor, request: Request, split: TokenSplit, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return output and LSE of whole sequences of this rank's heads, (B, H / ranks, S, D)."""
    heads = {"heads": query.shape[1], "kv_heads": key.shape[1]}

    def make() -> Call:
        return interned(replace(request.call, shape=replace(request.call.shape, **heads)))

    call, mask, balance = request.once("local call", make), None, split.balance
    if request.reason is None:
        if balance is None and not call.selection.is_call_wide:
            return ops.attention(query, key, value, call, request.backend)
        q_blocks = q_blocks_of(request, split.mesh, order, query.device)
        (mask,) = local_attention.choose_masks([LocalQueries(query, key, call)], request, q_blocks)
        if balance is not None:
            balance.update_from(mask, request.call.shape.kv_heads, split.mesh)
    return local_attention.attend(query, key, value, mask, call, request)


MODE = Mode("ulysses", attend, ("balance", "attn_mask"))
