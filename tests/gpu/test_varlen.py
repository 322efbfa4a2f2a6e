"""Packed sequences on a device: each segment is bitwise equal to its own call; bounds on device and host."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from gpu.conftest import BACKEND, DEVICE, FASTEST, cuda_only, equal, forget_recordings, make_inputs

pytestmark = pytest.mark.gpu
LENGTHS = [(300, 300)] * 3 + [(129, 1000), (385, 320), (1000, 129), (0, 70), (70, 0), (1, 64), (200, 901), (260, 290)]
"""Five segments of similar lengths, two other groups, and single segments."""


def make_packed() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    bounds_q, bounds_k = (torch.tensor([0, *side]).cumsum(0).int() for side in zip(*LENGTHS, strict=True))
    inputs = make_inputs(int(bounds_q[-1]), int(bounds_k[-1]), heads=4, kv_heads=2)
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in inputs)
    return query, key, value, bounds_q, bounds_k


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "quantization, options",
    [
        ("none", {"topk": 0.4}),
        (FASTEST, {"topk": 0.4}),
        ("int8_fp16", {"sparsity": sparge.TopCdf(0.7)}),
        (FASTEST, {"sparsity": sparge.Dense()}),
    ],
    ids=["none", "fastest", "int8_fp16", "dense"],
)
def test_segments_equal_a_loop(quantization: str, options: dict[str, Any], causal: bool) -> None:
    *tensors, bounds_q, bounds_k = make_packed()
    options = {**options, "backend": BACKEND, "quantization": quantization, "return_lse": True}
    on_device = (bounds_q.to(DEVICE), bounds_k.to(DEVICE))
    sparge.reset_stats()
    output, lse = sparge.varlen_attention(*tensors, *on_device, causal=causal, **options)
    assert sparge.stats().calls == 5, "2 groups, 2 single segments, 1 call without visible keys"
    again = sparge.varlen_attention(*tensors, bounds_q.tolist(), bounds_k, causal=causal, **options)
    assert torch.equal(output, again[0]) and torch.equal(lse, again[1])
    options |= {"is_causal": causal, "enable_gqa": True, "layout": "NHD"}
    for q_start, q_stop, k_start, k_stop in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        segment_result = output[q_start:q_stop], lse[:, q_start:q_stop]
        if k_start == k_stop:
            assert not segment_result[0].any() and bool((segment_result[1] == -math.inf).all())
        elif q_start < q_stop:
            keys = slice(k_start, k_stop)
            segment = (tensors[0][None, q_start:q_stop], tensors[1][None, keys], tensors[2][None, keys])
            expected = sparge.attention(*segment, **options)
            assert torch.equal(segment_result[0], expected[0][0]) and torch.equal(segment_result[1], expected[1][0])


@cuda_only
def test_graph_capture_needs_bounds_on_the_host() -> None:
    *tensors, bounds_q, bounds_k = make_packed()
    options: dict[str, Any] = {"topk": 0.4, "backend": BACKEND}
    on_device = (bounds_q.to(DEVICE), bounds_k.to(DEVICE))
    expected = sparge.varlen_attention(*tensors, bounds_q.tolist(), bounds_k.tolist(), **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(NotImplementedError, match="cu_seqlens_q: expected bounds on the host"):
            sparge.varlen_attention(*tensors, *on_device, **options)
        captured = sparge.varlen_attention(*tensors, bounds_q.tolist(), bounds_k.tolist(), **options)
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)
    assert torch.equal(sparge.varlen_attention(*tensors, *on_device, **options), expected)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        sparge.varlen_attention(*tensors, *on_device, **options)  # the bounds were read before


@cuda_only
def test_bounds_on_the_host_do_not_synchronize() -> None:
    """The bounds are new but need no new kernel. Their table on the device is readable from any stream."""
    options: dict[str, Any] = {"topk": 0.4, "backend": BACKEND, "quantization": FASTEST}
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in make_inputs(900, 900, heads=4))
    sparge.varlen_attention(query, key, value, [0, 300, 570, 900], [0, 300, 570, 900], **options)  # compiles
    torch.cuda.synchronize()
    stream, bounds = torch.cuda.Stream(), [0, 310, 590, 900]
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = sparge.varlen_attention(query, key, value, bounds, bounds, **options)
        with torch.cuda.stream(stream):
            elsewhere = sparge.varlen_attention(query, key, value, bounds, bounds, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(elsewhere, expected)


@cuda_only
def test_captured_graphs_read_the_table_of_an_earlier_call() -> None:
    """All segments are one packed call, so the earlier call has loaded every kernel."""
    options: dict[str, Any] = {"topk": 0.4, "backend": BACKEND}
    query, key, value = (tensor[0].transpose(0, 1).contiguous() for tensor in make_inputs(570, 570, heads=4))
    bounds = [0, 300, 570]
    expected = sparge.varlen_attention(query, key, value, bounds, bounds, **options)
    graph = torch.cuda.CUDAGraph()
    sparge.reset_stats()
    with torch.cuda.graph(graph):
        captured = sparge.varlen_attention(query, key, value, bounds, bounds, **options)
    assert sparge.stats().calls == 1, "one packed call"
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize(
    "quantization, options",
    [
        ("none", {"topk": 0.4}),
        (FASTEST, {"topk": 0.4}),
        ("int8_fp16", {"sparsity": sparge.TopCdf(0.7), "causal": True}),
        (FASTEST, {"sparsity": sparge.Dense()}),
    ],
)
def test_calls_with_equal_bounds_are_replayed(quantization: str, options: dict[str, Any]) -> None:
    query, key, value, bounds_q, bounds_k = make_packed()
    options = {**options, "backend": BACKEND, "quantization": quantization, "return_lse": True}
    others = [(query * factor, key.flip(0), value * factor) for factor in (1.0, -0.5, 2.0)]
    bounds = (bounds_q.tolist(), bounds_k.tolist())
    shifted = ([*bounds[0][:1], bounds[0][1] - 30, *bounds[0][2:]], bounds[1])
    expected = []
    for tensors in others:
        for each in (bounds, shifted):
            forget_recordings()
            expected.append(sparge.varlen_attention(*tensors, *each, **options))
    forget_recordings()
    for _ in range(3):
        calls = [(*tensors, *each) for tensors in others for each in (bounds, shifted)]
        for arguments, fresh_result in zip(calls, expected, strict=True):
            assert equal(sparge.varlen_attention(*arguments, **options), fresh_result)
