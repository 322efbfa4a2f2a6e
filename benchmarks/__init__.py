"""Measurements behind the README's tables: `python -m benchmarks.cpu`, then `python -m benchmarks.tables`."""
