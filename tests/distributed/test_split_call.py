"""`split_call.attention`: a call that an integration splits over ranks equals one process."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.cases import Case, make_tensors
from tests.distributed.threads import on_ranks

import sparge
from sparge.distributed import split_call
from sparge.integrations.diffusers.shards import Shards, _moves

HEADS, LENGTH = 4, 1024
RULE = sparge.Budget(0.5, pv_threshold=torch.tensor([-9.0, -9.0, -9.0, -0.5]))
"""The last head skips most P V products, the other heads skip none."""


def attend(tensors, ranks, heads, queries, rule):
    split = {"ranks": ranks, "heads": heads, "queries": queries}
    return split_call.attention(*tensors, **split, attend_locally=sparge.attention, sparsity=rule, backend="torch")


@pytest.mark.parametrize("how", ["heads", "queries"])
def test_per_head_options_of_a_budget_follow_the_heads(how: str) -> None:
    inputs = make_tensors(Case("ulysses", heads=(HEADS, HEADS)))
    expected = sparge.attention(*inputs, sparsity=RULE, backend="torch")
    without_threshold = sparge.attention(*inputs, sparsity=sparge.Budget(0.5), backend="torch")
    assert not torch.allclose(expected[:, 3], without_threshold[:, 3], atol=1e-3)  # the threshold has an effect

    def work(communicator):
        if how == "heads":
            heads, queries = (range(2), range(2, HEADS)), ((0, LENGTH),) * 2
            tensors = [x.chunk(2, 1)[communicator.rank] for x in inputs]
        else:
            heads, queries = (range(HEADS),) * 2, ((0, LENGTH // 2), (LENGTH // 2, LENGTH))
            tensors = [inputs[0].chunk(2, 2)[communicator.rank], *inputs[1:]]
        return attend(tensors, communicator, heads, queries, RULE)

    parts = on_ranks(2, work)
    torch.testing.assert_close(torch.cat(parts, 1 if how == "heads" else 2), expected, atol=2e-5, rtol=2e-5)


def test_similarity_threshold_raises() -> None:
    inputs = make_tensors(Case("ulysses", heads=(HEADS, HEADS)))
    rule = sparge.Budget(0.5, similarity_threshold=0.1)

    def work(communicator):
        tensors = [x.chunk(2, 1)[communicator.rank] for x in inputs]
        return attend(tensors, communicator, (range(2), range(2, HEADS)), ((0, LENGTH),) * 2, rule)

    with pytest.raises(NotImplementedError, match="similarity_threshold: expected None"):
        on_ranks(2, work)


def test_repeated_parts_are_not_resolved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_tensors(Case("ulysses", heads=(HEADS, HEADS)))
    resolved = []
    resolve = split_call.resolve

    def counted(*args, **kwargs):
        resolved.append(args)
        return resolve(*args, **kwargs)

    monkeypatch.setattr(split_call, "resolve", counted)

    def work(communicator):
        tensors = [x.chunk(2, 1)[communicator.rank] for x in inputs]
        split = (range(2), range(2, HEADS)), ((0, LENGTH),) * 2
        return [attend(tensors, communicator, *split, sparge.Budget(0.5)) for _ in range(3)]

    first, *others = (torch.cat(parts, 1) for parts in zip(*on_ranks(2, work), strict=True))
    assert len(resolved) <= 2  # at most once for each rank
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("tokens", "is_identity"), [((512, 512), True), ((500, 524), False), ((640, 384), False)])
def test_queries_are_exchanged_only_if_a_rank_lacks_some(tokens: tuple[int, int], is_identity: bool) -> None:
    shards = Shards(tokens, (0, 0))
    assert [_moves(shards, 1, rank, 2, None, "cpu").is_identity for rank in range(2)] == [is_identity] * 2
