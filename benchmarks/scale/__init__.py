"""Attention past one GPU: a rank's part is measured on one, what ranks send is computed: `python -m benchmarks.scale`.

plan      what is sent, how long that takes over stated links, and what of it cannot be hidden
parts     the part of one rank, by public functions
measure   the parts timed one after another on one GPU, into benchmarks/results/scale.jsonl
summary   the tables of docs/scale.md, and the bars of its picture
"""
