"""The Triton kernels on a CPU, in Triton's interpreter. (Neither named after Triton nor `kernels`: the
folder would hide the package of that name, and transformers imports the second where it is installed.)"""
