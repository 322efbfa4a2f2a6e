"""Enabled models that are compiled, pickled, trained, shared between pipelines or cached by diffusers."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from tiny_pipelines import PIPELINES, STEPS, call
from tiny_transformers import wan
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import sparge
from sparge import Policy, TopK

pytestmark = pytest.mark.timeout(240)

SPARSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch")
FIRST_DENSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch", dense_first_steps=0.25)
IDS = torch.randint(1, 99, (1, 400), generator=torch.Generator().manual_seed(1))


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).eval()


def gpt2() -> Any:
    """Return a model that can be pickled, unlike a Llama, in which `kernels` replaces functions with local classes."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=32, n_head=2, n_layer=2))


@functools.cache
def wan_pipeline() -> Any:
    return PIPELINES["wan"]()


@pytest.fixture
def pipe() -> Any:
    """Return a new pipeline around shared models, none of which is enabled."""
    made = type(wan_pipeline())(**wan_pipeline().components)
    model, scheduler = made.transformer, made.scheduler
    made.scheduler = type(scheduler).from_config(scheduler.config)
    yield made
    if sparge.integrations.diffusers.pipeline.is_enabled(model):
        sparge.disable(model)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_pipeline_with_a_compiled_transformer(pipe: Any, compiled_first: bool) -> None:
    """The wrapped model is enabled and disabled. The next test compiles it."""
    compiled, stock = torch.compile(pipe.transformer, backend="eager"), call("wan", pipe)
    with torch.compiler.set_stance("force_eager"):
        if compiled_first:
            pipe.transformer = compiled
        sparge.enable(pipe, SPARSE)
        pipe.transformer = compiled
        assert not torch.equal(call("wan", pipe)[-1], stock[-1])
        sparge.disable(pipe)
        assert torch.equal(call("wan", pipe)[-1], stock[-1])


def test_compiled_transformer() -> None:
    """`enable` and `disable` each cause a recompilation. The three compilations take 10 s."""
    torch.compiler.reset()
    model, inputs = wan()
    compiled = torch.compile(model.eval().requires_grad_(False), backend="eager")
    stock = compiled(**inputs)[0]
    sparge.enable(compiled, SPARSE)
    assert not torch.equal(compiled(**inputs)[0], stock)
    sparge.disable(compiled)
    assert torch.equal(compiled(**inputs)[0], stock)


def test_compiled_attention_modules_that_run_eagerly() -> None:
    """The wrapper of torch.compile has no scope of its own, which would be open around that of the module in it."""
    model, inputs = wan()
    sparge.enable(model.eval().requires_grad_(False), SPARSE)
    sparge.reset_stats()
    expected, stats = model(**inputs)[0], sparge.stats()
    sparge.disable(model)
    for block in model.blocks:
        block.attn1 = torch.compile(block.attn1, backend="eager")
    sparge.enable(model, SPARSE)
    sparge.reset_stats()
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(model(**inputs)[0], expected)
    assert sparge.stats() == stats


LOAD = """
import sys, torch
for model, inputs, expected, calls in torch.load(sys.argv[1], weights_only=False):
    import sparge
    sparge.reset_stats()
    output = model(**inputs)[0]
    assert torch.allclose(output, expected, atol=1e-5), (output - expected).abs().max()
    assert sparge.stats().sparse == calls > 0, sparge.stats()
    sparge.disable(model)
    assert not torch.allclose(model(**inputs)[0], expected, atol=1e-5)
"""


def test_saved_models_run_sparse_in_another_process(tmp_path: Path) -> None:
    saved = []
    for model, inputs in ((gpt2(), {"input_ids": IDS}), wan()):
        sparge.enable(model.eval().requires_grad_(False), SPARSE)
        sparge.reset_stats()
        expected = model(**inputs)[0]
        saved.append((model, inputs, expected, sparge.stats().sparse))
    torch.save(saved, tmp_path / "models.pt")
    subprocess.run([sys.executable, "-c", LOAD, str(tmp_path / "models.pt")], check=True)


def test_copied_transformer_is_detached_from_its_pipeline(pipe: Any) -> None:
    """The copy contains no pipeline and does not follow its scheduler."""
    sparge.enable(pipe, FIRST_DENSE)
    arguments = _arguments(pipe)
    copied = copy.deepcopy(pipe.transformer)
    schedules = [hook.__self__ for hook in copied._forward_pre_hooks.values() if hasattr(hook, "__self__")]
    assert all(vars(schedule).get("_pipeline") is None for schedule in schedules)
    with pytest.warns(UserWarning, match="outside the schedule"), torch.no_grad():
        copied(**arguments)
    assert set(sparge.stats().reasons) == {"dense: cross-attention", "dense: dense step, the schedule is unknown"}
    sparge.disable(copied)


def _arguments(pipe: Any) -> dict[str, Any]:
    """Return the arguments of the first forward pass of a pipeline's transformer."""
    found: list[dict[str, Any]] = []
    handle = pipe.transformer.register_forward_pre_hook(lambda _, __, kwargs: found.append(kwargs), with_kwargs=True)
    call("wan", pipe)
    handle.remove()
    sparge.reset_stats()
    return found[0]


def test_pyramid_attention_broadcast_gives_no_warning(pipe: Any) -> None:
    config = diffusers.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 2000),
        spatial_attention_block_identifiers=("blocks",),
        current_timestep_callback=lambda: 500,
    )
    diffusers.apply_pyramid_attention_broadcast(pipe.transformer, config)
    try:
        sparge.enable(pipe, SPARSE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call("wan", pipe)
        own = sparge.stats().layers["transformer.blocks.0.attn1"]
        assert set(own.reasons) == {"sparse: torch"}
        assert own.calls < 2 * STEPS, "the output of some steps is reused"
    finally:
        for module in pipe.transformer.modules():
            if hasattr(module, "_diffusers_hook"):
                module._diffusers_hook.remove_hook("pyramid_attention_broadcast")


class TestSharedTransformer:
    @pytest.mark.parametrize("has_run", [False, True])
    def test_pipeline_with_another_scheduler_warns(self, pipe: Any, has_run: bool) -> None:
        other = type(pipe)(**pipe.components)
        other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
        sparge.enable(pipe, FIRST_DENSE)
        if has_run:
            call("wan", pipe)
            sparge.reset_stats()
        with pytest.warns(UserWarning, match=r"outside the schedule .* that sparge\.enable was called with"):
            call("wan", other)
        assert sparge.stats().sparse == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call("wan", pipe)
            assert sparge.stats().sparse > 0


class TestFrozenModel:
    def train_head(self, model: Any, features: Any) -> Tensor:
        """Train a linear head on features of a frozen model in training mode, and return its gradient."""
        model.requires_grad_(False).train()
        head = nn.Linear(features().shape[-1], 1)
        head(features()).sum().backward()
        assert head.weight.grad is not None
        return head.weight.grad

    def test_language_model_warns_once(self) -> None:
        model = llama()
        sparge.enable(model, SPARSE)
        with pytest.warns(UserWarning, match="sparse in training mode") as caught:
            self.train_head(model, lambda: model.model(IDS)[0])
        assert len(caught) == 1
        assert sparge.stats().sparse == 4

    def test_diffusion_model_warns_once(self) -> None:
        model, inputs = wan()
        sparge.enable(model, SPARSE)
        with pytest.warns(UserWarning, match="sparse in training mode") as caught:
            self.train_head(model, lambda: model(**inputs)[0])
        assert len(caught) == 1

    @pytest.mark.parametrize("mode", ["eval", "no_grad", "trained"])
    def test_other_passes_do_not_warn(self, mode: str) -> None:
        """Evaluation, passes without gradients, and training that runs dense do not warn."""
        model = llama()
        sparge.enable(model, Policy(sparsity=SPARSE.selection, backend="torch", on_unsupported="dense"))
        model.requires_grad_(mode == "trained").train(mode != "eval")
        with warnings.catch_warnings(), torch.set_grad_enabled(mode != "no_grad"):
            warnings.simplefilter("error")
            model(IDS)
        assert (sparge.stats().sparse == 0) == (mode == "trained")
