"""Every mode equals one process: in masks exactly, in outputs within rounding. Ranks are threads that take turns."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.cases import MODES, RULES, Case, check, tensors, whole
from tests.distributed.threads import on_ranks

import sparge
from sparge.distributed import HeadBalance, gathered_attention, mesh_attention, ring_attention, ulysses_attention

TEXT = {"always_keep": [(0, 100)], "exact_queries": [(0, 100), (700, 710)]}


def every_case():
    for mode in MODES:
        for rule in RULES:
            for is_causal in (False, True):
                yield Case(mode, rule, is_causal)
        yield Case(mode, heads=(8, 8), batch=2)
        yield Case(mode, length=1000)  # ranks hold whole blocks, the last one what is left
        yield Case(mode, options=TEXT)
        yield Case(mode, is_causal=True, options=TEXT)
        for score in ("mean", "spread"):
            yield Case(mode, options={"score": score})
        yield Case(mode, options={"skipped": "drop"})
    for mode in ("gathered", "ring"):
        for rule in RULES:
            yield Case(mode, rule, True, "head_tail")
        yield Case(mode, "budget", False, "head_tail", options=TEXT)
        yield Case(mode, "topcdf", True, lengths=(384, 128, 256, 256))
    yield Case("gathered", options={"kv_heads_at_once": 1})
    yield Case("gathered", is_causal=True, options={"window": (200, 0)})
    yield Case("ulysses", options={"window": (200, 100)})
    yield Case("ulysses", heads=(4, 1))
    yield Case("ulysses", lengths=(300, 1, 423, 300))


@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_four_ranks_are_one_process(case: Case) -> None:
    inputs = tensors(case)
    expected = whole(case, inputs, "torch")
    on_ranks(4, lambda exchange: check(case, inputs, expected, (exchange,), "torch"))


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mode", ["gathered", "ring"])
def test_a_mesh_is_one_process(mode: str, is_causal: bool, rule: str) -> None:
    case = Case(mode, rule, is_causal, "head_tail" if is_causal else "contiguous")
    inputs = tensors(case)
    expected = whole(case, inputs, "torch")
    on_ranks(4, lambda *exchanges: check(case, inputs, expected, exchanges, "torch"), columns=2)


@pytest.mark.parametrize("mode", ["ulysses", "gathered"])
@pytest.mark.parametrize("rule", ["budget", "topcdf", "dense"])
def test_a_mask_of_keys_is_that_of_the_whole_sequence(mode: str, rule: str) -> None:
    hidden = torch.ones(2, 1, 1, 1024, dtype=torch.bool)
    hidden[0, ..., 130:400] = False
    hidden[1, ..., 900:] = False
    case = Case(mode, rule, batch=2, options={"attn_mask": hidden})
    inputs = tensors(case)
    expected = whole(case, inputs, "torch")
    on_ranks(2, lambda exchange: check(case, inputs, expected, (exchange,), "torch"))


@pytest.mark.parametrize("mode", ["gathered", "ulysses"])
def test_numbers_of_heads_are_cut_to_those_of_a_rank(mode: str) -> None:
    rule = sparge.TopK(torch.tensor([0.1, 0.3, 0.6, 0.9]), pv_threshold=torch.tensor([-9.0, -8.0, -7.0, -6.0]))
    case = Case(mode)
    inputs = tensors(case)
    expected = sparge.attention(*inputs, enable_gqa=True, sparsity=rule, backend="torch")
    parts = on_ranks(
        4,
        lambda exchange: MODES[mode](
            *(x.chunk(4, 2)[exchange.rank] for x in inputs),
            group=exchange,
            enable_gqa=True,
            sparsity=rule,
            backend="torch",
        ),
    )
    torch.testing.assert_close(torch.cat(parts, 2), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
def test_eight_bits_stay_within_their_own_error(mode: str, quantization: str) -> None:
    """Codes depend on which keys are rounded together; no mode may lie further from the truth than one process does."""
    case = Case(mode, options={"quantization": quantization})
    inputs = tensors(case)
    exact = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES["budget"])
    alone = sparge.attention(*inputs, enable_gqa=True, backend="torch", quantization=quantization, **RULES["budget"])
    options = {"enable_gqa": True, "backend": "torch", "quantization": quantization, **RULES["budget"]}
    parts = on_ranks(4, lambda ex: MODES[mode](*(x.chunk(4, 2)[ex.rank] for x in inputs), group=ex, **options))
    error = (torch.cat(parts, 2) - exact).norm() / exact.norm()
    assert 0 < error < 1.25 * (alone - exact).norm() / exact.norm()


@pytest.mark.parametrize("length", [1000, 1030])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gathered_pieces_may_cut_blocks(length: int, is_causal: bool) -> None:
    """Rows of blocks then begin elsewhere, so masks differ; the density is that of the budget, the rest is exact."""
    case = Case("gathered", length=length)
    inputs = tensors(case)
    lengths = [length - 3 * 251, 251, 251, 251]
    options = {"enable_gqa": True, "backend": "torch", "is_causal": is_causal}
    dense = sparge.attention(*inputs, sparsity=sparge.Dense(), **options)

    def work(rule):
        return lambda ex: gathered_attention(
            *(x.split(lengths, 2)[ex.rank] for x in inputs), group=ex, lengths=lengths, sparsity=rule, **options
        )

    torch.testing.assert_close(torch.cat(on_ranks(4, work(sparge.Dense())), 2), dense, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(torch.cat(on_ranks(4, work(sparge.Budget(1.0))), 2), dense, atol=2e-5, rtol=2e-5)
    sparge.reset_stats()
    sparse = torch.cat(on_ranks(4, work(sparge.Budget(0.5))), 2)
    assert sparge.stats().density == pytest.approx(0.5, abs=0.01)
    one = sparge.attention(*inputs, sparsity=sparge.Budget(0.5), **options)
    assert (sparse - dense).norm() < 1.3 * (one - dense).norm()


def test_tokens_first_is_taken_and_given_back() -> None:
    inputs = tensors(Case("ulysses"))
    expected = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES["budget"])
    for mode, function in MODES.items():
        parts = on_ranks(
            2,
            lambda ex, function=function: function(
                *(x.chunk(2, 2)[ex.rank].transpose(1, 2).contiguous() for x in inputs),
                group=ex,
                layout="NHD",
                enable_gqa=True,
                backend="torch",
                **RULES["budget"],
            ),
        )
        torch.testing.assert_close(torch.cat(parts, 1).transpose(1, 2), expected, atol=2e-5, rtol=2e-5, msg=mode)


@pytest.mark.parametrize("rule", ["budget", "topcdf"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4)])
def test_heads_are_dealt_by_what_they_cost(rule: str, heads: tuple[int, int]) -> None:
    inputs = tensors(Case("ulysses", heads=heads))
    inputs[0] *= torch.tensor([0.1] * 4 + [3.0] * 4)[:, None, None]  # the first heads look everywhere
    inputs[1] += torch.randn(1, heads[1], 16, 1, 32).expand(-1, -1, -1, 64, -1).flatten(2, 3)
    expected = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES[rule])

    def work(exchange):
        imbalances, outputs = [], []
        options = {"enable_gqa": True, "backend": "torch", "balance": HeadBalance(), **RULES[rule]}
        own = [x.chunk(2, 2)[exchange.rank] for x in inputs]
        for _ in range(3):
            if exchange.rank == 0:
                sparge.reset_stats()
            exchange.total(torch.zeros(1))  # nobody counts before the others have forgotten
            outputs.append(ulysses_attention(*own, group=exchange, **options))
            imbalances.append(sparge.stats().imbalance)
        return outputs, imbalances

    results = on_ranks(2, work)
    for step in range(3):
        together = torch.cat([outputs[step] for outputs, _ in results], 2)
        torch.testing.assert_close(together, expected, atol=2e-5, rtol=2e-5)
    first, second, third = results[0][1]
    assert 1.0 <= second < first and third == second
    assert first > 1.15


def test_the_crossover_is_that_of_the_exchanged_sizes() -> None:
    """4096 keys of one head pay on a GPU and here; 1024 of four do not, though they are as many scores."""
    query, key, value = (torch.randn(1, 4, 1024, 32) for _ in range(3))
    sparge.reset_stats()
    on_ranks(4, lambda ex: ulysses_attention(*(x.chunk(4, 2)[ex.rank] for x in (query, key, value)), group=ex))
    assert sparge.stats().reasons == {"dense: below the crossover": 4}
    sparge.reset_stats()
    named = {"backend": "torch"}
    on_ranks(4, lambda ex: ulysses_attention(*(x.chunk(4, 2)[ex.rank] for x in (query, key, value)), group=ex, **named))
    assert sparge.stats().reasons == {"sparse: torch": 4}


def test_one_rank_is_one_process() -> None:
    inputs = tensors(Case("ring"))
    expected = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES["budget"])
    for function in MODES.values():
        (output,) = on_ranks(
            1, lambda ex, f=function: f(*inputs, group=ex, enable_gqa=True, backend="torch", **RULES["budget"])
        )
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def refused(
    error: type[Exception], words: str, function, *arguments, size: int = 2, columns: int = 1, **options
) -> None:
    names = ("ulysses_group", "group") if columns > 1 else ("group",)
    with pytest.raises(error, match=words):
        on_ranks(
            size,
            lambda *exchanges: function(*arguments, **dict(zip(names, exchanges, strict=True)), **options),
            columns=columns,
        )


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    def some(heads: int, length: int, kv_heads: int | None = None):
        return [torch.randn(1, count, length, 32) for count in (heads, kv_heads or heads, kv_heads or heads)]

    refused(ValueError, "expected a multiple of 2 heads", ulysses_attention, *some(3, 128))
    refused(ValueError, "multiple or a divisor of 4", ulysses_attention, *some(12, 128, 6), size=4, enable_gqa=True)
    refused(ValueError, "multiple of 128 tokens on every rank but the last", ring_attention, *some(2, 100))
    refused(ValueError, "one even number of tokens", gathered_attention, *some(2, 101), sharding="head_tail")
    refused(ValueError, "sharding: expected one of", gathered_attention, *some(2, 128), sharding="zigzag")
    refused(ValueError, "lengths: expected a number above 0", gathered_attention, *some(2, 128), lengths=(128,))
    refused(TypeError, "lengths: expected an int for each", gathered_attention, *some(2, 128), lengths=(128.0, 128))
    refused(ValueError, "which has so many tokens", gathered_attention, *some(2, 128), lengths=(64, 192))
    refused(NotImplementedError, "without exponentials", ring_attention, *some(2, 128), quantization="int8_fp8_fast")
    refused(
        NotImplementedError,
        "expected causal attention",
        gathered_attention,
        *some(2, 512),
        window=(9, 9),
        backend="torch",
    )
    own_blocks = {"sparsity": sparge.TopK(0.5, diagonal=True), "backend": "torch"}
    refused(NotImplementedError, "got diagonal=True without", ring_attention, *some(2, 512), **own_blocks)
    refused(TypeError, "balance: expected a HeadBalance", ulysses_attention, *some(2, 512), balance=True)
    mask = torch.ones(1, 1, 256, 256, dtype=torch.bool)
    refused(NotImplementedError, "bool mask of all keys", ulysses_attention, *some(2, 128), mask)
    refused(ValueError, "kv_heads_at_once: expected None or", gathered_attention, *some(2, 128), kv_heads_at_once=0)
    options = {"sparsity": sparge.Budget(0.5, similarity_threshold=0.5), "backend": "torch"}
    refused(NotImplementedError, "similarity_threshold", ulysses_attention, *some(2, 512), **options)
    refused(ValueError, "inner: expected one of", mesh_attention, *some(2, 128), size=4, columns=2, inner="ulysses")
    ring = {"size": 4, "columns": 2, "inner": "ring", "kv_heads_at_once": 1}
    refused(ValueError, "kv_heads_at_once: expected None with inner", mesh_attention, *some(2, 128), **ring)
    refused(ValueError, r"ranks \[\d+, \d+\] in common", _on_a_group_twice, *some(2, 128))
    query, key, value = some(2, 128)
    refused(NotImplementedError, "gradients", _with_gradients, query, key, value)


def _on_a_group_twice(query, key, value, *, group):
    return mesh_attention(query, key, value, ulysses_group=group, group=group)


def _with_gradients(query, key, value, *, group):
    with torch.enable_grad():
        return ulysses_attention(query.requires_grad_(), key, value, group=group)


def test_no_process_group_is_said() -> None:
    query = torch.randn(1, 2, 128, 32)
    with pytest.raises(RuntimeError, match="expected an initialised process group"):
        ulysses_attention(query, query, query)
