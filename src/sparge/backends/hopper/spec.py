"""What the Hopper kernel is compiled for, and the layouts that follow from it.

A layout says which thread holds which element (of a tensor in registers) or where an element lies (in shared memory).
docs/hopper.md draws them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparge.backends.hopper.gluon import gl, mbarrier
from sparge.eight_bits import FP8_MAX, FP16_ROOM
from sparge.geometry import BLOCK_K, BLOCK_Q

CODES_PER_OCTAVE = 8.0
"""Of E4M3: 3 bits of fraction."""
SLACK = 8.0
"""Octaves that P may exceed 1 by, where the output is rescaled rarely."""


def _accumulator(columns: int, depth: int) -> gl.NVMMADistributedLayout:
    """64 rows of a warpgroup's matrix product, ``depth`` numbers deep per instruction."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, depth])


def _tile(swizzle: int, bits: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits)


@dataclass(frozen=True)
class Form:
    """A kind of call. Widths are padded to powers of two; what is missing is copied as 0.

    Attributes:
        quantized: Q and K are INT8 codes, else 16-bit numbers.
        fp8_values: V is FP8, transposed, else 16-bit numbers.
        codes: P's codes come straight from the scores, without exponentials. Needs fp8_values.
        peaks: "ignored", "asked" about in every tile or "known" (`peaks.way_with_peaks`); what lies far below one is
            taken as a part of its own.
        value_dim: channels of V a row computes, one of ``slices`` parts.
        output_dim: channels the caller sees.
        value_scales: distance of one head's value scales from the next one's.
        blocks: key blocks per tile, 1 or 2.
        stages: tiles on their way.
        rows_ahead: rows whose queries are held, 1 or 2.
    """

    quantized: bool
    fp8_values: bool
    codes: bool
    is_causal: bool
    has_threshold: bool
    all_blocks: bool
    count: bool
    peaks: str
    head_dim: int
    value_dim: int
    output_dim: int
    value_scales: int
    slices: int
    blocks: int
    stages: int
    rows_ahead: int

    @property
    def rescales_rarely(self) -> bool:
        """Whether P counts from a score that may lie below the maximum: with 16 bits it may exceed 1.

        With an INT8 S it gave nothing (docs/lab/hopper.md); a threshold needs the maximum.
        """
        return not self.quantized and not self.has_threshold

    @property
    def one(self) -> float:
        """Octaves: what P = 1 is stored as. The largest FP8 number, or what leaves FP16 room for smaller and larger."""
        if self.fp8_values:
            return math.log2(FP8_MAX)
        return FP16_ROOM - SLACK if self.rescales_rarely else FP16_ROOM

    @property
    def inverse_one(self) -> float:
        """What sums are multiplied by to count from P = 1."""
        return 2.0**-self.one

    @property
    def steps(self) -> float:
        """Per octave: what scores are counted in."""
        return CODES_PER_OCTAVE if self.codes else 1.0

    @property
    def keys(self) -> int:
        """Of one tile."""
        return self.blocks * BLOCK_K

    @property
    def chunk(self) -> int:
        """Channels of Q and K that lie in one row of shared memory, 128 bytes at most."""
        return min(self.head_dim, 128 if self.quantized else 64)

    @property
    def chunks(self) -> int:
        return self.head_dim // self.chunk

    @property
    def value_rows(self) -> int:
        """Of one copy of V."""
        return self.value_dim if self.fp8_values else BLOCK_K

    @property
    def value_columns(self) -> int:
        return 64

    @property
    def value_copies(self) -> int:
        """Per key block."""
        return self.value_dim * BLOCK_K // (self.value_rows * self.value_columns)

    @property
    def query_bytes(self) -> int:
        return BLOCK_Q * self.head_dim * (1 if self.quantized else 2)

    @property
    def tile_bytes(self) -> int:
        """K and V of one tile."""
        return self.keys * (
            self.head_dim * (1 if self.quantized else 2) + self.value_dim * (1 if self.fp8_values else 2)
        )

    @property
    def value_shape(self) -> list[int]:
        """All stages of V, by key block."""
        block = [self.value_dim, BLOCK_K] if self.fp8_values else [BLOCK_K, self.value_dim]
        return [self.stages * self.blocks, *block]

    @property
    def key_tile(self) -> gl.NVMMASharedLayout:
        bits = 8 if self.quantized else 16
        return _tile(self.chunk * bits // 8, bits)

    @property
    def value_tile(self) -> gl.NVMMASharedLayout:
        return _tile(64, 8) if self.fp8_values else _tile(128, 16)

    @property
    def ones_tile(self) -> gl.NVMMASharedLayout:
        return _tile(64, 8)

    @property
    def plain(self) -> gl.SwizzledSharedLayout:
        return gl.SwizzledSharedLayout(1, 1, 1, order=[0])

    @property
    def barrier(self) -> mbarrier.MBarrierLayout:
        return mbarrier.MBarrierLayout()

    @property
    def scores(self) -> gl.NVMMADistributedLayout:
        return _accumulator(self.keys, 32 if self.quantized else 16)

    @property
    def output(self) -> gl.NVMMADistributedLayout:
        return _accumulator(self.value_dim, 32 if self.fp8_values else 16)

    @property
    def sums(self) -> gl.NVMMADistributedLayout:
        """Products with a tile of ones: every column is the row sum."""
        return _accumulator(8, 32)

    @property
    def k_width(self) -> int:
        """Neighbouring columns of P that one register holds."""
        return 4 if self.fp8_values else 2

    @property
    def probability(self) -> gl.DotOperandLayout:
        """P as the left operand of P V."""
        return gl.DotOperandLayout(0, self.output, self.k_width)

    @property
    def summand(self) -> gl.DotOperandLayout:
        """P as the left operand of P times ones."""
        return gl.DotOperandLayout(0, self.sums, 4)

    @property
    def by_lanes(self) -> gl.DistributedLinearLayout:
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
    def lanes(self) -> gl.SliceLayout:
        """A number for each of a row's four threads, [64, 4]. Thread t holds the keys of group t, and of no other."""
        return gl.SliceLayout(1, gl.SliceLayout(3, self.by_lanes))

    @property
    def groups(self) -> gl.SliceLayout:
        """A number for each group of keys, [4]."""
        return gl.SliceLayout(0, self.lanes)

    @property
    def rows(self) -> gl.SliceLayout:
        """A number per row, where a row's threads need it for P."""
        return gl.SliceLayout(1, self.lanes)

    @property
    def output_rows(self) -> gl.SliceLayout:
        return gl.SliceLayout(1, self.output)

    @property
    def output_columns(self) -> gl.SliceLayout:
        return gl.SliceLayout(0, self.output)

    @property
    def stored(self) -> gl.DistributedLinearLayout:
        """The output with 8 neighbouring channels per thread."""
        wider = [[0, channels] for channels in (32, 64, 128) if channels < self.value_dim]
        return gl.DistributedLinearLayout(
            reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *wider],
            lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
            warp_bases=[[16, 0], [32, 0]],
            block_bases=[],
            shape=[64, self.value_dim],
        )

    @property
    def sum_rows(self) -> gl.SliceLayout:
        return gl.SliceLayout(1, self.sums)
