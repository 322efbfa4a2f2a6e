"""Ranks take turns on one device: their masks equal the masks of one process, and their errors are no larger."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.cases import MODES, RULES, Case, check_rank, make_tensors, run_one_process, run_rank
from tests.distributed.threads import on_ranks

import sparge
from gpu.conftest import BACKEND, DEVICE, FP8, ON_CUDA
from sparge.distributed import HeadBalance, context_parallel_attention

pytestmark = pytest.mark.gpu
LENGTH = 8192 if ON_CUDA else 512
WIDTH = 128 if ON_CUDA else 32


def every_case():
    for mode in MODES:
        for rule in ("budget", "topcdf", "dense"):
            yield Case(mode, rule, length=LENGTH)
        yield Case(mode, "budget", True, "contiguous" if mode == "ulysses" else "head_tail", length=LENGTH)
        yield Case(mode, "budget", length=LENGTH - 24, options={"always_keep": [(0, 100)], "score": "spread"})
        yield Case(mode, "budget", length=LENGTH, batch=2, heads=(8, 8), options={"exact_queries": [(300, 310)]})
    yield Case("gather", "budget", length=LENGTH, options={"kv_heads_at_once": 1})


@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_four_ranks_equal_one_process(case: Case) -> None:
    inputs = make_tensors(case, width=WIDTH, device=DEVICE, dtype=torch.bfloat16)
    case.options["quantization"] = "none"
    expected = run_one_process(case, inputs, BACKEND)
    on_ranks(4, lambda communicator: check_rank(case, inputs, expected, (communicator,), BACKEND, tolerance=2e-2))


@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_mesh_equals_one_process(mode: str) -> None:
    case = Case(mode, "budget", True, "head_tail", length=LENGTH, options={"quantization": "none"})
    inputs = make_tensors(case, width=WIDTH, device=DEVICE, dtype=torch.bfloat16)
    expected = run_one_process(case, inputs, BACKEND)
    on_ranks(
        4, lambda *communicators: check_rank(case, inputs, expected, communicators, BACKEND, tolerance=2e-2), columns=2
    )


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("quantization", [*FP8, "int8_fp16"])
def test_quantized_modes_have_at_most_the_error_of_one_process(mode: str, quantization: str) -> None:
    if mode == "ring" and quantization == "int8_fp8_fast":
        pytest.skip("unsupported: the LSE without exp2 is inaccurate")
    case = Case(mode, length=LENGTH, options={"quantization": quantization})
    inputs = make_tensors(case, width=WIDTH, device=DEVICE, dtype=torch.bfloat16)
    call = {"enable_gqa": True, "backend": BACKEND, **RULES["budget"]}
    exact = sparge.attention(*inputs, quantization="none", **call).float()
    alone = sparge.attention(*inputs, quantization=quantization, **call).float()
    parts = on_ranks(4, lambda communicator: run_rank(case, inputs, (communicator,), BACKEND)[0])
    error = (torch.cat(parts, 2).float() - exact).norm() / exact.norm()
    assert 0 < error < 1.25 * (alone - exact).norm() / exact.norm()


def test_per_head_options_on_the_host_follow_balanced_heads() -> None:
    case = Case("ulysses", heads=(8, 8), length=LENGTH)
    inputs = make_tensors(case, width=WIDTH, device=DEVICE, dtype=torch.bfloat16)
    rule = sparge.TopK(torch.linspace(0.1, 0.9, 8), min_blocks=1)
    options = {"sparsity": rule, "backend": BACKEND, "quantization": "none"}
    expected = sparge.attention(*inputs, **options)

    def work(communicator):
        balance, own = HeadBalance(), [x.chunk(2, 2)[communicator.rank] for x in inputs]
        return [context_parallel_attention(*own, group=communicator, balance=balance, **options) for _ in range(2)]

    for parts in zip(*on_ranks(2, work), strict=True):  # first in the given order, then balanced
        torch.testing.assert_close(torch.cat(parts, 2), expected, atol=2e-2, rtol=2e-2)


def test_auto_selects_a_quantization_whose_lse_can_be_merged() -> None:
    case = Case("ring", length=LENGTH)
    inputs = make_tensors(case, width=WIDTH, device=DEVICE, dtype=torch.bfloat16)
    explicit_case = Case("ring", length=LENGTH, options={"quantization": "int8_fp8"})
    with_auto, with_explicit = (
        on_ranks(2, lambda communicator, each=each: run_rank(each, inputs, (communicator,), BACKEND))
        for each in (case, explicit_case)
    )
    for own, other in zip(with_auto, with_explicit, strict=True):
        assert torch.equal(own[0], other[0])
