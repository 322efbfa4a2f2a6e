"""Kernels in Gluon for compute capability 9.0: asynchronous copies, warpgroup products, warp roles (docs/hopper.md)."""
