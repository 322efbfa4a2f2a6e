"""Estimate attention on several GPUs from measurements on one GPU: `python -m benchmarks.scale`.

plan      bytes that ranks send, their time over assumed links, and the time that attention does not hide
parts     the attention of one rank, computed by public functions
measure   times of the ranks' parts, one after another on one GPU, for benchmarks/results/scale.jsonl
summary   the table of docs/scale.md
"""
