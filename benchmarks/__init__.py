"""Measurements behind the tables and figures of the documentation (docs/benchmarks.md lists the commands)."""
