"""Repeated calls use the call cache: they return the same results and raise the same errors as a first call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import sparge
from sparge import Budget, TopK
from sparge.backends.base import Crossover
from sparge.backends.torch import TorchBackend
from sparge.call import forget_recordings
from sparge.dispatch import call_cache

LENGTH = 300
OPTIONS: dict[str, dict[str, Any]] = {
    "dense, below the crossover": {},
    "dense, causal": {"is_causal": True},
    "dense, requested": {"sparsity": sparge.Dense()},
    "dense, LSE": {"return_lse": True},
    "sparse": {"backend": "torch", "topk": 0.3},
    "sparse, causal, LSE": {"backend": "torch", "topk": 0.3, "is_causal": True, "return_lse": True},
    "sparse, ranges": {"backend": "torch", "topk": 0.3, "always_keep": [(0, 70)], "exact_queries": [(0, 70)]},
    "sparse, tokens first": {"backend": "torch", "topk": 0.3, "layout": "NHD"},
    "reference": {"backend": "reference", "sparsity": TopK(0.5, min_blocks=1)},
}
all_options = pytest.mark.parametrize("name", OPTIONS)


def qkv(seed: int, length: int = LENGTH, **changes: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 32, generator=generator).to(**changes) for _ in range(3)]


def run_uncached(*inputs: Tensor, **options: Any) -> Any:
    """Clear the call cache and run a call."""
    call_cache.forget()
    forget_recordings()
    return sparge.attention(*inputs, **options)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@all_options
def test_cached_calls_are_bitwise_equal_to_first_calls(name: str) -> None:
    options = OPTIONS[name]
    is_nhd = options.get("layout") == "NHD"
    inputs = [[x.transpose(1, 2).contiguous() if is_nhd else x for x in qkv(seed)] for seed in range(3)]
    expected = [as_tuple(run_uncached(*tensors, **options)) for tensors in inputs]
    call_cache.forget()
    sparge.reset_stats()
    for _ in range(2):
        for tensors, reference in zip(inputs, expected, strict=True):
            got = as_tuple(sparge.attention(*tensors, **options))
            assert [x.stride() for x in got] == [x.stride() for x in reference]
            assert all(torch.equal(*pair) for pair in zip(got, reference, strict=True))
    assert len(call_cache.runners()) == 1
    assert sparge.stats().calls == 6


def test_output_has_the_memory_layout_of_the_query() -> None:
    query, key, value = qkv(0)
    is_nhd = query.transpose(1, 2).contiguous().transpose(1, 2)
    for _ in range(3):
        assert sparge.attention(is_nhd, key, value).transpose(1, 2).is_contiguous()
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
def test_invalid_options_raise_after_valid_options(good: Any, bad: Any, error: type[Exception]) -> None:
    for _ in range(2):
        sparge.attention(*qkv(0), **good)
    for _ in range(2):
        with pytest.raises(error):
            sparge.attention(*qkv(0), **bad)


def test_invalid_tensors_raise_after_valid_tensors() -> None:
    query, key, value = qkv(0)
    for _ in range(2):
        sparge.attention(query, key, value)
    for tensors in ((query, key.half(), value), (query, key[:, :1], value), (query, key.to("meta"), value), (1, 2, 3)):
        with pytest.raises((TypeError, ValueError)):
            sparge.attention(*tensors)  # type: ignore[arg-type]


def test_gradients_raise_after_calls_without_gradients() -> None:
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


def test_masks_are_read_at_every_call() -> None:
    tensors = qkv(0)
    for options in ({}, {"backend": "torch", "topk": 0.4}):
        for hidden in (1, 50, 200):
            mask = (torch.arange(LENGTH) < LENGTH - hidden)[None, None, None]
            expected = run_uncached(*tensors, attn_mask=mask, **options)
            sparge.attention(*tensors, attn_mask=~mask, **options)
            assert torch.equal(sparge.attention(*tensors, attn_mask=mask, **options), expected)
            assert torch.equal(sparge.attention(*tensors, attn_mask=mask[0, 0], **options), expected)


def test_per_head_tensors_are_read_at_every_call() -> None:
    tensors = qkv(0)
    share = torch.tensor([0.2, 0.9])
    rule = TopK(share, min_blocks=1)
    before = sparge.attention(*tensors, sparsity=rule, backend="torch")
    share.fill_(1.0)
    after = sparge.attention(*tensors, sparsity=rule, backend="torch")
    assert not torch.equal(before, after)
    assert torch.equal(after, run_uncached(*tensors, sparsity=rule, backend="torch"))


def test_equal_rules_share_a_cache_entry() -> None:
    for _ in range(3):
        sparge.attention(*qkv(0), sparsity=Budget(0.4), backend="torch")
    assert len(call_cache.runners()) == 1


def test_autocast_casts_inputs_as_for_sdpa() -> None:
    tensors = qkv(0)
    for options in ({}, {"backend": "torch", "topk": 0.4}):
        cast = [tensor.bfloat16() for tensor in tensors]
        expected = sparge.attention(*cast, **options)
        with torch.autocast("cpu", torch.bfloat16):
            for mixed in (tensors, [cast[0], *tensors[1:]]):
                for _ in range(2):
                    got = sparge.attention(*mixed, **options)
                    assert got.dtype == torch.nn.functional.scaled_dot_product_attention(*mixed).dtype
                    assert torch.equal(got, expected)


def test_crossover_follows_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
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


class _CallInForward(torch.autograd.Function):
    """Runs a call in its forward, with gradients and forward-mode AD disabled."""

    @staticmethod
    def forward(_: Any, x: Tensor, call: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        return x + call()


class _DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _QuietMode(_DispatchMode):
    """A mode that torch.compile ignores, and whose dispatch keys TensorGuards ignore."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def within(context: Callable[[], AbstractContextManager[object]]) -> Callable[[Callable[[], Tensor]], Tensor]:
    def run(call: Callable[[], Tensor]) -> Tensor:
        with context():
            return call()

    return run


INTERCEPTED: dict[str, Callable[[Callable[[], Tensor]], Tensor]] = {
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "dispatch mode": within(_DispatchMode),
    "dispatch mode that torch.compile ignores": within(_QuietMode),
    "fake tensors": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "function mode": within(lambda: torch.device("cpu")),
    "forward-mode AD": within(forward_ad.dual_level),
    "vmap": lambda call: torch.vmap(lambda x: x + call())(torch.zeros(1))[0],
    "torch.func.grad": lambda call: torch.func.grad(lambda x: (x * call()).sum())(torch.ones(())),
    "autograd.Function": lambda call: _CallInForward.apply(torch.zeros(1, requires_grad=True), call),
    "jit.trace": lambda call: torch.jit.trace(lambda x: x + call(), torch.zeros(1), check_trace=False)(torch.zeros(1)),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", INTERCEPTED)
def test_intercepted_calls_do_not_run_cached_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = qkv(0)
    for _ in range(2):
        expected = sparge.attention(*tensors)
    cached, calls = call_cache.DenseCalls.__call__, []
    monkeypatch.setattr(call_cache.DenseCalls, "__call__", lambda *args: calls.append(name) or cached(*args))
    got = INTERCEPTED[name](lambda: sparge.attention(*tensors))
    assert not calls
    assert len(call_cache.runners()) == 1
    if name == "fake tensors":
        assert type(got) is FakeTensor and got.shape == expected.shape
    else:
        expected = expected.sum() if name == "torch.func.grad" else expected
        tolerance = {"rtol": 0.05, "atol": 0.01} if name == "autocast" else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(got.float(), expected, **tolerance)
    sparge.attention(*tensors)
    assert calls == [name]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_raise_after_valid_tensors() -> None:
    tensors = qkv(0)
    for _ in range(2):
        sparge.attention(*tensors)
    nested = torch.nested.nested_tensor([tensors[0][0]])
    for index in range(3):
        inputs = [*tensors[:index], nested, *tensors[index + 1 :]]
        with pytest.raises((TypeError, NotImplementedError)):
            sparge.attention(*inputs)


def test_the_metadata_of_tensors_determine_the_kind() -> None:
    tensors = qkv(0)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    for _ in range(2):
        for inputs in (tensors, strided, [x.bfloat16() for x in tensors], [tensors[0]] * 3):
            assert sparge.attention(*inputs).stride() == inputs[0].stride()
        assert len(call_cache.runners()) == 3  # one tensor three times has the metadata of three contiguous tensors
    query = tensors[0].clone()
    for metadata in (tensors[0], strided[0]):
        query.set_(metadata)  # type: ignore[call-overload]  # changes strides in place
        assert sparge.attention(query, *tensors[1:]).stride() == metadata.stride()
    assert len(call_cache.runners()) == 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_equal_calls_without_gradients_are_one_kind(mode: Callable[[], AbstractContextManager[object]]) -> None:
    query, key, value = qkv(0)
    query.requires_grad_()
    with mode():
        for _ in range(4):
            sparge.attention(query, key, value)
    assert len(call_cache.runners()) == 1
    with pytest.raises(NotImplementedError, match="gradients"):
        sparge.attention(query, key, value)


def test_replace_sdpa_does_not_intercept_the_dense_path() -> None:
    tensors = qkv(0)
    expected = sparge.attention(*tensors)
    sparge.reset_stats()
    with sparge.replace_sdpa(sparge.Policy(topk=0.5)):
        assert torch.equal(sparge.attention(*tensors), expected)
    assert sparge.stats().calls == 1


@pytest.mark.parametrize("options", [{}, {"backend": "torch", "topk": 0.4}], ids=["dense", "sparse"])
def test_tracing_records_an_operator(options: dict[str, Any]) -> None:
    def call(*tensors: Tensor) -> Tensor:
        return sparge.attention(*tensors, **options)

    inputs, others = qkv(0), qkv(1)
    expected = call(*others)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in inputs]
    with mode:
        assert call(*fakes).shape == expected.shape
    graph = torch.fx.experimental.proxy_tensor.make_fx(call)(*inputs)
    assert any("sparge" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(*others), expected)


def test_cache_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_cache, "MAX_KINDS", 3)
    for length in (10, 20, 30, 40, 50):
        tensors = qkv(0, length=length)
        assert torch.equal(sparge.attention(*tensors), sparge.attention(*tensors))
        assert len(call_cache.runners()) <= 3


@pytest.mark.parametrize("is_causal", [False, True])
def test_cached_dense_calls_run_only_sdpa(monkeypatch: pytest.MonkeyPatch, is_causal: bool) -> None:
    tensors, calls = qkv(0), []
    sparge.attention(*tensors, is_causal=is_causal)
    original: Callable[..., Tensor] = F.scaled_dot_product_attention
    (runner,) = call_cache.runners()
    monkeypatch.setattr(runner, "_sdpa", lambda *args: calls.append(1) or original(*args, is_causal=is_causal))
    got = sparge.attention(*tensors, is_causal=is_causal)
    assert calls == [1]
    torch.testing.assert_close(got, original(*tensors, is_causal=is_causal), rtol=1e-5, atol=1e-5)


def test_block_masks_are_read_at_every_call() -> None:
    tensors, others = qkv(0), qkv(1)
    masks = [sparge.predict(*pair[:2], topk=share) for pair in (tensors, others) for share in (0.2, 0.7)]
    for options in ({}, {"return_lse": True, "skipped": "mean"}, {"layout": "HND", "pv_threshold": -8.0}):
        expected = []
        for mask in masks:
            call_cache.forget()
            expected.append(as_tuple(sparge.block_sparse_attention(*tensors, mask, backend="torch", **options)))
        for _ in range(2):
            for mask, reference in zip(masks, expected, strict=True):
                got = as_tuple(sparge.block_sparse_attention(*tensors, mask, backend="torch", **options))
                assert all(map(torch.equal, got, reference))


def test_block_masks_are_checked_at_every_call() -> None:
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


def test_cached_predictions_use_the_tensors_of_the_call() -> None:
    inputs = [qkv(seed) for seed in range(3)]
    hidden = (torch.arange(LENGTH) < 100)[None, None, None]
    for options in ({}, {"is_causal": True}, {"attn_mask": hidden}, {"attn_mask": ~hidden}):
        expected = []
        for query, key, _ in inputs:
            call_cache.forget()
            expected.append(sparge.predict(query, key, topk=0.4, **options))
        for _ in range(2):
            for (query, key, _), reference in zip(inputs, expected, strict=True):
                got = sparge.predict(query, key, topk=0.4, **options)
                assert torch.equal(got.kv_indices, reference.kv_indices)
                assert torch.equal(got.kv_num_blocks, reference.kv_num_blocks)
                assert (got.window, got.is_causal) == (reference.window, reference.is_causal)
    with pytest.raises(TypeError, match="is_causal"):
        sparge.predict(*inputs[0][:2], topk=0.4, is_causal=1)  # type: ignore[arg-type]


def test_varlen_calls_use_the_bounds_of_the_call() -> None:
    packs = [[tensor[0].transpose(0, 1).contiguous() for tensor in qkv(seed)] for seed in range(2)]
    bounds = ([0, 100, LENGTH], (0, 200, LENGTH), torch.tensor([0, 50, 170, LENGTH]))
    for options in ({}, {"causal": True, "return_lse": True}):
        expected = []
        for pack in packs:
            for each in bounds:
                call_cache.forget()
                expected.append(
                    as_tuple(sparge.varlen_attention(*pack, each, each, topk=0.4, backend="torch", **options))
                )
        for _ in range(2):
            calls = [(pack, each) for pack in packs for each in bounds]
            for (pack, each), reference in zip(calls, expected, strict=True):
                got = as_tuple(sparge.varlen_attention(*pack, each, each, topk=0.4, backend="torch", **options))
                assert all(map(torch.equal, got, reference))
    bad = ([0, 100, LENGTH + 1], [0, 200, 100, LENGTH], [0, 100.0, LENGTH], [False, 100, LENGTH])
    for each in bad:
        with pytest.raises((TypeError, ValueError)):
            sparge.varlen_attention(*packs[0], each, each, topk=0.4, backend="torch")
