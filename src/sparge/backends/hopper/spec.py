"""What the Hopper kernel is compiled for, and the layouts that follow from it.

A layout says which thread holds which element (of a tensor in registers) or where an element lies (in shared memory).
docs/hopper.md draws them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparge.backends.gpu.gluon import gl, mbarrier
from sparge.backends.gpu.launch import padded
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ROW_GROUP
from sparge.numerics.quantization import FP8_MAX, FP8_MAX_BITS, FP8_STEPS_PER_LOG2, FP16_ROOM, coarse_unit

ROWS = gl.constexpr(ROW_GROUP)
"""Queries of one consumer: what a warpgroup's matrix instruction takes."""
CODE_STEP = 2.0**-24
"""The smallest float16. Codes are rounded as multiples of it: such a number's bits are the code."""
SLACK = gl.constexpr(8.0)
"""Log2 units that float16 leaves P above 1, where the output is rescaled rarely."""


def _accumulator_layout(columns: int, depth: int) -> gl.NVMMADistributedLayout:
    """The layout of 64 rows of a warpgroup's matrix product, ``depth`` numbers deep per instruction."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


def _operand_layout(swizzle: int, bits: int) -> gl.NVMMASharedLayout:
    """The layout of a matrix product's operand in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits)


@dataclass(frozen=True)
class Spec:
    """What one kind of call is compiled for. Widths are padded to powers of two; what is missing is copied as 0.

    Attributes:
        quantized: Q and K are INT8 codes, else 16-bit numbers.
        fp8_values: V is FP8, transposed, else 16-bit numbers.
        exponential_free: P's FP8 codes come straight from the scores ("int8_fp8_fast"). Needs fp8_values.
        has_first: query i sees no key before i + first_offset.
        has_last: query i sees no key behind i + last_offset.
        is_causal: that is i + kv_len - q_len, which costs no register.
        has_threshold: P V of 64 rows is skipped where all scores lie further below their row's maximum.
        all_blocks: a tile visits every visible key block, else those of a list.
        counts_blocks: visited and visible blocks, and skipped products, are added up for `stats`.
        means: the blocks that a tile does not visit enter as their means, in stages of their own.
        ordered: tiles come in a given order, else head by head.
        packed: batch elements are segments of a pack with lengths of their own. Needs ordered.
        tokens_first: in the output, the heads of a token lie together, as they always do in a pack.
        peaks: "ignored", looked for in "every_tile", or "marked" (`cuda.peak_handling`); what lies far below one is
            taken as a part of its own.
        head_dim: channels of Q and K.
        exact_dim: the same as the caller has them, not padded.
        value_dim: channels of V that a tile computes, one of ``value_slices`` parts.
        output_dim: channels the caller sees.
        value_scale_stride: distance of one head's value scales from the next one's.
        value_slices: tiles that share their queries, each with channels of its own.
        blocks: key blocks per stage, 1 or 2.
        stages: buffers of K and V.
        query_stages: buffers of Q, 1 or 2.
    """

    quantized: bool
    fp8_values: bool
    exponential_free: bool
    has_first: bool
    has_last: bool
    is_causal: bool
    has_threshold: bool
    all_blocks: bool
    counts_blocks: bool
    means: bool
    ordered: bool
    packed: bool
    tokens_first: bool
    peaks: str
    head_dim: int
    exact_dim: int
    value_dim: int
    output_dim: int
    value_scale_stride: int
    value_slices: int
    blocks: int
    stages: int
    query_stages: int

    @property
    def rescales_rarely(self) -> bool:
        """Whether P counts from the maximum of an earlier stage as long as it does not grow too large.

        FP8 has no range for that, a threshold needs the maximum, and INT8 scores did not gain (docs/lab/hopper.md).
        """
        return not self.quantized and not self.has_threshold

    @property
    def counts_skipped(self) -> bool:
        """Whether there are skipped products to be counted."""
        return self.has_threshold and self.counts_blocks

    @property
    def steps_per_octave(self) -> float:
        """The unit of the scores: log2 units, or what FP8 codes count in, eight for each, times `CODE_STEP`."""
        return FP8_STEPS_PER_LOG2 * CODE_STEP if self.exponential_free else 1.0

    @property
    def log2_one(self) -> float:
        """What P = 1 is stored as: the largest FP8 number, or what leaves FP16 room for smaller and larger ones."""
        if self.fp8_values:
            return math.log2(FP8_MAX)
        return FP16_ROOM - SLACK.value if self.rescales_rarely else FP16_ROOM

    @property
    def steps_of_one(self) -> float:
        """The same in steps, which the origin of P is lowered by."""
        return FP8_MAX_BITS * CODE_STEP if self.exponential_free else self.log2_one

    @property
    def inverse_one(self) -> float:
        """What sums of stored P are multiplied by."""
        return 2.0**-self.log2_one

    @property
    def coarse_scale(self) -> float:
        """Steps from which on the worth of an integer of Q K^T makes a stage coarse."""
        return coarse_unit(self.exact_dim) * self.steps_per_octave

    @property
    def mean_stride(self) -> int:
        """Distance of the float32 mean of a key block from the next one's."""
        return padded(self.exact_dim)

    @property
    def keys(self) -> int:
        """Keys of one stage."""
        return self.blocks * BLOCK_K

    @property
    def bias_columns(self) -> int:
        """Numbers of a key block's bias, if it may have one."""
        return BLOCK_K if self.means else 1

    @property
    def tile_numbers(self) -> int:
        """Numbers that a consumer must know about a tile: two, and its `lengths.Lengths` where they are its own."""
        return 7 if self.packed else 2

    @property
    def chunk(self) -> int:
        """Channels of Q and K that lie in one row of shared memory, 128 bytes at most."""
        return min(self.head_dim, 128 if self.quantized else 64)

    @property
    def chunks(self) -> int:
        """Copies of Q, and of a block of K."""
        return self.head_dim // self.chunk

    @property
    def value_rows(self) -> int:
        """Rows of one copy of V: channels if it is transposed, else keys."""
        return self.value_dim if self.fp8_values else BLOCK_K

    @property
    def value_columns(self) -> int:
        """Columns of one copy of V: keys if it is transposed, else channels."""
        return 64

    @property
    def value_copies(self) -> int:
        """Copies of a block of V."""
        return self.value_dim * BLOCK_K // (self.value_rows * self.value_columns)

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries of a tile."""
        return BLOCK_Q * self.head_dim * (1 if self.quantized else 2)

    @property
    def stage_bytes(self) -> int:
        """Bytes of K and V in one stage."""
        return self.keys * (
            self.head_dim * (1 if self.quantized else 2) + self.value_dim * (1 if self.fp8_values else 2)
        )

    @property
    def value_shape(self) -> list[int]:
        """The shape of all stages of V, by key block."""
        block = [self.value_dim, BLOCK_K] if self.fp8_values else [BLOCK_K, self.value_dim]
        return [self.stages * self.blocks, *block]

    @property
    def key_smem_layout(self) -> gl.NVMMASharedLayout:
        """Q and K in shared memory."""
        bits = 8 if self.quantized else 16
        return _operand_layout(self.chunk * bits // 8, bits)

    @property
    def value_smem_layout(self) -> gl.NVMMASharedLayout:
        """V in shared memory."""
        return _operand_layout(64, 8) if self.fp8_values else _operand_layout(128, 16)

    @property
    def ones_smem_layout(self) -> gl.NVMMASharedLayout:
        """The FP8 ones that P is multiplied with for its row sums."""
        return _operand_layout(64, 8)

    @property
    def metadata_smem_layout(self) -> gl.SwizzledSharedLayout:
        """Numbers in shared memory, one after the other."""
        return gl.SwizzledSharedLayout(1, 1, 1, order=[0])

    @property
    def barrier_layout(self) -> mbarrier.MBarrierLayout:
        """Barriers in shared memory."""
        return mbarrier.MBarrierLayout()

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """S of a stage, [64, keys]."""
        return _accumulator_layout(self.keys, 32 if self.quantized else 16)

    @property
    def exact_layout(self) -> gl.NVMMADistributedLayout:
        """S of a coarse key block, [64, 64]: each thread holds what it holds of `scores_layout`."""
        return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])

    @property
    def output_layout(self) -> gl.NVMMADistributedLayout:
        """P V, [64, value_dim]."""
        return _accumulator_layout(self.value_dim, 32 if self.fp8_values else 16)

    @property
    def sums_layout(self) -> gl.NVMMADistributedLayout:
        """P times ones, [64, 8]: every column is the row sum."""
        return _accumulator_layout(8, 32)

    @property
    def k_width(self) -> int:
        """Neighbouring columns of P that one register holds."""
        return 4 if self.fp8_values else 2

    @property
    def p_layout(self) -> gl.DotOperandLayout:
        """P as the left operand of P V."""
        return gl.DotOperandLayout(0, self.output_layout, self.k_width)

    @property
    def summed_p_layout(self) -> gl.DotOperandLayout:
        """P as the left operand of P times ones."""
        return gl.DotOperandLayout(0, self.sums_layout, 4)

    @property
    def p_by_lane_layout(self) -> gl.DistributedLinearLayout:
        """P of a key block as [64, 16 / w, 4, w]: each of a row's four threads has every fourth w neighbours."""
        width = self.k_width
        neighbours = [[0, 0, 0, bit] for bit in (1, 2) if bit < width]
        groups = [[0, bit, 0, 0] for bit in (1, 2, 4) if bit < 16 // width]
        return gl.DistributedLinearLayout(
            reg_bases=[*neighbours, [8, 0, 0, 0], *groups],
            lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
            warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
            block_bases=[],
            shape=[64, 16 // width, 4, width],
        )

    @property
    def lane_layout(self) -> gl.SliceLayout:
        """A number for each of a row's four threads, [64, 4]. Thread t holds the keys of group t, and of no other."""
        return gl.SliceLayout(1, gl.SliceLayout(3, self.p_by_lane_layout))

    @property
    def group_layout(self) -> gl.SliceLayout:
        """A number for each group of keys, [4]."""
        return gl.SliceLayout(0, self.lane_layout)

    @property
    def row_layout(self) -> gl.SliceLayout:
        """A number per row, [64], where a row's threads need it for P."""
        return gl.SliceLayout(1, self.lane_layout)

    @property
    def output_row_layout(self) -> gl.SliceLayout:
        """A number per row, [64], where a row's threads need it for the output."""
        return gl.SliceLayout(1, self.output_layout)

    @property
    def output_column_layout(self) -> gl.SliceLayout:
        """A number per channel of the output, [value_dim]."""
        return gl.SliceLayout(0, self.output_layout)

    @property
    def sums_row_layout(self) -> gl.SliceLayout:
        """A number per row, [64], where a row's threads need it for P times ones."""
        return gl.SliceLayout(1, self.sums_layout)

    @property
    def store_layout(self) -> gl.DistributedLinearLayout:
        """The output with 8 neighbouring channels per thread."""
        wider = [[0, channels] for channels in (32, 64, 128) if channels < self.value_dim]
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *wider],
            lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, self.value_dim],
        )
