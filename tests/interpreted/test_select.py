"""The selection kernel, compared with sorting: ties, zeros, NaN, budgets, masses, forced and dissimilar blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from interpreted.conftest import call_of
from selection import assert_valid_lists
from sparge import BlockMask, Budget, TopCdf, TopK
from sparge.backends.gpu.stages import budget
from sparge.backends.gpu.stages.mask_blocks import MaskFacts
from sparge.backends.gpu.stages.select import select
from sparge.masks.geometry import BLOCK_K, BLOCK_Q, Shape
from sparge.masks.visibility import SeenTokens, unfinished_blocks
from sparge.options.rules import Selection
from sparge.reference import prediction
from sparge.reference.shared import value_of_head

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NEVER_VISIBLE = torch.iinfo(torch.int32).max


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_probabilities(kind: str, rows: int, blocks: int, seed: int) -> Tensor:
    """Return float32 probabilities (rows, blocks) whose sums are exact: multiples of 2^-12 below 1."""
    generator = seeded(seed)
    if kind == "equal":
        return torch.full((rows, blocks), 2.0**-6)
    if kind == "zero":
        return torch.zeros(rows, blocks)
    if kind == "one":
        row = torch.zeros(rows, blocks)
        row[:, seed % blocks] = 1.0
        return row
    levels = {"ties": 4, "spread": 4096, "few": 64}[kind]
    drawn = torch.randint(levels, (rows, blocks), generator=generator)
    if kind == "few":
        drawn = torch.where(drawn > 60, drawn, 0)
    return drawn / levels / 64 // 2**-12 * 2**-12


def run_kernel(
    probability: Tensor,
    shape: Shape,
    sparsity: Selection,
    *,
    is_causal: bool = False,
    always_keep: list[tuple[int, int]] | None = None,
    first_seen: Tensor | None = None,
    query_similarity: Tensor | None = None,
    key_similarity: Tensor | None = None,
    threshold: Tensor | None = None,
) -> BlockMask:
    call = call_of(shape, is_causal=is_causal, sparsity=sparsity, always_keep=tuple(always_keep or ()))
    rows = probability if query_similarity is None else query_similarity
    facts = None if first_seen is None else MaskFacts(SeenTokens(keys=None, queries=None), first_seen)
    mask, order, _ = select(probability, rows, key_similarity, call, facts, threshold)
    assert (order is not None) == sparsity.is_call_wide
    assert order is None or order.sort().values.tolist() == list(range(mask.kv_num_blocks.numel()))
    return mask


def run_reference(
    probability: Tensor,
    shape: Shape,
    sparsity: Selection,
    *,
    is_causal: bool = False,
    always_keep: list[tuple[int, int]] | None = None,
    first_seen: Tensor | None = None,
    query_similarity: Tensor | None = None,
    key_similarity: Tensor | None = None,
    threshold: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return kept and visible blocks, (B, H, q_blocks, kv_blocks), selected by the reference."""
    size = (shape.batch, shape.heads, shape.q_blocks, shape.kv_blocks)
    kept, visible = torch.zeros(size, dtype=torch.bool), torch.zeros(size, dtype=torch.bool)
    call = call_of(shape, is_causal=is_causal, sparsity=sparsity, always_keep=tuple(always_keep or ()))
    unfinished = unfinished_blocks(shape, call.window, torch.device("cpu"))
    rows = torch.cartesian_prod(*map(torch.arange, size[:3])).view(-1, 3).tolist()
    for b, h, i in rows:
        seen_from = torch.arange(shape.kv_blocks) * BLOCK_K if first_seen is None else first_seen[b, h]
        last_query = min((i + 1) * BLOCK_Q, shape.q_len) - 1 + shape.causal_offset
        visible[b, h, i] = seen_from <= last_query if is_causal else seen_from < NEVER_VISIBLE
    candidates: list[list[prediction.QBlock]] = [[] for _ in range(shape.batch)]
    for b, h, i in rows:
        if i == 0:
            forced = prediction.forced_blocks(call, visible[b, h]) | unfinished
        flat, flat_kv = b * shape.heads + h, b * shape.kv_heads + h // shape.group
        dissimilar = torch.zeros(shape.kv_blocks, dtype=torch.bool)
        if threshold is not None:
            assert query_similarity is not None
            assert key_similarity is not None
            dissimilar = (query_similarity[flat, i] < threshold[h]) | (key_similarity[flat_kv] < threshold[h])
            dissimilar = dissimilar & ~unfinished[i]
        row = probability[flat, i]
        amount = value_of_head(sparsity.amount, h, shape)
        assert amount is not None
        blocks = (row.nan_to_num(0.0), visible[b, h, i], forced[i] | row.isnan(), dissimilar)
        candidates[b].append(prediction.QBlock(*blocks, amount, sparsity.min_blocks))
    for b in range(shape.batch):
        kept[b] = torch.stack(prediction.apply_rule(sparsity, candidates[b])).view_as(kept[b])
    return kept, visible


def assert_selection(probability: Tensor, shape: Shape, sparsity: Selection, **call: Any) -> Tensor:
    got = run_kernel(probability, shape, sparsity, **call)
    kept, visible = run_reference(probability, shape, sparsity, **call)
    assert_valid_lists(got)
    assert torch.equal(got.visible_num_blocks, visible.sum(-1, dtype=torch.int32))
    assert torch.equal(got.kv_num_blocks, kept.sum(-1, dtype=torch.int32))
    assert torch.equal(got.to_dense(), kept)
    return kept


sparsities = st.builds(
    lambda kind, shares, per_head, **rules: kind(
        torch.tensor(shares) if per_head and kind is not Budget else shares[0], **rules
    ),
    kind=st.sampled_from([TopK, TopCdf, Budget]),
    shares=st.lists(st.integers(1, 64).map(lambda n: n / 64), min_size=2, max_size=2),
    per_head=st.booleans(),
    min_blocks=st.sampled_from([0, 1, 3, 1000]),
    sink=st.sampled_from([None, True, False]),
    diagonal=st.sampled_from([None, True, False]),
)


@settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    kind=st.sampled_from(["ties", "spread", "few", "equal", "zero", "one"]),
    q_len=st.sampled_from([1, 128, 200, 300]),
    kv_len=st.sampled_from([1, 64, 130, 1000, 2048, 2500]),
    sparsity=sparsities,
    is_causal=st.booleans(),
    marks=st.sampled_from([0.0, 0.1]),
    seen=st.sampled_from([None, 0.8, 0.1]),
    threshold=st.sampled_from([None, 0.2, 0.6]),
    always=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_selection_equals_sorting(
    kind: str,
    q_len: int,
    kv_len: int,
    sparsity: Selection,
    is_causal: bool,
    marks: float,
    seen: float | None,
    threshold: float | None,
    always: bool,
    seed: int,
) -> None:
    shape = Shape(1, 2, 1, q_len, kv_len, 8, 8)
    generator = seeded(seed)
    probability = make_probabilities(kind, 2 * shape.q_blocks, shape.kv_blocks, seed).view(
        2, shape.q_blocks, shape.kv_blocks
    )
    probability[torch.rand(probability.shape, generator=generator) < marks] = math.nan
    call: dict[str, Any] = {"is_causal": is_causal}
    if seen is not None:
        within = torch.arange(shape.kv_blocks) * BLOCK_K + torch.randint(
            BLOCK_K, (1, 2, shape.kv_blocks), generator=generator
        )
        present = torch.rand(1, 2, shape.kv_blocks, generator=generator) < seen
        call["first_seen"] = torch.where(present & (within < kv_len), within, NEVER_VISIBLE).int()
    if threshold is not None:
        call["query_similarity"] = torch.rand(2, shape.q_blocks, generator=generator) + 0.3
        call["key_similarity"] = torch.rand(1, shape.kv_blocks, generator=generator)
        call["threshold"] = torch.tensor([threshold, threshold / 2])
    if always:
        call["always_keep"] = [(kv_len // 3, kv_len // 3 + 1), (kv_len - 1, kv_len)]
    assert_selection(probability, shape, sparsity, **call)


def select_blocks(row: list[float], sparsity: Selection) -> list[int]:
    probability = torch.tensor(row).view(1, 1, -1)
    shape = Shape(1, 1, 1, 128, 64 * len(row), 8, 8)
    return assert_selection(probability, shape, sparsity).flatten().nonzero().flatten().tolist()


def topcdf(cdf: float) -> TopCdf:
    return TopCdf(cdf, min_blocks=0)


def topk(share: float) -> TopK:
    return TopK(share, min_blocks=0)


def test_topcdf_keeps_the_block_that_crosses_the_mass() -> None:
    row = [0.0625, 0.5, 0.125, 0.25, 0.0625]
    assert select_blocks(row, topcdf(0.5)) == [1]
    assert select_blocks(row, topcdf(0.5078125)) == [1, 3]
    assert select_blocks(row, topcdf(0.75)) == [1, 3]
    assert select_blocks(row, topcdf(0.90625)) == [0, 1, 2, 3]
    assert select_blocks(row, topcdf(1.0)) == [0, 1, 2, 3, 4]


def test_topcdf_mass_is_a_share_of_the_sum() -> None:
    """The probabilities of some scores do not sum to 1."""
    assert select_blocks([0.25, 0.0, 0.25, 0.0], topcdf(0.75)) == [0, 2]
    assert select_blocks([0.25, 0.0, 0.25, 0.0], topcdf(0.5)) == [0]
    assert select_blocks([0.75, 0.25, 0.5, 0.5], topcdf(0.5)) == [0, 2]
    assert select_blocks([0.0] * 4, topcdf(0.5)) == [0]
    assert select_blocks([0.0] * 4, topcdf(1.0)) == [0, 1, 2, 3]


def test_ties_go_to_the_lower_index() -> None:
    assert select_blocks([0.25] * 4, topk(0.5)) == [0, 1]
    assert select_blocks([0.25] * 4, topcdf(0.75)) == [0, 1, 2]
    assert select_blocks([0.125, 0.25, 0.125, 0.25, 0.125, 0.125], topk(0.5)) == [0, 1, 3]


@pytest.mark.parametrize(
    "share, visible, expected", [(0.1, 1280, 128), (0.6, 25, 15), (0.3, 50, 15), (1e-9, 7, 1), (1.0, 7, 7)]
)
def test_topk_budgets_do_not_round_up(share: float, visible: int, expected: int) -> None:
    """A float32 share times a number of blocks can exceed an integer by rounding, but the budget must not."""
    shape = Shape(1, 1, 1, 128, 64 * visible, 8, 8)
    probability = make_probabilities("spread", 1, visible, 0).view(1, 1, -1)
    for given_share in (share, torch.tensor([share])):
        assert int(assert_selection(probability, shape, TopK(given_share, min_blocks=0)).sum()) == expected


def test_tiny_probabilities_keep_their_order() -> None:
    """This includes subnormal numbers, whose bits also have the order of integers."""
    row = [1.0, 1e-38, 3e-45, 0.0, 2e-45, 1e-30, 1e-42, 0.0]
    assert select_blocks(row, topk(0.5)) == [0, 1, 5, 6]
    assert select_blocks(row, topk(0.75)) == [0, 1, 2, 4, 5, 6]


@pytest.mark.parametrize("is_causal", [False, True])
def test_budget_orders_long_query_blocks_first(is_causal: bool) -> None:
    """Attention computes query blocks in this order; a long one at the end would delay the kernel."""
    shape = Shape(2, 10, 1, 2048, 2048, 8, 8)
    rows = shape.heads * shape.q_blocks
    probability = make_probabilities("spread", 2 * rows, shape.kv_blocks, 3).view(20, shape.q_blocks, shape.kv_blocks)
    call = call_of(shape, is_causal=is_causal, sparsity=Budget(0.125), exact_queries=((1900, 2048),))
    mask, order, _ = select(probability, probability, None, call)
    assert order is not None
    many = budget.LONG * 0.125 * shape.kv_blocks / (2 if is_causal else 1)
    of_batches = order.view(2, rows) - torch.tensor([[0], [rows]])
    for counts, numbers in zip(mask.kv_num_blocks.view(2, rows), of_batches, strict=True):
        is_long = counts > many
        number = int(is_long.sum())
        assert number == 2 * shape.heads
        assert numbers[:number].tolist() == is_long.nonzero().flatten().tolist()
        assert numbers[number:].tolist() == (~is_long).nonzero().flatten().flip(0).tolist()


def test_batches_and_heads_use_their_own_inputs() -> None:
    shape = Shape(2, 4, 2, 200, 320, 8, 8)
    probability = make_probabilities("spread", 16, 5, 3).view(8, 2, 5)
    generator = seeded(4)
    call = {
        "is_causal": True,
        "first_seen": torch.where(
            torch.rand(2, 4, 5, generator=generator) < 0.8, torch.arange(5) * 64, NEVER_VISIBLE
        ).int(),
        "query_similarity": torch.rand(8, 2, generator=generator),
        "key_similarity": torch.rand(4, 5, generator=generator),
        "threshold": torch.tensor([0.0, 0.3, 0.5, 1.0]),
    }
    assert_selection(probability, shape, TopK(torch.tensor([0.2, 0.4, 0.6, 0.8]), min_blocks=0), **call)
    call["first_seen"] = call["first_seen"][:, :1].expand(-1, 4, -1)
    assert_selection(probability, shape, TopCdf(0.3, min_blocks=1), **call)
    assert_selection(probability, shape, Budget(0.4), **call)


def test_budget_follows_the_probability_mass() -> None:
    """One head attends to one block, the other to all blocks equally."""
    rows = [[0.97] + [0.01] * 7, [0.125] * 8]
    shape = Shape(1, 2, 2, 128, 512, 8, 8)
    kept = assert_selection(torch.tensor(rows).view(2, 1, 8), shape, Budget(0.5))
    assert kept.flatten(0, 2).sum(-1).tolist() == [2, 6]
    kept = assert_selection(torch.tensor(rows).view(2, 1, 8), shape, Budget(0.125))
    assert kept.flatten(0, 2).sum(-1).tolist() == [1, 1]


@pytest.mark.parametrize("density", [0.01, 0.37, 1.0])
def test_budget_is_exact_and_ties_are_split_evenly(density: float) -> None:
    shape = Shape(2, 3, 3, 1000, 1280, 8, 8)
    for kind in ("equal", "ties", "spread", "one"):
        probability = make_probabilities(kind, 48, 20, 5).view(6, 8, 20)
        kept = assert_selection(probability, shape, Budget(density))
        rows = kept.flatten(1, 2).sum(-1)
        assert rows.sum(1).tolist() == [max(math.ceil(density * 480 - 1e-6), 24)] * 2
        if kind == "equal":
            assert int(rows.max() - rows.min()) <= 1, "equal query blocks keep equally many blocks"


def test_budget_with_many_query_blocks_per_head() -> None:
    shape = Shape(1, 3, 3, 128 * 100, 64 * 2, 8, 8)
    assert_selection(make_probabilities("ties", 300, 2, 1).view(3, 100, 2), shape, Budget(0.7))


def test_rules_without_a_kernel_are_rejected() -> None:
    class Unknown(TopK):
        name = "unknown"

    with pytest.raises(NotImplementedError, match=r"expected one of \('topk', 'topcdf', 'budget'\), got 'unknown'"):
        run_kernel(torch.zeros(1, 1, 2), Shape(1, 1, 1, 128, 128, 8, 8), Unknown(0.5))
