"""Triton kernels for query blocks and keys that are split over several ranks."""

from __future__ import annotations

import pytest
from tests.distributed.cases import Case, check_rank, make_tensors, run_one_process
from tests.distributed.threads import on_ranks

CASES = [
    Case("ulysses", "budget", heads=(4, 2), length=320),
    Case("gather", "budget", True, "head_tail", heads=(2, 1), length=512),
    Case("ring", "budget", heads=(2, 2), length=500, options={"score": "spread", "always_keep": [(0, 40)]}),
    Case("ring", "budget", True, "head_tail", heads=(2, 1), length=1024),
    Case("ring", "dense", True, "head_tail", heads=(2, 1), length=512),
    Case("ring", "topcdf", heads=(2, 1), length=512, options={"score": "mean"}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_equal_one_process(case: Case) -> None:
    case.options["quantization"] = "none"
    inputs = make_tensors(case)
    expected = run_one_process(case, inputs, "triton")
    on_ranks(2, lambda communicator: check_rank(case, inputs, expected, (communicator,), "triton"))
