"""Kernels before attention: statistics, codes, scores, selection, peaks."""
