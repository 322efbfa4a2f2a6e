"""`replace_sdpa`: SDPA's semantics, sparse attention only inside the scope, decisions of the policy, and counts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sparge
from conftest import assert_within_budget, exact_attention, make_qkv, plain_attention, relative_l1
from sparge import Policy, TopK
from sparge.backends import base
from sparge.backends.base import ALWAYS, Crossover
from sparge.dispatch import dense_rules
from sparge.integrations import calls, decisions, layers, model_call, padding
from sparge.integrations.model_call import ModelCall
from sparge.integrations.sdpa import Scope, Tokens, sparse_sdpa

pytestmark = pytest.mark.timeout(120)

ALL_BLOCKS = Policy(topk=1.0, backend="torch")
SPARSE = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch")


def masks(kind: str, q_len: int, kv_len: int) -> Tensor | None:
    generator = torch.Generator().manual_seed(5)
    if kind == "none":
        return None
    if kind == "padding":
        return (torch.arange(kv_len) < kv_len - 70)[None, None, None]
    if kind == "gaps":
        return torch.rand(1, 1, 1, kv_len, generator=generator) > 0.3
    if kind == "square":
        return torch.rand(q_len, kv_len, generator=generator) > 0.3
    return torch.randn(1, 2, q_len, kv_len, generator=generator)  # additive


class TestSemantics:
    @pytest.mark.parametrize("kind", ["none", "padding", "gaps", "square", "additive"])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_all_blocks_equal_sdpa(self, kind: str, kv_heads: int) -> None:
        query, key, value = make_qkv(300, heads=4, kv_heads=kv_heads)
        mask = masks(kind if kind != "additive" else "none", 300, 300)
        mask = torch.randn(300, 300, generator=torch.Generator().manual_seed(1)) if kind == "additive" else mask
        arguments = (query, key, value, mask, 0.0, False)
        expected = F.scaled_dot_product_attention(*arguments, scale=0.2, enable_gqa=True)
        with sparge.replace_sdpa(ALL_BLOCKS):
            got = F.scaled_dot_product_attention(*arguments, scale=0.2, enable_gqa=True)
        assert sparge.stats().reasons == {"sparse: torch": 1}
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("q_len, kv_len", [(300, 300), (200, 300), (300, 200)])
    def test_causal_mask_is_top_left_aligned(self, q_len: int, kv_len: int) -> None:
        query, key, value = make_qkv(q_len, kv_len)
        policy = Policy(topk=1.0, backend="torch", self_attention_only=False, on_unsupported="dense")
        expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        with sparge.replace_sdpa(policy):
            got = F.scaled_dot_product_attention(query=query, key=key, value=value, is_causal=True)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)
        reason = "sparse: torch" if q_len <= kv_len else "dense: unsupported (causal with more queries than keys)"
        assert sparge.stats().reasons == {reason: 1}

    def test_autocast(self) -> None:
        query, key, value = make_qkv(300)
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.scaled_dot_product_attention(query, key, value)
            with sparge.replace_sdpa(ALL_BLOCKS):
                got = F.scaled_dot_product_attention(query, key, value)
        assert got.dtype == expected.dtype == torch.bfloat16
        exact, _ = exact_attention(*(tensor.bfloat16() for tensor in (query, key, value)))
        assert_within_budget(got, exact, plain_attention(*(tensor.bfloat16() for tensor in (query, key, value))))

    def test_autocast_does_not_cast_float64(self) -> None:
        query, key, value = make_qkv(300, dtype=torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.scaled_dot_product_attention(query, key, value)
            with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")):
                got = F.scaled_dot_product_attention(query, key, value)
        assert expected.dtype == torch.float64
        assert torch.equal(got, expected)
        assert sparge.stats().reasons == {"dense: unsupported (float64)": 1}

    def test_autocast_rounds_masks(self) -> None:
        query, key, value = make_qkv(300)
        mask = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)) * 100
        seen: list[Tensor] = []

        def watch(*args: Any, **kwargs: Any) -> Tensor:
            seen.append(args[3])
            return sparge.attention(*args, **kwargs)

        with (
            pytest.MonkeyPatch.context() as patch,
            torch.autocast("cpu", torch.bfloat16),
            sparge.replace_sdpa(ALL_BLOCKS),
        ):
            patch.setattr(calls.api, "attention", watch)
            F.scaled_dot_product_attention(query, key, value, mask)
        assert [given.dtype for given in seen] == [torch.bfloat16]
        assert torch.equal(seen[0].squeeze(), mask.bfloat16())

    @pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right], ids=["upper left", "lower right"])
    @pytest.mark.parametrize("lengths", [(300, 300), (200, 300)])
    @pytest.mark.parametrize("scopes", [1, 2])
    def test_causal_bias(self, make: Any, lengths: tuple[int, int], scopes: int) -> None:
        query, key, value = make_qkv(*lengths)
        bias = make(*lengths)
        seen = torch.ones(lengths, dtype=torch.bool).tril(0 if make is causal_upper_left else lengths[1] - lengths[0])
        exact, _ = exact_attention(query, key, value, attn_mask=seen)
        for policy, reason in (
            (Policy(topk=1.0, backend="torch", self_attention_only=False), "sparse: torch"),
            (Policy(min_tokens=999, backend="torch", self_attention_only=False), "dense: fewer than min_tokens"),
        ):
            sparge.reset_stats()
            with contextlib.ExitStack() as stack:
                for _ in range(scopes):
                    stack.enter_context(sparge.replace_sdpa(policy))
                got = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
            torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=2e-6)
            assert sparge.stats().reasons == {reason: 1}

    def test_causal_bias_of_other_lengths(self) -> None:
        query, key, value = make_qkv(200)
        with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")):
            with pytest.raises(ValueError, match="causal=True"):
                F.scaled_dot_product_attention(query, key, value, causal_upper_left(200, 200), is_causal=True)
            bias = causal_upper_left(100, 100)  # SDPA uses the lengths of the tensors
            got = F.scaled_dot_product_attention(query, key, value, bias)
        assert torch.equal(got, F.scaled_dot_product_attention(query, key, value, is_causal=True))
        assert sparge.stats().sparse == 0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("rows", ["queries", "keys"])
    def test_mask_rows_of_the_dtype_minimum(self, dtype: torch.dtype, rows: str) -> None:
        """SDPA treats the minimum of a dtype like any other number."""
        query, key, value = make_qkv(200, dtype=dtype)
        lowest = torch.finfo(dtype).min
        mask = torch.zeros(1, 1, 200 if rows == "queries" else 1, 200, dtype=dtype)
        mask[..., 100:] = lowest
        with sparge.replace_sdpa(Policy(topk=1.0, backend="torch", on_unsupported="dense")):
            got = F.scaled_dot_product_attention(query, key, value, mask)
            assert sparge.stats().sparse == 1
            exact, _ = exact_attention(query, key, value, attn_mask=mask)
            assert_within_budget(got, exact, plain_attention(query, key, value, attn_mask=mask))
            mask[:, :, -1] = lowest
            got = F.scaled_dot_product_attention(query, key, value, mask)
        assert torch.equal(got, F.scaled_dot_product_attention(query, key, value, mask))
        assert (got[:, :, -1] != 0).any()
        assert sparge.stats().reasons["dense: unsupported (mask with rows of only its lowest number)"] == 1

    def test_mask_rows_of_the_dtype_minimum_in_a_compiled_program(self) -> None:
        query, key, value = make_qkv(200)
        mask = torch.full((200, 200), torch.finfo(torch.float32).min)
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="eager")
        with sparge.replace_sdpa(Policy(topk=1.0, backend="torch", on_unsupported="dense")):
            got = compiled(query, key, value, mask)
        torch.testing.assert_close(got, value.mean(2, keepdim=True).expand_as(got), rtol=1e-4, atol=1e-5)

    def test_sparse_output_equals_sparge_attention(self) -> None:
        query, key, value = make_qkv(600)
        with sparge.replace_sdpa(SPARSE):
            got = F.scaled_dot_product_attention(query, key, value)
        expected = sparge.attention(query, key, value, sparsity=SPARSE.selection, backend="torch")
        assert torch.equal(got, expected)
        assert relative_l1(got, exact_attention(query, key, value)[0]) > 0.1

    def test_always_keep_reaches_the_call(self) -> None:
        query, key, value = make_qkv(600)
        value.zero_()
        value[:, :, 590:] = 1.0
        policy = Policy(sparsity=TopK(0.01, min_blocks=1), backend="torch", always_keep=((-10, None),))
        with sparge.replace_sdpa(policy):
            assert (F.scaled_dot_product_attention(query, key, value) > 0).all()

    def test_all_ways_of_importing_sdpa(self) -> None:
        from torch.nn.functional import scaled_dot_product_attention

        query, key, value = make_qkv(200)
        with sparge.replace_sdpa(ALL_BLOCKS):
            scaled_dot_product_attention(query, key, value)
        assert sparge.stats().sparse == 1

    def test_sdpa_raises_its_own_errors(self) -> None:
        query, key, value = make_qkv(200)
        with sparge.replace_sdpa(ALL_BLOCKS), pytest.raises(TypeError):
            F.scaled_dot_product_attention(query, key)
        with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(query, key[..., :16], value)

    def test_mask_with_is_causal_runs_on_sdpa(self) -> None:
        arguments = (*make_qkv(200), torch.rand(200, 200, generator=torch.Generator().manual_seed(0)) > 0.3, 0.0, True)
        try:
            expected = F.scaled_dot_product_attention(*arguments)
        except RuntimeError:  # the documented behavior
            expected = None
        with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")):
            if expected is None:
                with pytest.raises(RuntimeError):
                    F.scaled_dot_product_attention(*arguments)
            else:
                assert torch.equal(F.scaled_dot_product_attention(*arguments), expected)
        assert sparge.stats().reasons == {"dense: unsupported (a mask and is_causal)": 1}


class TestMasksOnGpus:
    """Decisions for a GPU whose crossover under a mask is 5 heads of 2048 tokens, simulated on the CPU."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        by_mask, cuda = dense_rules.by_mask, torch.device("cuda")
        monkeypatch.setattr(dense_rules, "by_mask", lambda mask, shape, _, **more: by_mask(mask, shape, cuda, **more))
        monkeypatch.setattr(
            dense_rules.base, "crossover_under_mask_for", lambda *_: replace(ALWAYS, scores=5 * 2048**2)
        )

    @pytest.mark.parametrize(
        "shape, is_compiled", [((2048, 2048), False), ((1, 1, 2048, 2048), False), ((2048, 2048), True)], ids=str
    )
    def test_bool_mask_shared_by_heads_is_sparse(self, shape: tuple[int, ...], is_compiled: bool) -> None:
        tensors, mask = make_qkv(2048, heads=5, head_dim=16), documents(2048).view(shape)
        expected = sparge.attention(*tensors, mask, topk=0.25, backend="torch")
        sparge.reset_stats()
        sdpa = F.scaled_dot_product_attention
        with sparge.replace_sdpa(Policy(topk=0.25)):
            got = (torch.compile(sdpa, fullgraph=True, backend="eager") if is_compiled else sdpa)(*tensors, mask)
        assert torch.equal(got, expected)
        assert sparge.stats().reasons == {"sparse: torch": 1}

    @pytest.mark.parametrize(
        "kind, heads, reason",
        [
            ("bias", 5, "costly mask (additive mask)"),
            ("key bias", 5, "costly mask (additive mask)"),
            ("hiding bias", 5, "costly mask (additive mask)"),
            ("own heads", 5, "costly mask (mask that fewer than 4 heads share)"),
            ("shared", 3, "costly mask (mask that fewer than 4 heads share)"),
            ("shared", 4, "costly mask (full mask)"),
        ],
    )
    def test_other_masks_run_on_sdpa_with_a_reason(self, kind: str, heads: int, reason: str) -> None:
        tensors, shared = make_qkv(2048, heads=heads, head_dim=16), documents(2048)
        mask = {
            "bias": torch.linspace(-1, 1, 2048).repeat(2048, 1),
            "key bias": torch.linspace(-1, 1, 2048)[None],
            "hiding bias": torch.zeros(2048, 2048).masked_fill(~shared, -torch.inf),
            "own heads": shared.repeat(1, heads, 1, 1),
            "shared": shared,
        }[kind]
        with sparge.replace_sdpa(Policy(topk=0.25, on_unsupported="dense")):
            got = F.scaled_dot_product_attention(*tensors, mask)
        assert torch.equal(got, F.scaled_dot_product_attention(*tensors, mask))
        assert sparge.stats().reasons == {f"dense: {reason}": 1}

    @pytest.mark.parametrize("kind", ["shared", "own heads"])
    @pytest.mark.parametrize("own", [5, 1], ids=["most heads", "one head"])
    def test_ranks_with_unequal_heads_make_the_same_decision(self, kind: str, own: int) -> None:
        """One rank has 5 of 6 heads. If ranks decided by their own heads, they would deadlock."""
        tensors, shared = make_qkv(2048, heads=own, head_dim=16), documents(2048)[None, None]
        mask = shared if kind == "shared" else shared.repeat(1, 6, 1, 1)
        sizes = tuple(tensor[:, :1, :1].expand(-1, 5, 2048, -1) for tensor in tensors[:2])
        part = model_call.RankPart(sizes, sparge.attention, mask=mask)
        scope = Scope(layers.Layer("layer", Policy(topk=0.25, on_unsupported="dense")))
        output = sparse_sdpa(scope, *tensors, mask[:, :own], tokens=Tokens(True), part=part)
        assert (output is not None) == (kind == "shared")

    def test_expanded_masks_equal_the_masks_they_expand(self) -> None:
        tensors, shared = make_qkv(2200, heads=5, head_dim=16), documents(2200)
        keys = (torch.arange(2200) < 2100)[None, None, None]
        for mask in (shared, keys):
            with sparge.replace_sdpa(Policy(topk=0.25)):
                expected = F.scaled_dot_product_attention(*tensors, mask)
                got = F.scaled_dot_product_attention(*tensors, mask.expand(1, 5, 2200, 2200))
            assert torch.equal(got, expected)
        assert sparge.stats().reasons == {"sparse: torch": 4}
        wrong = keys[0, 0].expand(7, 2200)
        with sparge.replace_sdpa(Policy(on_unsupported="dense")), pytest.raises((RuntimeError, ValueError)):
            F.scaled_dot_product_attention(*tensors, wrong)

    def test_quantized_dense_calls_have_no_crossover_under_masks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dense_rules, "runs_quantized", lambda *_: True)
        layer = layers.Layer("a", Policy(dense="8bit"), dense=True)
        assert calls.attend(layer, ModelCall(*make_qkv(2048, heads=5, head_dim=16), documents(2048))) is None
        assert sparge.stats().reasons == {"dense: dense layer": 1}


def documents(length: int) -> Tensor:
    number = torch.arange(length) // 900
    return number[:, None] == number


def test_crossovers_under_masks() -> None:
    """Kernels that read masks have a measured crossover; other backends are never sparse under a mask."""
    assert {name: base.get(name).crossover_under_mask("cuda").scores for name in ("hopper", "triton")} == {
        "hopper": 2**30,
        "triton": 2**30,
    }
    assert base.get("torch").crossover_under_mask("cuda") == base.NEVER
    assert base.get("torch").crossover_under_mask("cpu") == base.NEVER
    assert base.crossover_under_mask_for(torch.device("cpu")) == base.NEVER


class TestDecisions:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("has_sinks", [False, True])
    def test_crossover_applies_to_each_sequence_under_a_named_quantization(
        self, is_causal: bool, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A policy that names a quantization does not disable the crossover, even of padded sequences."""
        monkeypatch.setattr(dense_rules.base, "crossover_of", lambda *_: Crossover(512, 512, 128, 0))
        monkeypatch.setattr(dense_rules.base, "crossover_for", lambda *_: Crossover(512, 512, 128, 0))
        tensors, mask = make_qkv(640, batch=2, heads=2), torch.ones(2, 1, 1, 640, dtype=torch.bool)
        mask[1, ..., 500:] = False
        call = {"is_causal": is_causal, "is_language": is_causal, "sinks": torch.ones(2) if has_sinks else None}
        named, plain = (
            calls.attend(layers.Layer(name, Policy(topk=0.5, quantization=name)), ModelCall(*tensors, mask, **call))
            for name in ("int8_fp16", "none")
        )
        assert not torch.equal(named[0], plain[0]), "quantized above the crossover"
        assert torch.equal(named[1], plain[1]), "in 16 bits below the crossover"
        short = [tensor[1:, :, :500] for tensor in tensors]
        if not has_sinks:
            expected = F.scaled_dot_product_attention(*short, is_causal=is_causal)
            torch.testing.assert_close(named[1:, :, :500], expected)
        sparge.reset_stats()
        calls.attend(
            layers.Layer("", Policy(quantization="int8_fp16")), ModelCall(*(t[1:] for t in tensors), mask[1:], **call)
        )
        assert sparge.stats().reasons == {"dense: below the crossover": 1}

    def test_repeated_decisions_of_a_layer_are_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cached while calls have the same shapes; the position in the schedule is read for each call."""
        decisions_made = []
        by_policy = dense_rules.by_policy
        monkeypatch.setattr(
            dense_rules, "by_policy", lambda *args, **call: decisions_made.append(1) or by_policy(*args, **call)
        )
        policy = Policy(backend="torch", min_tokens=150)
        layer = layers.Layer("a", policy, steps=layers.Steps(policy))
        long, short = torch.zeros(1, 2, 200, 16), torch.zeros(1, 2, 100, 16)
        for query, key, expected in (
            (short, short, "dense: fewer than min_tokens"),
            (short, short, "dense: fewer than min_tokens"),
            (long, short, "dense: cross-attention"),
            (long, long, "dense: dense step, the schedule is unknown"),
            (long, long, "dense: dense step, the schedule is unknown"),
        ):
            sparge.reset_stats()
            assert decisions.runs_dense(layer, query, key)
            assert sparge.stats().layers["a"].reasons == {expected: 1}
        assert len(decisions_made) == 3
        assert layer.steps is not None
        layer.steps.start(4)
        assert not decisions.runs_dense(layer, long, long)
        same_sizes = torch.zeros(1, 200, 200, 16)
        assert not decisions.runs_dense(layer, same_sizes, same_sizes)
        assert decisions.runs_dense(layer, same_sizes[:, :1], same_sizes, is_self=False)
        assert len(decisions_made) == 5

    @pytest.mark.parametrize(
        "policy, sizes, reason",
        [
            (Policy(), {"q_len": 200}, "below the crossover"),
            (Policy(backend="torch", min_tokens=201), {"q_len": 200}, "fewer than min_tokens"),
            (Policy(backend="torch"), {"q_len": 200, "kv_len": 77}, "cross-attention"),
            (Policy(backend="torch"), {"q_len": 200, "head_dim": 512}, "unsupported (head_dim 512)"),
            (Policy(backend="torch"), {"q_len": 200, "head_dim": 4}, "unsupported (head_dim 4)"),
            (Policy(backend="torch"), {"q_len": 200, "dtype": torch.float64}, "unsupported (float64)"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_reasons_of_dense_calls(self, policy: Policy, sizes: dict[str, Any], reason: str) -> None:
        query, key, value = make_qkv(**sizes)
        expected = F.scaled_dot_product_attention(query, key, value)
        with warnings.catch_warnings(record=True) as caught, sparge.replace_sdpa(policy):
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)
        assert sparge.stats().reasons == {f"dense: {reason}": 2}
        loud = reason.startswith("unsupported")
        assert [str(warning.message).startswith("sparge: ") for warning in caught] == [True] * loud, (
            "at most one warning"
        )

    @pytest.mark.parametrize("call", ["gradients", "dropout", "three", "broadcast", "subclass"])
    def test_unsupported_calls(self, call: str) -> None:
        query, key, value = make_qkv(200)
        dropout = 0.0
        if call == "gradients":
            query.requires_grad_()
        elif call == "dropout":
            dropout = 0.1
        elif call == "three":
            query, key, value = (tensor[0] for tensor in (query, key, value))
        elif call == "broadcast":
            key, value = key[:, :1], value[:, :1]
        else:
            query = torch.nn.Parameter(query, requires_grad=False)
        torch.manual_seed(3)
        expected = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        torch.manual_seed(3)
        with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")):
            got = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        assert torch.equal(got, expected)
        assert got.requires_grad == expected.requires_grad
        (reason,) = sparge.stats().reasons
        assert reason.startswith("dense: unsupported (")
        loud = sparge.replace_sdpa(Policy(backend="torch", on_unsupported="raise"))
        with loud, pytest.raises(NotImplementedError, match="cannot be sparse"):
            F.scaled_dot_product_attention(query, key, value, dropout_p=dropout)

    def test_nested_and_meta_tensors(self) -> None:
        policy = Policy(backend="torch", on_unsupported="dense")
        parts = [[torch.randn(length, 2, 16) for length in (30, 20)] for _ in range(3)]
        for layout in (torch.strided, torch.jagged):
            nested = [torch.nested.nested_tensor(part, layout=layout).transpose(1, 2) for part in parts]
            if layout == torch.strided:
                nested = [tensor.contiguous() for tensor in nested]
            expected = F.scaled_dot_product_attention(*nested)
            sparge.reset_stats()
            with sparge.replace_sdpa(policy):
                got = F.scaled_dot_product_attention(*nested)
            assert all(map(torch.equal, got.unbind(), expected.unbind()))
            assert sparge.stats().reasons == {"dense: unsupported (nested tensors)": 1}
        query, key, value = (tensor.to("meta") for tensor in make_qkv(200))
        for is_causal in (False, True):
            sparge.reset_stats()
            with sparge.replace_sdpa(policy):
                got = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
            assert got.is_meta
            assert got.shape == query.shape
            assert sparge.stats().reasons == {"dense: unsupported (devices)": 1}

    def test_torch_func_transforms_run_dense(self) -> None:
        query, key, value = make_qkv(200, batch=2)
        mask = torch.zeros(2, 1, 1, 1, 200, dtype=torch.bool)
        mask[0, ..., :150] = mask[1, ..., 20:] = True

        def results() -> tuple[Tensor, Tensor]:
            with sdpa_kernel(SDPBackend.MATH):  # other backends have neither tangents nor batching rules
                batch = torch.func.vmap(F.scaled_dot_product_attention)(
                    query[:, None], key[:, None], value[:, None], mask
                )
                return batch, torch.func.jvp(
                    lambda query: F.scaled_dot_product_attention(query, key, value), (query,), (query,)
                )[1]

        expected = results()
        assert expected[1].abs().max() > 0.1
        with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")):
            assert all(map(torch.equal, results(), expected))
        assert sparge.stats().reasons == {"dense: unsupported (a transform of torch.func)": 2}
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="gradients"):
            query = torch.autograd.forward_ad.make_dual(query, query)
            with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="raise")):
                F.scaled_dot_product_attention(query, key, value)

    def test_reentrant_checkpoints_recompute_the_same_forward(self) -> None:
        query, key, value = make_qkv(600)
        query.requires_grad_()

        def run(query: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(query * 2, key, value)

        expected = run(query)
        (gradient,) = torch.autograd.grad(expected.square().sum(), query)
        policy = Policy(sparsity=SPARSE.selection, backend="torch", on_unsupported="dense")
        for use_reentrant in (True, False):
            query.grad = None
            sparge.reset_stats()
            with sparge.replace_sdpa(policy):
                got: Any = checkpoint(run, query, use_reentrant=use_reentrant)
                got.square().sum().backward()
            assert torch.equal(got, expected)
            assert query.grad is not None
            torch.testing.assert_close(query.grad, gradient)
            assert sparge.stats().sparse == 0
            assert sparge.stats().dense >= 1, "torch runs the recomputation outside of modes"
        with torch.no_grad(), sparge.replace_sdpa(policy):
            run(query)
        assert sparge.stats().sparse == 1

    def test_dense_decision_runs_no_tensor_operation(self) -> None:
        class Count(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.names: list[str] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.names.append(str(func))
                return func(*args, **(kwargs or {}))

        query, key, value = make_qkv(200)
        seen = []
        for policy in (None, Policy()):
            with Count() as count:
                if policy is None:
                    F.scaled_dot_product_attention(query, key, value)
                else:
                    with sparge.replace_sdpa(policy):
                        F.scaled_dot_product_attention(query, key, value)
            seen.append(count.names)
        assert seen[0] == seen[1]

    def test_multi_head_attention_is_counted_as_dense(self) -> None:
        module = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval()
        tokens = torch.randn(1, 200, 32)
        with torch.no_grad(), sparge.replace_sdpa(ALL_BLOCKS):
            module(tokens, tokens, tokens + 1, need_weights=False)
        assert sparge.stats().reasons == {"dense: inside nn.MultiheadAttention": 1}


class TestScope:
    def test_no_effect_outside_the_scope(self) -> None:
        query, key, value = make_qkv(200)
        scope = sparge.replace_sdpa(ALL_BLOCKS)
        F.scaled_dot_product_attention(query, key, value)
        with scope:
            pass
        F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 0

    def test_scope_is_reentrant_and_restored_after_errors(self) -> None:
        query, key, value = make_qkv(200)
        scope = sparge.replace_sdpa(ALL_BLOCKS)
        with pytest.raises(ZeroDivisionError), scope, scope:
            F.scaled_dot_product_attention(query, key, value)
            raise ZeroDivisionError
        assert sparge.stats().calls == 1
        F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 1
        with scope:
            F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 2

    def test_only_the_innermost_scope_decides(self) -> None:
        query, key, value = make_qkv(200)
        with sparge.replace_sdpa(ALL_BLOCKS), sparge.replace_sdpa(Policy(min_tokens=999, backend="torch")):
            F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().reasons == {"dense: fewer than min_tokens": 1}

    def test_calls_of_sparge_attention_are_not_replaced(self) -> None:
        query, key, value = make_qkv(300)
        with sparge.replace_sdpa(Policy(backend="torch", self_attention_only=False)):
            sparge.attention(query, key, value, topk=0.5, backend="torch")
            sparge.attention(query, key, value)
        assert sparge.stats().reasons == {"sparse: torch": 1, "dense: below the crossover": 1}

    def test_decorator(self) -> None:
        query, key, value = make_qkv(200)

        @sparge.replace_sdpa(ALL_BLOCKS)
        def run(depth: int) -> Tensor:
            return run(depth - 1) if depth else F.scaled_dot_product_attention(query, key, value)

        run(2)
        run(0)
        assert sparge.stats().reasons == {"sparse: torch": 2}
        F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 2

    def test_decorated_generators(self) -> None:
        query, key, value = make_qkv(200)

        @sparge.replace_sdpa(ALL_BLOCKS)
        def steps(count: int) -> Iterator[Any]:
            try:
                for _ in range(count):
                    try:
                        sent = yield F.scaled_dot_product_attention(query, key, value)
                        assert sent in (None, "sent")
                    except KeyError:
                        yield "caught"
            finally:
                F.scaled_dot_product_attention(query, key, value)
            return "done"

        generator: Any = steps(3)
        assert sparge.stats().calls == 0
        next(generator)
        F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 1, "the scope is inactive while suspended"
        generator.send("sent")
        assert generator.throw(KeyError()) == "caught"
        next(generator)
        assert sparge.stats().calls == 3
        generator.close()
        assert sparge.stats().calls == 4
        generator = steps(0)
        with pytest.raises(StopIteration, match="done"):
            next(generator)
        assert sparge.stats().reasons == {"sparse: torch": 5}

    def test_decorated_coroutines(self) -> None:
        query, key, value = make_qkv(200)

        @sparge.replace_sdpa(ALL_BLOCKS)
        async def run(go_on: asyncio.Event) -> str:
            F.scaled_dot_product_attention(query, key, value)
            await go_on.wait()
            F.scaled_dot_product_attention(query, key, value)
            return "done"

        async def main() -> None:
            go_on = asyncio.Event()
            task = asyncio.create_task(run(go_on))
            await asyncio.sleep(0)
            F.scaled_dot_product_attention(query, key, value)
            assert sparge.stats().calls == 1, "the scope is inactive while suspended"
            go_on.set()
            assert await task == "done"

        asyncio.run(main())
        assert sparge.stats().reasons == {"sparse: torch": 2}

    def test_decorated_async_generators(self) -> None:
        query, key, value = make_qkv(200)

        @sparge.replace_sdpa(ALL_BLOCKS)
        @sparge.replace_sdpa(ALL_BLOCKS)
        async def steps() -> AsyncIterator[Any]:
            try:
                while True:
                    await asyncio.sleep(0)
                    F.scaled_dot_product_attention(query, key, value)
                    try:
                        if (yield "step") == "stop":
                            return
                    except KeyError:
                        yield "caught"
            finally:
                F.scaled_dot_product_attention(query, key, value)

        async def main() -> None:
            generator: Any = steps()
            assert await generator.asend(None) == "step"
            F.scaled_dot_product_attention(query, key, value)
            assert sparge.stats().calls == 1, "the scope is inactive while suspended"
            assert await generator.athrow(KeyError()) == "caught"
            assert await anext(generator) == "step"
            assert sparge.stats().calls == 2
            with pytest.raises(StopAsyncIteration):
                await generator.asend("stop")
            generator = steps()
            await anext(generator)
            await generator.aclose()

        asyncio.run(main())
        assert sparge.stats().reasons == {"sparse: torch": 5}

    def test_decorating_other_objects_raises(self) -> None:
        with pytest.raises(TypeError, match="expected a function to decorate, got the class Linear"):
            sparge.replace_sdpa(ALL_BLOCKS)(torch.nn.Linear)
        with pytest.raises(TypeError, match="expected a function to decorate, got 3"):
            sparge.replace_sdpa(ALL_BLOCKS)(3)  # type: ignore[type-var]

    def test_threads_have_separate_scopes(self) -> None:
        query, key, value = make_qkv(200)
        scope = sparge.replace_sdpa(ALL_BLOCKS)
        inside, outside_done = threading.Event(), threading.Event()
        counts = []

        def other() -> None:
            inside.wait()
            F.scaled_dot_product_attention(query, key, value)
            counts.append(sparge.stats().calls)
            with scope:
                F.scaled_dot_product_attention(query, key, value)
            outside_done.set()

        thread = threading.Thread(target=other)
        thread.start()
        with scope:
            inside.set()
            outside_done.wait()
            F.scaled_dot_product_attention(query, key, value)
        thread.join()
        assert counts == [0]
        assert sparge.stats().reasons == {"sparse: torch": 2}

    def test_compiled_programs_guard_on_the_scope(self) -> None:
        query, key, value = make_qkv(600)
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="eager")
        dense = compiled(query, key, value)
        with sparge.replace_sdpa(SPARSE):
            sparse = compiled(query, key, value)
            expected = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(sparse, expected)
        assert torch.equal(compiled(query, key, value), dense)
        assert not torch.equal(sparse, dense)
        assert sparge.stats().reasons == {"sparse: torch": 2}

    @pytest.mark.parametrize("rules", [{"dense_first_steps": 0.1}, {"dense_layers": (0,)}, {"budgets": {"a": 0.5}}])
    def test_rules_that_need_a_model_raise(self, rules: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"expected no rules about steps or layers .*sparge.enable"):
            sparge.replace_sdpa(Policy(**rules))
        with pytest.raises(TypeError, match=r"expected a sparge\.Policy, got float"):
            sparge.replace_sdpa(0.5)  # type: ignore[arg-type]


class TestPadding:
    """Masked keys at either end are cut off; the result equals masked attention."""

    @pytest.fixture
    def reads(self, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
        """Record the shapes of the masks that are read."""
        shapes: list[torch.Size] = []
        read = padding._read

        def record(visible: Tensor) -> Any:
            shapes.append(visible.shape)
            return read(visible)

        monkeypatch.setattr(padding, "_read", record)
        return shapes

    @pytest.mark.parametrize("spans", [[(0, 300)], [(40, 300)], [(0, 250)], [(33, 201)], [(40, 300), (0, 190), (0, 0)]])
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("q_len", [300, 120])
    def test_equals_masked_attention(self, spans: list[tuple[int, int]], is_causal: bool, q_len: int) -> None:
        batch = max(len(spans), 2)
        query, key, value = make_qkv(q_len, 300, batch=batch, heads=4, kv_heads=2)
        mask = torch.zeros(len(spans), 1, 1, 300, dtype=torch.bool)
        for row, (start, stop) in zip(mask[:, 0, 0], spans, strict=True):
            row[start:stop] = True
        got = calls.attend(
            layers.Layer("", ALL_BLOCKS),
            ModelCall(query, key, value, mask, is_causal=is_causal, enable_gqa=True, is_self=True),
        )
        assert got is not None
        exact, _ = exact_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        positions = torch.arange(q_len) + 300 - q_len
        for entry in range(batch):
            start, stop = spans[entry % len(spans)]
            hidden = torch.zeros(q_len, dtype=torch.bool)
            if is_causal:
                hidden = (positions < start) | (positions >= stop)
            torch.testing.assert_close(got[entry][:, ~hidden].double(), exact[entry][:, ~hidden], rtol=2e-5, atol=2e-6)
            assert (got[entry][:, hidden] == 0).all()

    def test_mask_is_read_once_unless_it_changes(self, reads: list[torch.Size]) -> None:
        mask = torch.ones(1, 1, 1, 100, dtype=torch.bool)
        assert padding.spans_of(mask) == padding.spans_of(mask) == ((0, 100),)
        assert len(reads) == 1
        mask[..., 80:] = False
        assert padding.spans_of(mask) == ((0, 80),)
        mask[..., 10:20] = False
        assert padding.spans_of(mask) is None
        assert padding.spans_of(mask.float()) is None

    def test_views_of_a_mask_are_read_once(self, reads: list[torch.Size]) -> None:
        """diffusers' dispatcher passes the same mask (B, S_k) to every layer as a new 4-D view."""
        mask = torch.ones(2, 100, dtype=torch.bool)
        for _ in range(3):
            assert padding.spans_of(mask[:, None, None, :]) == ((0, 100),) * 2
        assert len(reads) == 1
        assert padding.spans_of(mask[:1, None, None, :50]) == ((0, 50),), "a view of other entries"
        mask[:, :9] = False
        assert padding.spans_of(mask[:, None, None, :]) == ((9, 100),) * 2

    @pytest.mark.parametrize("waits", [True, False], ids=["device", "cpu"])
    def test_inference_mode_masks_are_read_once_per_pass(
        self, waits: bool, reads: list[torch.Size], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Inference tensors have no version counter: the result is reused until the same layer reads the mask again."""
        monkeypatch.setattr(padding, "_reading_waits", lambda _: waits)
        with torch.inference_mode():
            mask = torch.ones(1, 1, 1, 100, dtype=torch.bool)
            for stop in (100, 80):
                mask[..., stop:] = False
                for layer in ("a", "b", "c"):
                    assert padding.spans_of(mask, layer) == ((0, stop),)
            assert len(reads) == (2 if waits else 6)
            for stop in (60, 50):
                mask[..., stop:] = False
                assert padding.spans_of(mask) == ((0, stop),), "the layer is unknown"

    def test_sequences_of_a_call_count_as_one_call(self) -> None:
        query, key, value = make_qkv(300, batch=3)
        mask = torch.ones(3, 1, 1, 300, dtype=torch.bool)
        mask[0, ..., :] = False
        mask[1, ..., :40] = False
        layer = layers.Layer("a", ALL_BLOCKS)
        assert calls.attend(layer, ModelCall(query, key, value, mask)) is not None
        assert sparge.stats().layers["a"].reasons == {"sparse: torch": 1}
        assert calls.attend(layer, ModelCall(query[:2], key[:2], value[:2], mask[:1])) is not None
        assert sparge.stats().layers["a"].reasons == {"sparse: torch": 1, "dense: nothing to see": 1}

    def test_mask_that_broadcasts_over_the_keys(self) -> None:
        query, key, value = make_qkv(300, batch=2)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        expected = F.scaled_dot_product_attention(query, key, value, mask)
        with sparge.replace_sdpa(ALL_BLOCKS):
            got = F.scaled_dot_product_attention(query, key, value, mask)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("sizes", [(2, 1, 1, 250), (2, 1, 1, 350), (4, 1, 1, 300)])
    def test_mask_of_a_wrong_shape_raises(self, sizes: tuple[int, ...]) -> None:
        query, key, value = make_qkv(300, batch=2)
        with sparge.replace_sdpa(ALL_BLOCKS), pytest.raises((RuntimeError, ValueError)):
            F.scaled_dot_product_attention(query, key, value, torch.ones(sizes, dtype=torch.bool))

    def test_always_keep_is_shifted_by_cut_padding(self) -> None:
        query, key, value = make_qkv(640)
        value.zero_()
        value[:, :, 500] = 1.0
        mask = (torch.arange(640) >= 100)[None, None, None]
        policy = Policy(sparsity=TopK(0.01, min_blocks=1), backend="torch", always_keep=((0, 50), (500, 501)))
        with sparge.replace_sdpa(policy):
            assert (F.scaled_dot_product_attention(query, key, value, mask) > 0).all()
