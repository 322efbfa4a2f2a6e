"""The names of Gluon that kernels use, which are the same here for Triton 3.6 to 3.9."""

from __future__ import annotations

import typing

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_accumulator,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate

# Names that changed after Triton 3.6. If both exist, prefer the new one, because the old one may raise.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret = (
    shared_memory_descriptor.reinterpret
    if hasattr(shared_memory_descriptor, "reinterpret")
    else shared_memory_descriptor._reinterpret
)
tensor_descriptor = tma.tensor_descriptor


if typing.TYPE_CHECKING:
    from typing_extensions import dataclass_transform

    Aggregate = typing.TypeVar("Aggregate")

    @dataclass_transform()
    def aggregate(cls: type[Aggregate]) -> type[Aggregate]: ...

else:

    def aggregate(cls):
        """Decorate a class whose instances group values inside kernels. It is constructed like a dataclass.

        Triton 3.9 exports such a decorator and generates the constructor. Triton 3.6 does neither, and does not resolve
        string annotations.
        """

        def initialize(self, *values, **fields):
            for name, value in (*zip(cls.__annotations__, values, strict=False), *fields.items()):
                setattr(self, name, value)

        initialize.__triton_builtin__ = True  # Triton does not analyze the globals that a builtin refers to
        cls.__init__ = initialize
        cls.__annotations__ = typing.get_type_hints(cls)
        return _aggregate(cls)


def by_lane_layout(columns: int, width: int) -> gl.DistributedLinearLayout:
    """Return the layout of a warpgroup's product [64, columns], viewed as [64, columns / 4 / width, 4, width].

    Four threads hold a row. Each of them has every fourth group of ``width`` adjacent columns.
    """
    groups = columns // 4 // width
    neighbors = [[0, 0, 0, bit] for bit in (1, 2) if bit < width]
    return gl.DistributedLinearLayout(
        reg_bases=[*neighbors, [8, 0, 0, 0], *[[0, bit, 0, 0] for bit in (1, 2, 4, 8, 16) if bit < groups]],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        warp_bases=[[16, 0, 0, 0], [32, 0, 0, 0]],
        block_bases=[],
        shape=[64, groups, 4, width],
    )


@jit
def allocate_barriers(STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Return full and empty barriers of stages that one producer fills and CONSUMERS consumers release."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return full, empty


__all__ = [
    "TensorDescriptor",
    "aggregate",
    "allocate_barriers",
    "async_load",
    "barrier",
    "by_lane_layout",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "mma_v2",
    "reinterpret",
    "shared_memory_descriptor",
    "tensor_descriptor",
    "warpgroup_mma",
    "warpgroup_mma_accumulator",
    "warpgroup_mma_wait",
]
