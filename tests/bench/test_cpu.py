"""The CPU benchmark: columns of its rows, and the crossover derived from them."""

from __future__ import annotations

import pytest
from benchmarks.cpu import Case, Row, cases, crossovers, measure


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_have_speed_density_and_errors(is_causal: bool) -> None:
    rows = list(measure(Case("speed", 512, is_causal, head_dim=16, heads=1), turns=1, budget_s=0.1))
    assert [row["topk"] for row in rows] == [0.5, 0.25, 0.1]
    for row in rows:
        assert row["speedup"] == row["dense_s"] / row["sparse_s"]
        assert row["topk"] <= row["density"] < 0.6
        assert 0.2 < row["mass_recall"] <= 1
        assert row["dense_relative_l1"] < 1e-6 < row["relative_l1"] < 1.5


def test_cases() -> None:
    assert {
        case.suite: len(cases(case.suite, ["float32"], quick=False))
        for suite in ("speed", "memory", "crossover")
        for case in cases(suite, ["float32"], quick=True)
    } == {"speed": 2, "memory": 4, "crossover": 32}


def row_of(tokens: int, speedup: float, **other: object) -> Row:
    kind = {"dtype": "bfloat16", "units": "matrix", "is_causal": True, "topk": 0.5}
    return {**kind, "tokens": tokens, "speedup": speedup, **other}


def test_crossover_is_the_length_from_which_all_are_faster() -> None:
    rows = [row_of(2048, 1.2), row_of(4096, 1.0), row_of(8192, 1.1), row_of(8192, 1.3), row_of(16384, 1.4)]
    others = [row_of(8192, 0.5, topk=0.25), row_of(4096, 0.9, is_causal=False)]
    assert crossovers(rows + others) == [
        "bfloat16 (matrix), full: faster from no length on (4096: 0.90x)",
        "bfloat16 (matrix), causal: faster from 8192 on (2048: 1.20x, 4096: 1.00x, 8192: 1.10x, 16384: 1.40x)",
    ]
