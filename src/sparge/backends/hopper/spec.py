"""Compile-time parameters of the Hopper kernel, and the layouts derived from them.

A layout maps elements of a tensor to registers of threads, or to offsets in shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparge.backends.gpu.gluon import by_lane_layout, gl
from sparge.backends.gpu.launch import padded
from sparge.backends.gpu.stages.arguments import WindowSpec
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, ROW_GROUP
from sparge.numerics.quantization import FP8_MAX, FP8_MAX_BITS, FP8_STEPS_PER_LOG2, FP16_ROOM, coarse_unit

ROWS = gl.constexpr(ROW_GROUP)
"""Queries per consumer: the rows of a warpgroup's matrix instruction."""
SLACK = gl.constexpr(8.0)
"""Log2 units by which P may exceed 1 in float16, if the output is rescaled rarely (`Spec.rescales_rarely`)."""


def _accumulator_layout(columns: int, depth: int) -> gl.NVMMADistributedLayout:
    """Return the layout of a warpgroup's product, [64, columns]; ``depth`` is the K dimension of one instruction."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


def _operand_layout(swizzle: int, bits: int) -> gl.NVMMASharedLayout:
    """Return the layout of a matrix operand in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits)


@dataclass(frozen=True)
class Spec(WindowSpec):
    """Compile-time parameters of the kernel. Widths are padded to powers of two; TMA copies missing channels as 0.

    ``packed`` requires ``ordered``.
    """

    quantized: bool  # Q and K are INT8; otherwise 16-bit numbers
    fp8_values: bool  # V is FP8 and transposed; otherwise 16-bit numbers
    # P is computed without exp2: its FP8 bits are derived from the scores ("int8_fp8_fast"). Requires fp8_values.
    exponential_free: bool
    is_causal: bool  # last_offset is kv_len - q_len, which needs no register
    has_threshold: bool  # P V of 64 rows is skipped if all scores are far below their row's maximum
    all_blocks: bool  # a tile visits every visible key block; otherwise, it visits the blocks of a list
    counts_blocks: bool  # kept blocks, visible blocks and skipped products are counted for `stats`
    means: bool  # skipped blocks are replaced by their means, in additional stages
    ordered: bool  # tiles follow a given order; otherwise, they go head by head
    tokens_first: bool  # the heads of a token are adjacent in the output; always true for a pack
    peaks: str  # "ignored", "every_tile" or "marked" (`gpu.peak_handling`)
    head_dim: int  # channels of Q and K
    exact_dim: int  # channels of Q and K without padding
    value_dim: int  # channels of V per tile, one of ``value_slices`` slices
    output_dim: int  # channels of the output without padding
    value_scale_stride: int  # stride of the value scales between heads
    value_slices: int  # number of tiles that share their queries, each with its own value channels
    blocks: int  # key blocks per stage, 1 or 2
    stages: int  # buffers of K and V
    query_stages: int  # buffers of Q, 1 or 2

    @property
    def rescales_rarely(self) -> bool:
        """Return whether the row reference stays the maximum of an earlier stage until P grows too large.

        This is not done with FP8 values, which lack the range, or with a threshold, which needs the maximum of every
        stage. It did not make INT8 scores faster (docs/lab/hopper.md).
        """
        return not self.quantized and not self.has_threshold

    @property
    def units_per_log2(self) -> float:
        """Score units per log2 unit: 1, or the 8 FP8 bit patterns per log2 unit."""
        return float(FP8_STEPS_PER_LOG2) if self.exponential_free else 1.0

    @property
    def log2_one(self) -> float:
        """Log2 of the number that represents P = 1.

        In FP8, it is the largest number. In FP16, it leaves room for larger and for smaller P.
        """
        if self.fp8_values:
            return math.log2(FP8_MAX)
        return FP16_ROOM - SLACK.value if self.rescales_rarely else FP16_ROOM

    @property
    def stored_one(self) -> float:
        """The number that represents P = 1, as a logarithm in score units. It is subtracted from the row reference."""
        return float(FP8_MAX_BITS) if self.exponential_free else self.log2_one

    @property
    def coarse_scale(self) -> float:
        """Limit in score units: a stage is coarse if one unit of its INT8 products is at least this large."""
        return coarse_unit(self.exact_dim) * self.units_per_log2

    @property
    def mean_stride(self) -> int:
        """Stride of the float32 means between key blocks."""
        return padded(self.exact_dim)

    @property
    def keys(self) -> int:
        """Keys per stage."""
        return self.blocks * BLOCK_K

    @property
    def bias_columns(self) -> int:
        """Bias entries per key block in shared memory; 1 as a placeholder without means."""
        return BLOCK_K if self.means else 1

    @property
    def tile_numbers(self) -> int:
        """Number of properties of a tile in `Metadata.tile`: six, and the `scheduler.Lengths` if packed."""
        return 11 if self.packed else 6

    @property
    def chunk(self) -> int:
        """Channels of Q and K per row of shared memory, at most 128 bytes."""
        return min(self.head_dim, 128 if self.quantized else 64)

    @property
    def chunks(self) -> int:
        """TMA copies per tile of Q, and per key block."""
        return self.head_dim // self.chunk

    @property
    def value_rows(self) -> int:
        """Rows of one copy of V: channels if transposed, else keys."""
        return self.value_dim if self.fp8_values else BLOCK_K

    @property
    def value_columns(self) -> int:
        """Columns of one copy of V: keys if transposed, else channels."""
        return 64

    @property
    def value_copies(self) -> int:
        """TMA copies per block of V."""
        return self.value_dim * BLOCK_K // (self.value_rows * self.value_columns)

    @property
    def query_bytes(self) -> int:
        """Bytes of a tile's queries."""
        return BLOCK_Q * self.head_dim * (1 if self.quantized else 2)

    @property
    def stage_bytes(self) -> int:
        """Bytes of K and V per stage."""
        return self.keys * (
            self.head_dim * (1 if self.quantized else 2) + self.value_dim * (1 if self.fp8_values else 2)
        )

    @property
    def value_shape(self) -> list[int]:
        """Shape of V in shared memory: [key blocks of all stages, keys, channels]; with FP8, [..., channels, keys]."""
        block = [self.value_dim, BLOCK_K] if self.fp8_values else [BLOCK_K, self.value_dim]
        return [self.stages * self.blocks, *block]

    @property
    def key_smem_layout(self) -> gl.NVMMASharedLayout:
        """Layout of Q and K in shared memory."""
        bits = 8 if self.quantized else 16
        return _operand_layout(self.chunk * bits // 8, bits)

    @property
    def value_smem_layout(self) -> gl.NVMMASharedLayout:
        """Layout of V in shared memory."""
        return _operand_layout(64, 8) if self.fp8_values else _operand_layout(128, 16)

    @property
    def ones_smem_layout(self) -> gl.NVMMASharedLayout:
        """Layout of the FP8 ones that P is multiplied by for its row sums."""
        return _operand_layout(64, 8)

    @property
    def metadata_smem_layout(self) -> gl.SwizzledSharedLayout:
        """Layout of consecutive numbers in shared memory."""
        return gl.SwizzledSharedLayout(1, 1, 1, order=[0])

    @property
    def scores_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of S of a stage, [64, keys]."""
        return _accumulator_layout(self.keys, 32 if self.quantized else 16)

    @property
    def exact_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of S of a coarse key block, [64, 64]: each thread has the same elements as in `scores_layout`."""
        return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])

    @property
    def output_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of P V, [64, value_dim]."""
        return _accumulator_layout(self.value_dim, 32 if self.fp8_values else 16)

    @property
    def sums_layout(self) -> gl.NVMMADistributedLayout:
        """Layout of P times ones, [64, 8]: every column is the row sum."""
        return _accumulator_layout(8, 32)

    @property
    def k_width(self) -> int:
        """Number of adjacent columns of P in one register."""
        return 4 if self.fp8_values else 2

    @property
    def p_layout(self) -> gl.DotOperandLayout:
        """Layout of P as the left operand of P V."""
        return gl.DotOperandLayout(0, self.output_layout, self.k_width)

    @property
    def summed_p_layout(self) -> gl.DotOperandLayout:
        """Layout of P as the left operand of P times ones."""
        return gl.DotOperandLayout(0, self.sums_layout, 4)

    @property
    def p_by_lane_layout(self) -> gl.DistributedLinearLayout:
        """Layout of a key block's P as [64, 16 / w, 4, w]: w is `k_width`, and dimension 2 is the lane of a row."""
        return by_lane_layout(BLOCK_K, self.k_width)

    @property
    def lane_layout(self) -> gl.SliceLayout:
        """Layout of one number per lane, [64, 4]. A lane is one of a row's four threads; lane t has keys of group t."""
        return gl.SliceLayout(1, gl.SliceLayout(3, self.p_by_lane_layout))

    @property
    def group_layout(self) -> gl.SliceLayout:
        """Layout of one number per group of keys, [4]."""
        return gl.SliceLayout(0, self.lane_layout)

    @property
    def row_layout(self) -> gl.SliceLayout:
        """Layout of one number per row, [64], in the threads that compute P."""
        return gl.SliceLayout(1, self.lane_layout)

    @property
    def output_row_layout(self) -> gl.SliceLayout:
        """Layout of one number per row, [64], in the threads that have the row's output."""
        return gl.SliceLayout(1, self.output_layout)

    @property
    def sums_row_layout(self) -> gl.SliceLayout:
        """Layout of one number per row, [64], in the threads that have the row's P times ones."""
        return gl.SliceLayout(1, self.sums_layout)

    @property
    def store_layout(self) -> gl.DistributedLinearLayout:
        """Layout of the output with 8 neighboring channels per thread."""
        wider = [[0, channels] for channels in (32, 64, 128) if channels < self.value_dim]
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *wider],
            lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, self.value_dim],
        )
