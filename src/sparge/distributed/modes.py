"""The public functions: attention over a sequence whose tokens lie on the ranks of a process group.

    ulysses_attention     heads are exchanged for tokens; each rank computes whole sequences of its heads
    gathered_attention    keys and values are gathered; each rank computes its queries
    ring_attention        keys and values travel around; parts are merged by their LSE
    mesh_attention        Ulysses within one group, one of the others between groups

Prediction is global in all of them: the masks are those of one process. Compiled programs end before a call and go on
behind it: ranks exchange things in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sparge.distributed import gathered, ring, ulysses
from sparge.distributed.balance import HeadBalance
from sparge.distributed.exchange import Exchange, exchange_of
from sparge.distributed.mesh import Mesh
from sparge.distributed.places import Places, Sharding, places_of
from sparge.distributed.request import Options, Request, check_key_mask, check_lengths, of_heads, request
from sparge.masks.geometry import Shape
from sparge.options.checks import check_choice, check_flag
from sparge.options.common import Layout, PerHead, Quantization, ScoreName, Skipped
from sparge.options.rules import Sparsity
from sparge.options.scores import Score

INNER = ("gathered", "ring")


@torch.compiler.disable
def ulysses_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    lengths: Sequence[int] | None = None,
    balance: HeadBalance | None = None,
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
    """`sparge.attention` of a sequence whose tokens lie on several ranks, by an exchange of heads.

    Every rank gets whole sequences of some heads and computes them as one device would. All ranks call it together.

    Args:
        query: this rank's tokens, (B, H, n, D), or (B, n, H, D) with ``layout="NHD"``. Ranks hold neighbouring parts of
            the sequence in their order. H is a multiple of the number of ranks.
        key: the same tokens, (B, H_kv, n, D); H_kv is a multiple or a divisor of the number of ranks.
        value: the same tokens, (B, H_kv, n, D_v).
        attn_mask: bool (B | 1, 1, 1, S) over the keys of all ranks, the same on every rank.
        group: the process group, by default all ranks.
        lengths: tokens of every rank, the same on each (`split_lengths`); to be given where they are not all as many.
        balance: deals heads to ranks by what they cost in the call before; one for each layer.
        topk: budget of the whole call. Per-head numbers are those of all H heads.
        sparsity: selection rule of the whole call, instead of ``topk``.
        always_keep: key ranges of the whole sequence.
        exact_queries: query ranges of the whole sequence.
        return_lse: also return the LSE of this rank's tokens.

    The other arguments are those of `sparge.attention`. Whether it pays to be sparse is judged by the exchanged sizes.

    Returns:
        This rank's tokens of the output, (B, H, n, D_v), in the query's dtype and layout, and with ``return_lse`` their
        LSE (B, H, n).

    Raises:
        TypeError, ValueError: an argument is not what was expected.
        NotImplementedError: gradients, head_dim or device that cannot be served.
        RuntimeError: no process group; or torch.distributed's own, when a rank is gone.
    """
    exchange = exchange_of(group)
    options = Options.among(locals())
    check_flag("return_lse", return_lse)
    if balance is not None and not isinstance(balance, HeadBalance):
        raise TypeError(f"balance: expected a HeadBalance or None, got {type(balance).__name__}")
    lengths = _lengths(query, layout, lengths, exchange)
    check_key_mask(attn_mask, sum(lengths))

    def largest(whole: Shape) -> Shape:
        ulysses.check_heads(whole.heads, whole.kv_heads, exchange.size)
        kv_heads = max(whole.kv_heads // exchange.size, 1)
        return replace(whole, heads=whole.heads // exchange.size, kv_heads=kv_heads)

    query, key, value, asked = request(
        query,
        key,
        value,
        options,
        mode=("ulysses", exchange.size),
        total=sum(lengths),
        largest=largest,
        attn_mask=attn_mask,
        with_lse=return_lse,
    )
    shape = asked.call.shape
    order = None if balance is None else balance.heads(shape.kv_heads, shape.group, query.device)
    heads = ulysses.to_heads(query, key, value, exchange, lengths, order)
    output, lse = ulysses.compute(*heads, asked, exchange, order=order, balance=balance, with_lse=return_lse)
    return _result(*ulysses.to_tokens(output, lse if return_lse else None, exchange, lengths, order), layout)


@torch.compiler.disable
def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    sharding: Sharding = "contiguous",
    lengths: Sequence[int] | None = None,
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
    """`sparge.attention` of a sequence whose tokens lie on several ranks: K and V are gathered, queries stay.

    Any number of heads will do, and nothing is merged. K and V of the whole sequence are on a rank for a few heads at a
    time: the next ones arrive while these are computed.

    Args:
        query: as in `ulysses_attention`, with any number of heads.
        key: as in `ulysses_attention`.
        value: as in `ulysses_attention`.
        attn_mask: as in `ulysses_attention`.
        sharding: "contiguous", ranks hold neighbouring parts in their order; or "head_tail": of 2 P equal pieces, rank
            r holds piece r, then piece 2 P - 1 - r, so that causal attention gives every rank as much to do
            (`shard` cuts a sequence so).
        kv_heads_at_once: heads of K and V gathered at a time; by default as many as fit into 1 GiB.
        window: with causal attention alone.

    The other arguments, the result and the errors are those of `ulysses_attention`. Masks are exactly those of one
    process where each rank's pieces are whole blocks of 128 tokens; others are served too, with rows of blocks that
    begin at each piece.
    """
    exchange = exchange_of(group)
    options = Options.among(locals())
    check_flag("return_lse", return_lse)
    places = places_of(_lengths(query, layout, lengths, exchange), sharding)
    check_key_mask(attn_mask, places.total)
    query, key, value, asked = request(
        query,
        key,
        value,
        options,
        mode=("gathered", places),
        total=places.total,
        largest=_longest(places),
        attn_mask=attn_mask,
        with_lse=return_lse,
    )
    pool = gathered.pool_of(asked, places, exchange, [range(query.shape[1])] * exchange.size, query.device)
    output, lse = gathered.compute(
        query,
        key,
        value,
        asked,
        exchange,
        places,
        pool,
        kv_heads_at_once=_positive("kv_heads_at_once", kv_heads_at_once),
        with_lse=return_lse,
    )
    return _result(output, lse if return_lse else None, layout)


@torch.compiler.disable
def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    sharding: Sharding = "contiguous",
    lengths: Sequence[int] | None = None,
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
    """`sparge.attention` of a sequence whose tokens lie on several ranks: K and V travel from rank to rank.

    A rank never holds more of K and V than two ranks' parts. What its queries get of each part is merged by the LSE.

    Args:
        query: as in `gathered_attention`. Ranks hold multiples of 128 tokens (of 256 with "head_tail"), the last one
            any number.
        key: as in `gathered_attention`.
        value: as in `gathered_attention`.
        quantization: as in `sparge.attention`, but for "int8_fp8_fast", whose LSE is too rough for merging; "auto"
            takes "int8_fp8" instead of it.

    The other arguments, the result and the errors are those of `gathered_attention`; there is no mask and no window.
    """
    exchange = exchange_of(group)
    options = Options.among(locals())
    check_flag("return_lse", return_lse)
    places = places_of(_lengths(query, layout, lengths, exchange), sharding)
    ring.check_places(places)
    query, key, value, asked = request(
        query,
        key,
        value,
        options,
        mode=("ring", places),
        total=places.total,
        largest=_longest(places),
        is_merged=True,
    )
    pool = gathered.pool_of(asked, places, exchange, [range(query.shape[1])] * exchange.size, query.device)
    output, lse = ring.compute(query, key, value, asked, exchange, places, pool)
    return _result(output, lse if return_lse else None, layout)


@torch.compiler.disable
def mesh_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    ulysses_group: dist.ProcessGroup,
    group: dist.ProcessGroup,
    inner: Literal["gathered", "ring"] = "gathered",
    sharding: Sharding = "contiguous",
    kv_heads_at_once: int | None = None,
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
    """`sparge.attention` over a 2-D mesh of ranks: heads are exchanged within one group, keys between groups.

    Take it for several machines (heads within each, where links are fast), or where there are more ranks than heads.

    Args:
        query: as in `ulysses_attention`, as many tokens on every rank. The sequence is split for ``group`` first, by
            ``sharding``, and each part for ``ulysses_group``, contiguously.
        key: as in `ulysses_attention`.
        value: as in `ulysses_attention`.
        ulysses_group: this rank's row of the mesh, among which heads are exchanged.
        group: its column, among which K and V are gathered, or travel.
        inner: "gathered" or "ring".
        kv_heads_at_once: of "gathered".

    The other arguments, the result and the errors are those of `gathered_attention` and `ring_attention`.
    """
    outer, between = exchange_of(ulysses_group), exchange_of(group)
    ranks = Mesh(outer, between)
    options = Options.among(locals())
    check_flag("return_lse", return_lse)
    check_choice("inner", inner, INNER)
    kv_heads_at_once = _positive("kv_heads_at_once", kv_heads_at_once)
    if inner == "ring" and kv_heads_at_once is not None:
        raise ValueError(
            f'kv_heads_at_once: expected None with inner="ring", which gathers none, got {kv_heads_at_once}'
        )
    lengths = _lengths(query, layout, None, outer)
    _lengths(query, layout, None, between)
    places = places_of((sum(lengths),) * between.size, sharding)
    if inner == "ring":
        ring.check_places(places)

    def largest(whole: Shape) -> Shape:
        ulysses.check_heads(whole.heads, whole.kv_heads, outer.size)
        kv_heads = max(whole.kv_heads // outer.size, 1)
        return replace(_longest(places)(whole), heads=whole.heads // outer.size, kv_heads=kv_heads)

    query, key, value, asked = request(
        query,
        key,
        value,
        options,
        mode=("mesh", inner, outer.size, places),
        total=places.total,
        largest=largest,
        with_lse=return_lse,
        is_merged=inner == "ring",
    )
    heads = asked.call.shape.heads // outer.size
    query, key, value = ulysses.to_heads(query, key, value, outer, lengths, None)
    of_ranks = [range(rank * heads, (rank + 1) * heads) for rank in range(outer.size) for _ in range(between.size)]
    pool = gathered.pool_of(asked, places, ranks, of_ranks, query.device)
    own = slice(outer.rank * heads, (outer.rank + 1) * heads)
    if asked.call.has_per_head_numbers:
        asked = Request(of_heads(asked.call, own), asked.reason, asked.backend, asked.asked)
    if inner == "ring":
        output, lse = ring.compute(query, key, value, asked, between, places, pool)
    else:
        output, lse = gathered.compute(
            query, key, value, asked, between, places, pool, kv_heads_at_once=kv_heads_at_once, with_lse=return_lse
        )
    return _result(*ulysses.to_tokens(output, lse if return_lse else None, outer, lengths, None), layout)


def _lengths(query: Tensor, layout: str, lengths: Sequence[int] | None, exchange: Exchange) -> tuple[int, ...]:
    own = query.shape[1 if layout == "NHD" else 2] if isinstance(query, Tensor) and query.ndim == 4 else 0
    if lengths is None and exchange.size > 1 and own:
        exchange.check_alike(own, query.device)
    return check_lengths(lengths, own, exchange.rank, exchange.size)


def _longest(places: Places) -> Callable[[Shape], Shape]:
    return lambda whole: replace(whole, q_len=max(places.lengths))


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name}: expected None or an int above 0, got {value!r}")
    return value


def _result(output: Tensor, lse: Tensor | None, layout: str) -> Tensor | tuple[Tensor, Tensor]:
    output = output.transpose(1, 2) if layout == "NHD" else output
    return output if lse is None else (output, lse)
