"""The attention of one rank on one device, computed by public functions; nothing is sent.

Causal sequences are split into twice as many pieces as shards. A shard has one piece from each end (head and tail), so
that all shards see equal numbers of keys. Blocks are predicted over all keys first. A gather then makes one call per
piece, aligned bottom-right. A ring makes one call per chunk, with the mask columns of the chunk, and merges by LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sparge
from benchmarks.scale.plan import Split, Workload, exchanged_kv_heads
from sparge import BlockMask
from sparge.evaluate.inputs import FRAME_TOKENS, text_tensors, video_tensors
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ceil_div
from sparge.numerics.merge import merge
from sparge.options.common import Quantization, Skipped

VARIANTS = ("16 bits", "8 bits", "0.5", "0.25", "0.1")
"""Dense with torch's kernel, dense quantized, and densities of sparse attention (quantized on a GPU)."""
GROUP_NOISE = 0.4
"""Scale of the noise between the query heads of a group."""
FRAME_GRAIN = 4 * FRAME_TOKENS
"""The number of tokens of a synthetic video is a multiple of this."""


@dataclass(frozen=True)
class Inputs:
    """Query (1, H, S, D), key and value (1, Hkv, S, D) of a whole layer."""

    query: Tensor
    key: Tensor
    value: Tensor


def make_inputs(workload: Workload, device: str, seed: int = 0) -> Inputs:
    """Return text-like or video-like tensors in 16 bits (float32 on a CPU), made head by head to save memory."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    group, tokens = workload.heads // workload.kv_heads, workload.tokens
    many = tokens if workload.is_causal else ceil_div(tokens, FRAME_GRAIN) * FRAME_GRAIN
    make = text_tensors if workload.is_causal else video_tensors
    sides: tuple[list[Tensor], ...] = ([], [], [])
    for _ in range(workload.kv_heads):
        query, key, value = make((1, 1, many, workload.head_dim), generator)
        noise = torch.randn((1, group - 1, many, workload.head_dim), generator=generator, device=device, dtype=dtype)
        of_group = torch.cat([query.to(dtype), query.to(dtype) + GROUP_NOISE * noise], 1)
        for side, tensor in zip(sides, (of_group, key, value), strict=True):
            side.append(tensor[:, :, :tokens].to(dtype))
    return Inputs(*(torch.cat(side, 1) for side in sides))


def heads_of_rank(inputs: Inputs, workload: Workload, split: Split, rank: int = 0) -> Inputs:
    """Return the inputs of a rank after the head exchange: all tokens of its heads."""
    heads = workload.heads // split.ulysses
    kv_heads = exchanged_kv_heads(workload, split.ulysses) // split.ulysses
    first = rank * heads * workload.kv_heads // workload.heads
    query = inputs.query[:, rank * heads : (rank + 1) * heads]
    return Inputs(query, *(side[:, first : first + kv_heads] for side in (inputs.key, inputs.value)))


def ranges_of(workload: Workload, shards: int, shard: int) -> list[tuple[int, int]]:
    """Return the token ranges of a shard: one range of whole blocks, or head and tail of a causal sequence."""
    indices = [shard, 2 * shards - 1 - shard] if workload.is_causal and shards > 1 else [shard]
    pieces, blocks = shards * len(indices), ceil_div(workload.tokens, BLOCK_Q)
    bounds = [min(ceil_div(blocks * index, pieces) * BLOCK_Q, workload.tokens) for index in range(pieces + 1)]
    return [(bounds[index], bounds[index + 1]) for index in indices]


def copy_ranges(tensor: Tensor, ranges: list[tuple[int, int]]) -> Tensor:
    """Return a copy of the tokens of these ranges."""
    return torch.cat([tensor[:, :, start:stop] for start, stop in ranges], 2)


@dataclass(frozen=True)
class Attend:
    """The attention function of a variant: an entry of `VARIANTS`, or another density."""

    variant: str
    drops: bool
    """Whether skipped blocks are dropped, as in causal attention, instead of replaced by means."""
    merged: Quantization = "int8_fp8"
    """Quantization on a CPU, and of calls that return an LSE: the fastest quantization is too inexact for merging."""

    @property
    def is_sparse(self) -> bool:
        return not self.variant.endswith("bits")

    def predict(self, query: Tensor, key: Tensor, *, is_causal: bool) -> BlockMask | None:
        """Return the mask of queries that align with the last keys, or None for dense attention."""
        if not self.is_sparse:
            return None
        grouped = query.shape[1] != key.shape[1]
        return sparge.predict(query, key, topk=float(self.variant), is_causal=is_causal, enable_gqa=grouped)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: BlockMask | None,
        *,
        is_causal: bool,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output, and the LSE if requested."""
        if self.variant == "16 bits":
            return _dense(query, key, value, is_causal=is_causal, with_lse=with_lse)
        options: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1], "return_lse": with_lse}
        if with_lse or not query.is_cuda:
            options["quantization"] = self.merged
        if mask is None:
            result = sparge.attention(query, key, value, sparsity=sparge.Dense(), is_causal=is_causal, **options)
        else:
            skipped: Skipped = "drop" if self.drops else "mean"
            result = sparge.block_sparse_attention(query, key, value, mask, skipped=skipped, **options)
        return result if with_lse else (result, None)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute dense attention with torch's kernel, cuDNN's on a GPU.

    torch aligns causal attention top-left, so keys before the square need a separate call.
    """
    before = key.shape[2] - query.shape[2]
    if is_causal and before:
        square = _torch_kernel(query, key[:, :, before:], value[:, :, before:], is_causal=True, with_lse=True)
        past = _torch_kernel(query, key[:, :, :before], value[:, :, :before], is_causal=False, with_lse=True)
        output, lse = square[0].float(), square[1].float()
        merge(output, lse, *past)
        return output.to(query.dtype), lse
    output, lse = _torch_kernel(query, key, value, is_causal=is_causal, with_lse=with_lse)
    return output, lse if with_lse else None


def _torch_kernel(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """Call torch's operator that also returns the LSE: (B, H, S_q, D), (B, H, S_q)."""
    shape, group = query.shape, query.shape[1] // key.shape[1]
    if is_causal:
        key, value = (side.repeat_interleave(group, 1) if group > 1 else side for side in (key, value))
    else:  # treat the queries of a group as further queries of one head
        query = query.reshape(shape[0], key.shape[1], group * shape[2], shape[3])
    if query.is_cuda:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, with_lse, 0.0, is_causal
        )
    else:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
    return output.reshape(shape), lse.reshape(shape[:3]) if with_lse else lse


Run = Callable[[Attend], Tensor]


def gather_part(inputs: Inputs, workload: Workload, shards: int, shard: int) -> Run:
    """Return a function that computes attention of a shard's queries over all keys.

    With a single shard, this is the part of a Ulysses rank.
    """
    ranges, causal = ranges_of(workload, shards, shard), workload.is_causal
    pieces = [inputs.query[:, :, start:stop].contiguous() for start, stop in ranges]
    ends = [stop if causal else workload.tokens for _, stop in ranges]

    def run(attend: Attend) -> Tensor:
        outputs = []
        for query, end in zip(pieces, ends, strict=True):
            key, value = inputs.key[:, :, :end], inputs.value[:, :, :end]
            mask = attend.predict(query, key, is_causal=causal)
            outputs.append(attend(query, key, value, mask, is_causal=causal)[0])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    return run


def ring_part(inputs: Inputs, workload: Workload, shards: int, shard: int) -> Run:
    """Return a function that computes attention of a shard's queries over one chunk after another, its own first.

    In a causal sequence, only the shard's own chunk needs a causal mask. All queries see the heads of earlier shards
    and no tails of earlier shards. Only queries of the tail see the chunks of later shards.
    """
    causal, q_ranges = workload.is_causal, ranges_of(workload, shards, shard)
    query = copy_ranges(inputs.query, q_ranges)
    ends = [stop if causal else workload.tokens for _, stop in q_ranges]
    chunks = []
    for step in range(shards):
        source = (shard - step) % shards
        ranges = ranges_of(workload, shards, source)
        first = query.shape[2] // 2 if causal and source > shard else 0
        ranges = ranges[:1] if causal and source < shard else ranges
        chunks.append((first, ranges, copy_ranges(inputs.key, ranges), copy_ranges(inputs.value, ranges)))

    def kept_blocks(attend: Attend) -> Tensor | None:
        """Return the kept blocks of all queries, with columns padded to all keys."""
        if not attend.is_sparse:
            return None
        masks = []
        for piece, end in zip(query.split([stop - start for start, stop in q_ranges], 2), ends, strict=True):
            mask = attend.predict(piece, inputs.key[:, :, :end], is_causal=causal)
            assert mask is not None
            masks.append(mask.to_dense())
        width = ceil_div(workload.tokens, BLOCK_K)
        return torch.cat([F.pad(mask, (0, width - mask.shape[3])) for mask in masks], 2)

    def run(attend: Attend) -> Tensor:
        kept = kept_blocks(attend)
        for step, (first, ranges, key, value) in enumerate(chunks):
            queries, is_diagonal = query[:, :, first:], causal and step == 0
            mask = None
            if kept is not None:
                rows = kept[:, :, first // BLOCK_Q :]
                columns = [rows[..., start // BLOCK_K : ceil_div(stop, BLOCK_K)] for start, stop in ranges]
                blocks, q_len, kv_len = torch.cat(columns, 3), queries.shape[2], key.shape[2]
                mask = BlockMask.from_dense(blocks, q_len=q_len, kv_len=kv_len, is_causal=is_diagonal)
            output, lse = attend(queries, key, value, mask, is_causal=is_diagonal, with_lse=True)
            assert lse is not None
            if step == 0:
                merged, merged_lse = output.float(), lse.float()
            else:
                merge(merged[:, :, first:], merged_lse[:, :, first:], output, lse)
        return merged.to(query.dtype)

    return run


def part_of(inputs: Inputs, workload: Workload, split: Split, shard: int) -> Run:
    """Return a function that computes the attention of the rank with the first heads and this shard of the tokens."""
    make = ring_part if split.shards > 1 and split.way == "ring" else gather_part
    return make(heads_of_rank(inputs, workload, split), workload, split.shards, shard)


def exchange_copies(inputs: Inputs, workload: Workload, split: Split) -> Callable[[], object]:
    """Return a function that makes the copies of a rank around a head exchange, with tokens first in memory.

    Before the exchange, it makes the heads of query, key and value for each rank contiguous. After the exchange, it
    restores the order of the output's heads.
    """
    tokens, ulysses = workload.tokens // split.ranks, split.ulysses
    repeats = exchanged_kv_heads(workload, ulysses) // workload.kv_heads
    # [S / P, H, D]
    query, key, value = (
        side[0, :, :tokens].transpose(0, 1).contiguous() for side in (inputs.query, inputs.key, inputs.value)
    )

    def run() -> list[Tensor]:
        sides = [query, *(side.repeat_interleave(repeats, 1) if repeats > 1 else side for side in (key, value))]
        sent = [side.unflatten(1, (ulysses, -1)).transpose(0, 1).contiguous() for side in sides]
        return [*sent, sent[0].transpose(0, 1).contiguous()]

    return run


def gather_copies(inputs: Inputs, workload: Workload, split: Split) -> Callable[[], object]:
    """Return a function that makes the copies of a rank after a causal gather, which put heads and tails in order."""
    local = heads_of_rank(inputs, workload, split)
    gathered = [side[0].transpose(0, 1).contiguous() for side in (local.key, local.value)]  # [S, Hkv / U, D]
    ranges = [one for shard in range(split.shards) for one in ranges_of(workload, split.shards, shard)]
    order = sorted(range(len(ranges)), key=ranges.__getitem__)

    def run() -> list[Tensor]:
        split_up = [side.tensor_split(len(order)) for side in gathered]
        return [torch.cat([pieces[index] for index in order]) for pieces in split_up]

    return run


COPIES: dict[str, Callable[[Inputs, Workload, Split], Callable[[], object]]] = {
    "exchange": exchange_copies,
    "order": gather_copies,
}
"""Functions that copy around an exchange, timed separately and added to attention."""


def copies_of(workload: Workload, split: Split) -> list[str]:
    """Return the entries of `COPIES` that a rank of this split executes."""
    copies = ["exchange"] if split.ulysses > 1 else []
    return [*copies, "order"] if split.shards > 1 and split.way == "gather" and workload.is_causal else copies
