"""The Triton kernels on a CPU, in Triton's interpreter.

A folder named `triton` or `kernels` would hide the package of that name; transformers imports `kernels` if installed.
"""
