"""Equality and hashes of selection rules, and the call cache for rules with per-head tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import sparge
from sparge import Budget, Dense, TopCdf, TopK
from sparge.dispatch import call_cache
from sparge.options.checks import rule_from_topk

SHARES = [0.25, 0.75]


def shares(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a new tensor with one share per head."""
    return torch.tensor(SHARES, dtype=dtype)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TopK(0.5), TopK(0.5)),
        (Budget(0.5), rule_from_topk(0.5)),
        (TopK(shares()), TopK(shares())),
        (TopK(shares()), rule_from_topk(shares())),
        (TopCdf(shares()), TopCdf(shares(torch.float64))),
        (TopCdf(shares()), TopCdf(shares(torch.bfloat16))),
        (Budget(0.5, similarity_threshold=shares()), Budget(0.5, similarity_threshold=shares())),
        (TopK(0.5, pv_threshold=-shares()), TopK(0.5, pv_threshold=-shares())),
        (Dense(), Dense()),
    ],
    ids=str,
)
def test_equal_rules_have_equal_hashes(first: Any, second: Any) -> None:
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second, copy.deepcopy(first), pickle.loads(pickle.dumps(second))}) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TopK(0.5), TopK(0.25)),
        (TopK(0.5), TopCdf(0.5)),
        (TopK(0.5), TopK(torch.tensor([0.5]))),
        (TopK(shares()), TopK(shares().flip(0))),
        (TopK(shares()), TopK(torch.tensor([0.25]))),
        (TopK(shares()), TopCdf(shares())),
        (TopK(shares()), TopK(shares(), min_blocks=4)),
        (TopK(shares()), TopK(shares(), pv_threshold=-shares())),
        (TopK(shares()), None),
    ],
    ids=str,
)
def test_different_rules_are_not_equal(first: Any, second: Any) -> None:
    assert first != second


def test_equality_and_hash_follow_changes_of_the_tensor() -> None:
    tensor = shares()
    rule = TopK(tensor)
    assert rule == TopK(shares())
    tensor.mul_(0.5)
    assert rule != TopK(shares())
    assert rule == TopK(shares() * 0.5)
    assert hash(rule) == hash(TopK(shares() * 0.5))


def test_tensors_on_another_device_are_not_read() -> None:
    """A meta tensor has no values to read; rules with such tensors are equal if the tensor is the same object."""
    tensor = torch.empty(2, device="meta")
    assert TopK(tensor) == TopK(tensor)
    assert hash(TopK(tensor)) == hash(TopK(tensor))
    assert TopK(tensor) != TopK(torch.empty(2, device="meta"))


def test_repeated_calls_with_per_head_tensors() -> None:
    """Equal tensors give equal results, and a tensor that changes in place is read again."""
    query, key, value = (torch.randn(1, 2, 256, 32) for _ in range(3))

    def attend(topk: Tensor) -> Tensor:
        return sparge.attention(query, key, value, sparsity=TopK(topk, min_blocks=0), backend="torch")

    low, high = torch.tensor([0.25, 0.25]), torch.tensor([1.0, 1.0])
    call_cache.forget()
    expected = [attend(amount) for amount in (low, high)]
    assert not torch.equal(*expected)
    assert torch.equal(attend(low.clone()), expected[0])
    assert torch.equal(attend(high.clone()), expected[1])
    changed = low.clone()
    call_cache.forget()
    assert torch.equal(attend(changed), expected[0])
    changed.fill_(1.0)
    assert torch.equal(attend(low), expected[0]), "a cached call must not keep a tensor that changes"
    assert torch.equal(attend(changed), expected[1])
