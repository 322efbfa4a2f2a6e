"""`replace_sdpa`: SDPA's meaning, sparse only inside the scope, decided by the policy and counted."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sparge
from conftest import assert_within_budget, exact_attention, make_qkv, plain_attention, relative_l1
from sparge import Policy, TopK
from sparge.integrations import calls

pytestmark = pytest.mark.timeout(120)

ALL = Policy(topk=1.0, backend="torch")
THIN = Policy(sparsity=TopK(0.3, min_blocks=1), backend="torch")


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_WARNED", set())


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


class TestMeaning:
    @pytest.mark.parametrize("kind", ["none", "padding", "gaps", "square", "additive"])
    @pytest.mark.parametrize("kv_heads", [4, 2])
    def test_everything_kept_equals_sdpa(self, kind: str, kv_heads: int) -> None:
        query, key, value = make_qkv(300, heads=4, kv_heads=kv_heads)
        mask = masks(kind if kind != "additive" else "none", 300, 300)
        mask = torch.randn(300, 300, generator=torch.Generator().manual_seed(1)) if kind == "additive" else mask
        arguments = (query, key, value, mask, 0.0, False)
        expected = F.scaled_dot_product_attention(*arguments, scale=0.2, enable_gqa=True)
        with sparge.replace_sdpa(ALL):
            got = F.scaled_dot_product_attention(*arguments, scale=0.2, enable_gqa=True)
        assert sparge.stats().reasons == {"sparse: torch": 1}
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("q_len, kv_len", [(300, 300), (200, 300), (300, 200)])
    def test_causality_is_top_left(self, q_len: int, kv_len: int) -> None:
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
            with sparge.replace_sdpa(ALL):
                got = F.scaled_dot_product_attention(query, key, value)
        assert got.dtype == expected.dtype == torch.bfloat16
        exact, _ = exact_attention(*(tensor.bfloat16() for tensor in (query, key, value)))
        assert_within_budget(got, exact, plain_attention(*(tensor.bfloat16() for tensor in (query, key, value))))

    def test_sparse_output_is_that_of_attention(self) -> None:
        query, key, value = make_qkv(600)
        with sparge.replace_sdpa(THIN):
            got = F.scaled_dot_product_attention(query, key, value)
        expected = sparge.attention(query, key, value, sparsity=THIN.selection, backend="torch")
        assert torch.equal(got, expected)
        assert relative_l1(got, exact_attention(query, key, value)[0]) > 0.1

    def test_kept_ranges_reach_the_call(self) -> None:
        query, key, value = make_qkv(600)
        value.zero_()
        value[:, :, 590:] = 1.0
        policy = Policy(sparsity=TopK(0.01, min_blocks=1), backend="torch", always_keep=((-10, None),))
        with sparge.replace_sdpa(policy):
            assert (F.scaled_dot_product_attention(query, key, value) > 0).all()

    def test_however_it_was_imported(self) -> None:
        from torch.nn.functional import scaled_dot_product_attention

        query, key, value = make_qkv(200)
        with sparge.replace_sdpa(ALL):
            scaled_dot_product_attention(query, key, value)
        assert sparge.stats().sparse == 1

    def test_sdpa_raises_its_own_errors(self) -> None:
        query, key, value = make_qkv(200)
        with sparge.replace_sdpa(ALL), pytest.raises(TypeError):
            F.scaled_dot_product_attention(query, key)
        with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(query, key[..., :16], value)

    def test_a_mask_and_causality_are_left_to_sdpa(self) -> None:
        arguments = (*make_qkv(200), torch.rand(200, 200, generator=torch.Generator().manual_seed(0)) > 0.3, 0.0, True)
        try:
            expected = F.scaled_dot_product_attention(*arguments)
        except RuntimeError:  # what its documentation says
            expected = None
        with sparge.replace_sdpa(Policy(backend="torch", on_unsupported="dense")):
            if expected is None:
                with pytest.raises(RuntimeError):
                    F.scaled_dot_product_attention(*arguments)
            else:
                assert torch.equal(F.scaled_dot_product_attention(*arguments), expected)
        assert sparge.stats().reasons == {"dense: unsupported (a mask and is_causal)": 1}


class TestDecisions:
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
    def test_dense_and_why(self, policy: Policy, sizes: dict[str, Any], reason: str) -> None:
        query, key, value = make_qkv(**sizes)
        expected = F.scaled_dot_product_attention(query, key, value)
        with warnings.catch_warnings(record=True) as caught, sparge.replace_sdpa(policy):
            warnings.simplefilter("always")
            for _ in range(2):
                assert torch.equal(F.scaled_dot_product_attention(query, key, value), expected)
        assert sparge.stats().reasons == {f"dense: {reason}": 2}
        loud = reason.startswith("unsupported")
        assert [str(warning.message).startswith("sparge: ") for warning in caught] == [True] * loud, "once, if at all"

    @pytest.mark.parametrize("call", ["gradients", "dropout", "three", "broadcast", "subclass"])
    def test_what_cannot_be_sparse(self, call: str) -> None:
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

    def test_deciding_for_dense_computes_nothing(self) -> None:
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

    def test_multi_head_attention_is_not_reached_and_says_so(self) -> None:
        module = torch.nn.MultiheadAttention(32, 2, batch_first=True).eval()
        tokens = torch.randn(1, 200, 32)
        with torch.no_grad(), sparge.replace_sdpa(ALL):
            module(tokens, tokens, tokens + 1, need_weights=False)
        assert sparge.stats().reasons == {"dense: inside nn.MultiheadAttention": 1}


class TestScope:
    def test_nothing_outside(self) -> None:
        query, key, value = make_qkv(200)
        scope = sparge.replace_sdpa(ALL)
        F.scaled_dot_product_attention(query, key, value)
        with scope:
            pass
        F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 0

    def test_again_nested_and_after_errors(self) -> None:
        query, key, value = make_qkv(200)
        scope = sparge.replace_sdpa(ALL)
        with pytest.raises(ZeroDivisionError), scope, scope:
            F.scaled_dot_product_attention(query, key, value)
            raise ZeroDivisionError
        assert sparge.stats().calls == 1
        F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 1
        with scope:
            F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 2

    def test_the_innermost_decides_alone(self) -> None:
        query, key, value = make_qkv(200)
        with sparge.replace_sdpa(ALL), sparge.replace_sdpa(Policy(min_tokens=999, backend="torch")):
            F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().reasons == {"dense: fewer than min_tokens": 1}

    def test_our_own_calls_are_not_replaced(self) -> None:
        query, key, value = make_qkv(300)
        with sparge.replace_sdpa(Policy(backend="torch", self_attention_only=False)):
            sparge.attention(query, key, value, topk=0.5, backend="torch")
            sparge.attention(query, key, value)
        assert sparge.stats().reasons == {"sparse: torch": 1, "dense: below the crossover": 1}

    def test_decorator(self) -> None:
        query, key, value = make_qkv(200)

        @sparge.replace_sdpa(ALL)
        def run(depth: int) -> Tensor:
            return run(depth - 1) if depth else F.scaled_dot_product_attention(query, key, value)

        run(2)
        run(0)
        assert sparge.stats().reasons == {"sparse: torch": 2}
        F.scaled_dot_product_attention(query, key, value)
        assert sparge.stats().calls == 2

    def test_threads_have_scopes_of_their_own(self) -> None:
        query, key, value = make_qkv(200)
        scope = sparge.replace_sdpa(ALL)
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

    def test_compiled_programs_notice_the_scope(self) -> None:
        query, key, value = make_qkv(600)
        compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="eager")
        dense = compiled(query, key, value)
        with sparge.replace_sdpa(THIN):
            sparse = compiled(query, key, value)
            expected = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(sparse, expected)
        assert torch.equal(compiled(query, key, value), dense)
        assert not torch.equal(sparse, dense)
        assert sparge.stats().reasons == {"sparse: torch": 2}

    @pytest.mark.parametrize("rules", [{"dense_first_steps": 0.1}, {"dense_layers": (0,)}])
    def test_rules_that_need_a_model(self, rules: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=r"expected no rules about steps or layers .*sparge.enable"):
            sparge.replace_sdpa(Policy(**rules))
        with pytest.raises(TypeError, match=r"expected a sparge\.Policy, got float"):
            sparge.replace_sdpa(0.5)  # type: ignore[arg-type]


class TestPadding:
    """Keys hidden at an end are cut off; the result is that of the mask."""

    @pytest.mark.parametrize("spans", [[(0, 300)], [(40, 300)], [(0, 250)], [(33, 201)], [(40, 300), (0, 190), (0, 0)]])
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("q_len", [300, 120])
    def test_equals_the_mask(self, spans: list[tuple[int, int]], is_causal: bool, q_len: int) -> None:
        batch = max(len(spans), 2)
        query, key, value = make_qkv(q_len, 300, batch=batch, heads=4, kv_heads=2)
        mask = torch.zeros(len(spans), 1, 1, 300, dtype=torch.bool)
        for row, (start, stop) in zip(mask[:, 0, 0], spans, strict=True):
            row[start:stop] = True
        got = calls.attend(
            calls.Layer("", ALL), query, key, value, mask, is_causal=is_causal, enable_gqa=True, is_self=True
        )
        assert got is not None
        exact, _ = exact_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        positions = torch.arange(q_len) + 300 - q_len
        for entry in range(batch):
            start, stop = spans[entry % len(spans)]
            padding = positions >= stop if is_causal else torch.zeros(q_len, dtype=torch.bool)
            torch.testing.assert_close(
                got[entry][:, ~padding].double(), exact[entry][:, ~padding], rtol=2e-5, atol=2e-6
            )
            assert (got[entry][:, padding] == 0).all()

    def test_a_mask_is_read_once_unless_it_changes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sparge.integrations import padding

        reads = []
        read = padding._read
        monkeypatch.setattr(padding, "_read", lambda visible: reads.append(1) or read(visible))
        mask = torch.ones(1, 1, 1, 100, dtype=torch.bool)
        assert padding.spans_of(mask) == padding.spans_of(mask) == ((0, 100),)
        assert len(reads) == 1
        mask[..., 80:] = False
        assert padding.spans_of(mask) == ((0, 80),)
        mask[..., 10:20] = False
        assert padding.spans_of(mask) is None
        assert padding.spans_of(mask.float()) is None

    def test_a_mask_that_broadcasts_over_the_keys(self) -> None:
        query, key, value = make_qkv(300, batch=2)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        expected = F.scaled_dot_product_attention(query, key, value, mask)
        with sparge.replace_sdpa(ALL):
            got = F.scaled_dot_product_attention(query, key, value, mask)
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6)

    @pytest.mark.parametrize("sizes", [(2, 1, 1, 250), (2, 1, 1, 350), (4, 1, 1, 300)])
    def test_a_mask_that_does_not_fit_raises(self, sizes: tuple[int, ...]) -> None:
        query, key, value = make_qkv(300, batch=2)
        with sparge.replace_sdpa(ALL), pytest.raises((RuntimeError, ValueError)):
            F.scaled_dot_product_attention(query, key, value, torch.ones(sizes, dtype=torch.bool))

    def test_kept_ranges_move_along(self) -> None:
        query, key, value = make_qkv(640)
        value.zero_()
        value[:, :, 500] = 1.0
        mask = (torch.arange(640) >= 100)[None, None, None]
        policy = Policy(sparsity=TopK(0.01, min_blocks=1), backend="torch", always_keep=((0, 50), (500, 501)))
        with sparge.replace_sdpa(policy):
            assert (F.scaled_dot_product_attention(query, key, value, mask) > 0).all()
