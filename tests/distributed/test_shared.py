"""`shared.attention`: the parts of a call that an integration has split by itself are those of one process."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.cases import Case, tensors
from tests.distributed.threads import on_ranks

import sparge
from sparge.distributed import shared
from sparge.distributed.shared import Share

HEADS, LENGTH = 4, 1024
RULE = sparge.Budget(0.5, pv_threshold=torch.tensor([-9.0, -9.0, -9.0, -0.5]))
"""The last head skips much, the others nothing."""


@pytest.mark.parametrize("split", ["heads", "queries"])
def test_numbers_of_heads_under_a_budget_are_those_of_the_rank(split: str) -> None:
    inputs = tensors(Case("ulysses", heads=(HEADS, HEADS)))
    expected = sparge.attention(*inputs, sparsity=RULE, backend="torch")
    loose = sparge.attention(*inputs, sparsity=sparge.Budget(0.5), backend="torch")
    assert not torch.allclose(expected[:, 3], loose[:, 3], atol=1e-3)  # or it would say nothing

    def work(exchange):
        if split == "heads":
            share = Share(exchange, (range(2), range(2, HEADS)), ((0, LENGTH),) * 2)
            own = [x.chunk(2, 1)[exchange.rank] for x in inputs]
        else:
            share = Share(exchange, (range(HEADS),) * 2, ((0, LENGTH // 2), (LENGTH // 2, LENGTH)))
            own = [inputs[0].chunk(2, 2)[exchange.rank], *inputs[1:]]
        return shared.attention(*own, share=share, sparsity=RULE, backend="torch")

    parts = on_ranks(2, work)
    torch.testing.assert_close(torch.cat(parts, 1 if split == "heads" else 2), expected, atol=2e-5, rtol=2e-5)


def test_a_similarity_threshold_is_not_forgotten() -> None:
    inputs = tensors(Case("ulysses", heads=(HEADS, HEADS)))
    rule = sparge.Budget(0.5, similarity_threshold=0.1)

    def work(exchange):
        share = Share(exchange, (range(2), range(2, HEADS)), ((0, LENGTH),) * 2)
        own = [x.chunk(2, 1)[exchange.rank] for x in inputs]
        return shared.attention(*own, share=share, sparsity=rule, backend="torch")

    with pytest.raises(NotImplementedError, match="similarity_threshold: expected None"):
        on_ranks(2, work)
