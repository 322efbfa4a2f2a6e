"""The Triton kernels on a CPU, in Triton's interpreter. (Not named after Triton: the package would hide it.)"""
