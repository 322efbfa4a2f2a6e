"""Whole diffusers pipelines: exact with all blocks kept, dense by policy, counted, and restored."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from tiny_pipelines import CALLS, PIPELINES, STEPS, call
from torch import Tensor, nn

import sparge
from conftest import move_weights, relative_l1
from sparge import Policy, TopK

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore:In CPU autocast")]  # Mochi's own

EXACT = Policy(topk=1.0, quantization="none", backend="torch")
SPARSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch")
FIRST_DENSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch", dense_first_steps=0.25)


@dataclass(frozen=True)
class Layers:
    """Attention layers of a tiny pipeline's transformer, with their names in the statistics.

    Attributes:
        calls: number of calls of each layer per step, with guidance.
        self_attention: names of the self-attention layers.
        cross: names of the layers with cross-attention to the text.
    """

    calls: int
    self_attention: tuple[str, ...]
    cross: tuple[str, ...] = ()


LAYERS = {
    "cogvideox": Layers(1, ("transformer_blocks.0.attn1", "transformer_blocks.1.attn1")),
    "mochi": Layers(2, ("transformer_blocks.0.attn1", "transformer_blocks.1.attn1")),  # one call per sample
    "sd3": Layers(1, ("transformer_blocks.0.attn", "transformer_blocks.0.attn2", "transformer_blocks.1.attn")),
    "flux": Layers(1, ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")),
    "hunyuanvideo": Layers(1, ("transformer_blocks.0.attn", "single_transformer_blocks.0.attn")),
    "wan": Layers(
        2, ("blocks.0.attn1", "blocks.1.attn1"), ("blocks.0.attn2", "blocks.1.attn2")
    ),  # guidance in a separate pass
    "ltx": Layers(
        1,
        ("transformer_blocks.0.attn1", "transformer_blocks.1.attn1"),
        ("transformer_blocks.0.attn2", "transformer_blocks.1.attn2"),
    ),
}


@functools.cache
def build_pipeline(name: str) -> Any:
    return PIPELINES[name]()


@functools.cache
def stock_latents(name: str) -> list[Tensor]:
    """Return the latents of the stock pipeline after each step."""
    return call(name, build_pipeline(name))


@pytest.fixture(params=PIPELINES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def pipe(name: str) -> Iterator[Any]:
    """Return a shared pipeline, and disable it after the test."""
    stock_latents(name)
    pipe = build_pipeline(name)
    yield pipe
    if sparge.integrations.diffusers.pipeline.is_enabled(pipe):
        sparge.disable(pipe)


def assert_equal(got: list[Tensor], expected: list[Tensor]) -> None:
    for step, tensors in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(*tensors), f"step {step}"


def assert_counted(name: str, reasons_of_self: dict[str, int], reasons_of_cross: dict[str, int]) -> None:
    """Check that each layer counts these reasons, times its calls per step, and that there are no other layers."""
    layers = LAYERS[name]
    expected = dict.fromkeys(layers.self_attention, reasons_of_self) | dict.fromkeys(layers.cross, reasons_of_cross)
    counted = {layer: counts.reasons for layer, counts in sparge.stats().layers.items()}
    assert counted == {
        f"transformer.{layer}": {reason: steps * layers.calls for reason, steps in reasons.items()}
        for layer, reasons in expected.items()
    }


def test_all_blocks_give_the_stock_latents(name: str, pipe: Any) -> None:
    sparge.enable(pipe, EXACT)
    latents, stock = call(name, pipe)[-1], stock_latents(name)[-1]
    rounding = 64 * torch.finfo(torch.float32).eps  # measured: up to 5
    torch.testing.assert_close(latents, stock, rtol=0, atol=rounding * float(stock.abs().max()))
    assert_counted(name, {"sparse: torch": STEPS}, {"dense: cross-attention": STEPS})
    assert sparge.stats().density == 1


def test_first_step_is_dense_and_the_others_sparse(name: str, pipe: Any) -> None:
    sparge.enable(pipe, FIRST_DENSE)
    latents, stock = call(name, pipe), stock_latents(name)
    assert torch.equal(latents[0], stock[0])
    errors = [relative_l1(got, exact.double()) for got, exact in zip(latents[1:], stock[1:], strict=True)]
    assert all(0 < error < 0.5 for error in errors), errors
    assert_counted(name, {"dense: dense step": 1, "sparse: torch": STEPS - 1}, {"dense: cross-attention": STEPS})
    for layer in LAYERS[name].self_attention:
        density = sparge.stats().layers[f"transformer.{layer}"].density
        assert density is not None and 0.25 < density < 0.5


def test_every_pipeline_call_starts_a_schedule(name: str, pipe: Any) -> None:
    sparge.enable(pipe, FIRST_DENSE)
    assert_equal(call(name, pipe), call(name, pipe))
    assert_counted(
        name, {"dense: dense step": 2, "sparse: torch": 2 * (STEPS - 1)}, {"dense: cross-attention": 2 * STEPS}
    )


def test_dense_steps_are_bitwise_equal(name: str, pipe: Any) -> None:
    sparge.enable(pipe, Policy(backend="torch", dense_first_steps=1.0))
    assert_equal(call(name, pipe), stock_latents(name))
    assert_counted(name, {"dense: dense step": STEPS}, {"dense: cross-attention": STEPS})


def test_disable_gives_the_stock_pipeline(name: str, pipe: Any) -> None:
    scheduler = type(pipe.scheduler)
    sparge.enable(pipe, FIRST_DENSE)
    call(name, pipe)
    sparge.disable(pipe)
    sparge.reset_stats()
    assert_equal(call(name, pipe), stock_latents(name))
    assert sparge.stats().calls == 0
    assert type(pipe.scheduler) is scheduler


def test_saved_pipeline_equals_the_stock_pipeline(name: str, pipe: Any, tmp_path: Path) -> None:
    sparge.enable(pipe, FIRST_DENSE)
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path)
    move_weights(*(part for part in loaded.components.values() if isinstance(part, nn.Module)))
    assert_equal(call(name, loaded), stock_latents(name))
    assert sparge.stats().calls == 0


@pytest.mark.parametrize("name", ["flux", "hunyuanvideo"], indirect=True)
def test_true_guidance_runs_two_passes_per_step(name: str, pipe: Any) -> None:
    sparge.enable(pipe, FIRST_DENSE)
    call(name, pipe, negative_prompt="rain", true_cfg_scale=2.0)
    assert_counted(name, {"dense: dense step": 2, "sparse: torch": 2 * (STEPS - 1)}, {})


@pytest.mark.parametrize("name", ["cogvideox", "mochi", "wan"], indirect=True)
def test_without_guidance_a_step_has_half_the_calls(name: str, pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALLS[name], "guidance_scale", 1.0)
    sparge.enable(pipe, SPARSE)
    call(name, pipe)
    calls = {layer: counts.calls for layer, counts in sparge.stats().layers.items()}
    layers = LAYERS[name]
    assert calls == {f"transformer.{layer}": STEPS for layer in (*layers.self_attention, *layers.cross)}


def test_second_transformer_takes_over_within_a_schedule() -> None:
    """Wan 2.2 has a transformer for high noise and one for low noise; steps are counted across both."""
    parts = build_pipeline("wan").components
    pipe = type(build_pipeline("wan"))(**parts | {"transformer_2": PIPELINES["wan"]().transformer}, boundary_ratio=0.9)
    stock = call("wan", pipe)
    sparge.reset_stats()
    sparge.enable(pipe, FIRST_DENSE)
    latents = call("wan", pipe)
    sparge.disable(pipe)
    assert torch.equal(latents[0], stock[0]) and not torch.equal(latents[1], stock[1])
    layers = sparge.stats().layers
    assert layers["transformer.blocks.1.attn1"].reasons == {"dense: dense step": 2, "sparse: torch": 2}
    assert layers["transformer_2.blocks.1.attn1"].reasons == {"sparse: torch": 4}


@pytest.mark.parametrize("name", ["flux"], indirect=True)
def test_image_to_image_runs_a_part_of_the_schedule(pipe: Any) -> None:
    """Half of eight steps run: rules about steps count these four."""
    pipe = diffusers.FluxImg2ImgPipeline(**pipe.components)
    policy = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch", dense_first_steps=0.25, dense_last_steps=1)
    sparge.enable(pipe, policy)
    pipe.set_progress_bar_config(disable=True)
    sparse: list[int] = []

    def count(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
        sparse.append(sparge.stats().sparse)
        return values

    call = {"strength": 0.5, "num_inference_steps": 8, "height": 48, "width": 48, "output_type": "latent"}
    pipe("a cat", image=Image.new("RGB", (48, 48)), callback_on_step_end=count, **call)
    layers = sparge.stats().layers.values()
    assert [layer.reasons for layer in layers] == [{"dense: dense step": 2, "sparse: torch": 2}] * 2
    assert sparse == [0, 2, 4, 4], "dense, sparse, sparse, dense"


@pytest.mark.parametrize("same_class", [False, True])
@pytest.mark.parametrize("name", ["wan"], indirect=True)
def test_scheduler_set_after_enable_is_tracked(name: str, pipe: Any, same_class: bool) -> None:
    first, kind = pipe.scheduler, type(pipe.scheduler)
    sparge.enable(pipe, FIRST_DENSE)
    kind = kind if same_class else diffusers.FlowMatchEulerDiscreteScheduler
    made_by = type(first) if same_class else kind
    pipe.scheduler = made_by.from_config(first.config)
    call(name, pipe)
    assert_counted(name, {"dense: dense step": 1, "sparse: torch": STEPS - 1}, {"dense: cross-attention": STEPS})
    sparge.disable(pipe)
    assert type(pipe.scheduler) is kind
    assert "_sparge_steps" not in vars(first)
    pipe.scheduler = first  # the pipeline is shared by tests


@pytest.mark.parametrize("name", ["wan"], indirect=True)
def test_pipeline_and_its_transformer_share_their_state(name: str, pipe: Any) -> None:
    """The last `enable` applies; `disable` works on either of them."""
    sparge.enable(pipe, FIRST_DENSE)
    sparge.enable(pipe.transformer, SPARSE)
    assert "_sparge_steps" not in vars(pipe.scheduler)
    call(name, pipe)
    assert {row.calls for row in sparge.stats().layers.values()} == {2 * STEPS}
    assert "dense: dense step" not in sparge.stats().reasons
    sparge.disable(pipe)
    sparge.reset_stats()
    assert_equal(call(name, pipe), stock_latents(name))
    assert sparge.stats().calls == 0
    with pytest.raises(ValueError, match="expected an enabled model"):
        sparge.disable(pipe.transformer)
