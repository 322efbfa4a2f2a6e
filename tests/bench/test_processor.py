"""The bench of a processor: what its rows hold, and what it makes of them."""

from __future__ import annotations

import pytest
from benchmarks import processor as bench
from benchmarks.processor import Case, Row, crossovers, measure

from sparge.backends.torch import blocks


@pytest.mark.parametrize("is_causal", [False, True])
def test_rows_hold_speed_density_and_errors(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "VARIANT_TOKENS", 512)
    rows = list(measure(Case(512, is_causal, "float32", 16, heads=1), turns=1, budget_s=0.1))
    assert [row["topk"] for row in rows if row["variant"] == "as it is"] == [0.5, 0.25]
    assert {row["variant"] for row in rows} == set(bench.VARIANTS) - {"products in float32"}
    assert blocks.SPANS == (4, 2) and blocks.STEP_BLOCKS == 8, "a variant left its mark"
    for row in rows:
        assert row["speedup"] == row["dense_s"] / row["sparse_s"]
        assert row["topk"] <= row["density"] < 0.6
        assert row["dense_relative_l1"] < 1e-6 < row["relative_l1"] < 1.5


def row_of(tokens: int, speedup: float, **other: object) -> Row:
    kind = {"dtype": "bfloat16", "units": "matrix", "is_causal": True, "variant": "as it is", "topk": 0.5}
    return {**kind, "tokens": tokens, "speedup": speedup, **other}


def test_a_length_pays_where_all_longer_ones_do() -> None:
    rows = [row_of(2048, 1.2), row_of(4096, 1.0), row_of(8192, 1.1), row_of(8192, 1.3), row_of(16384, 1.4)]
    others = [row_of(8192, 0.5, topk=0.25), row_of(8192, 0.5, variant="not shared"), row_of(4096, 0.9, is_causal=False)]
    assert crossovers(rows + others) == [
        "bfloat16 (matrix), full: pays from no length on (4096: 0.90x)",
        "bfloat16 (matrix), causal: pays from 8192 on (2048: 1.20x, 4096: 1.00x, 8192: 1.10x, 16384: 1.40x)",
    ]
