"""Block-sparse attention in PyTorch, for CPUs and any other device: only kept blocks are gathered and multiplied.

Rows (query blocks of a head) with equal numbers of blocks form one batch of dense attention over their gathered keys.
Rows are cut for that: into what they share with their neighbours, which is gathered once; numbers of blocks that many
rows have, or threads would wait for each other; and blocks that need an element mask (edges of the window, the ragged
end, caller masks), so that the bulk of the work carries none. The parts are merged through their log-sum-exp. Sums are
float32 whatever the input, and so are products, unless the processor has matrix units for 16 bits (`processor`).

Quantised modes and the P V threshold need the online softmax of `online`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.backends.base import add_to_totals
from sparge.backends.torch import online
from sparge.backends.torch.processor import dtype_of_products, has_cpu_kernel
from sparge.backends.torch.tiles import Tiles, Workspace
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div
from sparge.masks.visibility import find_visibility
from sparge.numerics.block_means import BlockMeans, block_means, mean_bias
from sparge.options.rules import Dense

CHUNK_BYTES = 16 * 2**20
"""Keys and values gathered at a time: large enough to keep the threads busy, small enough for the caches."""
MANY_THREADS = 16
"""From so many on they get twice as much. Not more: the kernel packs as much again, and beyond 32 MiB the C library
takes fresh pages for it at every call."""
SPANS = (4, 2)
"""How many neighbours attend together to what all of them keep."""
WHOLE = 8
"""Key blocks of one step of torch's kernel, 512 keys: a row is cut into whole steps and a rest."""


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
        output, lse = _attend_rows(tiles, kept, seen.full, call)
        if call.replaces_skipped:
            means = block_means(key, value, seen.keys)
            bias = mean_bias(means, kept, shape, call.window)
            output, lse = _add_means(tiles, means, bias, call.scale, output, lse)
    add_to_totals(totals, mask, pv_skipped)
    rows = (shape.batch, shape.heads, shape.q_blocks * BLOCK_Q)
    output = output.view(*rows, shape.value_dim)[:, :, : shape.q_len].to(query.dtype)
    return output.contiguous(), lse.view(rows)[:, :, : shape.q_len].contiguous()


def _attend_rows(tiles: Tiles, kept: Tensor, full: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """All rows: output (rows, 128, Dv) and lse (rows, 128), float32; 0 and -inf where nothing is kept."""
    shape, device = tiles.shape, tiles.query.device
    total = shape.batch * shape.heads * shape.q_blocks
    result = _Result(
        torch.zeros(total, BLOCK_Q, shape.value_dim, dtype=torch.float32, device=device),
        torch.full((total, BLOCK_Q), -math.inf, dtype=torch.float32, device=device),
        torch.zeros(total, dtype=torch.bool, device=device),
    )
    workspace = Workspace(dtype_of_products(tiles.query, tiles.value, exact_lse=call.exact_lse))
    gathered = BLOCK_K * (shape.head_dim + shape.value_dim) * workspace.dtype.itemsize
    if not has_cpu_kernel(tiles.query, tiles.value):
        gathered += BLOCK_Q * BLOCK_K * 8  # scores and probabilities
    of_row = BLOCK_Q * (shape.head_dim * workspace.dtype.itemsize + shape.value_dim * 12)  # query, and what is merged
    left = (kept & full).flatten(0, 2)
    for span in SPANS if _may_share(call) else ():
        neighbours, shared = _shared(left, shape.q_blocks, span)
        left[neighbours] &= ~shared[:, None]
        for batch, columns in _batches(shared, gathered, span * of_row):
            rows = neighbours[batch]
            result.add(rows, *_attend_batch(tiles, rows, columns, workspace, call.scale))
    whole = _whole_steps(left)
    for part in (whole, left & ~whole):
        for rows, columns in _batches(part, gathered, of_row):
            rows = rows[:, None]
            result.add(rows, *_attend_batch(tiles, rows, columns, workspace, call.scale))
    for rows, columns in _batches((kept & ~full).flatten(0, 2), gathered + BLOCK_Q * BLOCK_K * 16, of_row):
        bias = tiles.element_bias(rows, columns)
        rows = rows[:, None]
        result.add(rows, *_attend_batch(tiles, rows, columns, workspace, call.scale, bias))
    return result.output, result.lse


class _Result(NamedTuple):
    """Output (rows, 128, Dv) and LSE (rows, 128) of what was added so far, and to which rows that was, (rows,)."""

    output: Tensor
    lse: Tensor
    begun: Tensor

    def add(self, rows: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Attention of the rows (n, span) over further keys: (n, span * 128, Dv) and (n, span * 128)."""
        rows = rows.flatten()
        part, part_lse = part.view(len(rows), BLOCK_Q, -1), part_lse.view(len(rows), BLOCK_Q)
        if bool(self.begun[rows].any()):
            part, part_lse = merge(self.output[rows], self.lse[rows], part, part_lse)
        self.output[rows], self.lse[rows], self.begun[rows] = part, part_lse, True


def _attend_batch(
    tiles: Tiles, rows: Tensor, columns: Tensor, into: Workspace, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of rows (n, span) that share the key blocks ``columns`` (n, c)."""
    key, value = tiles.keys_values(rows[:, 0], columns, into)
    query = tiles.queries(rows.flatten(), into).view(len(rows), -1, key.shape[-1])
    return attend(query, key, value, bias, scale)


def _add_means(
    tiles: Tiles, means: BlockMeans, bias: Tensor, scale: float, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge what `_attend_rows` returns with the means of skipped blocks, weighted by `mean_bias`, head by head."""
    shape = tiles.shape
    scores = 0 if has_cpu_kernel(tiles.query, tiles.value) else 3 * shape.kv_blocks
    at_once = max(1, CHUNK_BYTES // (4 * BLOCK_Q * (shape.head_dim + 2 * shape.value_dim + scores)))
    for number, (query, weights) in enumerate(zip(tiles.query.flatten(0, 1), bias.flatten(0, 1), strict=True)):
        batch, head = divmod(number, shape.heads)
        at = (batch, head // shape.group)
        for start in range(0, shape.q_blocks, at_once):
            row_bias = weights[start : start + at_once, None].expand(-1, BLOCK_Q, -1)
            if bool((row_bias[:, 0] != -math.inf).any()):  # NaN counts
                rows = slice(number * shape.q_blocks + start, number * shape.q_blocks + start + len(row_bias))
                key, value = (mean[at].expand(len(row_bias), -1, -1) for mean in (means.key, means.value))
                part = attend(query[start : start + at_once].float(), key, value, row_bias, scale)
                merge(output[rows], lse[rows], *part)
    return output, lse


def _may_share(call: Call) -> bool:
    """Whether a row may be cut as its neighbours' blocks would have it.

    Where each causal row chooses for itself it may not: the next one, which knows the future, would decide how its sums
    are rounded.
    """
    by_row = not isinstance(call.sparsity, Dense) and not call.sparsity.is_call_wide
    return not (call.is_causal and by_row)


def _shared(kept: Tensor, q_blocks: int, span: int) -> tuple[Tensor, Tensor]:
    """Rows of neighbours (n, span), and which blocks they should attend to together (n, kv_blocks)."""
    heads = torch.arange(len(kept), device=kept.device).unflatten(0, (-1, q_blocks))
    rows = heads[:, : q_blocks // span * span].reshape(-1, span)
    return rows, _whole_steps(kept[rows].all(1))


def _whole_steps(kept: Tensor) -> Tensor:
    """The first blocks of each row, as many as `WHOLE` divides.

    It depends on nothing else: how a row is cut, and so how its sums are rounded, must not tell of other rows.
    """
    return kept & (kept.cumsum(-1, dtype=torch.int32) <= kept.sum(-1, keepdim=True) // WHOLE * WHOLE)


def _batches(kept: Tensor, block_bytes: int, row_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows with equal numbers of kept blocks, (n,), and those blocks, (n, c), of about `CHUNK_BYTES` a batch."""
    chunk = 2 * CHUNK_BYTES if torch.get_num_threads() >= MANY_THREADS else CHUNK_BYTES
    counts = kept.sum(-1)
    starts = counts.cumsum(0) - counts
    order = torch.argsort(counts, descending=True, stable=True)  # largest first: the buffers are allocated once
    columns = kept.nonzero()[:, 1]
    values, sizes = torch.unique_consecutive(counts[order], return_counts=True)
    start = 0
    for count, size in zip(values.tolist(), sizes.tolist(), strict=True):
        if count:
            within = torch.arange(count, device=kept.device)
            batches = ceil_div(size, max(1, chunk // (count * block_bytes + row_bytes)))
            for batch in order[start : start + size].tensor_split(batches):
                yield batch, columns[starts[batch, None] + within]
        start += size


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention of a batch: (n, M, D), (n, K, D), (n, K, Dv) -> output (n, M, Dv), lse (n, M), float32."""
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
    query, key, value = query.float(), key.float(), value.float()
    scores = torch.bmm(query * scale, key.mT)  # [n, M, K]
    if bias is not None:
        scores = (scores + bias).masked_fill_(bias == -math.inf, -math.inf)
    lse = scores.logsumexp(-1)
    shift = lse.masked_fill(lse == -math.inf, 0.0)
    return torch.bmm(scores.sub_(shift[..., None]).exp_(), value), lse


def _attend_cpu(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query[:, None],
        key[:, None],
        value[:, None],
        attn_mask=None if bias is None else bias[:, None],
        scale=scale,
    )
    output, lse = output.squeeze(1).float(), lse.squeeze(1)
    zero = lse == 0
    if bool(zero.any()):  # the kernel reports 0 for a query whose scores are all -inf
        suspects = zero.any(-1)
        scores = torch.bmm(query[suspects].float(), key[suspects].float().mT) * scale
        if bias is not None:
            scores = scores + bias.expand(len(query), -1, -1)[suspects]
        lse[suspects] = lse[suspects].masked_fill((scores == -math.inf).all(-1), -math.inf)
    return output, lse


def merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Add to a softmax-weighted output that over other keys, by their log-sum-exp; in place."""
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(total == -math.inf, 0.0)
    mine, other = ((x - shift).exp()[..., None] for x in (lse, part_lse))
    return output.mul_(mine).addcmul_(part, other), lse.copy_(total)
