"""Block-sparse attention in PyTorch, for CPUs and other devices: only kept blocks are gathered and multiplied.

Query blocks that keep equal numbers of key blocks form a batch of dense attention over their gathered keys. Attention
of a query block is computed in parts, which are merged by their LSEs:

    shared     blocks that neighboring query blocks also keep; they are gathered once for all of them
    whole      other blocks, a multiple of the step of torch's kernel, so that all threads have equal work
    rest       the remaining blocks without an element mask
    partial    blocks with an element mask: edges of the window, the end of the sequence, caller masks

Sums are float32 for any input. So are products, unless the CPU has matrix units for 16-bit numbers (`processor`).
Quantized calls and calls with a P V threshold run in `reference.softmax`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparge.backends.base import add_to_totals
from sparge.backends.torch.processor import dtype_of_products, has_cpu_kernel
from sparge.backends.torch.tiles import Tiles, Workspace
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div
from sparge.masks.visibility import Visibility, find_visibility
from sparge.numerics.block_means import BlockMeans, block_means, mean_bias
from sparge.options.rules import Dense
from sparge.reference.softmax import GROUPS, attend_q_blocks

CHUNK_BYTES = 16 * 2**20
"""Bytes of keys and values gathered at a time: enough to occupy the threads, few enough for the caches."""
MANY_THREADS = 16
"""Number of threads from which chunks are twice as large. Even larger chunks are slower: the kernel copies the bytes
again, and above 32 MiB the C library maps fresh pages in every call."""
SPANS = (4, 2)
"""Numbers of neighboring query blocks for which key blocks that all of them keep are gathered once."""
STEP_BLOCKS = 8
"""Key blocks per step of torch's kernel (512 keys)."""


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention over the kept blocks: output (B, H, Sq, Dv) in the query's dtype, lse (B, H, Sq) float32."""
    shape = call.shape
    seen = find_visibility(shape, call.window, call.attn_mask, query.device)
    tiles = Tiles.cut(query, key, value, call, seen)
    listed = mask.to_dense()
    kept = listed & seen.blocks
    pv_skipped = kept.new_zeros((), dtype=torch.int64)
    if call.is_quantized or call.pv_threshold is not None:
        output, lse, pv_skipped = _attend_online(tiles, kept, seen, call)
        if call.pv_threshold is not None:  # listed blocks that the mask hides entirely count as skipped
            pv_skipped += GROUPS * (listed & ~kept).sum()
    else:
        output, lse = _attend_q_blocks(tiles, kept, seen.full, call)
        if call.replaces_skipped:
            means = block_means(key, value, seen.keys)
            bias = mean_bias(means, kept, shape, call.window)
            output, lse = _add_means(tiles, means, bias, call.scale, output, lse)
        sizes = (shape.batch, shape.heads, shape.q_blocks * BLOCK_Q)
        output, lse = output.view(*sizes, shape.value_dim)[:, :, : shape.q_len], lse.view(sizes)[:, :, : shape.q_len]
    add_to_totals(totals, mask, pv_skipped)
    return output.to(query.dtype).contiguous(), lse.contiguous()


def _attend_online(tiles: Tiles, kept: Tensor, seen: Visibility, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what the GPU kernels compute for quantized calls and P V thresholds, with `reference.softmax` in float32.

    This shows the quantization error on any machine, but is slower than the unquantized path.

    Returns:
        Output (B, H, Sq, Dv) and LSE (B, H, Sq), and the number of halves of blocks whose P V was skipped.
    """
    shape = call.shape
    query, key, value = (blocks.flatten(2, 3).float() for blocks in (tiles.query, tiles.key, tiles.value))
    query, key, value = query[:, :, : shape.q_len], key[:, :, : shape.kv_len], value[:, :, : shape.kv_len]
    keys_seen = torch.ones(1, 1, 1, dtype=torch.bool, device=key.device) if seen.keys is None else seen.keys
    result = attend_q_blocks(
        query,
        key,
        value,
        keys_seen.expand(key.shape[:3]),
        kept,
        call,
        lambda q_indices, kv_indices: tiles.element_bias(q_indices, kv_indices[:, None]),
        has_bias=kept & ~seen.full,
    )
    return result.output, result.lse, result.pv_skipped.sum()


def _attend_q_blocks(tiles: Tiles, kept: Tensor, full: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Compute attention of all query blocks: output (n, 128, Dv) and LSE (n, 128), float32.

    Output and LSE are 0 and -inf for queries that see no kept key.
    """
    shape, device = tiles.shape, tiles.query.device
    total = shape.batch * shape.heads * shape.q_blocks
    result = _Result(
        torch.zeros(total, BLOCK_Q, shape.value_dim, dtype=torch.float32, device=device),
        torch.full((total, BLOCK_Q), -math.inf, dtype=torch.float32, device=device),
        torch.zeros(total, dtype=torch.bool, device=device),
    )
    workspace = Workspace(dtype_of_products(tiles.query, tiles.value, exact_lse=call.exact_lse))
    block_bytes = BLOCK_K * (shape.head_dim + shape.value_dim) * workspace.dtype.itemsize
    if not has_cpu_kernel(tiles.query, tiles.value):
        block_bytes += BLOCK_Q * BLOCK_K * 8  # scores and probabilities
    # The query, and the outputs that are merged
    q_block_bytes = BLOCK_Q * (shape.head_dim * workspace.dtype.itemsize + shape.value_dim * 12)
    remaining = (kept & full).flatten(0, 2)
    for span in SPANS if _may_share(call) else ():
        neighbors, shared = _shared(remaining, shape.q_blocks, span)
        remaining[neighbors] &= ~shared[:, None]
        for batch, kv_indices in _batches(shared, block_bytes, span * q_block_bytes):
            q_indices = neighbors[batch]
            result.add(q_indices, *_attend_batch(tiles, q_indices, kv_indices, workspace, call.scale))
    whole = _whole_steps(remaining)
    for part in (whole, remaining & ~whole):
        for q_indices, kv_indices in _batches(part, block_bytes, q_block_bytes):
            q_indices = q_indices[:, None]
            result.add(q_indices, *_attend_batch(tiles, q_indices, kv_indices, workspace, call.scale))
    partial = (kept & ~full).flatten(0, 2)
    for q_indices, kv_indices in _batches(partial, block_bytes + BLOCK_Q * BLOCK_K * 16, q_block_bytes):
        bias = tiles.element_bias(q_indices, kv_indices)
        q_indices = q_indices[:, None]
        result.add(q_indices, *_attend_batch(tiles, q_indices, kv_indices, workspace, call.scale, bias))
    return result.output, result.lse


class _Result(NamedTuple):
    """Output (n, 128, Dv) and LSE (n, 128) over the parts so far; ``begun`` (n,) marks query blocks with a part."""

    output: Tensor
    lse: Tensor
    begun: Tensor

    def add(self, q_indices: Tensor, part: Tensor, part_lse: Tensor) -> None:
        """Merge a part of query blocks (n, span): output (n, span * 128, Dv), LSE (n, span * 128)."""
        q_indices = q_indices.flatten()
        part, part_lse = part.view(len(q_indices), BLOCK_Q, -1), part_lse.view(len(q_indices), BLOCK_Q)
        if bool(self.begun[q_indices].any()):
            part, part_lse = merge(self.output[q_indices], self.lse[q_indices], part, part_lse)
        self.output[q_indices], self.lse[q_indices], self.begun[q_indices] = part, part_lse, True


def _attend_batch(
    tiles: Tiles, q_indices: Tensor, kv_indices: Tensor, into: Workspace, scale: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention of spans of query blocks (n, span) over the key blocks ``kv_indices`` (n, c) of each span."""
    key, value = tiles.keys_values(q_indices[:, 0], kv_indices, into)
    query = tiles.queries(q_indices.flatten(), into).view(len(q_indices), -1, key.shape[-1])
    return attend(query, key, value, bias, scale)


def _add_means(
    tiles: Tiles, means: BlockMeans, bias: Tensor, scale: float, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over the means of skipped blocks into results of `_attend_q_blocks`, head by head.

    Args:
        bias: returned by `mean_bias`.
    """
    shape = tiles.shape
    scores = 0 if has_cpu_kernel(tiles.query, tiles.value) else 3 * shape.kv_blocks
    max_q_blocks = max(1, CHUNK_BYTES // (4 * BLOCK_Q * (shape.head_dim + 2 * shape.value_dim + scores)))
    for number, (query, weights) in enumerate(zip(tiles.query.flatten(0, 1), bias.flatten(0, 1), strict=True)):
        batch, head = divmod(number, shape.heads)
        at = (batch, head // shape.group)
        for start in range(0, shape.q_blocks, max_q_blocks):
            row_bias = weights[start : start + max_q_blocks, None].expand(-1, BLOCK_Q, -1)
            if bool((row_bias[:, 0] != -math.inf).any()):  # NaN counts
                q_slice = slice(number * shape.q_blocks + start, number * shape.q_blocks + start + len(row_bias))
                key, value = (mean[at].expand(len(row_bias), -1, -1) for mean in (means.key, means.value))
                part = attend(query[start : start + max_q_blocks].float(), key, value, row_bias, scale)
                merge(output[q_slice], lse[q_slice], *part)
    return output, lse


def _may_share(call: Call) -> bool:
    """Return whether neighboring query blocks may share gathered key blocks.

    Sharing changes the order in which a query block's sums are added, and so their rounding. In a causal call with
    separate selections per query block, that rounding would depend on the blocks of later query blocks, that is, on
    future tokens. Such calls do not share.
    """
    by_q_block = not isinstance(call.sparsity, Dense) and not call.sparsity.is_call_wide
    return not (call.is_causal and by_q_block)


def _shared(kept: Tensor, q_blocks: int, span: int) -> tuple[Tensor, Tensor]:
    """Return spans of neighboring query blocks (n, span), and the blocks that each span shares, (n, kv_blocks)."""
    heads = torch.arange(len(kept), device=kept.device).unflatten(0, (-1, q_blocks))
    q_indices = heads[:, : q_blocks // span * span].reshape(-1, span)
    return q_indices, _whole_steps(kept[q_indices].all(1))


def _whole_steps(kept: Tensor) -> Tensor:
    """Return the first kept blocks of each row, as many as fill whole steps of `STEP_BLOCKS`.

    A row is a query block or a span. Its result, and so the rounding of its sums, does not depend on other rows.
    """
    return kept & (kept.cumsum(-1, dtype=torch.int32) <= kept.sum(-1, keepdim=True) // STEP_BLOCKS * STEP_BLOCKS)


def _batches(kept: Tensor, block_bytes: int, q_block_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield query blocks (n,) that keep equally many blocks, and the blocks (n, c), about `CHUNK_BYTES` at a time."""
    chunk = 2 * CHUNK_BYTES if torch.get_num_threads() >= MANY_THREADS else CHUNK_BYTES
    counts = kept.sum(-1)
    starts = counts.cumsum(0) - counts
    order = torch.argsort(counts, descending=True, stable=True)  # largest first, so buffers are allocated once
    columns = kept.nonzero()[:, 1]
    values, sizes = torch.unique_consecutive(counts[order], return_counts=True)
    start = 0
    for count, size in zip(values.tolist(), sizes.tolist(), strict=True):
        if count:
            within = torch.arange(count, device=kept.device)
            batches = ceil_div(size, max(1, chunk // (count * block_bytes + q_block_bytes)))
            for batch in order[start : start + size].tensor_split(batches):
                yield batch, columns[starts[batch, None] + within]
        start += size


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute dense attention of a batch: (n, M, D), (n, K, D), (n, K, Dv) -> output (n, M, Dv), lse (n, M)."""
    if not has_cpu_kernel(query, value):
        return _attend_anywhere(query, key, value, bias, scale)
    output, lse = _attend_cpu(query, key, value, bias, scale)
    # The kernel adds the bias, so the score of a hidden NaN key is NaN - inf = NaN. Batch elements with NaN keys are
    # recomputed. Checking the sum is cheaper than checking every key.
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
    if bool(zero.any()):  # the kernel returns LSE 0 for a query whose scores are all -inf
        suspects = zero.any(-1)
        scores = torch.bmm(query[suspects].float(), key[suspects].float().mT) * scale
        if bias is not None:
            scores = scores + bias.expand(len(query), -1, -1)[suspects]
        lse[suspects] = lse[suspects].masked_fill((scores == -math.inf).all(-1), -math.inf)
    return output, lse


def merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge attention over other keys into ``output`` and ``lse`` by their LSEs, in place."""
    total = torch.logaddexp(lse, part_lse)
    shift = total.masked_fill(total == -math.inf, 0.0)
    weight, part_weight = ((x - shift).exp()[..., None] for x in (lse, part_lse))
    return output.mul_(weight).addcmul_(part, part_weight), lse.copy_(total)
