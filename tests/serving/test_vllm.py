"""vLLM's backend CUSTOM: long prefills equal `sparge.attention`, other requests run FlashAttention."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recorded_vllm import (
    BUILD,
    BUILDER,
    CACHES,
    FORWARD,
    IMPL,
    RECORDED,
    SPLITS,
    Engine,
    arguments_of,
    dense,
    engine,
    newest,
)
from torch import Tensor

import sparge
from sparge import serving

__all__ = ["engine", "newest"]  # fixtures

DEVICE = torch.device(os.environ.get("SPARGE_TEST_DEVICE", "cpu"))
HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 16, 16
SCALE = 0.3
OPTIONS = {"topk": 0.4, "backend": "torch", "min_tokens": 512}
NAME = "model.layers.1.self_attn"
MIXED = ((1, 900), (640, 0), (1, 40), (100, 0), (256, 700), (3, 500), (130, 300))
"""(queries, cached keys): decode, prompt, decode, short prompt, prefill chunk, verification, short chunk."""
LONG = (1, 4)


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """Create all tensors on the device, except those that vLLM keeps on the host."""
    with DEVICE:
        yield


@dataclass
class Batch:
    """Requests in vLLM's layout: packed, with all keys in the cache, and pages in random order."""

    query: Tensor
    key: Tensor
    value: Tensor
    cache: Tensor
    common: Any
    requests: list[tuple[Tensor, Tensor, Tensor]]
    starts: list[int]

    def output(self) -> Tensor:
        return torch.full_like(self.query, torch.nan)


def batch_of(engine: Engine, sizes: tuple[tuple[int, int], ...] = MIXED, *, padding: int = 5) -> Batch:
    torch.manual_seed(len(sizes))
    lengths = [queries + before for queries, before in sizes]
    pages = [-(-length // PAGE) for length in lengths]
    page_ids = torch.randperm(sum(pages) + 3)
    keys, values = (torch.full((sum(pages) + 3, PAGE, KV_HEADS, HEAD_DIM), torch.nan) for _ in range(2))
    table = torch.full((len(sizes), max(pages) + 2), 2**20, dtype=torch.int32)  # unused entries must not be read
    requests, used = [], 0
    for index, ((queries, _), length) in enumerate(zip(sizes, lengths, strict=True)):
        request_pages = page_ids[used : used + pages[index]]
        used += pages[index]
        table[index, : len(request_pages)] = request_pages
        q = torch.randn(queries, HEADS, HEAD_DIM)
        k, v = (torch.randn(length, KV_HEADS, HEAD_DIM) for _ in range(2))
        k[:, :, 0] += torch.linspace(-2, 2, length)[:, None]  # some blocks get more weight
        for cache, tokens in ((keys, k), (values, v)):
            whole = torch.nn.functional.pad(
                tokens, (0, 0, 0, 0, 0, len(request_pages) * PAGE - length), value=torch.nan
            )
            cache[request_pages] = whole.unflatten(0, (-1, PAGE))
        requests.append((q, k, v))
    starts = torch.tensor([0, *(queries for queries, _ in sizes)]).cumsum(0).to(torch.int32)
    tokens = int(starts[-1])
    common = engine.backend.CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(sizes),
        num_actual_tokens=tokens,
        max_query_len=max(queries for queries, _ in sizes),
        max_seq_len=max(lengths),
        block_table_tensor=table.clamp(max=len(keys) - 1),
        slot_mapping=torch.zeros(len(sizes), dtype=torch.int64),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32, device="cpu"),
    )
    own_keys = [k[len(k) - len(q) :] for q, k, _ in requests]
    own_values = [v[len(v) - len(q) :] for q, _, v in requests]
    padded = [
        torch.cat([*parts, torch.full((padding, *parts[0].shape[1:]), torch.nan)])
        for parts in ([q for q, _, _ in requests], own_keys, own_values)
    ]
    return Batch(*padded, CACHES[engine.layout](keys, values), common, requests, starts.tolist())


def layer_of(name: str = f"{NAME}.attn") -> Any:
    one = torch.ones(1)
    return SimpleNamespace(layer_name=name, _q_scale=one, _k_scale=one, _v_scale=one)


def run(engine: Engine, batch: Batch, options: Any = None, layer: Any = None, **others: Any) -> Tensor:
    """Run one step of one layer, and return its output."""
    builder = engine.builder(engine.config(HEADS, OPTIONS if options is None else options), KV_HEADS, HEAD_DIM)
    impl = engine.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS, **others)
    return forward(engine, impl, batch, builder.build(0, batch.common), layer)


def forward(engine: Engine, impl: Any, batch: Batch, metadata: Any, layer: Any = None) -> Tensor:
    engine.kernel.calls.clear()
    sparge.reset_stats()
    output = batch.output()
    returned = impl.forward(
        layer or layer_of(), batch.query, batch.key, batch.value, batch.cache, metadata, output=output
    )
    assert returned is output
    return output


def sparse(request: tuple[Tensor, Tensor, Tensor], **options: Any) -> Tensor:
    q, k, v = (tensor[None] for tensor in request)
    call = {"topk": 0.4, "backend": "torch", **options}
    return sparge.attention(q, k, v, is_causal=True, scale=SCALE, enable_gqa=True, layout="NHD", **call)[0]


def check(batch: Batch, output: Tensor, long: tuple[int, ...], **options: Any) -> None:
    """Check each request separately, and that the padding after them is not written."""
    for index, request in enumerate(batch.requests):
        part = output[batch.starts[index] : batch.starts[index + 1]]
        expected = sparse(request, **options) if index in long else dense(*request, SCALE)
        assert torch.equal(part, expected), index
        if index in long:
            assert not torch.allclose(expected, dense(*request, SCALE), atol=1e-3), "sparsity changes the output"
    assert output[batch.starts[-1] :].isnan().all()


def test_mixed_batches(engine: Engine) -> None:
    batch = batch_of(engine)
    output, stats = run(engine, batch), sparge.stats()
    check(batch, output, LONG)
    others = [queries for index, (queries, _) in enumerate(MIXED) if index not in LONG]
    assert engine.kernel.calls == [others], "one call with all other requests"
    assert stats.reasons == {"sparse: torch": 2, "dense: fewer than min_tokens": 1}
    assert stats.layers[NAME].sparse == 2


def test_default_device_does_not_move_host_tensors(newest: Engine) -> None:
    batch = batch_of(newest)
    builder = newest.builder(newest.config(HEADS, OPTIONS), KV_HEADS, HEAD_DIM)
    with torch.device("meta"):
        step = builder.build(0, batch.common).sparge
    rows, rest = step.rest_of(builder.build(0, batch.common))
    with torch.device("meta"):
        again, same = dataclasses.replace(step).rest_of(builder.build(0, batch.common))
    assert torch.equal(rows, again) and torch.equal(rest.query_start_loc, same.query_start_loc)


@pytest.mark.parametrize(
    "sizes, long",
    [
        (((1, 900), (1, 40), (640, 0)), (2,)),
        (((640, 64), (1, 900), (2, 40)), (0,)),
        (((640, 0), (1, 7), (512, 16), (129, 900)), (0, 2, 3)),
        (((640, 0), (600, 30)), (0, 1)),
        (((0, 0), (640, 0), (0, 0)), (1,)),
        (((1, 900), (640, 0), (0, 7), (3, 40), (0, 0)), (1,)),
    ],
    ids=["long last", "long first", "one short", "all long", "empty requests", "padded batch"],
)
def test_positions_of_long_requests(newest: Engine, sizes: tuple[tuple[int, int], ...], long: tuple[int, ...]) -> None:
    batch = batch_of(newest, sizes)
    check(batch, run(newest, batch), long)
    others = [queries for index, (queries, _) in enumerate(sizes) if queries and index not in long]
    assert newest.kernel.calls == ([others] if others else [])


def test_cache_of_two_pages(engine: Engine) -> None:
    """Two layouts differ only in the position of the dimension of size 2: the shape does not determine the layout."""
    sizes = ((128, 20),)
    batch = batch_of(engine, sizes)
    small = dataclasses.replace(batch)
    (_, k, v), page = batch.requests[0], 80
    keys, values = (tensor.new_full((2, page, KV_HEADS, HEAD_DIM), torch.nan) for tensor in (k, v))
    for cache, tokens in ((keys, k), (values, v)):
        cache[1], cache[0, : len(tokens) - page] = tokens[:page], tokens[page:]
    small.cache = CACHES[engine.layout](keys, values)
    small.common.block_table_tensor = torch.tensor([[1, 0]], dtype=torch.int32)
    output = run(engine, small, {"topk": 0.5, "backend": "torch"})
    assert torch.equal(output[:128], sparse(batch.requests[0], topk=0.5))


def test_batch_without_long_requests(newest: Engine) -> None:
    batch = batch_of(newest)
    for options, expected in (({"topk": 0.4, "min_tokens": 5000}, "dense: fewer than min_tokens"), ({}, "crossover")):
        check(batch, run(newest, batch, options), ())
        assert newest.kernel.calls == [[queries for queries, _ in MIXED]]
        assert [expected in reason for reason in sparge.stats().reasons] == [True]
    decode = batch_of(newest, ((1, 900), (1, 30)))
    check(decode, run(newest, decode), ())
    assert sparge.stats().reasons == {"dense: decode": 1}


def test_host_lengths_of_short_steps_are_not_read(newest: Engine) -> None:
    """vLLM may still be copying host lengths from the device."""
    batch = batch_of(newest, ((3, 900), (1, 30)))
    batch.common.query_start_loc_cpu = batch.common.seq_lens_cpu_upper_bound = SimpleNamespace()
    check(batch, run(newest, batch), ())


def test_draft_tokens_are_not_a_prefill(newest: Engine) -> None:
    """Host lengths of draft tokens are not exact."""
    batch = batch_of(newest, ((140, 600),))
    builder = newest.builder(newest.config(HEADS, OPTIONS, drafts=80), KV_HEADS, HEAD_DIM)
    impl = newest.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS)
    check(batch, forward(newest, impl, batch, builder.build(0, batch.common)), ())
    builder = newest.builder(newest.config(HEADS, OPTIONS, drafts=4), KV_HEADS, HEAD_DIM)
    check(batch, forward(newest, impl, batch, builder.build(0, batch.common)), (0,))


def test_block_table_of_another_layer_group(engine: Engine) -> None:
    """Groups of layers share metadata but have separate pages."""
    batch = batch_of(engine)
    builder = engine.builder(engine.config(HEADS, OPTIONS), KV_HEADS, HEAD_DIM)
    impl = engine.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS)
    first = builder.build(0, batch.common)
    check(batch, forward(engine, impl, batch, first), LONG)

    pages = SPLITS[engine.layout](batch.cache, HEAD_DIM)
    order = torch.randperm(len(pages[0]))
    moved = dataclasses.replace(batch, cache=CACHES[engine.layout](*(tensor[order] for tensor in pages)))
    table = order.argsort()[batch.common.block_table_tensor.long()].to(torch.int32)
    second = builder.update_block_table(first, table, batch.common.slot_mapping)
    check(moved, forward(engine, impl, moved, second), LONG)
    check(batch, forward(engine, impl, batch, first), LONG)


def test_keys_only_in_the_cache(engine: Engine) -> None:
    """A fused operator wrote the keys, or the layer reads the cache of another layer."""
    batch = batch_of(engine)
    shared = dataclasses.replace(
        batch, key=torch.full_like(batch.key, torch.nan), value=torch.full_like(batch.value, torch.nan)
    )
    check(batch, run(engine, shared, kv_sharing_target_layer_name="model.layers.0.self_attn.attn"), LONG)
    without = dataclasses.replace(batch, key=None, value=None)  # type: ignore[arg-type]
    check(batch, run(engine, without), LONG)


def test_memory_profiling_run(engine: Engine) -> None:
    batch = batch_of(engine)
    output = forward(engine, engine.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS), batch, None)
    assert (output == 0).all()
    assert sparge.stats().calls == 0


def test_outputs_with_merged_heads(newest: Engine) -> None:
    """vLLM's output may have heads and channels in one dimension."""
    batch = batch_of(newest, ((640, 0),))
    builder = newest.builder(newest.config(HEADS, OPTIONS), KV_HEADS, HEAD_DIM)
    output = batch.output().flatten(1)
    newest.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS).forward(
        layer_of(), batch.query, batch.key, batch.value, batch.cache, builder.build(0, batch.common), output
    )
    assert torch.equal(output[:640], sparse(batch.requests[0]).flatten(1))


@pytest.mark.parametrize(
    "reason, others",
    [
        ("sliding window", {"sliding_window": 64}),
        ("capped scores", {"logits_soft_cap": 30.0}),
        ("ALiBi", {"alibi_slopes": [0.5] * HEADS}),
        ("attention of type encoder_decoder", {"attn_type": "encoder_decoder"}),
    ],
)
@pytest.mark.filterwarnings("ignore:sparge")
def test_layers_that_fall_back_to_flash_attention(newest: Engine, reason: str, others: dict[str, Any]) -> None:
    batch = batch_of(newest)
    run(newest, batch, **others)
    assert newest.kernel.calls == [[queries for queries, _ in MIXED]]
    assert sparge.stats().reasons == {f"dense: unsupported ({reason})": 1}


@pytest.mark.parametrize(
    "reason, attribute, value",
    [
        ("attention sinks", "sinks", torch.zeros(HEADS)),
        ("KV cache of fp8", "kv_cache_dtype", "fp8"),
        ("context parallelism", "dcp_world_size", 2),
        ("context parallelism", "pcp_world_size", 2),
    ],
)
def test_unsupported_layer_properties(newest: Engine, reason: str, attribute: str, value: Any) -> None:
    impl = newest.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS)
    assert impl._why_dense() is None
    setattr(impl, attribute, value)
    assert impl._why_dense() == reason


@pytest.mark.filterwarnings("ignore:sparge")
def test_steps_that_fall_back_to_flash_attention(engine: Engine) -> None:
    """Any unrecognized field of the metadata of any version falls back to FlashAttention."""
    batch = batch_of(engine)
    builder = engine.builder(engine.config(HEADS, OPTIONS), KV_HEADS, HEAD_DIM)
    impl = engine.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS)
    plain = engine.flash_attn.FlashAttentionMetadataBuilder.build
    names = {field.name for field in dataclasses.fields(engine.flash_attn.FlashAttentionMetadata)}
    entries: list[tuple[str, Any]] = [
        (name, torch.ones(1)) for name in sorted(names - engine.sparge.KNOWN_FIELDS - {"use_cascade"})
    ]
    entries += [("causal", False), ("causal", torch.ones(len(MIXED), dtype=torch.int32))]
    entries += [("use_cascade", True)] if "use_cascade" in names else []
    for name, value in entries:

        def build(self: Any, *args: Any, name: str = name, value: Any = value) -> Any:
            metadata = plain(self, *args)
            setattr(metadata, name, value)
            return metadata

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine.flash_attn.FlashAttentionMetadataBuilder, "build", build)
            metadata = builder.build(0, batch.common)
        step = getattr(metadata, engine.sparge.STEP)
        assert step.obstacle == ("not causal" if name == "causal" else name)
        sent: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                engine.flash_attn.FlashAttentionImpl, "forward", lambda _, *args, sent=sent: sent.append(args[5])
            )
            impl.forward(layer_of(), batch.query, batch.key, batch.value, batch.cache, metadata, batch.output())
        assert len(sent) == 1 and sent[0] is metadata
    assert builder.build(0, batch.common).sparge.obstacle is None


@pytest.mark.filterwarnings("ignore:sparge")
def test_metadata_builders_that_wrap_ours_run_dense(newest: Engine) -> None:
    """vLLM's builder for static sinks changes the number of visible keys only on the device."""
    batch = batch_of(newest)

    class WrappingBuilder(newest.sparge.SpargeMetadataBuilder):  # type: ignore[name-defined]
        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)

    builder = newest.builder(newest.config(HEADS, OPTIONS), KV_HEADS, HEAD_DIM, WrappingBuilder)
    impl = newest.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS)
    check(batch, forward(newest, impl, batch, builder.build(0, batch.common)), ())
    assert list(sparge.stats().reasons) == ["dense: unsupported (a subclass of the metadata builder)"]


@pytest.mark.filterwarnings("ignore:sparge")
def test_lengths_only_on_the_device_run_dense(newest: Engine) -> None:
    batch = batch_of(newest)
    batch.common.seq_lens_cpu_upper_bound = None
    check(batch, run(newest, batch), ())
    assert list(sparge.stats().reasons) == ["dense: unsupported (no lengths on the host)"]
    check(batch, run(newest, batch, {**OPTIONS, "dense_layers": [1]}), ())
    assert list(sparge.stats().reasons) == ["dense: dense layer"]
    with pytest.raises(NotImplementedError, match="no lengths on the host"):
        run(newest, batch, {**OPTIONS, "on_unsupported": "raise"})


@pytest.mark.filterwarnings("ignore:sparge")
def test_unknown_cache_layout(newest: Engine) -> None:
    """Only requests without context, which do not read the cache, run sparse."""
    builder = newest.builder(newest.config(HEADS, OPTIONS), KV_HEADS, HEAD_DIM)
    impl = newest.impl(HEADS, HEAD_DIM, SCALE, KV_HEADS)
    impl._layout = None
    batch = batch_of(newest)
    check(batch, forward(newest, impl, batch, builder.build(0, batch.common)), ())
    batch = batch_of(newest, ((1, 900), (640, 0)))
    check(batch, forward(newest, impl, batch, builder.build(0, batch.common)), (1,))


def test_on_unsupported_raise(newest: Engine) -> None:
    with pytest.raises(NotImplementedError, match="sliding window"):
        run(newest, batch_of(newest), {**OPTIONS, "on_unsupported": "raise"}, sliding_window=64)


def test_dense_layers_and_budgets(newest: Engine) -> None:
    batch = batch_of(newest)
    for options, name, long in (
        ({**OPTIONS, "dense_layers": [1]}, NAME, ()),
        ({**OPTIONS, "dense_layers": [-3]}, NAME, ()),
        ({**OPTIONS, "dense_layers": [0, 2, 3]}, NAME, LONG),
        ({**OPTIONS, "budgets": {NAME: 1.0}}, NAME, ()),
    ):
        check(batch, run(newest, batch, options, layer_of(f"{name}.attn")), long)
        assert ("dense: dense layer" in sparge.stats().reasons) == (not long)
    check(batch, run(newest, batch, {**OPTIONS, "budgets": {NAME: 0.2}}), LONG, topk=0.2)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 0.4}, r"additional_config\['sparge'\]: policy: expected fields among .*, got top_k"),
        ({"topk": 2.0}, r"additional_config\['sparge'\]: topk: expected"),
        ([0.4], r"additional_config\['sparge'\]: expected fields of a sparge.Policy, got list"),
        ({"dense_first_steps": 2}, "expected no rules about denoising steps"),
        ({"dense": "8bit"}, "expected dense='16bit'"),
        ({"dense_layers": [9]}, "dense_layers: expected layers below 4"),
        ({"budgets": {"blocks.0": 0.3}}, "budgets: expected layers of the model"),
    ],
)
def test_invalid_policies_raise_at_startup(newest: Engine, options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        newest.builder(newest.config(HEADS, options), KV_HEADS, HEAD_DIM)


def test_backend_properties(engine: Engine) -> None:
    backend, parent = engine.sparge.SpargeBackend, engine.flash_attn.FlashAttentionBackend
    assert (backend.get_name(), backend.is_sparse()) == ("CUSTOM", False)
    assert backend.get_impl_cls() is engine.sparge.SpargeImpl
    assert backend.get_builder_cls() is engine.sparge.SpargeMetadataBuilder
    assert issubclass(backend, parent) and issubclass(engine.sparge.SpargeImpl, engine.flash_attn.FlashAttentionImpl)
    assert parent.supports_batch_invariance() and not backend.supports_batch_invariance()
    assert not backend.supports_device_cpu_query_lens_mismatch()
    support = engine.backend.AttentionCGSupport
    builder = engine.sparge.SpargeMetadataBuilder
    for level, expected in ((support.ALWAYS, support.UNIFORM_BATCH), (support.NEVER, support.NEVER)):
        with pytest.MonkeyPatch.context() as patch:
            flash = engine.flash_attn.FlashAttentionMetadataBuilder
            patch.setattr(flash, "get_cudagraph_support", classmethod(lambda *_, level=level: level))
            assert builder.get_cudagraph_support(None, None) is expected


def test_registration(newest: Engine) -> None:
    custom = newest.registry.AttentionBackendEnum.CUSTOM
    try:
        serving.register_vllm()
        serving.register_vllm()
        assert custom.get_path() == "sparge.serving.vllm.SpargeBackend"
        newest.registry.register_backend(custom, "another.plugin.Backend")
        serving.register_vllm()
        assert custom.get_path() == "another.plugin.Backend"
    finally:
        if newest.is_installed:
            custom.clear_override()


@pytest.mark.parametrize(
    "register, engine_name", [("register_vllm", "vLLM 0.20"), ("register_vllm_omni", "vLLM-Omni 0.30")]
)
def test_engine_without_a_registry_is_unchanged(
    register: str, engine_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines call every installed plug-in, so an exception would terminate them."""
    for name in ("vllm.v1.attention.backends.registry", "vllm_omni.diffusion.attention.backends.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    with caplog.at_level("INFO", "sparge"):
        getattr(serving, register)()
    assert f"expected {engine_name} or newer" in caplog.text


def test_signatures_match_vllm(engine: Engine) -> None:
    """Overrides have vLLM's parameters, and recorded signatures equal the installed ones."""
    flash, ours = engine.flash_attn, engine.sparge
    assert arguments_of(flash.FlashAttentionImpl.__init__) == IMPL
    assert arguments_of(flash.FlashAttentionMetadataBuilder.__init__) == BUILDER
    for method in (flash.FlashAttentionImpl.forward, ours.SpargeImpl.forward):
        assert arguments_of(method) == FORWARD
    for method in (flash.FlashAttentionMetadataBuilder.build, ours.SpargeMetadataBuilder.build):
        assert arguments_of(method) == BUILD
    for name in ("update_block_table", "get_cudagraph_support"):
        theirs = getattr(flash.FlashAttentionMetadataBuilder, name)
        assert arguments_of(getattr(ours.SpargeMetadataBuilder, name)) == arguments_of(theirs)
    names = {field.name for field in dataclasses.fields(flash.FlashAttentionMetadata)}
    version = engine.version.removeprefix("installed ")
    if version in RECORDED:
        assert names == set(RECORDED[version].fields)
        assert engine.layout == RECORDED[version].layout
    assert names >= engine.sparge.KNOWN_FIELDS - {"prefix_scheduler_metadata"}
