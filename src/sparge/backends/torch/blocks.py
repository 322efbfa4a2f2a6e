"""Block-sparse attention in PyTorch, for CPUs and any other device: only kept blocks are gathered and multiplied.

Rows (query blocks of a head) that keep the same number of blocks form one batch of dense attention over their
gathered keys. Blocks that need an element mask (edges of the window, the ragged end, caller masks) are attended to
separately and merged through their log-sum-exp, so that the bulk of the work carries no mask. Arithmetic is float32
whatever the input: on CPUs without 16-bit matrix units that is both faster and more accurate.

Quantised modes and the P V threshold need the online softmax of `online`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sparge.backends.base import add_to_totals
from sparge.backends.torch import online
from sparge.backends.torch.tiles import Tiles, Workspace
from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.geometry import BLOCK_K, BLOCK_Q
from sparge.replacement import BlockMeans, block_means, replaced_bias
from sparge.visibility import find_visibility

CHUNK_BYTES = 16 * 2**20
"""Keys and values gathered at a time: large enough to keep the threads busy, small enough for the caches."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over the kept blocks: output (B, H, Sq, Dv) in the query's dtype, lse (B, H, Sq) float32."""
    shape = call.shape
    seen = find_visibility(shape, call.window, call.attn_mask, query.device)
    tiles = Tiles.cut(query, key, value, call, seen)
    listed = mask.to_dense()
    kept = listed & seen.blocks
    pv_skipped = kept.new_zeros((), dtype=torch.int64)
    if call.is_quantized or call.pv_threshold is not None:
        output, lse, pv_skipped = online.attention(tiles, kept, seen, call)
        if call.pv_threshold is not None:  # of blocks that a mask hides all is skipped
            pv_skipped += online.GROUPS * (listed & ~kept).sum()
    else:
        output, lse = _attend_rows(tiles, kept, seen.full, call.scale)
        if call.replaces_skipped:
            means = block_means(key, value, seen.keys)
            bias = replaced_bias(means, kept, call).flatten(0, 2)
            output, lse = _add_means(tiles, means, bias, call.scale, output, lse)
    add_to_totals(totals, mask, pv_skipped)
    rows = (shape.batch, shape.heads, shape.q_blocks * BLOCK_Q)
    output = output.view(*rows, shape.value_dim)[:, :, : shape.q_len].to(query.dtype)
    return output.contiguous(), lse.view(rows)[:, :, : shape.q_len].contiguous()


def _attend_rows(tiles: Tiles, kept: Tensor, full: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All rows: output (rows, 128, Dv) and lse (rows, 128), float32; 0 and -inf where nothing is kept."""
    shape = tiles.shape
    total = shape.batch * shape.heads * shape.q_blocks
    device = tiles.query.device
    output = torch.empty(total, BLOCK_Q, shape.value_dim, dtype=torch.float32, device=device)
    output[~(kept & full).flatten(0, 2).any(-1)] = 0.0  # the others are written below
    lse = torch.full((total, BLOCK_Q), -math.inf, dtype=torch.float32, device=device)
    workspace = Workspace()
    gathered = BLOCK_K * (shape.head_dim + shape.value_dim) * 4
    if not has_cpu_kernel(tiles.query, tiles.value):
        gathered += BLOCK_Q * BLOCK_K * 8  # scores and probabilities
    for rows, columns in _batches(kept & full, gathered):
        key, value = tiles.keys_values(rows, columns, workspace)
        output[rows], lse[rows] = attend(tiles.queries(rows, workspace), key, value, None, scale)
    for rows, columns in _batches(kept & ~full, gathered + BLOCK_Q * BLOCK_K * 16):
        key, value = tiles.keys_values(rows, columns, workspace)
        bias = tiles.element_bias(rows, columns)
        part, part_lse = attend(tiles.queries(rows, workspace), key, value, bias, scale)
        output[rows], lse[rows] = merge(output[rows], lse[rows], part, part_lse)
    return output, lse


def _add_means(
    tiles: Tiles, means: BlockMeans, bias: Tensor, scale: float, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge what `_attend_rows` returns with the means of skipped blocks, weighted by `replaced_bias`."""
    shape, workspace = tiles.shape, Workspace()
    key, value = means.key.flatten(0, 1), means.value.flatten(0, 1)  # [B * Hkv, kv_blocks, width]
    some = (bias != -math.inf).any(-1).nonzero().flatten()  # NaN counts
    row_bytes = 4 * shape.kv_blocks * (shape.head_dim + shape.value_dim + 3 * BLOCK_Q)
    for rows in some.split(max(1, CHUNK_BYTES // row_bytes)):
        batch, head, _ = tiles.place(rows)
        kv_head = batch * shape.kv_heads + head // shape.group
        row_bias = bias[rows, None].expand(-1, BLOCK_Q, -1)
        part, part_lse = attend(tiles.queries(rows, workspace), key[kv_head], value[kv_head], row_bias, scale)
        output[rows], lse[rows] = merge(output[rows], lse[rows], part, part_lse)
    return output, lse


def _batches(kept: Tensor, block_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows with equal numbers of kept blocks, (n,), and those blocks, (n, c), up to `CHUNK_BYTES` a batch."""
    rows = kept.flatten(0, 2)
    counts = rows.sum(-1)
    order = torch.argsort(counts, descending=True, stable=True)  # largest first: the buffers are allocated once
    kept_first = torch.argsort((~rows).to(torch.uint8), dim=-1, stable=True)
    values, sizes = torch.unique_consecutive(counts[order], return_counts=True)
    start = 0
    for count, size in zip(values.tolist(), sizes.tolist(), strict=True):
        if count:
            step = max(1, CHUNK_BYTES // (count * block_bytes))
            for batch in order[start : start + size].split(step):
                yield batch, kept_first[batch, :count]
        start += size


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention of a batch, float32: (n, M, D), (n, K, D), (n, K, Dv) -> output (n, M, Dv), lse (n, M)."""
    if not has_cpu_kernel(query, value):
        return _attend_anywhere(query, key, value, bias, scale)
    output, lse = _attend_cpu(query, key, value, bias, scale)
    # The kernel adds the bias, and a hidden NaN stays NaN when -inf is added to it: do those rows again. A finite sum
    # rules them out at less cost than asking every element.
    if bias is not None and not bool(key.sum().isfinite()):
        broken = ~key.isfinite().flatten(1).all(1)
        bias = bias.expand(len(query), -1, -1)[broken]
        output[broken], lse[broken] = _attend_anywhere(query[broken], key[broken], value[broken], bias, scale)
    return output, lse


def _attend_anywhere(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    scores = torch.bmm(query * scale, key.mT)  # [n, M, K]
    if bias is not None:
        scores = (scores + bias).masked_fill_(bias == -math.inf, -math.inf)
    lse = scores.logsumexp(-1)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.bmm(scores.sub_(shift[..., None]).exp_(), value), lse


def has_cpu_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch's CPU flash attention takes these: it wants one width for keys and values."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[:, None],
        key[:, None],
        value[:, None],
        attn_mask=None if bias is None else bias[:, None],
        scale=scale,
    )
    output, lse = output.squeeze(1), lse.squeeze(1)
    zero = lse == 0
    if bool(zero.any()):  # the kernel reports 0 for a query whose scores are all -inf
        suspects = zero.any(-1)
        scores = torch.bmm(query[suspects], key[suspects].mT) * scale
        if bias is not None:
            scores = scores + bias.expand(len(query), -1, -1)[suspects]
        lse[suspects] = lse[suspects].masked_fill((scores == -math.inf).all(-1), -math.inf)
    return output, lse


def merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two softmax-weighted outputs over disjoint keys by their log-sum-exp."""
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(total == -math.inf, 0.0)
    mine, other = ((x - shift).exp()[..., None] for x in (lse, part_lse))
    return (output * mine).addcmul_(part, other), total
