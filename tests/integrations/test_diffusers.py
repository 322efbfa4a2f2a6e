"""diffusers' transformers: stock output with all blocks kept, text always kept, and bitwise stock after disable."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderTiny,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
)
from tiny_transformers import TRANSFORMERS, build
from torch import Tensor

import sparge
from conftest import watch_attention
from sparge import Policy, TopK
from sparge.integrations.diffusers import pipeline
from sparge.integrations.diffusers.models import KNOWN

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_gradients")]

ALL_BLOCKS = Policy(topk=1.0, backend="torch", on_unsupported="raise")
SPARSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch")
all_models = pytest.mark.parametrize("name", TRANSFORMERS)

SELF = {  # self-attention layers, and the range of their text keys
    "cogvideox": {"transformer_blocks.0.attn1": (0, 70), "transformer_blocks.1.attn1": (0, 70)},
    "flux": {
        "transformer_blocks.0.attn": (0, 70),
        "single_transformer_blocks.0.attn": (0, 70),
        "single_transformer_blocks.1.attn": (0, 70),
    },
    "hunyuanvideo": {"transformer_blocks.0.attn": (392, 442), "single_transformer_blocks.0.attn": (392, 442)},
    "ltx": {"transformer_blocks.0.attn1": None, "transformer_blocks.1.attn1": None},
    "mochi": {"transformer_blocks.0.attn1": (432, 482), "transformer_blocks.1.attn1": (432, 482)},
    "sd3": {
        "transformer_blocks.0.attn": (400, 470),
        "transformer_blocks.0.attn2": None,
        "transformer_blocks.1.attn": (400, 470),
    },
    "wan": {"blocks.0.attn1": None, "blocks.1.attn1": None},
}
CROSS = {
    "ltx": ["transformer_blocks.0.attn2", "transformer_blocks.1.attn2"],
    "wan": ["blocks.0.attn2", "blocks.1.attn2"],
}


def run(model: Any, inputs: dict[str, Any]) -> Tensor:
    output: Tensor = model(**inputs, return_dict=False)[0]
    return output


def test_every_supported_model_has_a_tiny_version() -> None:
    assert {type(build(name)[0]).__name__ for name in TRANSFORMERS} <= set(KNOWN)


@all_models
class TestEveryModel:
    def test_all_blocks_match_stock(self, name: str) -> None:
        model, inputs = build(name)
        expected = run(model, inputs)
        sparge.enable(model, ALL_BLOCKS)
        got = run(model, inputs)
        torch.testing.assert_close(got, expected, rtol=0, atol=float(30 * 2**-23 * expected.abs().max()))
        reasons = {layer: row.reasons for layer, row in sparge.stats().layers.items()}
        assert reasons == {
            **{layer: {"sparse: torch": 1} for layer in SELF[name]},
            **{layer: {"dense: cross-attention": 1} for layer in CROSS.get(name, [])},
        }

    def test_disable_restores(self, name: str) -> None:
        model, inputs = build(name)
        expected = run(model, inputs)
        before = {layer: sorted(vars(module)) for layer, module in model.named_modules()}
        backends = [getattr(module.processor, "_attention_backend", "") for module in self.attentions(model)]
        sparge.enable(model, SPARSE)
        sparse = run(model, inputs)
        assert not torch.equal(sparse, expected)
        sparge.enable(model, SPARSE)
        assert torch.equal(run(model, inputs), sparse)
        sparge.disable(model)
        assert torch.equal(run(model, inputs), expected)
        assert {layer: sorted(vars(module)) for layer, module in model.named_modules()} == before
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert [getattr(module.processor, "_attention_backend", "") for module in self.attentions(model)] == backends

    @staticmethod
    def attentions(model: Any) -> list[Any]:
        return [module for module in model.modules() if hasattr(module, "processor")]

    def test_text_is_kept(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = []
        watch_attention(monkeypatch, lambda *_, always_keep, **__: kept.append(always_keep))
        model, inputs = build(name)
        sparge.enable(model, SPARSE)
        run(model, inputs)
        assert kept == [None if text is None else [text] for text in SELF[name].values()]

    def test_dense_layers(self, name: str) -> None:
        model, inputs = build(name)
        sparge.enable(model, Policy(topk=0.5, backend="torch", dense_layers=(-1,)))
        run(model, inputs)
        last = [layer for layer in SELF[name] if layer.split(".")[:2] == list(SELF[name])[-1].split(".")[:2]]
        dense = [layer for layer, row in sparge.stats().layers.items() if row.reasons == {"dense: dense layer": 1}]
        assert dense == last

    def test_dense_layers_out_of_range(self, name: str) -> None:
        model, _ = build(name)
        total = len({layer.rpartition(".attn")[0] for layer in SELF[name]})
        sparge.enable(model, Policy(dense_layers=(total - 1, -total)))
        for wrong in (total, -total - 1, 99):
            message = rf"dense_layers: expected layers below {total} \(or from -{total} on\), got {wrong}$"
            with pytest.raises(ValueError, match=message):
                sparge.enable(model, Policy(dense_layers=(0, wrong)))
        sparge.disable(model)


@pytest.mark.parametrize("name", ["cogvideox", "flux"])  # one model that calls SDPA, one that uses the dispatcher
def test_compiled_equals_eager(name: str) -> None:
    model, inputs = build(name)
    sparge.enable(model, SPARSE)
    expected = run(model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(run(compiled, inputs), expected, rtol=0, atol=1e-5)
    assert sparge.stats().reasons["sparse: torch"] == 2 * len(SELF[name])


@pytest.mark.parametrize(
    "kind",
    [FlowMatchEulerDiscreteScheduler, DDIMScheduler, FlowMatchHeunDiscreteScheduler],
    ids=lambda kind: kind.__name__,
)
class TestSteps:
    def test_dense_steps_out_of_range(self, kind: Any) -> None:
        model, _ = build("wan")
        scheduler = kind()
        sparge.enable(model, Policy(dense_steps=(1, 99)), scheduler=scheduler)
        with pytest.warns(UserWarning, match=r"dense_steps: expected steps below (4|7) .*, got 99$"):
            scheduler.set_timesteps(4)

    def denoise(self, model: Any, inputs: dict[str, Any], scheduler: Any, steps: int, passes: int) -> list[int]:
        """Return the sparse calls of each step of a denoising loop with ``passes`` forward passes per step."""
        scheduler.set_timesteps(steps)
        latents, counts = inputs["hidden_states"], []
        for timestep in scheduler.timesteps:
            before = sparge.stats().sparse
            for _ in range(passes):
                noise = run(model, {**inputs, "hidden_states": latents})
            latents = scheduler.step(noise, timestep, latents).prev_sample
            counts.append(sparge.stats().sparse - before)
        return counts

    def test_dense_steps(self, kind: Any) -> None:
        model, inputs = build("wan")
        scheduler = kind()
        sparge.enable(
            model, Policy(topk=0.5, backend="torch", dense_first_steps=0.25, dense_last_steps=1), scheduler=scheduler
        )
        for steps in (4, 3):  # a second schedule starts at step 0
            counts = self.denoise(model, inputs, scheduler, steps, passes=2)
            total = len(scheduler.timesteps)
            assert counts == [0 if i < -(-total // 4) or i == total - 1 else 4 for i in range(total)]
        assert "dense: dense step" in sparge.stats().reasons

    def test_scheduler_is_restored(self, kind: Any) -> None:
        model, _ = build("wan")
        scheduler = kind()
        signatures = [inspect.signature(method) for method in (scheduler.step, scheduler.set_timesteps)]
        state = sorted(vars(scheduler))
        sparge.enable(model, Policy(dense_first_steps=1), scheduler=scheduler)
        assert isinstance(scheduler, kind)
        assert type(scheduler).__name__ == kind.__name__
        assert [inspect.signature(method) for method in (scheduler.step, scheduler.set_timesteps)] == signatures
        for copied in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
            copied.set_timesteps(3)
            assert len(copied.timesteps) >= 3
            assert type(copied) is kind
        sparge.disable(model)
        assert type(scheduler) is kind
        assert sorted(vars(scheduler)) == state


def test_dense_steps_compile_to_two_graphs() -> None:
    """One graph per step would exceed the limit of torch.compile, which is eight."""
    torch.compiler.reset()  # other tests may have marked lengths as dynamic
    model, inputs = build("wan")
    scheduler = FlowMatchEulerDiscreteScheduler()
    sparge.enable(model, Policy(topk=0.5, backend="torch", dense_first_steps=2), scheduler=scheduler)
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, fullgraph=True, backend=keep)
    scheduler.set_timesteps(5)
    for timestep in scheduler.timesteps:
        run(compiled, inputs)
        scheduler.step(inputs["hidden_states"], timestep, inputs["hidden_states"])
    assert len(graphs) == 2
    assert sparge.stats().reasons == {"sparse: torch": 3 * 2}


class TestDispatcher:
    def test_set_attention_backend(self) -> None:
        model, inputs = build("flux")
        expected = run(model, inputs)
        sparge.register(ALL_BLOCKS, "diffusers")
        model.set_attention_backend("sparge")
        try:
            got = run(model, inputs)
        finally:
            model.reset_attention_backend()
            model.set_attention_backend("native")
        assert sparge.stats().reasons == {"sparse: torch": 3}
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert torch.equal(run(model, inputs), expected)

    def test_backend_name_already_used_by_diffusers(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A backend of diffusers that is also named "sparge" is replaced."""
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        def upstream(query: Any, **_: Any) -> Any:
            return torch.zeros_like(query)

        model, inputs = build("flux")
        expected = run(model, inputs)
        sparge.register(ALL_BLOCKS, "diffusers")
        monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName("sparge"), upstream)
        sparge.register(ALL_BLOCKS, "diffusers")
        assert "replaced by this library's" in caplog.text
        model.set_attention_backend("sparge")
        try:
            torch.testing.assert_close(run(model, inputs), expected, rtol=0, atol=1e-5)
        finally:
            model.reset_attention_backend()
            model.set_attention_backend("native")
        assert sparge.stats().reasons == {"sparse: torch": 3}

    def test_backend_set_before_enable_is_restored(self) -> None:
        model, inputs = build("wan")
        model.set_attention_backend("_native_math")
        expected = run(model, inputs)
        sparge.enable(model, ALL_BLOCKS)
        run(model, inputs)
        assert sparge.stats().sparse == 2
        sparge.disable(model)
        assert torch.equal(run(model, inputs), expected)
        assert {module.processor._attention_backend for module in model.modules() if hasattr(module, "processor")} == {
            "_native_math"
        }
        model.set_attention_backend("native")

    def test_backend_set_after_enable_warns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from diffusers.models import attention_dispatch

        model, inputs = build("wan")
        sparge.enable(model, ALL_BLOCKS)
        registry = attention_dispatch._AttentionBackendRegistry
        name = attention_dispatch.AttentionBackendName.FLASH
        native = registry._backends[attention_dispatch.AttentionBackendName.NATIVE]

        def not_sdpa(**call: Any) -> Any:
            with torch._C.DisableTorchFunction():  # like a kernel that is not SDPA
                return native(**call)

        monkeypatch.setitem(registry._backends, name, not_sdpa)
        for module in model.modules():
            if hasattr(module, "processor"):
                module.processor._attention_backend = name
        with pytest.warns(UserWarning, match="did not call SDPA"):
            run(model, inputs)
        assert sparge.stats().reasons == {"dense: not through SDPA": 4}

    def test_without_the_private_registry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """If the dispatcher cannot be extended, its SDPA calls are intercepted."""
        monkeypatch.setattr(pipeline.backend, "register", lambda: None)
        model, inputs = build("flux")
        expected = run(model, inputs)
        sparge.enable(model, ALL_BLOCKS)
        got = run(model, inputs)
        assert sparge.stats().reasons == {"sparse: torch": 3}
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["cogvideox", "flux"])
def test_copy_of_an_enabled_model_is_enabled(name: str) -> None:
    model, inputs = build(name)
    expected = run(model, inputs)
    sparge.enable(model, SPARSE)
    sparse = run(model, inputs)
    copied = copy.deepcopy(model)
    sparge.disable(model)
    assert torch.equal(run(model, inputs), expected)
    sparge.reset_stats()
    assert torch.equal(run(copied, inputs), sparse)
    assert sparge.stats().sparse == len(SELF[name])
    sparge.disable(copied)
    assert torch.equal(run(copied, inputs), expected)
    assert sparge.stats().sparse == len(SELF[name])


@pytest.mark.parametrize("name", ["cogvideox", "flux"])
def test_interrupted_pass_leaves_no_open_scope(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch calls no hooks after Ctrl-C: the next pass or `disable` closes the open scopes."""
    model, inputs = build(name)
    expected = run(model, inputs)
    attention = next(module for module in model.modules() if hasattr(module, "processor"))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for undo in (lambda: run(model, inputs), lambda: sparge.disable(model)):
        sparge.enable(model, SPARSE)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(attention.to_v, "forward", interrupt)
            run(model, inputs)
        undo()
        assert pipeline.backend.THREAD.scopes == []
        sparge.reset_stats()
        query = torch.randn(1, 1, 300, 16)
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        assert sparge.stats().calls == 0
    assert torch.equal(run(model, inputs), expected)


def test_processor_shared_by_modules_is_restored() -> None:
    from diffusers.models.transformers.transformer_flux import FluxAttnProcessor

    model, inputs = build("flux")
    model.set_attn_processor(FluxAttnProcessor())
    expected = run(model, inputs)
    sparge.enable(model, SPARSE)
    run(model, inputs)
    sparge.disable(model)
    sparge.reset_stats()
    assert torch.equal(run(model, inputs), expected)
    assert {module.processor._attention_backend for module in model.modules() if hasattr(module, "processor")} == {None}
    assert sparge.stats().calls == 0


def test_two_models_track_one_scheduler() -> None:
    scheduler = DDIMScheduler()
    models = [build("wan")[0] for _ in range(2)]
    for model in models:
        sparge.enable(model, Policy(topk=0.5, backend="torch", dense_first_steps=1), scheduler=scheduler)
    inputs = build("wan")[1]
    scheduler.set_timesteps(2)
    for timestep in scheduler.timesteps:
        for model in models:
            run(model, inputs)
        scheduler.step(inputs["hidden_states"], timestep, inputs["hidden_states"])
    assert sparge.stats().sparse == 2 * 2
    sparge.disable(models[0])
    assert type(scheduler) is not DDIMScheduler
    sparge.disable(models[1])
    assert type(scheduler) is DDIMScheduler


def test_errors_leave_no_open_scope() -> None:
    model, inputs = build("cogvideox")
    sparge.enable(model, ALL_BLOCKS)
    with pytest.raises(RuntimeError):
        run(model, {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"][..., :3]})
    model.transformer_blocks[1].attn1.to_v.weight.data = model.transformer_blocks[1].attn1.to_v.weight.data[:, :5]
    with pytest.raises(RuntimeError):
        run(model, inputs)
    assert pipeline.backend.THREAD.scopes == []
    sparge.reset_stats()
    query = torch.randn(1, 1, 300, 16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert sparge.stats().calls == 0, "no mode is left on the stack"


def test_errors_of_enable() -> None:
    model, _ = build("flux")
    with pytest.raises(ValueError, match=r"expected a pipeline, or scheduler=\.\.\., for rules about denoising steps"):
        sparge.enable(model, Policy(dense_first_steps=0.1))
    with pytest.raises(NotImplementedError, match=r"AutoencoderTiny: expected a model with attention.*replace_sdpa"):
        sparge.enable(AutoencoderTiny(encoder_block_out_channels=(4, 4, 4, 4), decoder_block_out_channels=(4, 4, 4, 4)))
    with pytest.raises(ValueError, match="expected an enabled model"):
        sparge.disable(model)


def test_compile_repeated_blocks_shares_a_graph() -> None:
    """diffusers' compile_repeated_blocks must not need one graph per block."""
    torch.compiler.reset()
    model, inputs = build("wan")
    sparge.enable(model, SPARSE)
    expected = run(model, inputs)
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    model.compile_repeated_blocks(fullgraph=True, backend=keep)
    torch.testing.assert_close(run(model, inputs), expected, rtol=0, atol=1e-5)
    assert len(graphs) == 1
    assert sparge.stats().reasons["sparse: torch"] == 2 * len(SELF["wan"])
