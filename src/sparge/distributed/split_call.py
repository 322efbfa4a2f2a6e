"""Attention of one part of a call, while other ranks compute the other parts.

This is for integrations that exchange tensors themselves. A part has some heads or some queries, and all keys that its
queries see. Only a `Budget` depends on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparge.dispatch import validation
from sparge.dispatch.gradients import needs_grad_of
from sparge.dispatch.resolve import Options
from sparge.distributed import prediction
from sparge.distributed.balance import HeadBalance
from sparge.distributed.communicator import Communicator
from sparge.distributed.prediction import RankQBlocks
from sparge.distributed.request import Sizes, resolve, rule_for_heads
from sparge.masks.geometry import BLOCK_Q, Shape, ceil_div
from sparge.options.rules import Dense


@dataclass(frozen=True)
class CallSplit:
    """The part of a call that each rank computes.

    Attributes:
        ranks: the ranks that compute the call.
        heads: the query heads of each rank, as positions in ``order`` (head numbers if ``order`` is None).
        queries: the range [start, stop) of each rank's queries.
        balance: a `HeadBalance` to update with the kept blocks of this call. Every rank must then have all queries and
            the same number of heads.
        order: (H,), the heads assigned to rank 0, then those of rank 1, and so on; None for the natural order.
    """

    ranks: Communicator
    heads: tuple[range, ...]
    queries: tuple[tuple[int, int], ...]
    balance: HeadBalance | None = None
    order: Tensor | None = None
    merges_by_lse = False

    @property
    def total_heads(self) -> int:
        return max(own.stop for own in self.heads)

    @property
    def key(self) -> Hashable:
        return "split", self.ranks.name, self.ranks.rank, self.heads, self.queries

    def compared(self, query: Tensor, key: Tensor, layout: str) -> None:
        """Compare nothing: integrations compare policies before they exchange tensors."""

    def sizes(self, local: Shape, attn_mask: Tensor | None) -> Sizes:  # noqa: ARG002
        q_len, heads = max(stop - start for start, stop in self.queries), max(map(len, self.heads))
        largest = replace(local, q_len=q_len, heads=heads, kv_heads=max(heads // local.group, 1))
        return Sizes(local, largest)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    split: CallSplit,
    attend_locally: Callable[..., Any],
    **options: Any,
) -> Any:
    """Compute this rank's part of a call. All ranks must call this function together.

    Args:
        query, key, value: the tensors of this rank. Causality and ranges of tokens refer to them.
        split: the parts of all ranks. Per-head options have values for all heads.
        attend_locally: `sparge.attention` or a wrapper, called if the rule does not depend on other ranks.

    The other arguments (without ``on_unsupported``), the result and the errors are those of `sparge.attention`.
    """
    rule = validation.resolve_sparsity(options.pop("topk", None), options.pop("sparsity", None), split.total_heads)
    own = split.heads[split.ranks.rank]
    positions = slice(own.start, own.stop)
    own_heads = positions if split.order is None else split.order[positions]
    if not isinstance(rule, Dense):
        rule = rule_for_heads(rule, own_heads)
    needs_grad = needs_grad_of(query, key, value, attn_mask)
    if isinstance(rule, Dense) or not rule.is_call_wide or split.ranks.size == 1 or dropout_p or needs_grad:
        return attend_locally(query, key, value, attn_mask, dropout_p, sparsity=rule, **options)
    call_options = Options(sparsity=rule, **options)
    query, key, value, request = resolve(query, key, value, call_options, split, attn_mask)
    call, mask = request.call, None
    if request.reason is None:
        q_blocks = ceil_div(max(stop for _, stop in split.queries), BLOCK_Q)
        ranges = tuple((queries,) for queries in split.queries)
        pool = RankQBlocks(split.ranks, ranges, split.heads, q_blocks, split.order, query.device)
        (mask,) = prediction.choose_masks(query, [key], [call], request, pool)
        if split.balance is not None:
            split.balance.update(mask, split.total_heads // call.shape.group, split.ranks)
    output, lse = request.attend(query, key, value, mask, call)
    output = output.transpose(1, 2) if call_options.layout == "NHD" else output
    return (output, lse) if call_options.return_lse else output
