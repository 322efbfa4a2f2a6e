"""Packed sequences: every segment is bitwise equal to its own call."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

import sparge
from conftest import exact_attention
from sparge import Budget, Dense, TopCdf, TopK, varlen
from sparge.call import Call
from sparge.dispatch import ops
from sparge.masks.geometry import Shape
from sparge.masks.segments import Run, runs_of

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]

Lengths = list[tuple[int, int]]
EQUAL: Lengths = [(200, 200)] * 4
MIXED: Lengths = [(0, 0), (200, 200), (200, 200), (129, 300), (300, 129), (0, 70), (70, 0), (1, 64), (64, 1), (64, 1)]


def make_packed(
    lengths: Lengths, heads: int = 2, kv_heads: int = 1, width: int = 16, value_width: int = 16
) -> tuple[Any, ...]:
    """Return random q, k, v, cu_seqlens_q and cu_seqlens_k."""
    generator = torch.Generator().manual_seed(sum(q + 3 * k for q, k in lengths))
    total_q, total_k = (sum(side) for side in zip(*lengths, strict=True))
    sizes = ((total_q, heads, width), (total_k, kv_heads, width), (total_k, kv_heads, value_width))
    bounds = [torch.tensor([0, *side]).cumsum(0).int() for side in zip(*lengths, strict=True)]
    return *(torch.randn(size, generator=generator) for size in sizes), *bounds


def loop_over_segments(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Run one call per segment and return output and LSE."""
    output = q.new_zeros(len(q), q.shape[1], v.shape[2])
    lse = torch.full((q.shape[1], len(q)), -math.inf)
    edges = zip(bounds_q[:-1], bounds_q[1:], bounds_k[:-1], bounds_k[1:], strict=True)
    for q_start, q_stop, k_start, k_stop in edges:
        if q_start < q_stop and k_start < k_stop:
            segment = (q[None, q_start:q_stop], k[None, k_start:k_stop], v[None, k_start:k_stop])
            result = sparge.attention(*segment, layout="NHD", enable_gqa=True, return_lse=True, **options)
            output[q_start:q_stop], lse[:, q_start:q_stop] = result[0][0], result[1][0]
    return output, lse


def assert_equals_a_loop(tensors: tuple[Any, ...], causal: bool = False, **options: Any) -> dict[str, int]:
    """Check that a packed call equals a loop over its segments. Return the reasons that the statistics list."""
    expected = loop_over_segments(*tensors, is_causal=causal, **options)
    sparge.reset_stats()
    output, lse = sparge.varlen_attention(*tensors, causal=causal, return_lse=True, **options)
    reasons = sparge.stats().reasons
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1])
    return reasons


class TestEqualToALoopOverSegments:
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    @pytest.mark.parametrize("lengths", [EQUAL, MIXED], ids=["equal", "mixed"])
    @pytest.mark.parametrize(
        "options",
        [
            {"topk": 0.3},
            {"sparsity": TopK(0.3, min_blocks=1), "score": "mean"},
            {"sparsity": TopCdf(torch.tensor([0.5, 0.9]), min_blocks=1, pv_threshold=-2.0), "score": "spread"},
            {"sparsity": Budget(0.3, similarity_threshold=0.1), "quantization": "int8_fp8"},
            {"sparsity": Dense(), "quantization": "int8_fp16"},
        ],
        ids=["budget", "topk", "topcdf", "int8_fp8", "dense"],
    )
    def test_segments_equal_a_loop(self, lengths: Lengths, causal: bool, options: dict[str, Any]) -> None:
        assert_equals_a_loop(make_packed(lengths), causal, backend="torch", **options)

    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_short_segments_run_dense_and_long_ones_do_not(self, causal: bool) -> None:
        """The crossover applies to each segment, not to the total size."""
        lengths = [(1300, 1300)] * 5 + [(2100, 4200)] * 2
        reasons = assert_equals_a_loop(make_packed(lengths, width=8, value_width=8), causal, topk=0.3)
        assert reasons == {"dense: below the crossover": 1, "sparse: torch": 1}

    def test_crossover_applies_to_each_segment_of_a_batch(self) -> None:
        """The crossover is 2^23 scores: 2 heads of 2048 tokens. Five segments of 1 head are below it."""
        tensors = make_packed([(2048, 2048)] * 5, heads=1, width=8, value_width=8)
        assert assert_equals_a_loop(tensors) == {"dense: below the crossover": 5}

    def test_dense_calls_after_a_prefix_do_not_depend_on_the_batch(self) -> None:
        """All segments together exceed 2^22 mask elements, the limit of one code path of the torch backend."""
        assert_equals_a_loop(make_packed([(700, 1000)] * 8, width=8, value_width=8), causal=True)

    def test_other_dtypes_widths_and_strides(self) -> None:
        q, k, v, *bounds = make_packed([(200, 330)] * 3, heads=4, kv_heads=2, width=24, value_width=40)
        tensors = (q.bfloat16(), k.bfloat16(), v.bfloat16(), *bounds)
        assert_equals_a_loop(tensors, True, topk=0.4, backend="torch")
        together = torch.randn(600, 3, 2, 16, generator=torch.Generator().manual_seed(0))
        equal = torch.tensor([0, 200, 400, 600])
        assert_equals_a_loop((*together.unbind(1), equal, equal), topk=0.4, backend="torch")
        heads_first = torch.randn(3, 2, 600, 16, generator=torch.Generator().manual_seed(0)).transpose(1, 2)
        assert_equals_a_loop((*heads_first.unbind(0), equal, equal), topk=0.4, backend="torch")

    @pytest.mark.parametrize("window", [(70, 0), (100, 30), (-1, 40), (40, -1)])
    def test_windows(self, window: tuple[int, int]) -> None:
        """Windows are aligned to the end of each segment."""
        tensors = make_packed(MIXED)
        expected = loop_over_segments(*tensors, window=window, topk=0.6, backend="torch")
        got = sparge.varlen_attention(*tensors, window_size=window, topk=0.6, backend="torch", return_lse=True)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])

    def test_full_calls_are_exact(self) -> None:
        """With all blocks kept, the result is exact attention."""
        q, k, v, *bounds = make_packed(MIXED)
        output, lse = sparge.varlen_attention(q, k, v, *bounds, causal=True, topk=1.0, backend="torch", return_lse=True)
        for q_start, q_stop, k_start, k_stop in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
            segment = (x[None].transpose(1, 2) for x in (q[q_start:q_stop], k[k_start:k_stop], v[k_start:k_stop]))
            expected, expected_lse = exact_attention(*segment, is_causal=True)
            torch.testing.assert_close(output[q_start:q_stop].double(), expected[0].transpose(0, 1), atol=1e-5, rtol=0)
            torch.testing.assert_close(lse[:, q_start:q_stop].double(), expected_lse[0], atol=1e-5, rtol=0)

    def test_segments_are_independent(self) -> None:
        tensors = make_packed([(300, 300)] * 3)
        before = sparge.varlen_attention(*tensors, topk=0.3, backend="torch")
        for tensor in tensors[:3]:
            tensor[300:600] = math.nan
        after = sparge.varlen_attention(*tensors, topk=0.3, backend="torch")
        assert torch.equal(before[:300], after[:300]) and torch.equal(before[600:], after[600:])


class TestCalls:
    def test_consecutive_segments_of_equal_lengths_are_one_call(self) -> None:
        tensors = make_packed([(200, 200)] * 64, width=8, value_width=8)
        sparge.varlen_attention(*tensors, topk=0.5, backend="torch")
        assert sparge.stats().reasons == {"sparse: torch": 1}

    def test_keys_without_queries_separate_calls(self) -> None:
        """The queries of the segments are consecutive, their keys are not."""
        tensors = make_packed([(200, 200), (0, 50), (200, 200)])
        assert assert_equals_a_loop(tensors, topk=0.5, backend="torch") == {"sparse: torch": 2}
        assert runs_of([0, 4, 4, 8], [0, 4, 6, 10]) == [Run(1, 0, 4, 0, 4), Run(1, 4, 4, 6, 4)]

    def test_calls_without_visible_keys_are_counted(self) -> None:
        q, k, v, *bounds = make_packed([(3, 0), (3, 0)])
        output, lse = sparge.varlen_attention(q, k, v, *bounds, return_lse=True)
        assert sparge.stats().reasons == {"dense: nothing to see": 1}
        assert torch.equal(output, torch.zeros(6, 2, 16)) and torch.equal(lse, torch.full((2, 6), -math.inf))

    @pytest.mark.parametrize("lengths", [[(0, 0)], [(0, 5), (0, 3)]])
    def test_no_queries(self, lengths: Lengths) -> None:
        output, lse = sparge.varlen_attention(*make_packed(lengths, value_width=8), return_lse=True)
        assert output.shape == (0, 2, 8) and lse.shape == (2, 0)


class TestBounds:
    def test_bounds_on_the_host(self) -> None:
        q, k, v, bounds_q, bounds_k = make_packed(MIXED)
        expected, _ = sparge.varlen_attention(q, k, v, bounds_q, bounds_k, return_lse=True)
        for bounds in (bounds_q.tolist(), tuple(bounds_q.tolist()), bounds_q.long()):
            assert torch.equal(sparge.varlen_attention(q, k, v, bounds, bounds_k.tolist()), expected)

    def test_bounds_are_read_once_and_again_after_a_write(self) -> None:
        bounds = TensorOnAnotherDevice([0, 4, 8])
        assert varlen.read_bounds("", bounds) == varlen.read_bounds("", bounds) == (0, 4, 8)
        assert bounds.reads == 1
        bounds[1] = 5
        assert varlen.read_bounds("", bounds) == (0, 5, 8)
        with torch.inference_mode():
            bounds = TensorOnAnotherDevice([0, 4, 8])
            assert varlen.read_bounds("", bounds) == (0, 4, 8)
            bounds[1] = 5
            assert varlen.read_bounds("", bounds) == (0, 5, 8), "inference tensors have no version counter"

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (
                {"cu_seqlens_q": [0, 300]},
                ValueError,
                "cu_seqlens_q: expected bounds from 0 to the 400 tokens of q",
            ),
            (
                {"cu_seqlens_k": [1, 400]},
                ValueError,
                "expected bounds from 0 to the 400 tokens of k, got 1",
            ),
            (
                {"cu_seqlens_q": [0, 300, 200, 400]},
                ValueError,
                "cu_seqlens_q: expected ascending bounds, got 200",
            ),
            ({"cu_seqlens_q": [0, 400]}, ValueError, "cu_seqlens_k: expected 2 bounds as in cu_seqlens_q, got 3"),
            ({"cu_seqlens_q": []}, ValueError, "cu_seqlens_q: expected bounds from 0 to the 400 tokens of q, got none"),
            ({"cu_seqlens_q": [0, 200.0, 400]}, TypeError, "cu_seqlens_q: expected ints"),
            ({"cu_seqlens_q": torch.tensor([0.0, 400.0])}, TypeError, "cu_seqlens_q: expected int32 or int64"),
            (
                {"cu_seqlens_q": torch.zeros(1, 3, dtype=torch.int32)},
                TypeError,
                "cu_seqlens_q: expected int32 or int64",
            ),
            ({"cu_seqlens_q": "0 400"}, TypeError, "cu_seqlens_q: expected a tensor, a list or a tuple"),
            (
                {"cu_seqlens_k": torch.zeros(3, dtype=torch.int32, device="meta")},
                ValueError,
                "cu_seqlens_k: expected the query's device cpu or the CPU, got meta",
            ),
            ({"max_seqlen_q": 199}, ValueError, "max_seqlen_q: expected at least 200, the longest segment, got 199"),
            ({"max_seqlen_k": 1.5}, TypeError, "max_seqlen_k: expected an int or None, got float"),
            ({"q": torch.zeros(1, 400, 2, 16)}, ValueError, "q: expected 3 dimensions"),
            ({"v": torch.zeros(399, 1, 16)}, ValueError, "v: expected 400 tokens as in k, got 399"),
            ({"k": torch.zeros(400, 1, 8)}, ValueError, "key: expected batch 1 and head_dim 16"),
            ({"k": "keys"}, TypeError, "k: expected a torch.Tensor, got str"),
            ({"window_size": (-2, 0)}, ValueError, "window_size: expected numbers from 0 up"),
            ({"window_size": 5}, TypeError, "window_size: expected None or a pair"),
            ({"softcap": 30.0}, NotImplementedError, "softcap: expected 0.0"),
            ({"causal": 1}, TypeError, "causal: expected a bool"),
            ({"dropout_p": 0.1}, NotImplementedError, "dropout_p: expected 0.0"),
            ({"topk": 2.0}, ValueError, "topk: expected a value in"),
        ],
    )
    def test_invalid_arguments_raise(self, change: dict[str, Any], error: type[Exception], message: str) -> None:
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        arguments: dict[str, Any] = {**dict(zip(names, make_packed([(200, 200)] * 2), strict=True)), **change}
        with pytest.raises(error, match=message):
            sparge.varlen_attention(**arguments)
        assert sparge.stats().calls == 0

    def test_window_can_express_causality(self) -> None:
        tensors = make_packed(EQUAL)
        expected = sparge.varlen_attention(*tensors, causal=True)
        assert torch.equal(sparge.varlen_attention(*tensors, window_size=(-1, 0)), expected)
        assert torch.equal(sparge.varlen_attention(*tensors, 200, 200, 0.0, None, False, [-1, 0]), expected)


class TensorOnAnotherDevice(Tensor):
    """A CPU tensor that reports another device, and counts its reads."""

    reads = 0
    device = torch.device("meta")  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, numbers: list[int]) -> TensorOnAnotherDevice:
        return Tensor._make_subclass(cls, torch.tensor(numbers))

    def tolist(self) -> list[int]:
        self.reads += 1
        return self.as_subclass(Tensor).tolist()


class TestDerivatives:
    def test_gradients_raise_or_run_dense(self) -> None:
        tensors = make_packed([(100, 100), (50, 80)])
        for tensor in tensors[:3]:
            tensor.requires_grad_()
        with pytest.raises(NotImplementedError, match="gradients"):
            sparge.varlen_attention(*tensors)
        output = sparge.varlen_attention(*tensors, causal=True, on_unsupported="dense")
        got = torch.autograd.grad(output.square().sum(), tensors[:3])
        assert sparge.stats().reasons == {"dense: unsupported (gradients)": 2}
        exact = exact_loop_over_segments(*tensors)
        for ours, expected in zip(got, torch.autograd.grad(exact.square().sum(), tensors[:3]), strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def exact_loop_over_segments(q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor) -> Tensor:
    parts = []
    for q_start, q_stop, k_start, k_stop in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        segment = (x[None].transpose(1, 2) for x in (q[q_start:q_stop], k[k_start:k_stop], v[k_start:k_stop]))
        parts.append(exact_attention(*segment, is_causal=True)[0][0].transpose(0, 1))
    return torch.cat(parts)


class TestCompiled:
    OPTIONS = pytest.mark.parametrize(
        "options",
        [
            {"topk": 0.3, "causal": True, "return_lse": True},
            {"sparsity": TopK(torch.tensor([0.3, 0.6]), min_blocks=1, pv_threshold=-2.0), "softmax_scale": -0.1},
        ],
        ids=["budget", "per head"],
    )

    @OPTIONS
    def test_one_full_graph_for_all_packings(self, options: dict[str, Any]) -> None:
        counter = CompileCounter()

        def run(*tensors: Any) -> Any:
            return sparge.varlen_attention(*tensors, backend="torch", **options)

        torch._dynamo.reset()
        compiled = torch.compile(run, backend=counter, fullgraph=True, dynamic=True)
        for lengths in (MIXED, [(200, 330)] * 3, [(130, 200), (330, 64)]):
            tensors = make_packed(lengths)
            sparge.reset_stats()
            expected = run(*tensors)
            eager = sparge.stats()
            sparge.reset_stats()
            got = compiled(*tensors)
            assert sparge.stats() == eager
            pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
            assert all(torch.equal(ours, other) for ours, other in pairs)
        assert counter.frame_count == 1

    def test_invalid_bounds_raise_at_run_time(self) -> None:
        torch._dynamo.reset()
        q, k, v, *bounds = make_packed(EQUAL)
        compiled = torch.compile(sparge.varlen_attention, backend="eager", fullgraph=True)
        compiled(q, k, v, *bounds)
        with pytest.raises(ValueError, match="cu_seqlens_q: expected bounds from 0 to the 800 tokens"):
            compiled(q, k, v, bounds[0] // 2, bounds[1])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"cu_seqlens_q": [False, 200, 400]}, "cu_seqlens_q: expected ints"),
            ({"cu_seqlens_k": None}, "cu_seqlens_k: expected a tensor, a list or a tuple"),
            ({"max_seqlen_k": 400.0}, "max_seqlen_k: expected an int or None"),
        ],
    )
    def test_invalid_types_raise_as_in_eager_calls(self, change: dict[str, Any], message: str) -> None:
        torch._dynamo.reset()
        q, k, v, *bounds = make_packed([(200, 200)] * 2)
        arguments = {"cu_seqlens_q": bounds[0], "cu_seqlens_k": bounds[1], **change}
        with pytest.raises(TypeError, match=message):
            torch.compile(sparge.varlen_attention, backend="eager")(q, k, v, **arguments)

    def test_operator_passes_opcheck(self) -> None:
        q, k, v, *bounds = make_packed([(200, 200)] * 2)
        call = Call(Shape(1, 2, 1, 400, 400, 16, 16), True, 0.25, sparsity=Budget(0.5), skipped="auto")
        arguments = (q, k, v, *bounds, None, 200, *ops.pack(call, "torch"))
        for with_lse in (False, True):
            opcheck(torch.ops.sparge.varlen.default, (*arguments, with_lse))
        nothing = torch.tensor([0, 0], dtype=torch.int32)
        whole = torch.tensor([0, 400], dtype=torch.int32)
        _, lse = torch.ops.sparge.varlen(q, k[:0], v[:0], whole, nothing, None, None, *ops.pack(call, "torch"), False)
        assert lse.shape == (0,), "without return_lse, the LSE is empty also if no key is visible"
