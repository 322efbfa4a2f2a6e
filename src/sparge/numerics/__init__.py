"""Arithmetic shared by the reference and the torch backend: quantization, block means, budget allocation, merging."""
