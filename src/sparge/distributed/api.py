"""`context_parallel_attention`: attention over a sequence whose tokens are split across several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from sparge.dispatch.resolve import Options
from sparge.distributed import gather, ring, ulysses
from sparge.distributed.balance import HeadBalance
from sparge.distributed.mesh import Group, resolve_mesh
from sparge.distributed.request import TokenSplit, resolve
from sparge.distributed.sharding import Sharding
from sparge.options.checks import check_choice
from sparge.options.common import Layout, PerHead, Quantization, ScoreName, Skipped
from sparge.options.rules import Sparsity
from sparge.options.scores import Score

MODES = {"ulysses": ulysses.attend, "gather": gather.attend, "ring": ring.attend}
"""Functions that compute this rank's heads: (query, key, value, request, split, order of heads) -> output and LSE."""


@torch.compiler.disable
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mode: Literal["ulysses", "gather", "ring"] = "ulysses",
    group: Group = None,
    sharding: Sharding = "contiguous",
    lengths: Sequence[int] | None = None,
    balance: HeadBalance | None = None,
    kv_heads_at_once: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    topk: PerHead | None = None,
    sparsity: Sparsity | None = None,
    score: ScoreName | Score = "moment",
    quantization: Quantization = "auto",
    layout: Layout = "HND",
    always_keep: Sequence[tuple[int, int]] | None = None,
    exact_queries: Sequence[tuple[int, int]] | None = None,
    skipped: Skipped = "auto",
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `sparge.attention` of a sequence whose tokens are split across several ranks.

    All ranks must call this function together and with the same options, which refer to the whole sequence. Ranks
    compare their options in the first call with these options. If every rank has whole blocks of 128 tokens, exactly
    the same blocks are kept as in a single process. The function causes a graph break under torch.compile.

    - "ulysses": ranks exchange tokens for heads, and each rank computes whole sequences of its heads.
    - "gather": ranks keep their queries and gather K and V, a few heads at a time. It supports any number of heads.
    - "ring": ranks keep their queries and send K and V around a ring, so that each rank stores K and V of at most two
      ranks. Outputs are merged by their LSE. All ranks except the last must have a multiple of 128 tokens (256 with
      "head_tail").

    Args:
        query: this rank's tokens, (B, H, n, D), or (B, n, H, D) with ``layout="NHD"``. With "ulysses", H is a multiple
            of the number of ranks.
        key: the same tokens, (B, H_kv, n, D). With "ulysses", H_kv is a multiple or a divisor of the number of ranks.
        value: the same tokens, (B, H_kv, n, D_v).
        attn_mask: bool (B | 1, 1, 1, S) over the keys of all ranks, equal on all ranks; not with "ring".
        mode: see above.
        group: a process group. Default: all ranks. "gather" and "ring" also accept a two-dimensional ``DeviceMesh`` or
            a pair (outer, ulysses) of process groups. Ranks then exchange heads within ``ulysses``, and K and V within
            ``outer``. Use this for several machines (with Ulysses inside each), or for more ranks than heads. The
            sequence is split over ``outer`` by ``sharding``, and each part is split contiguously over ``ulysses``.
        sharding: "contiguous", or "head_tail" (not with "ulysses"): of 2 P equal pieces, rank r has pieces r and
            2 P - 1 - r, which balances the work of causal attention. `shard` splits a sequence.
        lengths: number of tokens on each rank, the same list on every rank. Default: equal numbers.
        balance: a `HeadBalance`, which load-balances heads across ranks by their costs in the previous call. Each layer
            needs its own object. Only with "ulysses" and without a mesh.
        kv_heads_at_once: number of K/V heads that are gathered at a time. Default: as many as fit into 1 GiB. Only with
            "gather".
        window: with "gather" and "ring", windows must be causal.
        topk: share of the blocks of the whole call. Per-head values are given for all H heads.
        sparsity: rule for the whole call, like ``topk``.
        always_keep: key ranges of the whole sequence.
        exact_queries: query ranges of the whole sequence.
        quantization: as in `sparge.attention`. With "ring", "int8_fp8_fast" is not supported, and "auto" selects
            "int8_fp8" instead.
        return_lse: also return the LSE of this rank's tokens.

    The other arguments are those of `sparge.attention`. A call runs dense if the largest part that a rank computes is
    below the crossover.

    Returns:
        This rank's tokens of the output, (B, H, n, D_v), in the query's dtype and layout, and with ``return_lse`` their
        LSE (B, H, n).

    Raises:
        TypeError, ValueError: an argument is invalid, or differs between ranks.
        NotImplementedError: the call needs gradients, or its head_dim, mask or device is not supported.
        RuntimeError: there is no process group, or another rank failed (raised by torch.distributed).
    """
    check_choice("mode", mode, tuple(MODES))
    if balance is not None and not isinstance(balance, HeadBalance):
        raise TypeError(f"balance: expected a HeadBalance or None, got {type(balance).__name__}")
    lengths = tuple(lengths) if isinstance(lengths, list) else lengths
    split = TokenSplit(mode, resolve_mesh(group, mode), lengths, sharding, kv_heads_at_once, balance)
    options = Options(
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        window=window,
        topk=topk,
        sparsity=sparsity,
        score=score,
        quantization=quantization,
        layout=layout,
        always_keep=always_keep,
        exact_queries=exact_queries,
        skipped=skipped,
        return_lse=return_lse,
        backend=backend,
    )
    query, key, value, request = resolve(query, key, value, options, split, attn_mask)
    ranks, shape, lengths, order = split.mesh.ulysses, request.call.shape, request.lengths, None
    if balance is not None:
        order = balance.query_heads(shape.kv_heads, shape.group, query.device)
    query, key, value = ulysses.to_heads(query, key, value, ranks, lengths, lengths, order)
    if request.call.has_per_head_numbers:
        heads = split.mesh.heads_of_this_rank(shape.heads)
        request = request.for_heads(heads if order is None else order[heads])
    output, lse = MODES[mode](query, key, value, request, split, order)
    output = ulysses.to_tokens(output, ranks, lengths, shape.heads, order)
    output = output.transpose(1, 2) if layout == "NHD" else output
    if not return_lse:
        return output
    return output, ulysses.to_tokens(lse[..., None], ranks, lengths, shape.heads, order)[..., 0]
