"""Every mode equals one process: masks exactly, outputs within rounding. The ranks are threads that take turns."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.cases import MODES, RULES, Case, check_rank, make_tensors, run_one_process
from tests.distributed.threads import on_ranks

import sparge
from sparge.distributed import HeadBalance, context_parallel_attention

TEXT = {"always_keep": [(0, 100)], "exact_queries": [(0, 100), (700, 710)]}


def every_case():
    for mode in MODES:
        for rule in RULES:
            for is_causal in (False, True):
                yield Case(mode, rule, is_causal)
        yield Case(mode, heads=(8, 8), batch=2)
        yield Case(mode, length=1000)  # all ranks but the last have whole blocks
        yield Case(mode, options=TEXT)
        yield Case(mode, is_causal=True, options=TEXT)
        for score in ("mean", "spread"):
            yield Case(mode, options={"score": score})
        yield Case(mode, options={"skipped": "drop"})
    for mode in ("gather", "ring"):
        for rule in RULES:
            yield Case(mode, rule, True, "head_tail")
        yield Case(mode, "budget", False, "head_tail", options=TEXT)
        yield Case(mode, "topcdf", True, lengths=(384, 128, 256, 256))
    yield Case("gather", options={"kv_heads_at_once": 1})
    yield Case("gather", is_causal=True, options={"window": (200, 0)})
    yield Case("ulysses", options={"window": (200, 100)})
    yield Case("ulysses", heads=(4, 1))
    yield Case("ulysses", lengths=(300, 1, 423, 300))


@pytest.mark.parametrize("case", list(every_case()), ids=str)
def test_four_ranks_equal_one_process(case: Case) -> None:
    inputs = make_tensors(case)
    expected = run_one_process(case, inputs, "torch")
    on_ranks(4, lambda communicator: check_rank(case, inputs, expected, (communicator,), "torch"))


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_mesh_equals_one_process(mode: str, is_causal: bool, rule: str) -> None:
    case = Case(mode, rule, is_causal, "head_tail" if is_causal else "contiguous")
    inputs = make_tensors(case)
    expected = run_one_process(case, inputs, "torch")
    on_ranks(4, lambda *communicators: check_rank(case, inputs, expected, communicators, "torch"), columns=2)


@pytest.mark.parametrize("mode", ["gather", "ring"])
def test_mesh_accepts_lengths_masks_and_per_head_options(mode: str) -> None:
    rule = sparge.TopK(torch.tensor([0.1, 0.3, 0.6, 0.9]))
    options = {"enable_gqa": True, "backend": "torch", "sparsity": rule}
    if mode == "gather":
        options["attn_mask"] = torch.arange(1024).view(1, 1, 1, -1) % 5 > 0
    inputs, lengths = make_tensors(Case(mode)), [256, 128, 384, 256]
    expected = sparge.attention(*inputs, **options)

    def work(row, column):
        local = [x.split(lengths, 2)[2 * column.rank + row.rank] for x in inputs]
        return context_parallel_attention(*local, mode=mode, group=(column, row), lengths=lengths, **options)

    parts = on_ranks(4, work, columns=2)
    torch.testing.assert_close(torch.cat(parts, 2), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mode", ["ulysses", "gather"])
@pytest.mark.parametrize("rule", ["budget", "topcdf", "dense"])
def test_key_masks_cover_the_whole_sequence(mode: str, rule: str) -> None:
    mask = torch.ones(2, 1, 1, 1024, dtype=torch.bool)
    mask[0, ..., 130:400] = False
    mask[1, ..., 900:] = False
    case = Case(mode, rule, batch=2, options={"attn_mask": mask})
    inputs = make_tensors(case)
    expected = run_one_process(case, inputs, "torch")
    on_ranks(2, lambda communicator: check_rank(case, inputs, expected, (communicator,), "torch"))


@pytest.mark.parametrize("mode", ["gather", "ulysses"])
def test_per_head_options_follow_the_heads(mode: str) -> None:
    rule = sparge.TopK(torch.tensor([0.1, 0.3, 0.6, 0.9]), pv_threshold=torch.tensor([-9.0, -8.0, -7.0, -6.0]))
    case = Case(mode)
    inputs = make_tensors(case)
    expected = sparge.attention(*inputs, enable_gqa=True, sparsity=rule, backend="torch")
    parts = on_ranks(
        4,
        lambda communicator: context_parallel_attention(
            *(x.chunk(4, 2)[communicator.rank] for x in inputs),
            mode=mode,
            group=communicator,
            enable_gqa=True,
            sparsity=rule,
            backend="torch",
        ),
    )
    torch.testing.assert_close(torch.cat(parts, 2), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
def test_quantized_modes_have_at_most_the_error_of_one_process(mode: str, quantization: str) -> None:
    """The error may differ, because other keys share a scale, but must not be much larger."""
    case = Case(mode, options={"quantization": quantization})
    inputs = make_tensors(case)
    exact = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES["budget"])
    alone = sparge.attention(*inputs, enable_gqa=True, backend="torch", quantization=quantization, **RULES["budget"])
    options = {"enable_gqa": True, "backend": "torch", "quantization": quantization, **RULES["budget"]}
    parts = on_ranks(
        4,
        lambda communicator: context_parallel_attention(
            *(x.chunk(4, 2)[communicator.rank] for x in inputs), mode=mode, group=communicator, **options
        ),
    )
    error = (torch.cat(parts, 2) - exact).norm() / exact.norm()
    assert 0 < error < 1.25 * (alone - exact).norm() / exact.norm()


@pytest.mark.parametrize("length", [1000, 1030])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_gather_accepts_pieces_that_split_blocks(length: int, is_causal: bool) -> None:
    """Query blocks start at other tokens, so masks differ. The density equals the budget, and density 1 is exact."""
    case = Case("gather", length=length)
    inputs = make_tensors(case)
    lengths = [length - 3 * 251, 251, 251, 251]
    options = {"enable_gqa": True, "backend": "torch", "is_causal": is_causal}
    dense = sparge.attention(*inputs, sparsity=sparge.Dense(), **options)

    def work(rule):
        return lambda communicator: context_parallel_attention(
            *(x.split(lengths, 2)[communicator.rank] for x in inputs),
            mode="gather",
            group=communicator,
            lengths=lengths,
            sparsity=rule,
            **options,
        )

    torch.testing.assert_close(torch.cat(on_ranks(4, work(sparge.Dense())), 2), dense, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(torch.cat(on_ranks(4, work(sparge.Budget(1.0))), 2), dense, atol=2e-5, rtol=2e-5)
    sparge.reset_stats()
    sparse = torch.cat(on_ranks(4, work(sparge.Budget(0.5))), 2)
    assert sparge.stats().density == pytest.approx(0.5, abs=0.01)
    one = sparge.attention(*inputs, sparsity=sparge.Budget(0.5), **options)
    assert (sparse - dense).norm() < 1.3 * (one - dense).norm()


def test_tokens_first_layout() -> None:
    inputs = make_tensors(Case("ulysses"))
    expected = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES["budget"])
    for mode in MODES:
        parts = on_ranks(
            2,
            lambda communicator, mode=mode: context_parallel_attention(
                *(x.chunk(2, 2)[communicator.rank].transpose(1, 2).contiguous() for x in inputs),
                mode=mode,
                group=communicator,
                layout="NHD",
                enable_gqa=True,
                backend="torch",
                **RULES["budget"],
            ),
        )
        torch.testing.assert_close(torch.cat(parts, 1).transpose(1, 2), expected, atol=2e-5, rtol=2e-5, msg=mode)


@pytest.mark.parametrize("rule", ["budget", "topcdf"])
@pytest.mark.parametrize("heads", [(8, 8), (8, 4)])
def test_heads_are_load_balanced(rule: str, heads: tuple[int, int]) -> None:
    inputs = make_tensors(Case("ulysses", heads=heads))
    inputs[0] *= torch.tensor([0.1] * 4 + [3.0] * 4)[:, None, None]  # the first heads attend to many keys
    inputs[1] += torch.randn(1, heads[1], 16, 1, 32).expand(-1, -1, -1, 64, -1).flatten(2, 3)
    expected = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES[rule])

    def work(communicator):
        imbalances, outputs = [], []
        options = {"enable_gqa": True, "backend": "torch", "balance": HeadBalance(), **RULES[rule]}
        local = [x.chunk(2, 2)[communicator.rank] for x in inputs]
        for _ in range(3):
            if communicator.rank == 0:
                sparge.reset_stats()
            communicator.all_reduce(torch.zeros(1))  # all ranks count after the reset
            outputs.append(context_parallel_attention(*local, group=communicator, **options))
            imbalances.append(sparge.stats().imbalance)
        return outputs, imbalances

    results = on_ranks(2, work)
    for step in range(3):
        together = torch.cat([outputs[step] for outputs, _ in results], 2)
        torch.testing.assert_close(together, expected, atol=2e-5, rtol=2e-5)
    first, second, third = results[0][1]
    assert 1.0 <= second < first and third == second
    assert first > 1.15


def test_crossover_depends_on_the_exchanged_sizes() -> None:
    """1024 keys of 4 heads are below the crossover, even if each rank has all keys of one head."""
    query, key, value = (torch.randn(1, 4, 1024, 32) for _ in range(3))
    sparge.reset_stats()
    on_ranks(
        4,
        lambda communicator: context_parallel_attention(
            *(x.chunk(4, 2)[communicator.rank] for x in (query, key, value)), group=communicator
        ),
    )
    assert sparge.stats().reasons == {"dense: below the crossover": 4}
    sparge.reset_stats()
    named = {"backend": "torch"}
    on_ranks(
        4,
        lambda communicator: context_parallel_attention(
            *(x.chunk(4, 2)[communicator.rank] for x in (query, key, value)), group=communicator, **named
        ),
    )
    assert sparge.stats().reasons == {"sparse: torch": 4}


def test_one_rank_equals_one_process() -> None:
    inputs = make_tensors(Case("ring"))
    expected = sparge.attention(*inputs, enable_gqa=True, backend="torch", **RULES["budget"])
    for mode in MODES:
        (output,) = on_ranks(
            1,
            lambda communicator, mode=mode: context_parallel_attention(
                *inputs, mode=mode, group=communicator, enable_gqa=True, backend="torch", **RULES["budget"]
            ),
        )
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def random_qkv(heads: int, length: int, kv_heads: int | None = None) -> list[torch.Tensor]:
    return [torch.randn(1, count, length, 32) for count in (heads, kv_heads or heads, kv_heads or heads)]


DIAGONAL = {"sparsity": sparge.TopK(0.5, diagonal=True), "backend": "torch"}
THRESHOLD = {"sparsity": sparge.Budget(0.5, similarity_threshold=0.5), "backend": "torch"}
FULL, KEYS = torch.ones(1, 1, 256, 256, dtype=torch.bool), torch.ones(1, 1, 1, 256, dtype=torch.bool)
UNSUPPORTED = {
    "mode": (ValueError, "mode: expected one of 'ulysses', 'gather', 'ring', got 'mesh'", (2, 128), {"mode": "mesh"}),
    "heads": (ValueError, "expected a multiple of 2 heads", (3, 128), {}),
    "short": (ValueError, "multiple of 128 tokens on every rank but the last", (2, 100), {"mode": "ring"}),
    "odd": (ValueError, "same even number of tokens", (2, 101), {"mode": "gather", "sharding": "head_tail"}),
    "sharding": (ValueError, "sharding: expected one of", (2, 128), {"mode": "gather", "sharding": "zigzag"}),
    "one length": (ValueError, "lengths: expected a number above 0", (2, 128), {"lengths": (128,)}),
    "float": (TypeError, "lengths: expected an int for each", (2, 128), {"lengths": (128.0, 128)}),
    "wrong lengths": (ValueError, "the number of its tokens", (2, 128), {"mode": "gather", "lengths": [64, 192]}),
    "rough LSE": (NotImplementedError, "exp2", (2, 128), {"mode": "ring", "quantization": "int8_fp8_fast"}),
    "window": (
        NotImplementedError,
        "expected causal attention",
        (2, 512),
        {"mode": "gather", "window": (9, 9), "backend": "torch"},
    ),
    "diagonal": (NotImplementedError, "got diagonal=True without", (2, 512), {"mode": "ring", **DIAGONAL}),
    "balance": (TypeError, "balance: expected a HeadBalance", (2, 512), {"balance": True}),
    "balance of a ring": (ValueError, "balance: expected None", (2, 512), {"mode": "ring", "balance": HeadBalance()}),
    "head_tail of heads": (ValueError, "sharding: expected 'contiguous'", (2, 512), {"sharding": "head_tail"}),
    "full mask": (NotImplementedError, "bool mask of all keys", (2, 128), {"attn_mask": FULL}),
    "mask of a ring": (NotImplementedError, "attn_mask: expected None", (2, 128), {"mode": "ring", "attn_mask": KEYS}),
    "no heads": (ValueError, "expected None or an int above 0", (2, 128), {"mode": "gather", "kv_heads_at_once": 0}),
    "heads of a ring": (ValueError, "at_once: expected None with", (2, 128), {"mode": "ring", "kv_heads_at_once": 1}),
    "threshold": (NotImplementedError, "similarity_threshold", (2, 512), THRESHOLD),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_arguments_raise_on_every_rank(name: str) -> None:
    error, message, sizes, options = UNSUPPORTED[name]
    inputs = random_qkv(*sizes)

    def work(communicator):
        with pytest.raises(error, match=message):
            context_parallel_attention(*inputs, group=communicator, **options)
        return True

    assert on_ranks(2, work) == [True, True]


def assert_raises_on_ranks(error: type[Exception], message: str, size: int, columns: int, call) -> None:
    with pytest.raises(error, match=message):
        on_ranks(size, call, columns=columns)


def test_unsupported_groups_and_gradients_raise() -> None:
    inputs = random_qkv(2, 128)
    wide = random_qkv(12, 128, 6)
    assert_raises_on_ranks(
        ValueError,
        "multiple or a divisor of 4",
        4,
        1,
        lambda group: context_parallel_attention(*wide, enable_gqa=True, group=group),
    )
    assert_raises_on_ranks(
        ValueError,
        'one process group with mode="ulysses", got 2',
        4,
        2,
        lambda row, column: context_parallel_attention(*inputs, group=(column, row)),
    )
    assert_raises_on_ranks(
        ValueError,
        "kv_heads_at_once: expected None",
        4,
        2,
        lambda row, column: context_parallel_attention(*inputs, mode="ring", group=(column, row), kv_heads_at_once=1),
    )
    assert_raises_on_ranks(
        ValueError,
        r"ranks \[\d+, \d+\] in common",
        2,
        1,
        lambda group: context_parallel_attention(*inputs, mode="gather", group=(group, group)),
    )
    assert_raises_on_ranks(NotImplementedError, "gradients", 2, 1, lambda group: _with_gradients(*inputs, group=group))


def _with_gradients(query, key, value, *, group):
    with torch.enable_grad():
        return context_parallel_attention(query.requires_grad_(), key, value, group=group)


def test_missing_process_group_raises() -> None:
    query = torch.randn(1, 2, 128, 32)
    with pytest.raises(RuntimeError, match="expected an initialized process group"):
        context_parallel_attention(query, query, query)
