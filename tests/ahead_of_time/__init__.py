"""The Triton kernels compiled for GPUs that are not here."""
