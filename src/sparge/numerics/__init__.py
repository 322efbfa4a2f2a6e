"""Arithmetic that the reference and the torch backend share: quantization, block means, budgets."""
