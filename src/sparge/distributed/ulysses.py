"""Ulysses: ranks exchange tokens for heads, compute whole sequences of some heads, and exchange them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from sparge.call import Call, interned
from sparge.dispatch import ops
from sparge.distributed.balance import HeadBalance
from sparge.distributed.budget import Ranks, RowPool, Rows, order_of_heads, order_of_rows
from sparge.distributed.computing import attend, choose_rows
from sparge.distributed.exchange import Exchange
from sparge.distributed.request import Request, of_heads
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError unless heads can be dealt evenly, those of K and V perhaps to several ranks each."""
    if heads % ranks:
        raise ValueError(
            f"query: expected a multiple of {ranks} heads for {ranks} ranks, got {heads} (gathered_attention and "
            "ring_attention take any number, mesh_attention a divisor of the ranks)"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"key: expected a multiple or a divisor of {ranks} heads for {ranks} ranks, got {kv_heads}")


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, exchange: Exchange, lengths: Sequence[int], heads: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Whole sequences of this rank's heads, (B, H / ranks, S, D).

    Args:
        heads: (H,), heads of queries in the order of ranks; None is their own.
    """
    group = query.shape[1] // key.shape[1]
    if heads is not None:
        query = query.index_select(1, heads)
        key, value = (tensor.index_select(1, heads[::group] // group) for tensor in (key, value))
    if key.shape[1] < exchange.size:  # ranks whose queries share a head of K and V each get it
        copies = exchange.size // key.shape[1]
        key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    query, key, value = exchange.start_all_to_heads((query, key, value), lengths)()
    return query, key, value


def to_tokens(
    output: Tensor, lse: Tensor | None, exchange: Exchange, lengths: Sequence[int], heads: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """This rank's tokens of all heads, and their LSE; undoes `to_heads`."""
    output = exchange.to_tokens(output, lengths)
    if lse is not None:
        lse = exchange.to_tokens(lse[..., None], lengths)[..., 0]
    if heads is not None:
        back = heads.argsort()
        output = output.index_select(1, back)
        lse = None if lse is None else lse.index_select(1, back)
    return output, lse


def own_heads(heads: int, ranks: Ranks, order: Tensor | None) -> Tensor | slice:
    """The heads of this rank."""
    own = heads // ranks.size
    cut = slice(ranks.rank * own, (ranks.rank + 1) * own)
    return cut if order is None else order[cut]


def compute(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: Request,
    ranks: Ranks,
    *,
    order: Tensor | None = None,
    balance: HeadBalance | None = None,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's heads over whole sequences, (B, H / ranks, S, D); a budget is that of all ranks.

    Args:
        asked: the whole call, with all heads.
        order: (H,), heads in the order of ranks.
        balance: learns what each head cost.
    """
    call = local_call(query, key, asked, ranks, order)
    if asked.reason is not None:
        return attend(query, key, value, None, call, asked, with_lse=with_lse)
    if balance is None and not call.selection.is_call_wide:
        return ops.attention(query, key, value, call, asked.backend)
    mask = predict(query, key, call, asked, ranks, order)
    if balance is not None:
        balance.learn_from(mask, asked.call.shape.kv_heads, ranks)
    return attend(query, key, value, mask, call, asked, with_lse=with_lse)


def local_call(query: Tensor, key: Tensor, asked: Request, ranks: Ranks, order: Tensor | None) -> Call:
    """The call of this rank's heads."""
    whole = asked.call.shape

    def find() -> Call:
        heads = (query.shape[1], key.shape[1])
        shape = Shape(whole.batch, *heads, whole.q_len, whole.kv_len, whole.head_dim, whole.value_dim)
        return interned(replace(of_heads(asked.call, own_heads(whole.heads, ranks, order)), shape=shape))

    return find() if asked.call.has_per_head_numbers else asked.once(("heads", query.shape[1], key.shape[1]), find)


def predict(query: Tensor, key: Tensor, call: Call, asked: Request, ranks: Ranks, order: Tensor | None) -> BlockMask:
    """The mask of this rank's heads."""
    whole, own = asked.call.shape, call.shape.heads

    def find() -> Tensor:
        heads = tuple(range(rank * own, (rank + 1) * own) for rank in range(ranks.size))
        return order_of_rows((((0, whole.q_len),),) * ranks.size, heads, whole.q_blocks, query.device)

    rows = asked.once(("rows", ranks.size), find) if order is None else order_of_heads(order, whole.q_blocks)
    pool = RowPool(ranks, rows, own * whole.q_blocks)
    return choose_rows([Rows(query, key, call)], asked, pool)[0]
