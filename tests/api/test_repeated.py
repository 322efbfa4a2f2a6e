"""Calls that are repeated are looked up: they give what a first call gives, and raise what it raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import sparge
from sparge import Budget, TopK
from sparge.backends.base import Crossover
from sparge.backends.torch import TorchBackend
from sparge.call import forget_recordings
from sparge.dispatch import call_cache

LENGTH = 300
OPTIONS: dict[str, dict[str, Any]] = {
    "dense by itself": {},
    "dense, causal": {"is_causal": True},
    "dense, asked for": {"sparsity": sparge.Dense()},
    "dense, LSE": {"return_lse": True},
    "sparse": {"backend": "torch", "topk": 0.3},
    "sparse, causal, LSE": {"backend": "torch", "topk": 0.3, "is_causal": True, "return_lse": True},
    "sparse, ranges": {"backend": "torch", "topk": 0.3, "always_keep": [(0, 70)], "exact_queries": [(0, 70)]},
    "sparse, tokens first": {"backend": "torch", "topk": 0.3, "layout": "NHD"},
    "reference": {"backend": "reference", "sparsity": TopK(0.5, min_blocks=1)},
}
options = pytest.mark.parametrize("name", OPTIONS)


def qkv(seed: int, length: int = LENGTH, **changes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 32, generator=generator).to(**changes) for _ in range(3)]


def first(*inputs: Tensor, **given: Any) -> Any:
    """A call that nothing is remembered for."""
    call_cache.forget()
    forget_recordings()
    return sparge.attention(*inputs, **given)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@options
def test_the_same_bits_on_other_tensors(name: str) -> None:
    given = OPTIONS[name]
    turned = given.get("layout") == "NHD"
    inputs = [[x.transpose(1, 2).contiguous() if turned else x for x in qkv(seed)] for seed in range(3)]
    expected = [as_tuple(first(*tensors, **given)) for tensors in inputs]
    call_cache.forget()
    sparge.reset_stats()
    for _ in range(2):
        for tensors, wanted in zip(inputs, expected, strict=True):
            got = as_tuple(sparge.attention(*tensors, **given))
            assert [x.stride() for x in got] == [x.stride() for x in wanted]
            assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))
    assert len(call_cache._runners) == 1
    assert sparge.stats().calls == 6


def test_an_output_lies_as_its_query() -> None:
    query, key, value = qkv(0)
    turned = query.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(3):
        assert sparge.attention(turned, key, value).transpose(1, 2).is_contiguous()
        assert sparge.attention(query, key, value).is_contiguous()


@pytest.mark.parametrize(
    ("good", "bad", "error"),
    [
        ({"is_causal": True}, {"is_causal": 1}, TypeError),
        ({"return_lse": False}, {"return_lse": 0}, TypeError),
        ({"enable_gqa": True}, {"enable_gqa": 1}, TypeError),
        ({"topk": 1.0}, {"topk": True}, TypeError),
        ({"scale": 1.0}, {"scale": True}, TypeError),
        ({"dropout_p": 0.0}, {"dropout_p": False}, TypeError),
        ({"always_keep": [(0, 5)]}, {"always_keep": [(0, LENGTH + 1)]}, ValueError),
        ({"always_keep": [(0, 5)]}, {"always_keep": 5}, TypeError),
        ({}, {"backend": "fastest"}, ValueError),
        ({}, {"dropout_p": 0.5}, NotImplementedError),
    ],
    ids=str,
)
def test_bad_options_are_refused_after_good_ones(good: Any, bad: Any, error: type[Exception]) -> None:
    for _ in range(2):
        sparge.attention(*qkv(0), **good)
    for _ in range(2):
        with pytest.raises(error):
            sparge.attention(*qkv(0), **bad)


def test_bad_tensors_are_refused_after_good_ones() -> None:
    query, key, value = qkv(0)
    for _ in range(2):
        sparge.attention(query, key, value)
    for tensors in ((query, key.half(), value), (query, key[:, :1], value), (query, key.to("meta"), value), (1, 2, 3)):
        with pytest.raises((TypeError, ValueError)):
            sparge.attention(*tensors)  # type: ignore[arg-type]


def test_gradients_are_refused_after_calls_without() -> None:
    query, key, value = qkv(0)
    for _ in range(2):
        sparge.attention(query, key, value)
    query.requires_grad_()
    with pytest.raises(NotImplementedError, match="gradients"):
        sparge.attention(query, key, value)
    with torch.no_grad():
        sparge.attention(query, key, value)
    with pytest.raises(NotImplementedError, match="gradients"):
        torch.func.jvp(lambda x: sparge.attention(x, key, value), (key,), (key,))


def test_a_mask_is_read_each_time() -> None:
    tensors = qkv(0)
    for given in ({}, {"backend": "torch", "topk": 0.4}):
        for hidden in (1, 50, 200):
            mask = (torch.arange(LENGTH) < LENGTH - hidden)[None, None, None]
            expected = first(*tensors, attn_mask=mask, **given)
            sparge.attention(*tensors, attn_mask=~mask, **given)
            assert torch.equal(sparge.attention(*tensors, attn_mask=mask, **given), expected)
            assert torch.equal(sparge.attention(*tensors, attn_mask=mask[0, 0], **given), expected)


def test_numbers_of_heads_are_read_each_time() -> None:
    tensors = qkv(0)
    share = torch.tensor([0.2, 0.9])
    rule = TopK(share, min_blocks=1)
    before = sparge.attention(*tensors, sparsity=rule, backend="torch")
    share.fill_(1.0)
    after = sparge.attention(*tensors, sparsity=rule, backend="torch")
    assert not torch.equal(before, after)
    assert torch.equal(after, first(*tensors, sparsity=rule, backend="torch"))


def test_equal_rules_are_one_kind() -> None:
    for _ in range(3):
        sparge.attention(*qkv(0), sparsity=Budget(0.4), backend="torch")
    assert len(call_cache._runners) == 1


def test_autocast_casts_as_it_does_for_sdpa() -> None:
    tensors = qkv(0)
    for given in ({}, {"backend": "torch", "topk": 0.4}):
        cast = [tensor.bfloat16() for tensor in tensors]
        expected = sparge.attention(*cast, **given)
        with torch.autocast("cpu", torch.bfloat16):
            for mixed in (tensors, [cast[0], *tensors[1:]]):
                for _ in range(2):
                    got = sparge.attention(*mixed, **given)
                    assert got.dtype == torch.nn.functional.scaled_dot_product_attention(*mixed).dtype
                    assert torch.equal(got, expected)


def test_the_number_of_threads_decides_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossover(*_: object) -> Crossover:
        return Crossover(keys=10**6 if torch.get_num_threads() > 1 else 0, causal_keys=0, queries=0, scores=0)

    monkeypatch.setattr(TorchBackend, "crossover", crossover)
    tensors, before = qkv(0), torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            sparge.reset_stats()
            sparge.attention(*tensors)
            assert (sparge.stats().dense == 1) == (threads == 2)
    finally:
        torch.set_num_threads(before)


def test_replace_sdpa_does_not_intercept_the_dense_path() -> None:
    tensors = qkv(0)
    expected = sparge.attention(*tensors)
    sparge.reset_stats()
    with sparge.replace_sdpa(sparge.Policy(topk=0.5)):
        assert torch.equal(sparge.attention(*tensors), expected)
    assert sparge.stats().calls == 1


@pytest.mark.parametrize("given", [{}, {"backend": "torch", "topk": 0.4}], ids=["dense", "sparse"])
def test_tracing_sees_an_operator(given: dict[str, Any]) -> None:
    def call(*tensors: Tensor) -> Tensor:
        return sparge.attention(*tensors, **given)

    inputs, others = qkv(0), qkv(1)
    expected = call(*others)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
    with mode:
        assert call(*fakes).shape == expected.shape
    graph = torch.fx.experimental.proxy_tensor.make_fx(call)(*inputs)
    assert any("sparge" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(*others), expected)


def test_the_number_of_kinds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_KINDS", 3)
    for length in (10, 20, 30, 40, 50):
        tensors = qkv(0, length=length)
        assert torch.equal(sparge.attention(*tensors), sparge.attention(*tensors))
        assert len(call_cache._runners) <= 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_dense_call_is_sdpa(monkeypatch: pytest.MonkeyPatch, is_causal: bool) -> None:
    """Nothing but torch's kernel runs when a short call is call_cache."""
    tensors, calls = qkv(0), []
    sparge.attention(*tensors, is_causal=is_causal)
    original: Callable[..., Tensor] = F.scaled_dot_product_attention
    (runner,) = call_cache._runners.values()
    monkeypatch.setattr(runner, "_sdpa", lambda *args: calls.append(1) or original(*args, is_causal=is_causal))
    got = sparge.attention(*tensors, is_causal=is_causal)
    assert calls == [1]
    torch.testing.assert_close(got, original(*tensors, is_causal=is_causal), rtol=1e-5, atol=1e-5)


def test_given_blocks_are_read_each_time() -> None:
    tensors, others = qkv(0), qkv(1)
    masks = [sparge.predict(*pair[:2], topk=share) for pair in (tensors, others) for share in (0.2, 0.7)]
    for given in ({}, {"return_lse": True, "skipped": "mean"}, {"layout": "HND", "pv_threshold": -8.0}):
        expected = []
        for mask in masks:
            call_cache.forget()
            expected.append(as_tuple(sparge.block_sparse_attention(*tensors, mask, backend="torch", **given)))
        for _ in range(2):
            for mask, wanted in zip(masks, expected, strict=True):
                got = as_tuple(sparge.block_sparse_attention(*tensors, mask, backend="torch", **given))
                assert all(map(torch.equal, got, wanted))


def test_given_blocks_are_checked_each_time() -> None:
    tensors = qkv(0)
    mask = sparge.predict(*tensors[:2], topk=0.5)
    causal = sparge.predict(*tensors[:2], topk=0.5, is_causal=True)
    for _ in range(2):
        sparge.block_sparse_attention(*tensors, mask, is_causal=False)
    with pytest.raises(ValueError, match="is_causal"):
        sparge.block_sparse_attention(*tensors, causal, is_causal=False)
    with pytest.raises(TypeError, match="is_causal"):
        sparge.block_sparse_attention(*tensors, mask, is_causal=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask"):
        sparge.block_sparse_attention(*[tensor[:, :, :200] for tensor in tensors], mask, is_causal=False)


def test_predictions_are_those_of_their_tensors() -> None:
    inputs = [qkv(seed) for seed in range(3)]
    hidden = (torch.arange(LENGTH) < 100)[None, None, None]
    for given in ({}, {"is_causal": True}, {"attn_mask": hidden}, {"attn_mask": ~hidden}):
        expected = []
        for query, key, _ in inputs:
            call_cache.forget()
            expected.append(sparge.predict(query, key, topk=0.4, **given))
        for _ in range(2):
            for (query, key, _), wanted in zip(inputs, expected, strict=True):
                got = sparge.predict(query, key, topk=0.4, **given)
                assert torch.equal(got.kv_indices, wanted.kv_indices)
                assert torch.equal(got.kv_num_blocks, wanted.kv_num_blocks)
                assert (got.window, got.is_causal) == (wanted.window, wanted.is_causal)
    with pytest.raises(TypeError, match="is_causal"):
        sparge.predict(*inputs[0][:2], topk=0.4, is_causal=1)  # type: ignore[arg-type]


def test_packs_go_by_their_bounds() -> None:
    packs = [[tensor[0].transpose(0, 1).contiguous() for tensor in qkv(seed)] for seed in range(2)]
    bounds = ([0, 100, LENGTH], (0, 200, LENGTH), torch.tensor([0, 50, 170, LENGTH]))
    for given in ({}, {"causal": True, "return_lse": True}):
        expected = []
        for pack in packs:
            for each in bounds:
                call_cache.forget()
                expected.append(
                    as_tuple(sparge.varlen_attention(*pack, each, each, topk=0.4, backend="torch", **given))
                )
        for _ in range(2):
            calls = [(pack, each) for pack in packs for each in bounds]
            for (pack, each), wanted in zip(calls, expected, strict=True):
                got = as_tuple(sparge.varlen_attention(*pack, each, each, topk=0.4, backend="torch", **given))
                assert all(map(torch.equal, got, wanted))
    bad = ([0, 100, LENGTH + 1], [0, 200, 100, LENGTH], [0, 100.0, LENGTH], [False, 100, LENGTH])
    for each in bad:
        with pytest.raises((TypeError, ValueError)):
            sparge.varlen_attention(*packs[0], each, each, topk=0.4, backend="torch")
