"""The Triton kernels, compiled without a GPU."""
