"""Gluon as this backend uses it, under one set of names for Triton 3.6 to 3.9."""

from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Names that changed after Triton 3.6. Where both exist, the old one may only raise.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
reinterpret = (
    shared_memory_descriptor.reinterpret
    if hasattr(shared_memory_descriptor, "reinterpret")
    else shared_memory_descriptor._reinterpret
)

__all__ = [
    "TensorDescriptor",
    "async_load",
    "barrier",
    "fence_async_shared",
    "gl",
    "jit",
    "mbarrier",
    "reinterpret",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
