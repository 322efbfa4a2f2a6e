"""ComfyUI's node and attention override, tested with a stand-in for ComfyUI's calls, copies and sampler."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from comfyui_stand_in import (
    HEAD_DIM,
    HEADS,
    TOKENS,
    Flux,
    Patcher,
    Tensors,
    flat,
    run,
    sample,
    sdpa,
    sparse_layers,
    wrapped,
)
from torch import Tensor
from torch.overrides import TorchFunctionMode

import sparge
from conftest import assert_within_budget, exact_attention, make_qkv, plain_attention
from sparge.backends import base
from sparge.integrations import calls, comfyui, layers
from sparge.integrations.comfyui import attention_override, parse_blocks, sparsify
from sparge.integrations.model_call import ModelCall

FOLDER = Path(__file__).parents[2] / "comfyui"


@pytest.fixture
def qkv() -> Tensors:
    return make_qkv(TOKENS, batch=1, heads=HEADS, head_dim=HEAD_DIM)


@pytest.fixture
def short() -> Tensors:
    """Return short tensors for tests that only check counts."""
    return make_qkv(128, batch=1, heads=HEADS, head_dim=HEAD_DIM)


@pytest.fixture
def node() -> Iterator[ModuleType]:
    """Load the folder as ComfyUI does: by its path, with the path as module name."""
    name = str(FOLDER).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


ALL_BLOCKS = 99.999
"""A percentage that is rounded up to all blocks; 100 would run without a prediction."""


class TestLayouts:
    @pytest.mark.parametrize("skip_output_reshape", [False, True])
    @pytest.mark.parametrize("skip_reshape", [False, True])
    @pytest.mark.parametrize("length", [200, 129])
    def test_all_blocks_match_stock_attention(self, length: int, skip_reshape: bool, skip_output_reshape: bool) -> None:
        tensors = make_qkv(length, batch=2, heads=3, head_dim=24)
        inputs = tensors if skip_reshape else tuple(map(flat, tensors))
        call = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
        out = run(attention_override(ALL_BLOCKS, backend="torch"), *inputs, 3, **call)
        exact, plain = exact_attention(*tensors)[0], plain_attention(*tensors)
        if not skip_output_reshape:
            exact, plain = flat(exact), flat(plain)
        assert_within_budget(out, exact, plain)
        assert torch.equal(plain, sdpa(*inputs, 3, **call)), "the stand-in is SDPA"
        assert sparge.stats().sparse == 1

    @pytest.mark.parametrize("skip_reshape", [False, True])
    def test_grouped_heads_and_scale(self, skip_reshape: bool) -> None:
        tensors = make_qkv(200, batch=1, heads=4, kv_heads=2, head_dim=16)
        inputs = tensors if skip_reshape else tuple(map(flat, tensors))
        override = attention_override(ALL_BLOCKS, backend="torch")
        out = run(override, *inputs, 4, skip_reshape=skip_reshape, enable_gqa=True, scale=0.1)
        exact, plain = exact_attention(*tensors, scale=0.1)[0], plain_attention(*tensors, scale=0.1)
        assert_within_budget(out, flat(exact), flat(plain))
        assert sparge.stats().sparse == 1

    def test_sparse_output_equals_sparge_attention(self, qkv: Tensors) -> None:
        out = run(attention_override(25, backend="torch"), *map(flat, qkv), HEADS)
        assert torch.equal(out, flat(sparge.attention(*qkv, topk=0.25, backend="torch")))
        assert sparge.stats().density == 0.25
        assert not torch.equal(out, sdpa(*map(flat, qkv), HEADS))


class TestHundredPercent:
    """100 percent is dense attention, quantized on devices where quantization is faster, here simulated on a CPU."""

    def output_of_second_block(self, qkv: Tensors, **call: Any) -> Tensor:
        override = attention_override(100, dense_blocks="0", backend="torch")
        for index in (0, 1):
            options = {"block_type": "double", "block_index": index, "total_blocks": 2}
            out = run(override, *map(flat, qkv), HEADS, options=options, **call)
        return out

    def test_is_quantized_if_faster(self, qkv: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(base, "_fastest_quantization", lambda *_: "int8_fp8")
        out = self.output_of_second_block(qkv)
        options = {"sparsity": sparge.Dense(), "backend": "torch", "quantization": "int8_fp8"}
        assert {name: layer.reasons for name, layer in sparge.stats().layers.items()} == {
            "double_block.0": {"dense: dense layer": 1},
            "double_block.1": {"dense in 8 bits: dense layer": 1},
        }
        assert torch.equal(out, flat(sparge.attention(*qkv, **options)))

    @pytest.mark.parametrize("is_faster, call", [(False, {}), (True, {"attn_precision": torch.float32})])
    def test_is_stock_otherwise(
        self, is_faster: bool, call: dict[str, Any], qkv: Tensors, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if is_faster:
            monkeypatch.setattr(base, "_fastest_quantization", lambda *_: "int8_fp8")
        assert torch.equal(self.output_of_second_block(qkv, **call), sdpa(*map(flat, qkv), HEADS))
        assert sparge.stats().reasons == {"dense: dense layer": 2}


def masks(length: int) -> dict[str, Tensor]:
    """Return bool and additive masks of all shapes; every query sees at least one key."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "2-D": (length, length),
        "2-D, one row": (1, length),
        "3-D": (2, length, length),
        "3-D, one batch": (1, length, length),
        "3-D, one row": (2, 1, length),
        "4-D": (2, 3, length, length),
        "4-D, one head": (2, 1, length, length),
        "4-D, keys": (2, 1, 1, length),
    }
    found = {}
    for name, shape in shapes.items():
        seen = torch.rand(shape, generator=generator) < 0.7
        seen[..., :1] = True
        found[f"{name}, bool"] = seen
        found[f"{name}, bias"] = torch.randn(shape, generator=generator)
        found[f"{name}, -inf"] = torch.zeros(shape).masked_fill(~seen, -torch.inf)
        found[f"{name}, lowest"] = torch.zeros(shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return found


class TestMasks:
    @pytest.mark.parametrize("name", masks(8))
    def test_all_blocks_match_stock_attention(self, name: str) -> None:
        mask = masks(200)[name]
        tensors = make_qkv(200, batch=2, heads=3, head_dim=16)
        out = run(attention_override(ALL_BLOCKS, backend="torch"), *map(flat, tensors), 3, mask)
        full = mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
        exact, plain = exact_attention(*tensors, attn_mask=full)[0], plain_attention(*tensors, attn_mask=full)
        assert_within_budget(out, flat(exact), flat(plain))
        assert sparge.stats().sparse == 1

    def test_masked_keys_do_not_change_sparse_output(self, qkv: Tensors) -> None:
        query, key, value = qkv
        seen = torch.arange(TOKENS)[None] < TOKENS - 100
        override = attention_override(25, backend="torch")
        first = run(override, *map(flat, qkv), HEADS, seen)
        key[:, :, -100:], value[:, :, -100:] = 9.0, 1e4
        assert torch.equal(first, run(override, *map(flat, (query, key, value)), HEADS, seen))
        assert sparge.stats().sparse == 2

    def test_mask_of_a_wrong_shape_runs_stock(self) -> None:
        tensors = make_qkv(200, batch=2, heads=2, head_dim=16)
        with pytest.warns(UserWarning, match="shape of the mask"), pytest.raises(RuntimeError, match="size"):
            run(attention_override(50, backend="torch"), *tensors, 2, torch.ones(7, 200).bool(), skip_reshape=True)


class TestSteps:
    def test_steps_outside_the_range_are_bitwise_dense(self, qkv: Tensors) -> None:
        model = Flux(0, *qkv)
        stock = sdpa(*qkv, HEADS, skip_reshape=True)
        patched = sparsify(Patcher(), keep_percent=25, start_percent=0.3, end_percent=0.7, backend="torch")
        equal = [all(torch.equal(out, stock) for out in step.values()) for step in sample(patched, model)]
        assert equal == [True, True, False, False, True], "steps at 0, .2, .4, .6, .8"
        assert sparge.stats().reasons == {"sparse: torch": 10, "dense: dense step": 15}
        assert set(sparse_layers().values()) == {(2, 3)}

    @pytest.mark.parametrize(
        ("start", "end", "sparse"), [(0.4, 1, 3), (0, 0.4, 3), (0.4, 0.4, 1), (0, 1, 5), (1, 1, 0)]
    )
    def test_range_includes_its_bounds(self, start: float, end: float, sparse: int, short: Tensors) -> None:
        patched = sparsify(Patcher(), start_percent=start, end_percent=end, backend="torch")
        sample(patched, Flux(0, *short))
        assert sparge.stats().sparse == 5 * sparse

    def test_range_uses_the_models_schedule(self, short: Tensors) -> None:
        """With a shift of 9, sigma is 0.9 at half of the schedule. Of five steps, the first three have a higher sigma.

        These three are dense; the last two are sparse.
        """
        patcher = Patcher()
        patcher.objects["model_sampling"].shift = 9.0
        sample(sparsify(patcher, start_percent=0.5, backend="torch"), Flux(0, *short))
        assert sparge.stats().sparse == 5 * 2

    def test_sigma_is_read_once_per_step(self, short: Tensors) -> None:
        class Reads(TorchFunctionMode):
            count = 0

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                del types
                self.count += func in (Tensor.__float__, Tensor.item, Tensor.tolist, Tensor.__bool__)
                return func(*args, **(kwargs or {}))

        patched = sparsify(Patcher(), start_percent=0.9, backend="torch")
        with Reads() as reads:
            sample(patched, Flux(0, *short), passes=2)
        assert sparge.stats().calls == 50
        assert reads.count == 5
        with Reads() as reads:
            sample(sparsify(Patcher(), dense_blocks="0-2", backend="torch"), Flux(0, *short))
        assert reads.count == 0, "without a range, sigma is not read"

    def test_missing_sigmas_run_dense_with_a_warning(self, qkv: Tensors) -> None:
        override = attention_override(25, start_sigma=0.5, backend="torch")
        with pytest.warns(UserWarning, match="no sigmas"):
            out = run(override, *qkv, HEADS, skip_reshape=True)
        assert torch.equal(out, sdpa(*qkv, HEADS, skip_reshape=True))
        assert sparge.stats().dense == 1


class TestBlocks:
    @pytest.mark.parametrize(
        ("text", "dense"),
        [
            ("", set()),
            ("0", {"double_block.0", "single_block.0"}),
            ("-1", {"double_block.1", "single_block.2"}),
            ("2, -3", {"single_block.0", "single_block.2"}),
            ("0-1", {"double_block.0", "double_block.1", "single_block.0", "single_block.1"}),
            ("7", set()),
        ],
    )
    def test_named_blocks_are_bitwise_dense(self, text: str, dense: set[str], qkv: Tensors) -> None:
        stock = sdpa(*qkv, HEADS, skip_reshape=True)
        patched = sparsify(Patcher(), keep_percent=25, dense_blocks=text, backend="torch")
        (outputs,) = sample(patched, Flux(0, *qkv), steps=1)
        assert {name for name, out in outputs.items() if torch.equal(out, stock)} == dense
        assert sparse_layers() == {name: (0, 1) if name in dense else (1, 0) for name in outputs}

    def test_unets_use_the_block_number(self, short: Tensors) -> None:
        override = attention_override(25, dense_blocks="4", backend="torch")
        for block, index in itertools.product([("input", 4), ("input", 5), ("middle", 0)], [0, 1]):
            options = {"block": block, "block_index": index}
            run(override, *short, HEADS, skip_reshape=True, options=options)
        assert sparse_layers() == {
            "input_block.4.0": (0, 1),
            "input_block.4.1": (0, 1),
            "input_block.5.0": (1, 0),
            "input_block.5.1": (1, 0),
            "middle_block.0.0": (1, 0),
            "middle_block.0.1": (1, 0),
        }

    @pytest.mark.parametrize(
        ("text", "options", "reason"),
        [
            ("0", {}, "dense_blocks, but the model does not number its blocks"),
            (
                "1, -1",
                {"block": ("input", 4), "block_index": 0},
                "negative dense_blocks, but the model does not give its number of blocks",
            ),
            ("4, -1", {"block": ("input", 4), "block_index": 0}, None),
            ("-1", {"block_index": 3}, "negative dense_blocks, but the model does not give its number of blocks"),
        ],
    )
    def test_unknown_block_numbers_run_dense_with_a_warning(
        self, text: str, options: dict[str, Any], reason: str | None, qkv: Tensors
    ) -> None:
        override = attention_override(25, dense_blocks=text, backend="torch")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = run(override, *qkv, HEADS, skip_reshape=True, options=options)
            run(override, *make_qkv(64, heads=HEADS), HEADS, skip_reshape=True, options=options)
        assert torch.equal(out, sdpa(*qkv, HEADS, skip_reshape=True))
        message = f"sparge: an attention call cannot be sparse: {reason}; it runs dense"
        assert [str(warning.message) for warning in caught] == ([] if reason is None else [message])
        assert sparge.stats().sparse == 0

    def test_calls_without_a_layer_name_count_in_the_totals(self, short: Tensors) -> None:
        run(attention_override(25, backend="torch"), *short, HEADS, skip_reshape=True)
        assert sparge.stats().sparse == 1
        assert sparse_layers() == {}

    @pytest.mark.parametrize(
        ("text", "numbers"),
        [
            (" ", ()),
            ("0, 1, -1", (0, 1, -1)),
            ("0-3,-1", (0, 1, 2, 3, -1)),
            (" 2 - 4 ,3", (2, 3, 4)),
            ("-3--1", (-3, -2, -1)),
        ],
    )
    def test_parsing(self, text: str, numbers: tuple[int, ...]) -> None:
        assert parse_blocks(text) == numbers

    @pytest.mark.parametrize("text", ["first", "0,,1", "0 1", "3-1", "0--1", "1.5", "0-99999", "-", "1,"])
    def test_bad_text_raises(self, text: str) -> None:
        expected = f"dense_blocks: expected numbers and ranges such as '0, 1, -1' or '0-3, -1', got {text!r}"
        with pytest.raises(ValueError, match=re.escape(expected)):
            sparsify(Patcher(), dense_blocks=text)


class TestText:
    TEXT = 100

    def expected(self, tensors: tuple[Tensor, ...], *kept: tuple[int, int]) -> Tensor:
        out = sparge.attention(*tensors, topk=0.25, always_keep=list(kept) or None, backend="torch")
        sparge.reset_stats()
        return flat(out)

    @pytest.fixture
    def tensors(self) -> Tensors:
        """Text at the start and the end, with low scores for all image queries."""
        query, key, value = make_qkv(TOKENS, heads=HEADS, head_dim=HEAD_DIM)
        direction = torch.ones(HEAD_DIM)
        query = query + direction
        for text in (slice(0, self.TEXT), slice(-self.TEXT, None)):
            key[:, :, text] -= 3 * direction
        return query, key, value

    def test_text_marked_by_the_model_is_kept(self, tensors: Tensors) -> None:
        without, first, last = (
            self.expected(tensors, *kept) for kept in ([], [(0, self.TEXT)], [(TOKENS - self.TEXT, TOKENS)])
        )
        assert not torch.equal(without, first)
        assert not torch.equal(without, last)
        layout = SimpleNamespace(
            seq_len=TOKENS, segments=[(0, 60, "text"), (60, self.TEXT, "audio"), (self.TEXT, TOKENS, "video")]
        )
        other = SimpleNamespace(seq_len=TOKENS + 1, segments=[(0, self.TEXT, "text")])
        cases: list[tuple[dict[str, Any], Tensor]] = [
            ({}, without),
            ({"img_slice": [self.TEXT, TOKENS]}, first),
            ({"img_slice": [0, TOKENS - self.TEXT]}, last),
            ({"img_slice": [0, TOKENS]}, without),
            ({"img_slice": [self.TEXT, TOKENS + 1]}, without),
            ({"minimax_h3_layout": layout}, first),
            ({"minimax_h3_layout": other}, without),
        ]
        for options, expected in cases:
            out = run(attention_override(25, backend="torch"), *tensors, HEADS, skip_reshape=True, options=options)
            assert torch.equal(out, expected), options

    def test_double_blocks_use_the_text_marks_of_single_blocks_in_the_same_run(self, tensors: Tensors) -> None:
        without, kept = self.expected(tensors), self.expected(tensors, (0, self.TEXT))
        patched = sparsify(Patcher(), keep_percent=25, backend="torch")
        for _ in range(2):
            first, second = sample(patched, Flux(self.TEXT, *tensors), steps=2)
            assert torch.equal(first["double_block.1"], without)
            for out in (first["single_block.0"], second["double_block.0"], second["single_block.2"]):
                assert torch.equal(out, kept)

    def test_dense_steps_provide_text_marks(self, tensors: Tensors) -> None:
        kept = self.expected(tensors, (0, self.TEXT))
        patched = sparsify(Patcher(), keep_percent=25, start_percent=0.3, backend="torch")
        first, second = sample(patched, Flux(self.TEXT, *tensors), steps=2)
        assert torch.equal(first["double_block.0"], sdpa(*tensors, HEADS, skip_reshape=True))
        assert torch.equal(second["double_block.0"], kept)


class TestDense:
    """Dense calls are forwarded with their arguments."""

    def recorder(self) -> tuple[list[tuple[Any, ...]], Callable[..., Tensor]]:
        seen: list[tuple[Any, ...]] = []

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            seen.append((args, kwargs))
            return sdpa(*args, **kwargs)

        return seen, attention

    def test_cross_attention_and_short_calls(self) -> None:
        query, key, value = make_qkv(TOKENS, 77, heads=HEADS, head_dim=HEAD_DIM)
        options = {"block_type": "double", "block_index": 3}
        override = attention_override(25, min_tokens=1024, backend="torch")
        run(override, query, key, value, HEADS, skip_reshape=True, options=options)
        run(override, query[:, :, :1023], query[:, :, :1023], query[:, :, :1023], HEADS, skip_reshape=True)
        run(attention_override(25), query, query, query, HEADS, skip_reshape=True)  # 2048 keys on CPUs
        assert sparge.stats().reasons == {
            "dense: cross-attention": 1,
            "dense: fewer than min_tokens": 1,
            "dense: below the crossover": 1,
        }
        assert sparse_layers() == {"double_block.3": (0, 1)}

    def test_arguments_are_forwarded_unchanged(self) -> None:
        tensors = [flat(tensor) for tensor in make_qkv(64, heads=HEADS, head_dim=HEAD_DIM)]
        seen, attention = self.recorder()
        options = {"optimized_attention_override": attention_override(25)}
        mask = torch.zeros(64, 64)
        wrapped(attention)(*tensors, HEADS, mask, attn_precision=torch.float32, strange=1, transformer_options=options)
        ((args, kwargs),) = seen
        assert [*map(id, args)] == [*map(id, (*tensors, HEADS, mask))]
        assert kwargs.pop("transformer_options") is options
        assert kwargs == {"attn_precision": torch.float32, "strange": 1, "_inside_attn_wrapper": True}

    def test_earlier_override_computes_dense_calls(self, qkv: Tensors) -> None:
        seen: list[int] = []

        def earlier(func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
            assert func is sdpa
            seen.append(kwargs["transformer_options"]["block_index"])
            return func(*args, **kwargs) + 1

        patcher = Patcher()
        patcher.model_options["transformer_options"]["optimized_attention_override"] = earlier
        patched = sparsify(patcher, keep_percent=25, dense_blocks="1", backend="torch")
        (outputs,) = sample(patched, Flux(0, *qkv), steps=1)
        stock = sdpa(*qkv, HEADS, skip_reshape=True)
        assert seen == [1, 1]
        assert torch.equal(outputs["double_block.1"], stock + 1)
        assert torch.equal(outputs["single_block.0"], flat(sparge.attention(*qkv, topk=0.25, backend="torch")))
        assert patcher.model_options["transformer_options"]["optimized_attention_override"] is earlier

    def test_two_nodes_with_different_step_ranges(self, qkv: Tensors) -> None:
        first = sparsify(Patcher(), keep_percent=ALL_BLOCKS, end_percent=0.4, backend="torch")
        both = sparsify(first, keep_percent=25, start_percent=0.5, backend="torch")
        outputs = sample(both, Flux(0, *qkv), steps=2)
        for step, topk in zip(outputs, (1.0, 0.25), strict=True):
            expected = flat(sparge.attention(*qkv, topk=topk, backend="torch"))
            assert torch.equal(step["double_block.0"], expected)

    @pytest.mark.parametrize(
        ("reason", "change"),
        [
            ("head_dim 512", {"head_dim": 512}),
            ("float64", {"dtype": torch.float64}),
            ("argument gate", {"gate": 1.0}),
            ("number of heads", {"call_heads": 1}),
            ("gradients", {"requires_grad": True}),
        ],
    )
    def test_unsupported_calls_warn_once_and_run_stock(self, reason: str, change: dict[str, Any]) -> None:
        call_heads = change.pop("call_heads", 2)
        extra = {"gate": change.pop("gate")} if "gate" in change else {}
        requires_grad = change.pop("requires_grad", False)
        tensors = make_qkv(64, heads=2, **{"head_dim": 16, **change})
        tensors[0].requires_grad_(requires_grad)
        override = attention_override(50, backend="torch")
        with pytest.warns(UserWarning, match=f"cannot be sparse: {reason}; it runs dense") as caught:
            outputs = [run(override, *tensors, call_heads, skip_reshape=True, **extra) for _ in range(2)]
        assert len(caught) == 1
        for out in outputs:
            assert torch.equal(out, sdpa(*tensors, call_heads, skip_reshape=True))
        assert sparge.stats().reasons == {f"dense: unsupported ({reason})": 2}

    def test_three_dimensions_with_skip_reshape(self) -> None:
        tensor = torch.randn(1, 64, 30)
        with pytest.raises(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(attention_override(50, backend="torch"), tensor, tensor, tensor, 4)
        assert sparge.stats().reasons == {"dense: unsupported (3 dimensions)": 1}

    @pytest.mark.parametrize(
        ("call", "quantization"),
        [
            ({}, "auto"),
            ({"attn_precision": torch.float32}, "none"),
            ({"low_precision_attention": False}, "none"),
            ({"low_precision_attention": True, "attn_precision": torch.float16}, "auto"),
        ],
    )
    def test_attn_precision_disables_quantization(
        self, call: dict[str, Any], quantization: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used = []

        def spy(layer: layers.Layer, call: ModelCall) -> Tensor | None:
            used.append(layer.policy.quantization)
            return calls.attend(layer, call)

        monkeypatch.setattr(comfyui, "attend", spy)
        run(attention_override(50, backend="torch"), *make_qkv(200, heads=2), 2, skip_reshape=True, **call)
        assert used == [quantization]
        assert sparge.stats().sparse == 1


class TestModel:
    def test_original_model_is_unchanged(self, short: Tensors) -> None:
        patcher = Patcher()
        before = copy.deepcopy(patcher.model_options)
        options = patcher.model_options["transformer_options"]
        patched = sparsify(patcher, backend="torch")
        assert patcher.model_options == before
        assert patcher.model_options["transformer_options"] is options
        assert patched.model_options["transformer_options"]["patches"] == {"some": [1]}
        sample(patcher, Flux(0, *short))
        assert sparge.stats().calls == 0

    def test_original_is_unchanged_if_clones_share_dictionaries(self) -> None:
        class Sharing(Patcher):
            def clone(self) -> Patcher:
                return copy.copy(self)

        patcher = Sharing()
        sparsify(patcher)
        assert patcher.model_options == {"transformer_options": {"patches": {"some": [1]}}}

    def test_override_expects_plain_tensors(self) -> None:
        """ComfyUI only passes containers of tensors to overrides that have the attribute ``container_function``."""
        assert not hasattr(attention_override(), "container_function")

    def test_clones_stay_sparse(self, short: Tensors) -> None:
        patched = sparsify(Patcher(), start_percent=0.5, backend="torch").clone().clone()
        sample(patched, Flux(0, *short), steps=2)
        assert sparge.stats().sparse == 5

    def test_first_sparse_call_is_logged(self, short: Tensors, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            sample(sparsify(Patcher(), dense_blocks="0", backend="torch"), Flux(0, *short))
        assert caplog.messages == ["sparge: sparse attention is on, 128 tokens, double_block.1"]

    @pytest.mark.parametrize(
        ("values", "error", "message"),
        [
            ({"keep_percent": 0}, ValueError, "keep_percent: expected a number in (0, 100], got 0"),
            ({"keep_percent": 101}, ValueError, "keep_percent: expected a number in (0, 100], got 101"),
            ({"keep_percent": "50"}, TypeError, "keep_percent: expected a number, got str"),
            ({"start_percent": 0.6, "end_percent": 0.5}, ValueError, "end_percent <= 1, got 0.6 and 0.5"),
            ({"end_percent": 1.5}, ValueError, "expected 0 <= start_percent <= end_percent <= 1, got 0.0 and 1.5"),
            ({"min_tokens": -1}, ValueError, "min_tokens: expected 0 or more, got -1"),
        ],
    )
    def test_bad_values_raise(self, values: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=re.escape(message)):
            sparsify(Patcher(), **values)


class TestNode:
    def test_runs_with_default_inputs(self, node: ModuleType) -> None:
        """Run the node as ComfyUI does, on a sequence above the crossover of the CPU."""
        (name,) = node.NODE_CLASS_MAPPINGS
        assert node.NODE_DISPLAY_NAME_MAPPINGS[name] == "Sparse attention (sparge)"
        form = node.NODE_CLASS_MAPPINGS[name]
        inputs = form.INPUT_TYPES()["required"]
        assert [*inputs] == ["model", "keep_percent", "start_percent", "end_percent", "dense_blocks", "min_tokens"]
        values = {key: entry[1]["default"] for key, entry in inputs.items() if key != "model"}
        (patched,) = getattr(form(), form.FUNCTION)(model=Patcher(), **{**values, "dense_blocks": "0"})
        assert form.RETURN_TYPES == ("MODEL",)
        tensors = make_qkv(2304, heads=HEADS, head_dim=8)
        first, second = sample(patched, Flux(100, *tensors), steps=2)
        assert torch.equal(first["double_block.1"], sdpa(*tensors, HEADS, skip_reshape=True)), "start_percent"
        text = [(0, 100)]
        expected = flat(sparge.attention(*tensors, topk=0.5, always_keep=text, exact_queries=text))
        assert torch.equal(second["double_block.1"], expected)
        assert sparse_layers() == {name: (int(not name.endswith(".0")), 1 + name.endswith(".0")) for name in first}

    def test_missing_package_is_reported(
        self, node: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in ("sparge", "sparge.integrations", "sparge.integrations.comfyui"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=r"the Python package sparge cannot be imported.*pip install"):
            node.SpargeAttention().patch(Patcher())
        assert node.__spec__ is not None
        node.__spec__.loader.exec_module(node)
        assert [(record.levelname, record.message) for record in caplog.records] == [("ERROR", node.MISSING)]

    def test_example_workflow_has_the_node_between_loader_and_sampler(self, node: ModuleType) -> None:
        workflow = json.loads((FOLDER / "example_workflow.json").read_text())
        (number,) = (key for key, entry in workflow.items() if entry["class_type"] in node.NODE_CLASS_MAPPINGS)
        values = workflow[number]["inputs"]
        inputs = node.SpargeAttention.INPUT_TYPES()["required"]
        assert values.keys() == inputs.keys()
        assert all(values[key] == entry[1]["default"] for key, entry in inputs.items() if key != "model")
        assert workflow[values["model"][0]]["class_type"] == "CheckpointLoaderSimple"
        takers = [entry["class_type"] for entry in workflow.values() if [number, 0] in entry["inputs"].values()]
        assert takers == ["KSampler"]
        links = [value for entry in workflow.values() for value in entry["inputs"].values() if isinstance(value, list)]
        assert all(link[0] in workflow for link in links)

    def test_node_has_the_version_of_the_library(self) -> None:
        text = (FOLDER / "pyproject.toml").read_text()
        assert f'version = "{sparge.__version__}"' in text
