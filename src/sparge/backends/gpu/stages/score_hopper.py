"""`score.score_kernel` for compute capability 9.0, for calls without a mask, a left bound of the window, or segments.

    producer    one warp, which copies statistics of key blocks, tile by tile
    consumer    two warpgroups, each of which scores its rows against every tile

Rows stay in registers as the left operand of the products. Consumers wait only for the producer, not for each other.
Programs are persistent: there is one per multiprocessor, and it takes every n-th item.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from sparge.backends.gpu import primitives
from sparge.backends.gpu.gluon import (
    TensorDescriptor,
    aggregate,
    allocate_barriers,
    async_load,
    barrier,
    by_lane_layout,
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    reinterpret,
    shared_memory_descriptor,
    tensor_descriptor,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from sparge.backends.gpu.launch import buffer_like, launch, multiprocessors, padded, power_of_two, strides_of
from sparge.backends.gpu.primitives import BLOCK_K, BLOCK_Q, kernel
from sparge.backends.gpu.stages import configs
from sparge.backends.gpu.stages.key_value_statistics import BlockStatistics
from sparge.call import Call
from sparge.masks.geometry import ceil_div
from sparge.masks.window import last_offset
from sparge.options import scores

row_order = jit(primitives.row_order.fn)
sampled_query = jit(primitives.sampled_query.fn)

NEGLIGIBLE = gl.constexpr(scores.NEGLIGIBLE)
CHUNK = 64
"""Channels in one row of shared memory, 128 bytes."""
ROWS = gl.constexpr(64)
"""Rows of a consumer, the M dimension of a warpgroup's matrix instruction."""
CONSUMERS = gl.constexpr(2)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
"""Registers per thread."""


@dataclass(frozen=True)
class HopperScoreSpec:
    """Compile-time values of the kernel."""

    width: int  # channels of the statistics, 64 or more
    from_means: bool  # rows are means of parts of a block, float32; otherwise samples
    samples: int  # rows of a query block, at most 64
    exponent: int  # 1 for the mean over rows, 2 for the root of the mean square
    # has_variance, has_low: further products besides q . mean, see `score.RowOperands`
    has_variance: bool
    has_low: bool
    has_last: bool  # query i sees no key after i + last_offset
    columns: int  # key blocks of a tile
    stages: int  # tiles in shared memory

    @property
    def samples_padded(self) -> int:
        """Return the number of rows of a query block, padded to a power of two."""
        return power_of_two(self.samples)

    @property
    def blocks(self) -> int:
        """Return the number of query blocks of a consumer."""
        return ROWS.value // self.samples_padded

    @property
    def parts(self) -> int:
        """Return the number of statistics tensors: high and low parts of the means, and variances if used."""
        return 3 if self.has_variance else 2

    @property
    def chunks(self) -> int:
        """Return the number of TMA copies for a tile of one tensor."""
        return self.width // CHUNK

    @property
    def stage_bytes(self) -> int:
        """Return the number of bytes of a stage."""
        return self.parts * self.columns * self.width * 2

    @property
    def log2_samples(self) -> float:
        """Return the term to add to log2 of each row sum, so that a sum over a query block's samples is their mean."""
        return math.log2(self.samples) / self.exponent

    @property
    def copied_layout(self) -> gl.NVMMASharedLayout:
        """Return the layout of a TMA copy in shared memory."""
        return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """Return the layout of the scores of a tile, [rows, columns]."""
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, self.columns, 16])

    @property
    def rows_layout(self) -> gl.DotOperandLayout:
        """Return the layout of rows as the left operand, [rows, width]."""
        return gl.DotOperandLayout(0, self.scores_layout, 2)

    @property
    def by_lane_layout(self) -> gl.DistributedLinearLayout:
        """Return the layout of scores as [rows, columns / 8, 4, 2]; dimension 2 is the thread of a row."""
        return by_lane_layout(self.columns, 2)

    @property
    def lane_layout(self) -> gl.SliceLayout:
        """Return the layout of one number for each of the four threads of a row, [rows, 4]."""
        return gl.SliceLayout(1, gl.SliceLayout(3, self.by_lane_layout))

    @property
    def row_layout(self) -> gl.SliceLayout:
        """Return the layout of one number per row, [rows]."""
        return gl.SliceLayout(1, self.scores_layout)


@aggregate
class Sizes:
    """Sizes of the call; ``items`` is the number of work items (`Item`)."""

    head_dim: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    q_len: gl.tensor
    kv_len: gl.tensor
    last_offset: gl.tensor
    q_blocks: gl.tensor
    kv_blocks: gl.tensor
    items: gl.tensor


@aggregate
class Item:
    """A work item: query blocks of one head from ``first_block`` on, and the number of tiles that they see."""

    flat_head: gl.tensor
    first_block: gl.tensor
    tiles: gl.tensor


@aggregate
class Stages:
    """Shared memory: TMA copies of all stages, and barriers for copied (full) and released (empty) stages."""

    copies: shared_memory_descriptor
    full: shared_memory_descriptor
    empty: shared_memory_descriptor


@aggregate
class Statistics:
    """TMA descriptors of the means of key blocks, in a high and a low part, and of their variances."""

    mean_high: tensor_descriptor
    mean_low: tensor_descriptor
    variance: tensor_descriptor


@aggregate
class RowOperands:
    """A consumer's rows, [rows, width] bfloat16 each: see `score.RowOperands`."""

    query: gl.tensor
    low: gl.tensor
    square: gl.tensor


@jit
def _copy(descriptor, head, first, PART: gl.constexpr, stages, stage, SPEC: gl.constexpr):
    """Start copying a tile of a statistics tensor, whose index is PART, into a stage. Missing entries become 0."""
    chunks: gl.constexpr = SPEC.chunks
    for chunk in gl.static_range(chunks):
        buffer = stages.copies.index((stage * SPEC.parts + PART) * chunks + chunk)
        buffer = reinterpret(buffer, descriptor.dtype, descriptor.block_shape, descriptor.layout)
        async_load(descriptor, [head, first, chunk * descriptor.block_shape[2]], stages.full.index(stage), buffer)


@jit
def _item(number, sizes, SPEC: gl.constexpr):
    """Return the `Item` with an index.

    Items with the last query blocks of all heads come first, because they take longest in causal attention.
    """
    blocks: gl.constexpr = SPEC.blocks * CONSUMERS
    groups = (sizes.q_blocks + blocks - 1) // blocks
    all_heads = sizes.items // groups
    first_block = (groups - 1 - number // all_heads) * blocks
    stop = sizes.kv_blocks
    if SPEC.has_last:
        last_key = gl.minimum((first_block + blocks) * BLOCK_Q, sizes.q_len) - 1 + sizes.last_offset
        stop = gl.minimum(stop, gl.maximum(last_key + 1, 0) // BLOCK_K + 1)
    tiles = (stop + SPEC.columns - 1) // SPEC.columns
    return Item(number % all_heads, first_block, tiles)


@jit
def _produce(statistics, stages, sizes, SPEC: gl.constexpr):
    """Copy all tiles of every item, once for each of the two passes."""
    counter = 0
    for number in range(gl.program_id(0), sizes.items, gl.num_programs(0)):
        item = _item(number, sizes, SPEC)
        kv_head = item.flat_head // sizes.group
        for index in range(0, 2 * item.tiles):
            stage = counter % SPEC.stages
            mbarrier.wait(stages.empty.index(stage), ((counter // SPEC.stages) & 1) ^ 1)
            mbarrier.expect(stages.full.index(stage), SPEC.stage_bytes)
            first = index % item.tiles * SPEC.columns
            _copy(statistics.mean_high, kv_head, first, 0, stages, stage, SPEC)
            _copy(statistics.mean_low, kv_head, first, 1, stages, stage, SPEC)
            if SPEC.has_variance:
                _copy(statistics.variance, kv_head, first, 2, stages, stage, SPEC)
            counter += 1


@jit
def _tile(stages, stage, PART: gl.constexpr, SPEC: gl.constexpr):
    """Return a view of a stage's statistics as the right operand, [width, columns]."""
    shape: gl.constexpr = [SPEC.stages * SPEC.parts, SPEC.columns, SPEC.width]
    tiles = reinterpret(stages.copies, gl.bfloat16, shape, SPEC.copied_layout)
    return tiles.index(stage * SPEC.parts + PART).permute((1, 0))


@jit
def _scores(operands, stages, counter, SPEC: gl.constexpr):
    """Compute scores of the next tile, [rows, columns], and release its stage."""
    stage = counter % SPEC.stages
    mbarrier.wait(stages.full.index(stage), (counter // SPEC.stages) & 1)
    mean_high = _tile(stages, stage, 0, SPEC)
    scores = gl.full((ROWS, SPEC.columns), 0.0, gl.float32, SPEC.scores_layout)
    scores = warpgroup_mma(operands.query, mean_high, scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(operands.query, _tile(stages, stage, 1, SPEC), scores, is_async=True)
    if SPEC.has_low:
        scores = warpgroup_mma(operands.low, mean_high, scores, is_async=True)
    if SPEC.has_variance:
        scores = warpgroup_mma(operands.square, _tile(stages, stage, 2, SPEC), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(stages.empty.index(stage), count=1)
    return scores


@jit
def _sum_samples(values, SAMPLES: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """See `score._sum_samples`."""
    if SAMPLES == 1:
        return values
    elif SAMPLES > 16:
        return gl.sum(gl.reshape(values, (ROWS // SAMPLES, SAMPLES, COLUMNS)), 1)
    else:
        halves = gl.sum(gl.reshape(values, (ROWS // 16, 2, 8, COLUMNS)), 1)
        return gl.sum(gl.reshape(halves, (ROWS // SAMPLES, SAMPLES // 2, COLUMNS)), 1)


@jit
def _load_rows(query_ptr, query_strides, flat_head, first_block, sizes, SPEC: gl.constexpr):
    """Load the `RowOperands` of a consumer."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, SPEC.rows_layout))
    channels = gl.arange(0, SPEC.width, gl.SliceLayout(0, SPEC.rows_layout))
    block, sample = row_order(rows, SPEC.samples_padded)
    q_block = first_block + block
    used = (q_block < sizes.q_blocks) & (sample < SPEC.samples)
    if SPEC.from_means:
        place = (flat_head * sizes.q_blocks + q_block).to(gl.int64) * SPEC.samples + sample
        pointers = query_ptr + place * sizes.head_dim
    else:
        batch, head = flat_head // sizes.heads, flat_head % sizes.heads
        base = query_ptr + batch.to(gl.int64) * query_strides[0] + head.to(gl.int64) * query_strides[1]
        first_query = gl.maximum(-sizes.last_offset, 0) if SPEC.has_last else 0
        pick = sampled_query(q_block, sample, first_query, sizes.q_len, SPEC.samples)
        pointers = base + pick.to(gl.int64) * query_strides[2]
    inside = gl.expand_dims(used, 1) & gl.expand_dims(channels < sizes.head_dim, 0)
    loaded = gl.load(gl.expand_dims(pointers, 1) + gl.expand_dims(channels, 0), mask=inside, other=0.0)
    wide = loaded.to(gl.float32)
    wide = gl.where(gl.abs(wide) < float("inf"), wide, float("nan"))
    query = wide.to(gl.bfloat16)
    low = (wide - query.to(gl.float32)).to(gl.bfloat16)
    return RowOperands(query, low, (wide * wide).to(gl.bfloat16))


@jit
def _eligible(first_block, first, sizes, SPEC: gl.constexpr):
    """Return which blocks of a tile end before the last key that each row's query block sees, [rows, columns] bool."""
    rows = gl.arange(0, ROWS, SPEC.row_layout)
    columns = first + gl.arange(0, SPEC.columns, gl.SliceLayout(0, SPEC.scores_layout))
    block, _ = row_order(rows, SPEC.samples_padded)
    last_key = gl.full((ROWS,), 2147483647, gl.int32, SPEC.row_layout)
    if SPEC.has_last:
        last_key = gl.minimum((first_block + block + 1) * BLOCK_Q, sizes.q_len) - 1 + sizes.last_offset
    end = gl.minimum((columns + 1) * BLOCK_K, sizes.kv_len) - 1
    return gl.expand_dims(columns < sizes.kv_blocks, 0) & (gl.expand_dims(end, 0) <= gl.expand_dims(last_key, 1))


@jit
def _add_to_sums(scores, lane_max, lane_sum, SPEC: gl.constexpr):
    """Add the scores of a tile to the running maxima and sums of exponentials, [rows, 4], one per thread of a row."""
    scores = gl.maximum(scores, float("-inf"))  # ignores NaN
    by_lane = gl.convert_layout(
        gl.reshape(scores, (ROWS, SPEC.columns // 8, 4, 2)), SPEC.by_lane_layout, assert_trivial=True
    )
    new_max = gl.maximum(lane_max, gl.max(gl.max(by_lane, 3), 1))
    safe_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    shifted = by_lane - gl.expand_dims(gl.expand_dims(safe_max, 1), 3)
    lane_sum = lane_sum * gl.exp2(lane_max - safe_max) + gl.sum(gl.sum(gl.exp2(shifted), 3), 1)
    return new_max, lane_sum


@jit
def _shift_of_rows(lane_max, lane_sum, SPEC: gl.constexpr):
    """Return the shift of each row, [rows]: a score s adds 2^(exponent s - shift) to the probability of its block.

    Unused rows have shift inf, so they add 0.
    """
    row_max = gl.max(lane_max, 1)
    safe_max = gl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = gl.sum(lane_sum * gl.exp2(lane_max - gl.expand_dims(safe_max, 1)), 1)
    row_max = gl.convert_layout(safe_max, SPEC.row_layout)
    row_sum = gl.convert_layout(row_sum, SPEC.row_layout)
    shift = gl.where(row_sum > 0.0, row_max + gl.log2(row_sum) + SPEC.log2_samples, 0.0)
    _, sample = row_order(gl.arange(0, ROWS, SPEC.row_layout), SPEC.samples_padded)
    return gl.where(sample < SPEC.samples, shift * SPEC.exponent, float("inf"))


@jit
def _store_shares(share, probability_ptr, flat_head, first_block, first, sizes, SPEC: gl.constexpr):
    """Store the shares [rows, columns], averaged over the rows of each query block."""
    average = _sum_samples(share, SPEC.samples_padded, ROWS, SPEC.columns)  # [blocks, columns]
    if SPEC.exponent == 2:
        average = gl.sqrt(average)
    average = gl.where(average < NEGLIGIBLE, 0.0, average)  # keeps NaN
    layout: gl.constexpr = average.type.layout
    block = first_block + gl.arange(0, SPEC.blocks, gl.SliceLayout(1, layout))
    column = first + gl.arange(0, SPEC.columns, gl.SliceLayout(0, layout))
    places = (flat_head * sizes.q_blocks + block).to(gl.int64) * sizes.kv_blocks
    stored = gl.expand_dims(block < sizes.q_blocks, 1) & gl.expand_dims(column < sizes.kv_blocks, 0)
    gl.store(probability_ptr + (gl.expand_dims(places, 1) + gl.expand_dims(column, 0)), average, mask=stored)


@jit
def _consume(CONSUMER: gl.constexpr, stages, sizes, query_ptr, query_strides, probability_ptr, SPEC: gl.constexpr):
    """Score all tiles of every item in two passes: the first computes row maxima and sums, the second probabilities.

    Both passes share one loop body, because matrix products take most of the compilation time.
    """
    counter = 0
    for number in range(gl.program_id(0), sizes.items, gl.num_programs(0)):
        # Prologue: rows, and the end of the blocks that need no element mask
        item = _item(number, sizes, SPEC)
        first_block = item.first_block + CONSUMER * SPEC.blocks
        operands = _load_rows(query_ptr, query_strides, item.flat_head, first_block, sizes, SPEC)
        whole = sizes.kv_blocks
        if SPEC.has_last:
            last_key = gl.minimum((first_block + 1) * BLOCK_Q, sizes.q_len) - 1 + sizes.last_offset
            whole = gl.minimum(whole, gl.maximum(last_key + 1, 0) // BLOCK_K)

        lane_max = gl.full((ROWS, 4), float("-inf"), gl.float32, SPEC.lane_layout)
        lane_sum = gl.full((ROWS, 4), 0.0, gl.float32, SPEC.lane_layout)
        row_shift = gl.full((ROWS,), 0.0, gl.float32, SPEC.row_layout)

        # Main loop: both passes
        for index in range(0, 2 * item.tiles):
            scores = _scores(operands, stages, counter, SPEC)
            counter += 1
            first = index % item.tiles * SPEC.columns
            if first + SPEC.columns > whole:
                scores = gl.where(_eligible(first_block, first, sizes, SPEC), scores, float("-inf"))
            if index < item.tiles:
                lane_max, lane_sum = _add_to_sums(scores, lane_max, lane_sum, SPEC)
            else:
                if index == item.tiles:
                    row_shift = _shift_of_rows(lane_max, lane_sum, SPEC)
                share = gl.exp2(scores * SPEC.exponent - gl.expand_dims(row_shift, 1))
                _store_shares(share, probability_ptr, item.flat_head, first_block, first, sizes, SPEC)


@partial(kernel, jit=jit)
def hopper_score_kernel(
    mean_high_desc,
    mean_low_desc,
    variance_desc,
    query_ptr,
    probability_ptr,
    query_strides,
    head_dim,
    heads,
    group,
    q_len,
    kv_len,
    last_offset,
    q_blocks,
    kv_blocks,
    items,
    SPEC: gl.constexpr,
):
    """Compute probability[block, j] = mean over the block's rows i of softmax_j s[i, j]; see `score.score_kernel`.

    Grid: one program per multiprocessor, which takes every n-th `Item`.

    Reads
        mean_high, mean_low, variance    [B * Hkv, kv_blocks, D padded] bfloat16, by TMA
        query            [B, H, Sq, D], or [B * H, q_blocks, samples, D padded] float32 (SPEC.from_means)
    Writes
        probability      [B * H, q_blocks, kv_blocks] float32
    """
    # Shared memory and barriers
    copies = gl.allocate_shared_memory(
        gl.bfloat16,
        [SPEC.stages * SPEC.parts * SPEC.chunks, SPEC.columns, SPEC.width // SPEC.chunks],
        SPEC.copied_layout,
    )
    full, empty = allocate_barriers(SPEC.stages, CONSUMERS)
    fence_async_shared()
    barrier()

    # Roles
    sizes = Sizes(head_dim, heads, group, q_len, kv_len, last_offset, q_blocks, kv_blocks, items)
    stages = Stages(copies, full, empty)
    statistics = Statistics(mean_high_desc, mean_low_desc, variance_desc)
    gl.warp_specialize(
        [
            (_consume, (0, stages, sizes, query_ptr, query_strides, probability_ptr, SPEC)),
            (_consume, (1, stages, sizes, query_ptr, query_strides, probability_ptr, SPEC)),
            (_produce, (statistics, stages, sizes, SPEC)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def serves(call: Call, *, has_threshold: bool) -> bool:
    """Return whether the kernel supports the call."""
    is_plain = call.attn_mask is None and not has_threshold and call.window.left is None and call.segments is None
    has_score = call.score.name in ("moment", "mean") and getattr(call.score, "samples", 1) <= ROWS.value
    return is_plain and has_score and padded(call.shape.head_dim) >= CHUNK


def launch_scores(rows: Tensor, statistics: BlockStatistics, call: Call, *, from_means: bool, has_low: bool) -> Tensor:
    """Return the expected share of attention in each key block, (B * H, q_blocks, kv_blocks) float32.

    Args:
        rows: `QuerySummary.mean` if ``from_means``; otherwise the queries, which the kernel samples.
        has_low: whether rounding the rows to bfloat16 loses precision. The remainders are then a second operand.
    """
    shape, score = call.shape, call.score
    width, heads = padded(shape.head_dim), shape.batch * shape.heads
    options = configs.stage_config("score_hopper", width)
    spec = HopperScoreSpec(
        width=width,
        from_means=from_means,
        samples=getattr(score, "samples", 1),
        exponent=score.exponent,
        has_variance=score.name == "moment",
        has_low=has_low,
        has_last=call.window.right is not None,
        columns=options.columns,
        stages=options.stages,
    )
    probability = buffer_like(rows, True, heads, shape.q_blocks, shape.kv_blocks)
    offset = last_offset(call.window, shape)
    items = ceil_div(shape.q_blocks, spec.blocks * CONSUMERS.value) * heads
    launch(
        hopper_score_kernel,
        min(items, multiprocessors(rows)),
        mean_high_desc=_descriptor(statistics.mean_high, spec),
        mean_low_desc=_descriptor(statistics.mean_low, spec),
        variance_desc=_descriptor(statistics.variance if spec.has_variance else statistics.mean_low, spec),
        query_ptr=rows,
        probability_ptr=probability,
        query_strides=strides_of(rows),
        head_dim=width if from_means else shape.head_dim,
        heads=shape.heads,
        group=shape.group,
        q_len=shape.q_len,
        kv_len=shape.kv_len,
        last_offset=0 if offset is None else offset,
        q_blocks=shape.q_blocks,
        kv_blocks=shape.kv_blocks,
        items=items,
        SPEC=spec,
        num_warps=4,
    )
    return probability


def _descriptor(tensor: Tensor, spec: HopperScoreSpec) -> TensorDescriptor:
    """Return the TMA descriptor of statistics (B * Hkv, kv_blocks, width), copied in tiles of `CHUNK` channels."""
    layout = replace(spec.copied_layout, rank=3)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, spec.columns, CHUNK], layout)
