"""`sparge.attention` of a part of a call whose other parts are computed by other ranks at the same time.

For integrations that exchange tensors themselves: what a model's call has become on this rank is some heads of it, or
some of its queries, over all keys that these see. Only a `Budget` concerns the other ranks; everything else is the call
that it looks like.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparge import api
from sparge.dispatch import validation
from sparge.dispatch.gradients import needs_grad_of
from sparge.distributed.balance import HeadBalance
from sparge.distributed.budget import Ranks, RowPool, Rows, order_of_heads, order_of_rows
from sparge.distributed.computing import attend, choose_rows
from sparge.distributed.request import Options, of_heads, request, rule_of_heads
from sparge.masks.geometry import BLOCK_Q, Shape, ceil_div
from sparge.options.rules import Dense


@dataclass(frozen=True)
class Share:
    """Which part of a call each rank has.

    Attributes:
        ranks: whom to ask.
        heads: of every rank, its heads of queries.
        queries: of every rank, where its queries (start, stop) lie in the call's sequence of them.
        balance: learns what the heads cost, where each rank has all queries of as many heads.
        order: (H,), the heads that it dealt, of which ranks have those that ``heads`` says; None: it dealt none.
    """

    ranks: Ranks
    heads: tuple[range, ...]
    queries: tuple[tuple[int, int], ...]
    balance: HeadBalance | None = None
    order: Tensor | None = None

    @property
    def all_heads(self) -> int:
        return max(own.stop for own in self.heads)

    def pool(self, device: torch.device) -> RowPool:
        """The rows of all ranks."""
        blocks = ceil_div(max(stop for _, stop in self.queries), BLOCK_Q)
        if self.order is not None:
            order = order_of_heads(self.order, blocks)
        else:
            order = order_of_rows(tuple((place,) for place in self.queries), self.heads, blocks, device)
        start, stop = self.queries[self.ranks.rank]
        return RowPool(self.ranks, order, ceil_div(stop - start, BLOCK_Q) * len(self.heads[self.ranks.rank]))


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    share: Share,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`sparge.attention` of this rank's part. All ranks call it together.

    Args:
        query, key, value: those of this rank; causality and ranges of tokens are about them.
        share: what the other ranks have. Numbers for each head are those of all heads.

    The other arguments (``on_unsupported`` is none of them), the result and the errors are those of `sparge.attention`.
    """
    topk, sparsity = options.pop("topk", None), options.pop("sparsity", None)
    rule = validation.resolve_sparsity(topk, sparsity, share.all_heads)
    cut = slice(share.heads[share.ranks.rank].start, share.heads[share.ranks.rank].stop)
    own_heads = cut if share.order is None else share.order[cut]
    call: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    needs_grad = needs_grad_of(query, key, value, attn_mask)
    if isinstance(rule, Dense) or not rule.is_call_wide or share.ranks.size == 1 or dropout_p or needs_grad:
        if not isinstance(rule, Dense):
            rule = rule_of_heads(rule, own_heads)
        alone: Any = api.attention
        return alone(query, key, value, attn_mask, dropout_p, **call, **options, sparsity=rule, return_lse=return_lse)
    layout = options.pop("layout", "HND")
    given = Options(
        window=options.pop("window", None),
        topk=None,
        sparsity=rule,
        score=options.pop("score", "moment"),
        quantization=options.pop("quantization", "auto"),
        layout=layout,
        always_keep=options.pop("always_keep", None),
        exact_queries=options.pop("exact_queries", None),
        skipped=options.pop("skipped", "auto"),
        backend=options.pop("backend", "auto"),
        **call,
    )
    if options:
        raise TypeError(f"expected the arguments of sparge.attention, got {', '.join(options)}")
    most = max(stop - start for start, stop in share.queries)
    most_heads = max(map(len, share.heads))

    def largest(here: Shape) -> Shape:
        return replace(here, q_len=most, heads=most_heads, kv_heads=max(most_heads // here.group, 1))

    query, key, value, asked = request(
        query,
        key,
        value,
        given,
        mode=("share", share.heads, share.queries),
        largest=largest,
        heads=share.all_heads,
        attn_mask=attn_mask,
        with_lse=return_lse,
    )
    local, mask = of_heads(asked.call, own_heads), None
    if asked.reason is None:
        (mask,) = choose_rows([Rows(query, key, local)], asked, share.pool(query.device))
        if share.balance is not None:
            share.balance.learn_from(mask, share.all_heads // local.shape.group, share.ranks)
    output, lse = attend(query, key, value, mask, local, asked, with_lse=return_lse)
    output = output.transpose(1, 2) if layout == "NHD" else output
    return (output, lse) if return_lse else output
