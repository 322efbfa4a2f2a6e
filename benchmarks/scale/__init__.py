"""Attention on several GPUs, with one rank's part measured and links computed: `python -m benchmarks.scale`.

plan      bytes that ranks send, their time over assumed links, and the time that attention does not hide
parts     the attention of one rank, computed by public functions
measure   times the parts one after another on one GPU, into benchmarks/results/scale.jsonl
summary   the table of docs/scale.md
"""
