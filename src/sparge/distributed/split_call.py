"""Attention of one part of a call, while other ranks compute the other parts.

This is for integrations that exchange tensors themselves. A part has some heads or some queries, and all keys that its
queries see. Only a `Budget` depends on the other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from sparge.call import interned
from sparge.dispatch import call_cache, ops, reasons, validation
from sparge.dispatch.gradients import needs_grad_of
from sparge.dispatch.resolve import Options, check_tensors, resolve
from sparge.distributed import prediction
from sparge.distributed.balance import HeadBalance
from sparge.distributed.communicator import Communicator
from sparge.distributed.prediction import RankQBlocks
from sparge.distributed.request import rule_for_heads
from sparge.options.rules import Dense, Sparsity


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *,
    ranks: Communicator,
    heads: tuple[range, ...],
    queries: tuple[tuple[int, int], ...],
    balance: HeadBalance | None = None,
    order: Tensor | None = None,
    attend_locally: Callable[..., Any],
    sparsity: Sparsity,
    **options: Any,
) -> Any:
    """Compute this rank's part of a call. All ranks must call this function together, with the same options.

    Args:
        query, key, value: the tensors of this rank, heads first. Causality and token ranges refer to positions in them.
        ranks: the ranks that compute the call.
        heads: the query heads of each rank, as positions in ``order`` (head numbers if ``order`` is None). Per-head
            options have values for all heads.
        queries: the range [start, stop) of each rank's queries.
        balance: a `HeadBalance` to update with the kept blocks of this call. Every rank must then have all queries and
            the same number of heads.
        order: (H,), the heads assigned to rank 0, then those of rank 1, and so on; None for the natural order.
        attend_locally: `sparge.attention` or a wrapper, called if the rule does not depend on other ranks.

    The other arguments (without ``topk``, ``on_unsupported`` and ``layout``), the result and the errors are those of
    `sparge.attention`.
    """
    total_heads, local_heads = max(part.stop for part in heads), heads[ranks.rank]
    rule = validation.resolve_sparsity(None, sparsity, total_heads)
    if not isinstance(rule, Dense):
        positions = slice(local_heads.start, local_heads.stop)
        rule = rule_for_heads(rule, positions if order is None else order[positions])
    needs_grad = needs_grad_of(query, key, value, attn_mask)
    if isinstance(rule, Dense) or not rule.is_call_wide or ranks.size == 1 or dropout_p or needs_grad:
        return attend_locally(query, key, value, attn_mask, dropout_p, sparsity=rule, **options)
    call_options = Options(sparsity=rule, **options)
    kind, resolved = call_cache.find(query, key, value, attn_mask, call_options, ("split", heads, queries))
    if resolved is None:
        tensors = check_tensors(query, key, value, call_options)
        query, key, value, local = tensors.query, tensors.key, tensors.value, tensors.shape
        max_heads, max_queries = max(map(len, heads)), max(stop - start for start, stop in queries)
        largest = replace(local, q_len=max_queries, heads=max_heads, kv_heads=max(max_heads // local.group, 1))
        resolved = resolve(tensors, attn_mask, call_options, largest=largest)
        if resolved.is_repeatable and attn_mask is None:
            call_cache.remember(kind, resolved)
    call, with_lse = interned(resolved.call), call_options.return_lse
    if resolved.reason is None:
        pool = RankQBlocks(ranks, tuple((span,) for span in queries), heads, order, query.device)
        (mask,) = prediction.choose_masks(query, [key], [call], call, resolved.backend, pool)
        if balance is not None:
            balance.update(mask, total_heads // call.shape.group, ranks)
        output, lse = ops.attend(query, key, value, mask, call, resolved.backend)
    else:
        label = reasons.describe(resolved.reason)
        output, lse = ops.dense(query, key, value, call, call_options.backend, with_lse=with_lse, label=label)
    return (output, lse) if with_lse else output
