"""Kernels before attention: statistics, quantization, scores, selection, peaks."""
