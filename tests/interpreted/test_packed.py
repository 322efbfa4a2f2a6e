"""Segments of unequal lengths in one call: every segment is bitwise equal to its own call."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from conftest import assert_exact, make_qkv
from interpreted.conftest import CPU
from sparge import Budget, Dense, TopCdf, TopK
from sparge.backends import base
from sparge.call import Call
from sparge.dispatch import call_cache, packs
from sparge.dispatch.dense_rules import Target
from sparge.masks.geometry import Shape
from sparge.masks.segments import Run, Segment, group_segments

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS = [(130, 200), (0, 9), (250, 129), (70, 0), (1, 64), (129, 256)]
"""Three segments that form a group, a single one, and segments without queries or keys, with partial blocks."""


def pack(**sizes: Any) -> tuple[list[Tensor], list[int], list[int]]:
    bounds_q, bounds_k = (torch.tensor([0, *side]).cumsum(0).tolist() for side in zip(*LENGTHS, strict=True))
    inputs = make_qkv(bounds_q[-1], bounds_k[-1], **{"heads": 2, "kv_heads": 1, "head_dim": 16, **sizes})
    return [tensor[0].transpose(0, 1).contiguous() for tensor in inputs], bounds_q, bounds_k


def assert_equals_a_loop(
    tensors: list[Tensor], bounds_q: list[int], bounds_k: list[int], *, causal: bool, **options: Any
) -> Tensor:
    options |= {"return_lse": True, "backend": "triton"}
    sparge.reset_stats()
    output, lse = sparge.varlen_attention(*tensors, bounds_q, bounds_k, causal=causal, **options)
    assert sparge.stats().calls == 3, "1 group of 3 segments, 1 single segment, 1 without visible keys"
    options |= {"is_causal": causal, "enable_gqa": True, "layout": "NHD", "window": options.pop("window_size", None)}
    for q_start, q_stop, k_start, k_stop in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        ours, our_lse = output[q_start:q_stop], lse[:, q_start:q_stop]
        if k_start == k_stop:
            assert not ours.any() and bool((our_lse == -math.inf).all())
        elif q_start < q_stop:
            segment = (tensors[0][None, q_start:q_stop], *(tensor[None, k_start:k_stop] for tensor in tensors[1:]))
            found, found_lse = sparge.attention(*segment, **options)
            torch.testing.assert_close(ours, found[0], rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(our_lse, found_lse[0], rtol=0, atol=0, equal_nan=True)
    return output


@pytest.mark.parametrize(
    "options, causal",
    [
        ({"sparsity": Budget(0.6), "quantization": "int8_fp8"}, False),
        ({"sparsity": Budget(0.5), "quantization": "int8_fp16", "skipped": "mean"}, True),
        ({"sparsity": TopK(0.4), "quantization": "none", "score": "spread"}, False),
        ({"sparsity": TopCdf(0.6, pv_threshold=-8.0), "quantization": "none", "score": "mean"}, True),
        ({"sparsity": Dense(), "quantization": "int8_fp8"}, True),
        ({"sparsity": Dense(), "quantization": "none"}, True),
        ({"sparsity": Budget(0.4), "quantization": "int8_fp8", "window_size": (90, 40), "skipped": "mean"}, False),
    ],
)
def test_packed_calls_equal_a_loop(options: dict[str, Any], causal: bool) -> None:
    assert_equals_a_loop(*pack(), causal=causal, **options)


@pytest.mark.parametrize("quantization", ["none", "int8_fp16"])
def test_segments_do_not_affect_each_other(quantization: str) -> None:
    """The last block of a segment ends where the next segment, here with NaN, begins."""
    tensors, bounds_q, bounds_k = pack(dtype=torch.float16)
    tensors[0][bounds_q[2] : bounds_q[3]] = torch.nan
    for tensor in tensors[1:]:
        tensor[bounds_k[2] : bounds_k[3]] = torch.nan
    output = assert_equals_a_loop(tensors, bounds_q, bounds_k, causal=False, topk=0.5, quantization=quantization)
    assert torch.isfinite(output[: bounds_q[2]]).all() and torch.isfinite(output[bounds_q[3] :]).all()


def test_small_dense_segments_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a GPU with the default backend, where these segments are below the crossover."""
    resolve = base.resolve
    monkeypatch.setattr(base, "resolve", lambda name, device: resolve("triton" if name == "auto" else name, device))
    tensors, bounds_q, bounds_k = pack()
    sparge.reset_stats()
    output, lse = sparge.varlen_attention(*tensors, bounds_q, bounds_k, causal=True, topk=0.5, return_lse=True)
    assert sparge.stats().reasons == {"dense: below the crossover": 2, "dense: nothing to see": 1}
    for q_start, q_stop, k_start, k_stop in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        if q_start < q_stop and k_start < k_stop:
            segment = [tensor[None].transpose(1, 2) for tensor in tensors]
            segment = [segment[0][:, :, q_start:q_stop], *(tensor[:, :, k_start:k_stop] for tensor in segment[1:])]
            found = output[None, q_start:q_stop].transpose(1, 2), lse[None, :, q_start:q_stop]
            assert_exact(found, *segment, is_causal=True)
    sparge.reset_stats()
    monkeypatch.setattr(packs, "SMALL_SCORES", 2 * 250 * 129)
    call_cache.forget()
    sparge.varlen_attention(*tensors, bounds_q, bounds_k, causal=True, topk=0.5)
    assert sparge.stats().calls == 5, "only the single segment is small"


def make_plan(lengths: list[tuple[int, int]], heads: int = 2, **call: Any) -> packs.Plan:
    bounds_q, bounds_k = ([0, *accumulate(side)] for side in zip(*lengths, strict=True))
    request = Call(Shape(1, heads, 1, bounds_q[-1], bounds_k[-1], 16, 16), False, 1.0, Budget(0.5), **call)
    return packs.plan_of(bounds_q, bounds_k, request, Target("triton", "triton", CPU, torch.float32), may_pack=True)


class TestPlans:
    def test_groups_have_equal_block_counts_rounded_up_to_a_power_of_two(self) -> None:
        plan = make_plan([(129, 65), (257, 128), (256, 128), (256, 129), (256, 70)])
        assert [[segment.q_len for segment in group.segments] for group in plan.groups] == [[129, 256, 256]]
        assert [part.q_len for part in plan.parts] == [257, 256], "other segments are separate calls in their order"
        assert [part.count for part in plan.groups[0].parts] == [1, 1, 1], (
            "without a table, all segments are separate calls"
        )

    def test_windows_apply_to_all_segments_of_a_group_or_none(self) -> None:
        """Kernels depend on which window bounds exist; `stages.peaks` is one of them."""
        lengths = [(128, 190), (120, 250), (100, 180), (110, 256)]
        groups = make_plan(lengths, window=(200, 0)).groups
        assert [(group.mode.window.left, len(group.segments)) for group in groups] == [(None, 2), (200, 2)]
        assert len(make_plan(lengths, window=(300, 0)).groups) == 1

    def test_groups_are_split_if_their_block_maps_are_too_large(self) -> None:
        segments = [Segment(0, 2**16 - index, 0, 2**16) for index in range(9)]
        assert [len(group) for group in group_segments(segments, heads=32)] == [8, 1]

    def test_consecutive_segments_of_equal_lengths_are_a_batch(self) -> None:
        assert make_plan([(200, 200)] * 3) == packs.Plan((Run(3, 0, 200, 0, 200),), ())
