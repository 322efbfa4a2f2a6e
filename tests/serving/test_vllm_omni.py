"""vLLM-Omni: the backend, with layers, steps and video positions, and the function of the `sparse_attn` interface."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded_vllm import arguments_of
from recorded_vllm_omni import FORWARD, IMPL, METADATA, RECORDED, SDPA, Engine, engine
from torch import Tensor

import sparge
from sparge import serving
from sparge.masks import ordering
from sparge.serving.sparse_attn import sparse_attn

__all__ = ["engine"]  # a fixture

HEADS, HEAD_DIM, SCALE = 2, 16, 0.3
GRID, TEXT = (6, 10, 12), 77
VIDEO = 720
OPTIONS = {"topk": 0.4, "backend": "torch"}


def tensors(tokens: int = VIDEO, kv_heads: int = HEADS, kv_tokens: int | None = None) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((tokens, HEADS), (kv_tokens or tokens, kv_heads), (kv_tokens or tokens, kv_heads))
    return [torch.randn(1, length, heads, HEAD_DIM) for length, heads in sizes]


def sparse(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    call: dict[str, Any] = {"topk": 0.4, "backend": "torch", "enable_gqa": True, **options}
    return sparge.attention(q, k, v, mask, scale=SCALE, layout="NHD", **call)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False) -> Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    call: dict[str, Any] = {"is_causal": is_causal, "scale": SCALE, "enable_gqa": q.shape[1] != k.shape[1]}
    return F.scaled_dot_product_attention(q, k, v, mask, **call).transpose(1, 2)


def in_hilbert_order(q: Tensor, k: Tensor, v: Tensor, text: int = 0, **options: Any) -> Tensor:
    """Return sparse attention of text followed by a video in Hilbert order."""
    order = ordering.order_of(GRID)
    moved = (order.apply(tensor, dim=1, start=text) for tensor in (q, k, v))
    return order.undo(sparse(*moved, score="spread", **options), dim=1, start=text)


def test_self_attention(engine: Engine) -> None:
    for kv_heads in (2, 1):
        q, k, v = tensors(kv_heads=kv_heads)
        impl = engine.impl(num_kv_heads=kv_heads, backend_kwargs=OPTIONS, prefix="blocks.3.attn1", role="self")
        sparge.reset_stats()
        output = impl.forward(q, k, v)
        assert sparge.stats().layers["blocks.3.attn1"].reasons == {"sparse: torch": 1}
        assert torch.equal(output, sparse(q, k, v))
        assert not torch.allclose(output, dense(q, k, v), atol=1e-3)


def test_masks_over_keys(engine: Engine) -> None:
    q, k, v = tensors()
    mask = torch.ones(1, VIDEO, dtype=torch.bool)
    mask[:, 600:] = False
    metadata = engine.abstract.AttentionMetadata(attn_mask=mask)
    output = engine.impl(backend_kwargs=OPTIONS).forward(q, k, v, metadata)
    assert torch.equal(output, sparse(q, k[:, :600], v[:, :600]))
    output = engine.impl(backend_kwargs={"min_tokens": 9999}).forward(q, k, v, metadata)
    torch.testing.assert_close(output, dense(q, k, v, mask[:, None, None]), rtol=0, atol=1e-6)


def test_dense_calls_run_the_platform_backend(engine: Engine) -> None:
    q, k, v = tensors()
    sparge.reset_stats()
    for options in ({"min_tokens": 9999}, {"dense_layers": [3], **OPTIONS}, {"budgets": {"blocks.3": 1.0}, **OPTIONS}):
        output = engine.impl(backend_kwargs=options, prefix="blocks.3").forward(q, k, v)
        assert torch.equal(output, dense(q, k, v))
    cross = engine.impl(backend_kwargs=OPTIONS, role="cross").forward(q, k, v)
    assert torch.equal(cross, dense(q, k, v))
    assert sparge.stats().reasons == {
        "dense: fewer than min_tokens": 1,
        "dense: dense layer": 2,
        "dense: cross-attention": 1,
    }


class MasklessBackend:
    """A platform backend without mask support."""

    def __init__(self, **arguments: Any) -> None:
        assert arguments["softmax_scale"] == SCALE and arguments["prefix"] == "blocks.0"

    @classmethod
    def get_impl_cls(cls) -> Any:
        return cls

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        del attention_spec
        return False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
        assert attn_metadata is None or attn_metadata.attn_mask is None
        return dense(query, key, value) + 1


def test_masks_without_support_of_the_platform_backend(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{__name__}.MasklessBackend"
    platform = engine.sparge.current_omni_platform
    monkeypatch.setattr(type(platform), "get_diffusion_attn_backend_cls", lambda *_, **__: path)
    impl = engine.impl(backend_kwargs={"min_tokens": 9999}, prefix="blocks.0")
    q, k, v = tensors()
    mask = torch.arange(VIDEO)[None] < 600
    metadata = engine.abstract.AttentionMetadata
    for attn_metadata in (None, metadata()):
        assert torch.equal(impl.forward(q, k, v, attn_metadata), dense(q, k, v) + 1)
    output = impl.forward(q, k, v, metadata(attn_mask=mask))
    torch.testing.assert_close(output, dense(q, k, v, mask[:, None, None]), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:sparge")
def test_unsupported_calls(engine: Engine) -> None:
    q, k, v = tensors()
    spans = engine.abstract.AttentionMetadata(full_attn_spans=[[(0, 9)]])
    cases: list[tuple[str, dict[str, Any], list[Tensor], Any]] = [
        ("spans of full attention", {}, [q, k, v], spans),
        ("layout BNSD", {"qkv_layout": "BNSD"}, [q, k, v], None),
        (
            "dense_layers, but the layer",
            {"backend_kwargs": {**OPTIONS, "dense_layers": [1]}, "prefix": "a"},
            [q, k, v],
            None,
        ),
        (
            "causal, with lengths that differ",
            {"causal": True, "backend_kwargs": {**OPTIONS, "self_attention_only": False}},
            [q[:, :640], k, v],
            None,
        ),
    ]
    for expected, others, (query, key, value), metadata in cases:
        impl = engine.impl(**{"backend_kwargs": OPTIONS, "prefix": "blocks.0", **others})
        sparge.reset_stats()
        output = impl.forward(query, key, value, metadata)
        assert torch.equal(output, dense(query, key, value, is_causal=impl.causal))
        (reason,) = sparge.stats().reasons
        assert reason.startswith(f"dense: unsupported ({expected}")


def test_videos_after_text(engine: Engine) -> None:
    """The text is kept, the video is in Hilbert order, and the tokens after it are ignored."""
    q, k, v = tensors(TEXT + VIDEO + 40)
    layout = engine.abstract.VideoTokenLayout(prefix_len=TEXT, latent_grid=GRID)
    mask = torch.ones(1, TEXT + VIDEO + 40, dtype=torch.bool)
    mask[:, TEXT + VIDEO :] = False
    for tensor in (q, k, v):
        tensor[:, TEXT + VIDEO :] = torch.nan
    metadata = engine.abstract.AttentionMetadata(attn_mask=mask, video_layout=layout)
    output = engine.impl(backend_kwargs=OPTIONS).forward(q, k, v, metadata)
    inside = [tensor[:, : TEXT + VIDEO] for tensor in (q, k, v)]
    assert torch.equal(output[:, : TEXT + VIDEO], in_hilbert_order(*inside, TEXT, always_keep=[(0, TEXT)]))
    assert (output[:, TEXT + VIDEO :] == 0).all() and output.shape == q.shape


def test_several_videos(engine: Engine) -> None:
    """Several videos have no single grid, so tokens stay in place; tokens outside of videos are kept."""
    span = engine.abstract.VideoTokenSpan
    layout = engine.abstract.VideoTokenLayout(
        used_len=700, video_spans=(span(330, (3, 10, 12), "target"), span(20, (2, 10, 12), "reference"))
    )
    q, k, v = tensors()
    metadata = engine.abstract.AttentionMetadata(video_layout=layout)
    output = engine.impl(backend_kwargs=OPTIONS).forward(q, k, v, metadata)
    inside = [tensor[:, :700] for tensor in (q, k, v)]
    assert torch.equal(output[:, :700], sparse(*inside, always_keep=[(0, 20), (260, 330), (690, 700)]))


def test_video_layout_of_a_wrong_length_is_ignored(engine: Engine) -> None:
    q, k, v = tensors(600)
    metadata = engine.abstract.AttentionMetadata(
        video_layout=engine.abstract.VideoTokenLayout(prefix_len=0, latent_grid=GRID, used_len=VIDEO)
    )
    output = engine.impl(backend_kwargs=OPTIONS).forward(q, k, v, metadata)
    assert torch.equal(output, sparse(q, k, v))


@pytest.mark.parametrize("strategy, kept", [("front", (0, 64)), ("rear", (VIDEO - 64, VIDEO))])
def test_joint_text_in_ulysses_is_kept(engine: Engine, strategy: str, kept: tuple[int, int]) -> None:
    q, k, v = tensors()
    text = k[:, slice(*kept)]
    metadata = engine.abstract.AttentionMetadata(
        joint_query=text, joint_key=text, joint_value=text, joint_strategy=strategy
    )
    output = engine.impl(backend_kwargs=OPTIONS).forward(q, k, v, metadata)
    assert torch.equal(output, sparse(q, k, v, always_keep=[kept]))


def test_dense_steps(engine: Engine) -> None:
    q, k, v = tensors()
    impl = engine.impl(backend_kwargs={**OPTIONS, "dense_first_steps": 2, "dense_last_steps": 0.1})
    is_dense = []
    for index in range(10):
        with engine.step(index, 10):
            is_dense.append(torch.equal(impl.forward(q, k, v), dense(q, k, v)))
    assert is_dense == [True, True, *[False] * 7, True]
    sparge.reset_stats()
    with engine.step(None, None):
        assert torch.equal(impl.forward(q, k, v), dense(q, k, v))
    assert sparge.stats().reasons == {"dense: dense step, the schedule is unknown": 1}


def test_policy_from_the_environment(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM-Omni 0.30 passes options only to its own backends."""
    q, k, v = tensors()
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(OPTIONS))
    for text in (json.dumps(OPTIONS), str(path)):
        monkeypatch.setenv("SPARGE_POLICY", text)
        assert torch.equal(engine.impl().forward(q, k, v), sparse(q, k, v))
        assert torch.equal(
            engine.impl(backend_kwargs={**OPTIONS, "topk": 0.2}).forward(q, k, v), sparse(q, k, v, topk=0.2)
        )
    for text, message in (
        ('{"top_k": 1}', "SPARGE_POLICY: policy: expected fields among .*, got top_k"),
        ("{", "SPARGE_POLICY: Expecting property name"),
        ("nowhere.json", "SPARGE_POLICY: expected a JSON object or the path of a file, got 'nowhere.json'"),
    ):
        monkeypatch.setenv("SPARGE_POLICY", text)
        with pytest.raises(ValueError, match=message):
            engine.impl()


def test_invalid_options_raise_at_startup(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backend_kwargs: policy: expected fields among .*, got sparsity_ratio"):
        engine.impl(backend_kwargs={"sparsity_ratio": 0.5})
    with pytest.raises(ValueError, match=r"expected dense_layers counted from 0 .*, got -2"):
        engine.impl(backend_kwargs={"dense_layers": [1, -2]})
    with pytest.raises(ValueError, match="expected dense='16bit'"):
        engine.impl(backend_kwargs={"dense": "8bit"})
    config = dataclasses.make_dataclass("Config", ["parallel_config"])
    parallel = dataclasses.make_dataclass("Parallel", ["ring_degree"])
    monkeypatch.setattr(engine.sparge, "get_current_diffusion_config_or_none", lambda: config(parallel(2)))
    with pytest.raises(ValueError, match=r"ring_degree: expected 1 .*, got 2"):
        engine.impl(backend_kwargs=OPTIONS)


@pytest.fixture
def registered(engine: Engine) -> Iterator[Any]:
    """Return vLLM-Omni's backend names after registration."""
    names = engine.registry.DiffusionAttentionBackendEnum
    serving.register_vllm_omni()
    yield names
    member = names._member_map_.pop("SPARGE")
    names._value2member_map_.pop(member._value_)
    names._member_names_.remove("SPARGE")


def test_registration(engine: Engine, registered: Any) -> None:
    members = list(registered)
    serving.register_vllm_omni()
    assert list(registered) == members, "a second registration changes nothing"
    assert registered["SPARGE"] is members[-1] is registered("sparge.serving.vllm_omni.SpargeBackend")
    assert registered["SPARGE"].get_path() == "sparge.serving.vllm_omni.SpargeBackend"
    assert registered["TORCH_SDPA"].get_path() == SDPA
    if engine.is_installed:
        assert registered["SPARGE"].get_class().get_name() == "SPARGE"


def test_backend_properties(engine: Engine) -> None:
    backend = engine.sparge.SpargeBackend
    assert backend.get_name() == "SPARGE" and backend.get_impl_cls() is engine.sparge.SpargeImpl
    assert backend.get_metadata_cls() is engine.abstract.AttentionMetadata
    assert backend.supports_attention_mask() and backend.supports_head_size(72)
    assert not backend.supports_piecewise_spans and not backend.supports_paged_kv
    assert backend.supported_platforms == ("cuda",)
    assert (
        arguments_of(engine.abstract.AttentionImpl.__init__) == IMPL == arguments_of(engine.sparge.SpargeImpl.__init__)
    )
    for name in ("forward", "forward_cuda"):
        assert arguments_of(getattr(engine.abstract.AttentionImpl, name)) == FORWARD
    assert arguments_of(engine.sparge.SpargeImpl.forward_cuda) == FORWARD
    names = tuple(field.name for field in dataclasses.fields(engine.abstract.AttentionMetadata))
    assert names == METADATA, f"recorded from {RECORDED}"


def test_attention_layer_selects_the_backend_by_name(
    engine: Engine, registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not engine.is_installed:
        pytest.skip("vLLM-Omni is not installed; its layer was not recorded")
    layer_module: Any = import_module("vllm_omni.diffusion.attention.layer")
    selector: Any = import_module("vllm_omni.diffusion.attention.selector")
    data: Any = import_module("vllm_omni.diffusion.data")
    config = data.AttentionConfig(per_role={"self": "SPARGE"})
    role = selector.get_attn_backend_for_role

    def resolved(name: str | None, head_size: int, allow_trtllm_default: bool = True) -> Any:
        del head_size, allow_trtllm_default
        return registered[name].get_class() if name else engine.sdpa.SDPABackend

    monkeypatch.setattr(selector, "_cached_get_backend_cls", resolved)
    monkeypatch.setattr(
        layer_module, "get_attn_backend_for_role", lambda **arguments: role(**{**arguments, "attention_config": config})
    )
    monkeypatch.setattr(
        layer_module, "build_parallel_attention_strategy", lambda **_: layer_module.NoParallelAttention()
    )
    monkeypatch.setenv("SPARGE_POLICY", json.dumps(OPTIONS))
    layer = layer_module.Attention(HEADS, HEAD_DIM, causal=False, softmax_scale=SCALE, prefix="blocks.1.attn")
    assert isinstance(layer.attention, engine.sparge.SpargeImpl)
    q, k, v = tensors()
    sparge.reset_stats()
    assert torch.equal(layer(q, k, v), sparse(q, k, v))


def call(q: Tensor, k: Tensor, v: Tensor, params: dict[str, Any], *, is_causal: bool = False) -> Tensor:
    return sparse_attn(q, k, v, params, is_causal=is_causal, softmax_scale=SCALE)


def test_sparse_attn_function() -> None:
    q, k, v = tensors(kv_heads=1)
    assert torch.equal(call(q, k, v, dict(OPTIONS)), sparse(q, k, v))
    assert torch.equal(call(q, k, v, dict(OPTIONS), is_causal=True), sparse(q, k, v, is_causal=True))
    assert torch.equal(call(q, k, v, {"topk": 0.4}), dense(q, k, v)), "below the crossover"
    mask = (torch.arange(VIDEO) < 600)[None]
    assert torch.equal(call(q, k, v, {**OPTIONS, "attn_mask": mask}), sparse(q, k[:, :600], v[:, :600]))
    assert sparse_attn.capabilities == {"supports_attention_mask": True}  # type: ignore[attr-defined]


@pytest.mark.parametrize("as_tensors", [False, True])
def test_sparse_attn_params(as_tensors: bool) -> None:
    q, k, v = tensors()
    kind: Callable[[Any], Any] = (lambda value: torch.tensor([value])) if as_tensors else (lambda value: value)
    sizes = {"latent_shape": kind((6, 20, 24)), "patch_size": kind((1, 2, 2))}
    params = {**OPTIONS, **sizes, "kv_cache_dtype": "fp8", "total_latent_frames": 6}
    assert torch.equal(call(q, k, v, params), in_hilbert_order(q, k, v))
    short = [tensor[:, :640] for tensor in (q, k, v)]
    assert torch.equal(call(*short, params), sparse(*short)), "the grid does not match the tokens"
    rules = {**OPTIONS, "dense_first_steps": 2, "total_denoise_steps": kind(8)}
    for index, is_dense in ((1, True), (2, False)):
        output = call(q, k, v, {**rules, "denoise_step_idx": kind(index)})
        assert torch.equal(output, dense(q, k, v)) == is_dense
    assert torch.equal(call(q, k, v, rules), dense(q, k, v)), "the step is unknown"


def test_sparse_attn_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    monkeypatch.setenv("SPARGE_POLICY", json.dumps(OPTIONS))
    assert torch.equal(call(q, k, v, {}), sparse(q, k, v))
    monkeypatch.setenv("SPARGE_POLICY", json.dumps({**OPTIONS, "topk": 0.2}))
    assert torch.equal(call(q, k, v, {}), sparse(q, k, v, topk=0.2))
    with pytest.raises(ValueError, match="params: expected no rules about layers"):
        call(q, k, v, {"dense_layers": [0]})
    with pytest.raises(ValueError, match="params: topk: expected"):
        call(q, k, v, {"topk": 2})
