"""Image and video models: `sparge.attention` gets reordered tokens, and outputs keep the model's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("diffusers")

import torch
from tiny_transformers import build
from torch import Tensor
from torch.library import opcheck

import sparge
from conftest import make_qkv, tokens_first
from sparge import Budget, Policy, TopCdf, TopK
from sparge.dispatch import ops
from sparge.integrations.calls import attend, substituted
from sparge.integrations.layers import Layer, Steps
from sparge.integrations.model_call import ModelCall
from sparge.masks.ordering import ORDERS, order_of

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("no_gradients")]

GRID = (3, 12, 12)
"""The grid of the tiny Wan and CogVideoX. CogVideoX has 70 text tokens before it."""


@dataclass
class Seen:
    """A call that reached `sparge.attention`."""

    layer: str
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value


def watch_calls(model: Any, inputs: dict[str, Any], **policy: Any) -> tuple[Tensor, list[Seen]]:
    """Return a model's output and its sparse calls."""
    calls: list[Seen] = []

    def attention(layer: str, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **options: Any) -> Tensor:
        calls.append(Seen(layer, query, key, value, options))
        return sparge.attention(query, key, value, *mask, **options)

    sparge.enable(model, Policy(backend="torch", on_unsupported="raise", **policy))
    with substituted(attention):
        output = model(**inputs, return_dict=False)[0]
    sparge.disable(model)
    return output, calls


def run_one_call(
    policy: Policy,
    tokens: int,
    *,
    grid: tuple[int, ...] | None,
    text: Sequence[tuple[int, int]] = (),
    kv_len: int | None = None,
    **call: Any,
) -> Seen:
    """Run one attention call of a layer under the policy, and return the call that reaches `sparge.attention`."""
    calls: list[Seen] = []

    def attention(layer: str, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Tensor:
        calls.append(Seen(layer, query, key, value, options))
        return query

    tensors = make_qkv(tokens, kv_len, heads=1, head_dim=8)
    with substituted(attention):
        output = attend(Layer("layer", policy), ModelCall(*tensors, text=text, grid=grid, **call))
    assert output is not None
    assert torch.equal(output, tensors[0]), "the original order is restored"
    seen = calls[0]
    seen.options["is_ordered"] = not torch.equal(seen.query, tensors[0])
    return seen


class TestModels:
    @pytest.mark.parametrize("name, start", [("wan", 0), ("cogvideox", 70)])
    @pytest.mark.parametrize("order", ["hilbert", "morton", "tile"])
    def test_calls_get_reordered_tokens(self, name: str, start: int, order: str) -> None:
        """Compare the first layer, since later layers contain rounding errors. Text stays first."""
        model, inputs = build(name)
        plain, by_row = watch_calls(model, inputs, topk=1.0, order="row")
        output, ordered = watch_calls(model, inputs, topk=1.0, order=order)
        assert [call.layer for call in ordered] == [call.layer for call in by_row]
        expected = order_of(GRID, order)
        for before, after in zip(by_row[0].tensors, ordered[0].tensors, strict=True):
            assert after.shape[2] == start + 432
            assert torch.equal(after, expected.apply(before, 2, start))
            assert torch.equal(after[:, :, :start], before[:, :, :start])
            assert not torch.equal(after, before)
        torch.testing.assert_close(output, plain, rtol=0, atol=float(30 * 2**-23 * plain.abs().max()))

    def test_hilbert_and_spread_are_the_default(self) -> None:
        model, inputs = build("wan")
        output, calls = watch_calls(model, inputs, sparsity=TopK(0.3, min_blocks=1))
        named, _ = watch_calls(model, inputs, sparsity=TopK(0.3, min_blocks=1), order="hilbert", score="spread")
        assert torch.equal(output, named)
        assert {call.options["score"] for call in calls} == {"spread"}
        by_row, calls = watch_calls(model, inputs, sparsity=TopK(0.3, min_blocks=1), order="row")
        assert {call.options["score"] for call in calls} == {"moment"}
        assert not torch.equal(output, by_row)

    @pytest.mark.parametrize("name", ["hunyuanvideo", "ltx", "mochi", "sd3"])
    def test_other_models_are_reordered(self, name: str) -> None:
        model, inputs = build(name)
        _, calls = watch_calls(model, inputs, topk=1.0)
        _, by_row = watch_calls(model, inputs, topk=1.0, order="row")
        assert not torch.equal(calls[0].query, by_row[0].query)
        torch.testing.assert_close(calls[0].query.sort(2).values, by_row[0].query.sort(2).values, rtol=0, atol=0)

    def test_grid_is_read_from_position_ids(self) -> None:
        model, inputs = build("flux")
        _, calls = watch_calls(model, inputs, topk=1.0)
        _, by_row = watch_calls(model, inputs, topk=1.0, order="row")
        assert calls[0].options["score"] == "spread"
        text = inputs["encoder_hidden_states"].shape[1]
        along = sparge.masks.ordering.order_of((20, 20), "hilbert")
        assert torch.equal(calls[0].query[:, :, :text], by_row[0].query[:, :, :text])
        assert torch.equal(calls[0].query[:, :, text:], along.apply(by_row[0].query[:, :, text:], dim=2))

    @pytest.mark.parametrize("change", ["second image", "reversed order"])
    def test_tokens_stay_in_place_if_positions_form_no_grid(self, change: str) -> None:
        model, inputs = build("flux")
        places = inputs["img_ids"].clone()
        if change == "second image":
            places[200:, 0] = 1
        else:
            places = places.flip(0)
        inputs["img_ids"] = places
        _, calls = watch_calls(model, inputs, topk=1.0)
        _, by_row = watch_calls(model, inputs, topk=1.0, order="row")
        assert torch.equal(calls[0].query, by_row[0].query)
        assert calls[0].options["score"] == "moment"

    def test_grid_is_read_from_positional_arguments(self) -> None:
        model, inputs = build("wan")
        _, by_name = watch_calls(model, inputs, topk=1.0)
        places = ("hidden_states", "timestep", "encoder_hidden_states")
        calls: list[Tensor] = []

        def attention(_: str, query: Tensor, *__: Any, **___: Any) -> Tensor:
            calls.append(query)
            return query

        sparge.enable(model, Policy(topk=1.0, backend="torch"))
        with substituted(attention):
            model(*(inputs[name] for name in places), return_dict=False)
        assert torch.equal(calls[0], by_name[0].query)

    def test_grid_follows_the_input_size(self) -> None:
        model, inputs = build("wan")
        other = {**inputs, "hidden_states": inputs["hidden_states"][..., :16]}
        _, by_row = watch_calls(model, other, topk=1.0, order="row")
        _, calls = watch_calls(model, other, topk=1.0)
        assert torch.equal(calls[0].query, order_of((3, 12, 8)).apply(by_row[0].query))

    @pytest.mark.parametrize("name", ["wan", "hunyuanvideo"])
    def test_compiled_equals_eager(self, name: str) -> None:
        """HunyuanVideo masks part of its text, which a compiled program cannot cut off."""
        model, inputs = build(name)
        sparge.enable(model, Policy(sparsity=TopK(0.3, min_blocks=1), order="hilbert", backend="torch"))
        expected = model(**inputs, return_dict=False)[0]
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**inputs, return_dict=False)[0], expected, rtol=0, atol=1e-5)
        assert sparge.stats().reasons["sparse: torch"] == 4


class TestCalls:
    POLICY = Policy(topk=0.3, backend="torch", on_unsupported="raise")

    def test_grid_must_match_all_tokens_except_text(self) -> None:
        for text in ((), [(0, 70)], [(432, 500)], [(0, 70), (502, 520)]):
            count = 432 + sum(stop - start for start, stop in text)
            assert run_one_call(self.POLICY, count, grid=GRID, text=text).options["is_ordered"]
            for other in (count - 1, count + 1):
                seen = run_one_call(self.POLICY, other, grid=GRID, text=text)
                assert not seen.options["is_ordered"], "the grid does not match the tokens"
                assert seen.options["score"] == "moment"

    @pytest.mark.parametrize(
        "policy, call",
        [
            ({"always_keep": ((0, 10),)}, {}),
            ({"order": "row"}, {}),
            ({}, {"grid": None}),
            ({}, {"is_causal": True}),
            ({}, {"attn_mask": torch.rand(1, 1, 432, 432) < 0.9}),
            ({}, {"attn_mask": (torch.arange(432) < 400)[None, None, None]}),  # hides the end
            ({"self_attention_only": False}, {"kv_len": 700}),
        ],
        ids=["always_keep", "row_order", "no_grid", "causal", "full_mask", "hidden_end_of_grid", "cross_attention"],
    )
    def test_calls_that_keep_tokens_in_place(self, policy: dict[str, Any], call: dict[str, Any]) -> None:
        made = Policy(topk=0.3, backend="torch", on_unsupported="raise", **policy)
        seen = run_one_call(made, 432, **{"grid": GRID, **call})
        assert not seen.options["is_ordered"]
        assert seen.options["score"] == "moment"

    def test_grid_is_used_with_masked_text(self) -> None:
        """As in HunyuanVideo, text follows the video, and a mask hides the end of the text."""
        mask = (torch.arange(502) < 460)[None, None, None]
        seen = run_one_call(self.POLICY, 502, grid=GRID, text=[(432, 502)], attn_mask=mask)
        assert seen.key.shape[2] == 460
        assert seen.options["is_ordered"]
        assert seen.options["score"] == "spread"

    @pytest.mark.parametrize(
        "policy, score",
        [
            ({}, "spread"),
            ({"skipped": "mean"}, "spread"),
            ({"skipped": "drop"}, "moment"),
            ({"score": "mean"}, "mean"),
            ({"topk": None, "sparsity": TopK(0.3)}, "spread"),
            ({"topk": None, "sparsity": TopCdf(0.9)}, "moment"),
        ],
        ids=str,
    )
    def test_default_score(self, policy: dict[str, Any], score: str) -> None:
        made = Policy(**{"topk": 0.3, "backend": "torch", **policy})
        seen = run_one_call(made, 432, grid=GRID)
        assert seen.options["is_ordered"]
        assert seen.options["score"] == score
        assert seen.options["skipped"] == made.skipped

    def test_language_models_have_no_grid(self) -> None:
        seen = run_one_call(self.POLICY, 432, grid=None, is_language=True)
        assert (seen.options["score"], seen.options["skipped"]) == ("moment", "drop")

    @pytest.mark.parametrize(
        "rule, is_exact",
        [(Budget(0.25), True), (Budget(0.24), False), (TopK(0.1), False), (TopK(0.3), True), (TopCdf(0.5), True)],
        ids=str,
    )
    def test_text_queries_are_exact_if_cheap(self, rule: Any, is_exact: bool) -> None:
        """1 of 33 query blocks costs an eighth of the budget 0.2424 (8 / 33). TopCdf counts as a budget of 0.25."""
        policy = Policy(sparsity=rule, backend="torch")
        seen = run_one_call(policy, 4096 + 70, grid=(4, 32, 32), text=[(0, 70)])
        assert seen.options.get("exact_queries") == ([(0, 70)] if is_exact else None)
        assert seen.options["always_keep"] == [(0, 70)]
        longer = run_one_call(policy, 4096 + 129, grid=(4, 32, 32), text=[(0, 129)])
        assert "exact_queries" not in longer.options, "text spans two query blocks"

    def test_without_text_no_query_is_exact(self) -> None:
        assert "exact_queries" not in run_one_call(self.POLICY, 432, grid=GRID).options


class TestRepeatedCalls:
    """Later calls of a layer reuse the decisions of its first call."""

    POLICY = Policy(sparsity=TopK(0.4, min_blocks=1), backend="torch")
    TEXT = ((0, 70),)

    def attend(self, layer: Layer, seed: int, **call: Any) -> Tensor | None:
        return attend(
            layer, ModelCall(*make_qkv(502, heads=2, head_dim=16, seed=seed), text=self.TEXT, grid=GRID, **call)
        )

    def test_repeated_calls_equal_the_first_call(self) -> None:
        layer = Layer("layer", self.POLICY)
        for seed in range(4):
            with substituted(lambda _, *tensors, **options: sparge.attention(*tensors, **options)):
                expected = self.attend(layer, seed)
            found = self.attend(layer, seed)
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()

    def test_layers_with_the_same_policy_are_counted_separately(self) -> None:
        for name in ("a", "b", "b"):
            self.attend(Layer(name, self.POLICY), 0)
        assert {name: layer.sparse for name, layer in sparge.stats().layers.items()} == {"a": 1, "b": 2}
        assert sparge.stats().layers["a"].density == sparge.stats().layers["b"].density

    def test_dense_steps_stay_dense(self) -> None:
        policy = Policy(sparsity=TopK(0.4, min_blocks=1), backend="torch", dense_steps=(1,))
        steps = Steps(policy)
        steps.start(3)
        layer = Layer("layer", policy, steps=steps)
        found = []
        for _ in range(3):
            found.append(self.attend(layer, 0))
            steps.advance()
        assert [output is None for output in found] == [False, True, False]

    def test_policy_dense_layers_and_arguments_are_part_of_the_cache_key(self) -> None:
        output = self.attend(Layer("layer", self.POLICY), 0)
        assert self.attend(Layer("layer", self.POLICY, dense=True), 0) is None
        assert self.attend(Layer("layer", self.POLICY, is_cross=True), 0) is None
        others = [
            self.attend(Layer("layer", Policy(sparsity=TopK(0.6, min_blocks=1), backend="torch")), 0),
            self.attend(Layer("layer", Policy(sparsity=TopK(0.4, min_blocks=1), backend="torch", order="row")), 0),
            self.attend(Layer("layer", self.POLICY), 0, scale=0.5),
            self.attend(Layer("layer", self.POLICY), 0, is_causal=True),
        ]
        assert not any(torch.equal(output, other) for other in others)

    def test_autocast_is_respected(self) -> None:
        layer = Layer("layer", self.POLICY)
        self.attend(layer, 0)
        with torch.autocast("cpu", torch.bfloat16):
            assert self.attend(layer, 0).dtype == torch.bfloat16

    def test_gradients_are_detected_after_a_call_without_gradients(self) -> None:
        layer = Layer("layer", Policy(sparsity=TopK(0.4, min_blocks=1), backend="torch", on_unsupported="raise"))
        tensors = make_qkv(502, heads=2, head_dim=16)
        attend(layer, ModelCall(*tensors, text=self.TEXT, grid=GRID))
        tensors[0].requires_grad_()
        with torch.enable_grad(), pytest.raises(NotImplementedError, match="gradients"):
            attend(layer, ModelCall(*tensors, text=self.TEXT, grid=GRID))


class TestReorderOp:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("start", [0, 5])
    @pytest.mark.parametrize("is_tokens_first", [True, False], ids=["tokens_first", "heads_first"])
    def test_undo_restores_the_tokens(self, order: str, start: int, is_tokens_first: bool) -> None:
        """Strides are kept, and the result has tokens before heads, which avoids a copy."""
        tokens = torch.randn(2, 3, 5 + 60 + 7, 4, generator=torch.Generator().manual_seed(0))
        if is_tokens_first:
            tokens = tokens_first(tokens)
        moved = ops.reorder(tokens, (3, 4, 5), order, start)
        assert torch.equal(moved, order_of((3, 4, 5), order).apply(tokens, 2, start))
        back = ops.reorder(moved, (3, 4, 5), order, start, undo=True)
        assert torch.equal(back, tokens)
        assert moved.stride() == tokens.stride()
        assert back.transpose(1, 2).is_contiguous()

    @pytest.mark.parametrize("tokens", [60, 72], ids=["all_tokens", "some_tokens"])
    def test_opcheck(self, tokens: int) -> None:
        for undo in (False, True):
            arguments = ([torch.randn(1, 2, tokens, 4)], [3, 4, 5], "hilbert", tokens - 60, undo)
            assert set(opcheck(torch.ops.sparge.along.default, arguments).values()) == {"SUCCESS"}

    def test_strided_tokens(self) -> None:
        """A compiled program assumes the correct strides for tokens before heads, the layout of models."""
        tokens = torch.randn(1, 60, 2, 4).transpose(1, 2)
        assert set(opcheck(torch.ops.sparge.along.default, ([tokens], [3, 4, 5], "tile", 0, False)).values()) == {
            "SUCCESS"
        }

    def test_compiled(self) -> None:
        """One graph serves all sizes of a grid."""
        torch._dynamo.reset()
        graphs = []

        def count_graphs(graph: torch.fx.GraphModule, _: object) -> object:
            graphs.append(graph)
            return graph.forward

        def there_and_back(tokens: Tensor, height: int) -> tuple[Tensor, Tensor]:
            moved = ops.reorder(tokens, (2, height, 6), "hilbert", 3)
            return moved, ops.reorder(moved, (2, height, 6), "hilbert", 3, undo=True)

        compiled = torch.compile(there_and_back, backend=count_graphs, fullgraph=True, dynamic=True)
        for height in (5, 6, 9):
            tokens = torch.randn(1, 2, 3 + 12 * height, 4)
            moved, back = compiled(tokens, height)
            assert torch.equal(moved, order_of((2, height, 6)).apply(tokens, 2, 3))
            assert torch.equal(back, tokens)
        assert len(graphs) == 1
