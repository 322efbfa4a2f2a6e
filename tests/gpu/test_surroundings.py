"""torch.compile, CUDA graphs, streams, synchronization, recompilation, statistics."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.library import opcheck

import sparge
from conftest import tokens_first
from gpu.conftest import BACKEND, DEVICE, FASTEST, ON_CUDA, cuda_only, equal, forget_recordings, make_inputs, modes
from sparge import Dense, TopCdf, TopK
from sparge.call import Call
from sparge.dispatch import ops
from sparge.integrations.calls import attend as attend_layer
from sparge.integrations.layers import Layer
from sparge.integrations.model_call import ModelCall
from sparge.masks.geometry import Shape
from sparge.masks.ordering import order_of

pytestmark = pytest.mark.gpu

CALLS: dict[str, dict[str, Any]] = {
    "causal": {"topk": 0.3, "is_causal": True, "quantization": "none"},
    "quantized": {"topk": 0.3, "quantization": "auto"},
    "quantized, threshold": {"sparsity": TopCdf(0.9, min_blocks=1, pv_threshold=-8.0), "quantization": "int8_fp16"},
    "similarity": {"sparsity": TopK(0.3, similarity_threshold=0.01), "score": "mean", "quantization": "none"},
    "dense": {"sparsity": Dense(), "quantization": "auto", "is_causal": True},
}
calls = pytest.mark.parametrize("name", CALLS)


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return sparge.attention(query, key, value, enable_gqa=True, return_lse=True, backend=BACKEND, **options)


def qkv(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return make_inputs(length, heads=4, kv_heads=2, seed=seed)


def key_padding(length: int) -> Tensor:
    """Return a key mask (1, 1, 1, length) that hides the last 50 keys."""
    return (torch.arange(length, device=DEVICE) < length - 50)[None, None, None]


def mask_of(kind: str, length: int) -> Tensor | None:
    seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=DEVICE).triu(-300)
    return {
        "no mask": None,
        "padding": key_padding(length),
        "elements": seen,
        "bias": torch.zeros(1, 4, length, length, device=DEVICE).masked_fill(~seen, -torch.inf),
    }[kind]


masks = pytest.mark.parametrize("kind", ["no mask", "padding", "elements", "bias"])


class TestCompile:
    @calls
    def test_one_full_graph_serves_all_lengths(self, name: str) -> None:
        counter = CompileCounter()

        torch._dynamo.reset()
        compiled = torch.compile(
            lambda *inputs: attend(*inputs, **CALLS[name]), backend=counter, fullgraph=True, dynamic=True
        )
        for length in (700, 1024, 1337, 2100):
            assert equal(compiled(*qkv(length)), attend(*qkv(length), **CALLS[name]))
        assert counter.frame_count == 1, "a new length must not recompile"

    def test_compiled_functions_equal_eager(self) -> None:
        torch._dynamo.reset()

        def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mask = sparge.predict(query, key, topk=0.3, enable_gqa=True, backend=BACKEND)
            return 2 * sparge.block_sparse_attention(query, key, value, mask, enable_gqa=True, backend=BACKEND)

        compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="inductor" if ON_CUDA else "aot_eager")
        for length in (700, 1024):
            assert torch.equal(compiled(*qkv(length)), block(*qkv(length)))

    def test_operators_pass_opcheck(self) -> None:
        query, key, value = make_inputs(300, heads=2)
        mask = sparge.predict(query, key, topk=0.5, is_causal=True, backend=BACKEND)
        lists = (mask.kv_num_blocks, mask.kv_indices, mask.visible_num_blocks)
        rule = TopK(torch.tensor([0.3, 0.6], device=DEVICE), similarity_threshold=0.1)
        shape = Shape(*query.shape[:2], key.shape[1], 300, 300, query.shape[3], value.shape[3])
        call = Call(shape, True, 0.2, rule, sparge.Moment(4), ((0, 5),))
        padded = ops.pack(
            replace(call, quantization="int8_fp8", pv_threshold=-8.0, attn_mask=key_padding(300)), BACKEND
        )
        given = ops.pack(replace(call, quantization=FASTEST, pv_threshold=-8.0), BACKEND)
        cases = {
            torch.ops.sparge.predict.default: (query, key, *padded),
            torch.ops.sparge.attend.default: (query, key, value, *lists, *given),
            torch.ops.sparge.dense.default: (query, key, value, *ops.pack(call, BACKEND), True, "a check"),
            torch.ops.sparge.attention.default: (query, key, value, *padded),
        }
        for operator, arguments in cases.items():
            assert set(opcheck(operator, arguments).values()) == {"SUCCESS"}


@cuda_only
class TestStreams:
    @calls
    @masks
    def test_captured_graphs_use_new_inputs(self, name: str, kind: str) -> None:
        static = qkv(1000)
        mask = mask_of(kind, 1000)
        call = functools.partial(attend, attn_mask=mask, **CALLS[name])
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            call(*static)
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(*static)
        for seed in (1, 2, 3):
            other = qkv(1000, seed)
            for tensor, new in zip(static, other, strict=True):
                tensor.copy_(new)
            graph.replay()
            assert equal(captured, call(*other))

    @calls
    def test_calls_run_on_the_current_stream(self, name: str) -> None:
        """A call waits for earlier work on the current stream, here inputs that arrive late."""
        expected = attend(*qkv(1000), **CALLS[name])
        late = [torch.zeros_like(tensor) for tensor in qkv(1000)]
        source = qkv(1000)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # about 10 ms
            for tensor, number in zip(late, source, strict=True):
                tensor.copy_(number)
            got = attend(*late, **CALLS[name])
        torch.cuda.current_stream().wait_stream(side)
        assert equal(got, expected)

    def test_current_device_does_not_change(self) -> None:
        last = torch.cuda.device_count() - 1
        tensors = [tensor.to(f"cuda:{last}") for tensor in qkv(700)]
        before = torch.cuda.current_device()
        got = attend(*tensors, topk=0.3, quantization=FASTEST)
        assert torch.cuda.current_device() == before
        expected = attend(*qkv(700), topk=0.3, quantization=FASTEST)
        assert equal([tensor.to(DEVICE) for tensor in got], expected)

    @pytest.fixture
    def no_synchronization(self) -> Iterator[Callable[[Callable[[], Any]], Any]]:
        """Return a function that runs a call twice and raises if the second run synchronizes."""

        def run(call: Callable[[], Any]) -> Any:
            call()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return call()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        yield run
        torch.cuda.set_sync_debug_mode("default")

    @calls
    @masks
    def test_attention_does_not_synchronize(self, name: str, kind: str, no_synchronization: Callable[..., Any]) -> None:
        tensors, mask = qkv(1000), mask_of(kind, 1000)
        no_synchronization(lambda: attend(*tensors, attn_mask=mask, **CALLS[name]))

    def test_predict_and_block_sparse_attention_do_not_synchronize(
        self, no_synchronization: Callable[..., Any]
    ) -> None:
        query, key, value = qkv(1000)
        options = {"enable_gqa": True, "backend": BACKEND}
        per_head = TopK(torch.tensor([0.1, 0.2, 0.4, 0.8], device=DEVICE), pv_threshold=-8.0)
        for sparsity in (TopK(0.3), TopCdf(0.8), per_head):
            mask = no_synchronization(
                lambda sparsity=sparsity: sparge.predict(
                    query, key, sparsity=sparsity, always_keep=[(0, 70)], is_causal=True, **options
                )
            )
            for quantization in ("none", FASTEST):
                no_synchronization(
                    lambda mask=mask, quantization=quantization: sparge.block_sparse_attention(
                        query, key, value, mask, quantization=quantization, pv_threshold=-8.0, **options
                    )
                )
        blocks = mask.to_dense()
        no_synchronization(lambda: sparge.block_sparse_attention(query, key, value, blocks, **options))

    @pytest.mark.parametrize("layout", ["NHD", "packed"])
    @pytest.mark.parametrize("quantization", ["none", FASTEST])
    def test_views_are_not_copied(self, quantization: str, layout: str) -> None:
        """A call with views needs no more memory than a call with contiguous tensors; one copy would be 8 MiB."""
        plain = make_inputs(4096, heads=8, head_dim=128)
        packed = torch.stack([tensor.transpose(1, 2) for tensor in plain], 2)  # [B, S, 3, H, D]
        views = packed.unbind(2)
        if layout == "NHD":
            views = [view.contiguous() for view in views]
        options = {"topk": 0.3, "quantization": quantization}
        peaks = []
        for tensors, order in ((plain, "HND"), (views, "NHD")):
            attend(*tensors, layout=order, **options)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            attend(*tensors, layout=order, **options)
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert peaks[1] < peaks[0] + 4 * 2**20


@calls
def test_output_has_the_memory_layout_of_the_query(name: str) -> None:
    """The second call is a replay if the backend supports replays."""
    query, key, value = qkv(700)
    transposed = tokens_first(query)
    plain, plain_lse = attend(query, key, value, **CALLS[name])
    for _ in range(2):
        output, lse = attend(transposed, key, value, **CALLS[name])
        assert output.transpose(1, 2).is_contiguous() and plain.is_contiguous()
        assert torch.equal(output, plain) and torch.equal(lse, plain_lse)


def compiled_kernels() -> int:
    """Return the number of variants of the backend's kernels that this process has compiled."""
    from triton.runtime.jit import JITFunction

    kernels = set()
    for name, module in list(sys.modules.items()):
        if name.startswith("sparge.backends."):
            for attribute in vars(module).values():
                while not isinstance(attribute, JITFunction) and hasattr(attribute, "fn"):  # autotuners wrap kernels
                    attribute = attribute.fn
                if isinstance(attribute, JITFunction):
                    kernels.add(attribute)
    assert kernels, "no kernel was found"
    variants = 0
    for kernel in kernels:
        if hasattr(kernel, "device_caches"):  # a tuple per device, its first entry the variants
            variants += sum(len(caches[0]) for caches in kernel.device_caches.values())
        else:  # Triton before 3.3
            variants += sum(map(len, kernel.cache.values()))
    return variants


@cuda_only
class TestKernels:
    @modes
    @pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
    @pytest.mark.skipif(BACKEND != "triton", reason="counts Triton's kernels")
    def test_lengths_do_not_recompile_kernels(self, masked: bool, quantization: str) -> None:
        """Selection keeps a query block in registers and may compile once each time the number of keys doubles."""

        def run(length: int) -> None:
            mask = key_padding(length) if masked else None
            attend(*qkv(length), attn_mask=mask, topk=0.3, is_causal=True, quantization=quantization)

        warm_up = [1000, 3000, 6001]
        if masked:
            warm_up += [1024, 3072, 6016]  # rows of a mask start at a multiple of 16 or not
        for length in warm_up:
            run(length)
        before = compiled_kernels()
        assert before > 0
        lengths = [130, 192, 255, 256, 257, 511, 512, 640, 777, 960, 961, 1023, 1025, 1280, 1921, 2000, 2047, 2048]
        lengths += [2049, 2561, 3000, 3333, 4000, 4095, 4096, 4097, 5000, 6143, 7777, 8191]
        assert len(lengths) == 30
        for length in lengths:
            run(length)
        assert compiled_kernels() == before


class TestSettings:
    @calls
    @pytest.mark.parametrize("setting", ["autocast", "inference mode", "float64 by default", "tf32"])
    def test_global_settings_do_not_change_results(self, name: str, setting: str) -> None:
        tensors = qkv(700)
        expected = plain = attend(*tensors, **CALLS[name])

        def assert_same() -> None:
            forget_recordings()
            for _ in range(2):  # recorded, then replayed
                assert equal(attend(*tensors, **CALLS[name]), expected)

        if setting == "autocast":
            dtype = torch.float16 if ON_CUDA else torch.bfloat16
            expected = attend(*(tensor.to(dtype) for tensor in tensors), **CALLS[name])
            with torch.autocast(DEVICE.type, dtype):
                assert_same()
        elif setting == "inference mode":
            with torch.inference_mode():
                assert_same()
        elif setting == "float64 by default":
            torch.set_default_dtype(torch.float64)
            try:
                assert_same()
            finally:
                torch.set_default_dtype(torch.float32)
        else:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("medium")
            try:
                assert_same()
            finally:
                torch.set_float32_matmul_precision(before)
        assert equal(attend(*tensors, **CALLS[name]), plain)

    def test_concurrent_calls(self) -> None:
        """Concurrent calls are counted exactly and return the same results as single calls."""
        jobs = [
            functools.partial(attend, *qkv(500 + 7 * index), **CALLS[name])
            for index, name in enumerate(name for name in CALLS for _ in range(4))
        ]
        alone = [job() for job in jobs]
        serial = sparge.stats()
        sparge.reset_stats()
        forget_recordings()
        if ON_CUDA:
            torch.cuda.synchronize()
        with ThreadPoolExecutor(8) as pool:
            together = [future.result() for future in [pool.submit(job) for job in jobs]]
        assert sparge.stats() == serial
        assert serial.calls == 20
        assert all(equal(a, b) for a, b in zip(together, alone, strict=True))


class TestStatistics:
    def test_calls_and_density(self) -> None:
        query, key, value = qkv(1280)
        for _ in range(2):
            attend(query, key, value, sparsity=TopK(0.25, min_blocks=1))
        attend(query, key, value, sparsity=Dense())
        half = torch.zeros(10, 20, dtype=torch.bool, device=DEVICE)
        half[:, :10] = True
        sparge.block_sparse_attention(query, key, value, half, enable_gqa=True, backend=BACKEND)
        sparge.predict(query, key, enable_gqa=True, backend=BACKEND)
        stats = sparge.stats()
        assert stats.reasons == {f"sparse: {BACKEND}": 3, "dense: sparsity=Dense()": 1}
        assert (stats.calls, stats.sparse, stats.dense) == (4, 3, 1)
        assert stats.density == pytest.approx((0.25 + 0.25 + 0.5) / 3, abs=1e-12)

    @pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
    def test_density_equals_the_density_of_the_mask(self, masked: bool) -> None:
        query, key, value = qkv(700)
        options = {"sparsity": TopCdf(0.6, min_blocks=1), "is_causal": True}
        options["attn_mask"] = key_padding(700) if masked else None
        attend(query, key, value, **options)
        mask = sparge.predict(query, key, enable_gqa=True, backend=BACKEND, **options)
        assert 0 < mask.density() < 1
        assert sparge.stats().density == pytest.approx(mask.density(), abs=1e-12)

    def test_masked_calls_count_for_the_backend_that_computes_them(self) -> None:
        query, key, value = qkv(700)
        attend(query, key, value, topk=0.5, attn_mask=key_padding(700))
        assert sparge.stats().reasons == {"sparse: triton": 1}

    def test_named_backends_do_not_run_dense(self) -> None:
        query, key, value = qkv(100)
        attend(query, key, value, topk=0.5)
        assert sparge.stats().reasons == {f"sparse: {BACKEND}": 1}


@pytest.mark.parametrize("transposed", [False, True], ids=["heads first", "tokens first"])
@pytest.mark.parametrize("text", [(), ((0, 77),)], ids=["video", "text and video"])
def test_layers_with_token_reordering(text: tuple[tuple[int, int], ...], transposed: bool) -> None:
    """Reordering, attention and the inverse order are one recording; every replay equals the three separate steps."""
    grid, start = (4, 16, 16), text[0][1] if text else 0
    layer = Layer("", sparge.Policy(topk=0.5, backend=BACKEND))
    for seed in range(4):
        query, key, value = qkv(start + 1024, seed=seed)
        if transposed:
            query, key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value))
        found = attend_layer(layer, ModelCall(query, key, value, enable_gqa=True, text=text, grid=grid))
        moved = [ops.reorder(tokens, grid, "hilbert", start) for tokens in (query, key, value)]
        options = {"score": layer.policy.score_of(is_ordered=True, is_causal=False), "always_keep": list(text) or None}
        expected = sparge.attention(*moved, topk=0.5, enable_gqa=True, backend=BACKEND, **options)
        assert torch.equal(found, ops.reorder(expected, grid, "hilbert", start, undo=True))
        assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("start", [0, 77])
def test_reordering_keeps_the_memory_layout(start: int) -> None:
    """This includes replays."""
    generator, grid = torch.Generator().manual_seed(0), (6, 17, 31)
    for _ in range(3):
        sizes = (3, 2, start + 6 * 17 * 31 + 5, 3, 128)
        whole = torch.randn(sizes, generator=generator).to(DEVICE, torch.bfloat16)
        tensors = [tokens.transpose(1, 2) for tokens in whole]
        expected = [order_of(grid).apply(tokens.cpu(), 2, start) for tokens in tensors]
        moved = [ops.reorder(tokens, grid, "hilbert", start) for tokens in tensors]
        together = ops.reorder_all(tensors, grid, "hilbert", start)
        back = [ops.reorder(tokens, grid, "hilbert", start, undo=True) for tokens in moved]
        assert all(torch.equal(found.cpu(), correct) for found, correct in zip(moved, expected, strict=True))
        assert all(map(torch.equal, together, moved))
        assert all(map(torch.equal, back, tensors))
        assert all(found.transpose(1, 2).is_contiguous() for found in (*moved, *together, *back))
