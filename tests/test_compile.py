"""The operators under torch.compile and torch.library.opcheck."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

import sparge
from sparge.call import Call
from sparge.dispatch import ops
from sparge.masks.geometry import Shape


def qkv(length: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randn(1, 2, length, 16, generator=generator) for _ in range(3))


@pytest.mark.parametrize(
    "options",
    [
        {"topk": 0.3, "is_causal": True},
        {"sparsity": sparge.TopCdf(0.9, pv_threshold=-8.0)},
        {"sparsity": sparge.TopK(torch.tensor([0.3, 0.6]), similarity_threshold=0.01), "score": "mean"},
        {"sparsity": sparge.Dense(), "quantization": "int8_fp8"},
        {"topk": 0.2, "skipped": "mean", "score": sparge.Spread(4), "quantization": "int8_fp8"},
    ],
)
def test_full_graph_with_dynamic_lengths_equals_eager(options):
    counter = CompileCounter()

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *inputs: sparge.attention(*inputs, return_lse=True, **options),
        backend=counter,
        fullgraph=True,
        dynamic=True,
    )
    for length in (4100, 4160, 4224) if options.get("is_causal") else (2100, 2560, 2688):  # beyond the crossover
        inputs = qkv(length)
        for got, expected in zip(compiled(*inputs), sparge.attention(*inputs, return_lse=True, **options), strict=True):
            assert torch.equal(got, expected)
    assert counter.frame_count == 1, "a new length must not compile again"
    is_dense = isinstance(options.get("sparsity"), sparge.Dense)
    assert sparge.stats().sparse == (0 if is_dense else 6), "expected all calls to be sparse, compiled and eager"


@pytest.mark.parametrize(
    ("call", "compilations"),
    [
        (lambda *inputs: sparge.attention(*inputs, topk=torch.tensor([0.3, 0.6])), 1),
        (lambda *inputs: sparge.attention(*inputs, always_keep=[(0, inputs[0].shape[2] // 2)], topk=0.3), 1),
        (lambda *inputs: sparge.attention(*inputs, exact_queries=[(0, inputs[0].shape[2] // 2)], topk=0.3), 1),
        (lambda *inputs: sparge.attention(*inputs, window=(inputs[0].shape[2] // 2, 2000), topk=0.3), 1),
        (lambda *inputs: sparge.attention(*inputs, dropout_p=1.0, on_unsupported="warn"), 1),
        (lambda *inputs: sparge.attention(*inputs, scale=inputs[0].shape[2] ** -0.5), 3),  # torch keeps floats fixed
    ],
    ids=["per head", "always keep", "exact queries", "window", "unsupported", "scale"],
)
def test_arguments_that_depend_on_tensors_or_sizes_compile(call, compilations):
    torch._dynamo.reset()
    counter = CompileCounter()

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (2100, 2560, 2688):
            assert torch.equal(compiled(*qkv(length)), call(*qkv(length)))
    assert counter.frame_count == compilations


def test_predict_and_block_sparse_attention_compile():
    torch._dynamo.reset()
    inputs = qkv(700)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return sparge.block_sparse_attention(query, key, value, sparge.predict(query, key, topk=0.3))

    assert torch.equal(torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), run(*inputs))


def test_compiled_calls_are_counted():
    torch._dynamo.reset()
    sparge.reset_stats()
    compiled = torch.compile(lambda *inputs: sparge.attention(*inputs, topk=0.5), backend="eager", fullgraph=True)
    inputs = qkv(2560)
    for _ in range(3):
        compiled(*inputs)
    assert sparge.stats().reasons == {"sparse: torch": 3}
    assert sparge.stats().density == 0.5


@pytest.mark.parametrize("tokens_first", [False, True])
def test_operators_pass_opcheck(tokens_first):
    query, key, value = qkv(300)
    if tokens_first:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    rule = sparge.TopK(torch.tensor([0.3, 0.6]), similarity_threshold=0.1)
    shape = Shape(1, 2, 2, 300, 300, 16, 16)
    call = Call(shape, True, 0.2, rule, sparge.Moment(4), ((0, 5),), "int8_fp8", -8.0)
    mask = sparge.predict(query, key, topk=0.5, is_causal=True)
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)
    packed = ops.pack(call, "torch")
    cases = {
        torch.ops.sparge.predict.default: (query, key, *packed),
        torch.ops.sparge.attend.default: (query, key, value, *lists, *ops.pack(call, "torch")),
        torch.ops.sparge.dense.default: (query, key, value, *ops.pack(call, "torch"), True, "a check"),
        torch.ops.sparge.attention.default: (query, key, value, *packed),
        torch.ops.sparge.along.default: ([query, query + 1], [5, 6, 10], "hilbert", 0, False),
    }
    for operator, arguments in cases.items():
        assert set(opcheck(operator, arguments).values()) == {"SUCCESS"}
    results = opcheck(torch.ops.sparge.attention.default, (query, key, value, *packed), {"or_dense": True})
    assert set(results.values()) == {"SUCCESS"}


def test_pack_and_unpack_of_a_call_round_trip():
    shape = Shape(1, 2, 1, 300, 400, 16, 24)
    for call in (
        Call(shape, True, 0.5, sparge.TopK(0.3, min_blocks=2, sink=False, diagonal=True), sparge.Moment(4), ((0, 5),)),
        Call(shape, False, 0.5, sparge.TopCdf(0.9, similarity_threshold=0.2, sink=True, diagonal=False), sparge.Mean()),
        Call(shape, False, 1.0, quantization="int8_fp16", pv_threshold=-3.0),
        Call(shape, False, 0.5, sparge.TopK(0.3, sink=False, diagonal=False), sparge.Spread(4), skipped="mean"),
    ):
        assert ops.unpack(shape, ops.pack(call, "triton")) == (call, "triton")
