"""The exactness matrix: errors of unquantized calls, full and sparse, against float64. Each test file has one dtype.

Every head_dim is combined with every pair of lengths; causality, grouped heads and layout vary so that any two
settings occur together (`Exactness.test_cases_cover_every_pair_of_settings`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

import sparge
from conftest import SPARSE
from gpu.conftest import BACKEND, assert_matches_exact, equal, forget_recordings, make_inputs

HEAD_DIMS = (32, 40, 64, 72, 96, 128, 160, 192, 256)
LENGTHS = ((200, 200), (129, 321), (330, 129), (1, 200), (512, 1000))


@dataclass(frozen=True)
class Case:
    head_dim: int
    lengths: tuple[int, int]
    is_causal: bool
    heads: tuple[int, int]
    layout: str

    def __str__(self) -> str:
        causal = "causal" if self.is_causal else "full"
        lengths, heads = "x".join(map(str, self.lengths)), ":".join(map(str, self.heads))
        return f"{self.head_dim}-{lengths}-{causal}-{heads}-{self.layout}"


CASES = [
    Case(
        head_dim,
        lengths,
        is_causal=(a + b) % 2 == 1,
        heads=((6, 2), (2, 2))[(a + b // 2) % 2],
        layout=("HND", "NHD")[(a // 2 + b) % 2],
    )
    for (a, head_dim), (b, lengths) in product(enumerate(HEAD_DIMS), enumerate(LENGTHS))
]


def run(case: Case, query: Tensor, key: Tensor, value: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Run a call in the layout of the case and return output (B, H, S, D) and LSE."""
    tensors = [query, key, value]
    if case.layout == "NHD":
        tensors = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    output, lse = sparge.attention(
        *tensors,
        is_causal=case.is_causal,
        enable_gqa=True,
        layout=case.layout,
        quantization="none",
        skipped="drop",
        return_lse=True,
        backend=BACKEND,
        **options,
    )
    return (output.transpose(1, 2) if case.layout == "NHD" else output), lse


class Exactness:
    """Tests for one dtype, which subclasses set."""

    dtype: torch.dtype

    def test_cases_cover_every_pair_of_settings(self) -> None:
        for first, second in combinations([field.name for field in fields(Case)], 2):
            pairs = {(getattr(case, first), getattr(case, second)) for case in CASES}
            choices = [{getattr(case, name) for case in CASES} for name in (first, second)]
            assert len(pairs) == len(choices[0]) * len(choices[1])

    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_full_and_sparse(self, case: Case) -> None:
        heads, kv_heads = case.heads
        query, key, value = make_inputs(
            *case.lengths, batch=2, heads=heads, kv_heads=kv_heads, head_dim=case.head_dim, dtype=self.dtype
        )
        call = {"is_causal": case.is_causal}
        assert_matches_exact(run(case, query, key, value, topk=1), query, key, value, **call)
        blocks = sparge.predict(query, key, enable_gqa=True, backend=BACKEND, **SPARSE, **call)
        assert blocks.density() < 0.6
        got = run(case, query, key, value, **SPARSE)
        assert_matches_exact(got, query, key, value, block_mask=blocks.to_dense(), **call)
        others = [tensor.flip(2).contiguous() for tensor in (query, key, value)]
        replayed = run(case, *others, **SPARSE)
        forget_recordings()
        assert equal(replayed, run(case, *others, **SPARSE)), "the second call is a replay"
        backend = "triton" if BACKEND == "hopper" and query.dtype == torch.float32 else BACKEND
        assert sparge.stats().reasons == {f"sparse: {backend}": 4}
