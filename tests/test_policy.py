"""`Policy`: validation at construction, JSON round trips, dense steps and layers, kept ranges."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from sparge import Policy, TopCdf, TopK

POLICIES = [
    Policy(),
    Policy(topk=0.3, score="mean", min_tokens=4096, quantization="none", backend="torch"),
    Policy(sparsity=TopK(0.2, min_blocks=4, sink=True, pv_threshold=-9.0)),
    Policy(sparsity=TopCdf(0.9, similarity_threshold=0.4)),
    Policy(dense_first_steps=0.1, dense_last_steps=2, dense_steps=(5, -4), dense_layers=(0, -1)),
    Policy(always_keep=((0, 226), (-10, None)), self_attention_only=False, on_unsupported="raise"),
    Policy(topk=0.1, order="hilbert", skipped="mean", score="spread"),
    Policy(order="row", skipped="drop", score="auto"),
    Policy(dense_first_steps=2, dense="8bit"),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_json_round_trip(policy: Policy) -> None:
    text = policy.to_json()
    assert Policy.from_json(text) == policy
    assert hash(policy) == hash(Policy.from_json(text))
    assert json.loads(text) == json.loads(policy.to_json())


def test_json_omits_defaults_and_accepts_lists() -> None:
    assert Policy().to_json() == "{}"
    assert Policy(order="auto", skipped="auto", score="auto").to_json() == "{}"
    assert json.loads(POLICIES[6].to_json()) == {"topk": 0.1, "score": "spread", "skipped": "mean", "order": "hilbert"}
    assert json.loads(POLICIES[4].to_json())["dense_layers"] == [0, -1]
    written = '{"dense_layers": [0], "always_keep": [[0, 77], [-5, null]], "sparsity": {"kind": "TopK", "topk": 0.1}}'
    expected = Policy(dense_layers=(0,), always_keep=((0, 77), (-5, None)), sparsity=TopK(0.1))
    assert Policy.from_json(written) == expected


def test_json_of_per_head_topk() -> None:
    policy = Policy.from_json(Policy(sparsity=TopK(torch.tensor([0.25, 0.5]))).to_json())
    assert isinstance(policy.selection, TopK)
    assert torch.equal(torch.as_tensor(policy.selection.topk), torch.tensor([0.25, 0.5]))


@pytest.mark.parametrize(
    "text, error, message",
    [
        ("[]", TypeError, "expected a JSON object, got list"),
        ('{"top_k": 0.5}', ValueError, "got top_k"),
        ('{"sparsity": {"kind": "Top", "topk": 0.5}}', ValueError, "one of 'TopK', 'TopCdf', 'Budget', got 'Top'"),
        ('{"sparsity": {"kind": "TopK", "share": 1}}', ValueError, "sparsity: expected one of .*, topk, got share"),
        ('{"topk": 2}', ValueError, r"topk: expected a value in \(0, 1\], got 2"),
    ],
)
def test_invalid_json_is_rejected(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Policy.from_json(text)


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"topk": 0.5, "sparsity": TopK(0.5)}, ValueError, "expected topk or sparsity, got both"),
        ({"topk": torch.ones(2)}, TypeError, "topk: expected a number or None, got a tensor"),
        ({"sparsity": 0.5}, TypeError, r"expected Budget\(...\), TopK\(...\) or TopCdf\(...\), got float"),
        ({"score": "median"}, ValueError, "score: expected one of 'auto', 'moment', 'mean', 'spread', got 'median'"),
        ({"score": None}, ValueError, "score: expected one of 'auto', 'moment', 'mean', 'spread', got None"),
        (
            {"order": "zigzag"},
            ValueError,
            "order: expected one of 'auto', 'row', 'tile', 'morton', 'hilbert', got 'zigzag'",
        ),
        ({"skipped": "zero"}, ValueError, "skipped: expected one of 'auto', 'mean', 'drop', got 'zero'"),
        ({"quantization": "int4"}, ValueError, "quantization: expected one of"),
        ({"min_tokens": -1}, ValueError, "min_tokens: expected 0 or more, got -1"),
        ({"min_tokens": 4096.0}, TypeError, "min_tokens: expected an int, got float"),
        ({"dense_first_steps": 1.2}, ValueError, "dense_first_steps: expected a number of steps"),
        ({"dense_last_steps": -1}, ValueError, "dense_last_steps: expected a number of steps"),
        ({"dense_last_steps": "0.1"}, TypeError, "dense_last_steps: expected a number of steps"),
        ({"dense_steps": 3}, TypeError, "dense_steps: expected a list of ints, got 3"),
        ({"dense_layers": [0.0]}, TypeError, "dense_layers: expected a list of ints"),
        ({"always_keep": [(0,)]}, TypeError, "always_keep: expected .* pairs"),
        ({"always_keep": [(None, 5)]}, TypeError, "always_keep: expected .* pairs"),
        ({"self_attention_only": 1}, TypeError, "self_attention_only: expected a bool, got 1"),
        ({"on_unsupported": "ignore"}, ValueError, "on_unsupported: expected one of"),
        ({"backend": "cuda"}, ValueError, "backend: expected one of"),
        ({"dense": 8}, ValueError, "dense: expected one of '16bit', '8bit', got 8"),
        ({"dense": "8bit", "quantization": "none"}, ValueError, "dense: expected '16bit' with quantization='none'"),
    ],
    ids=str,
)
def test_invalid_fields_are_rejected(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Policy(**fields)


@pytest.mark.parametrize(
    "fields, is_ordered, is_causal, score",
    [
        ({}, True, False, "spread"),
        ({}, False, False, "moment"),
        ({}, True, True, "moment"),
        ({"skipped": "mean"}, True, True, "spread"),
        ({"skipped": "mean"}, False, False, "moment"),
        ({"skipped": "drop"}, True, False, "moment"),
        ({"sparsity": TopK(0.2)}, True, False, "spread"),
        ({"sparsity": TopCdf(0.9)}, True, False, "moment"),
        ({"score": "mean"}, True, False, "mean"),
        ({"score": "spread", "skipped": "drop"}, False, True, "spread"),
    ],
    ids=str,
)
def test_score_depends_on_rule_order_and_causality(
    fields: dict[str, Any], is_ordered: bool, is_causal: bool, score: str
) -> None:
    assert Policy(**fields).score_of(is_ordered=is_ordered, is_causal=is_causal) == score


@pytest.mark.parametrize(
    "fields, total, dense",
    [
        ({}, 5, []),
        ({"dense_first_steps": 2}, 5, [0, 1]),
        ({"dense_first_steps": 0.1}, 30, [0, 1, 2]),
        ({"dense_first_steps": 0.1}, 5, [0]),
        ({"dense_first_steps": 1.0}, 3, [0, 1, 2]),
        ({"dense_first_steps": 1}, 3, [0]),
        ({"dense_last_steps": 0.4}, 5, [3, 4]),
        ({"dense_steps": (1, -1)}, 4, [1, 3]),
        ({"dense_first_steps": 9}, 4, [0, 1, 2, 3]),
        ({"dense_first_steps": 1, "dense_last_steps": 1, "dense_steps": (2,)}, 5, [0, 2, 4]),
    ],
)
def test_dense_steps(fields: dict[str, Any], total: int, dense: list[int]) -> None:
    policy = Policy(**fields)
    assert [step for step in range(total) if policy.is_dense_step(step, total)] == dense
    assert policy.has_step_rules == bool(fields)


def test_dense_layers() -> None:
    policy = Policy(dense_layers=(0, -2, 7))
    assert [layer for layer in range(6) if policy.is_dense_layer(layer, 6)] == [0, 4]


def test_kept_ranges_are_clipped_to_the_keys() -> None:
    policy = Policy(always_keep=((0, 226), (-64, None), (500, 600), (-2000, -900)))
    assert policy.kept_ranges(1000) == [(0, 226), (936, 1000), (500, 600), (0, 100)]
    assert policy.kept_ranges(100) == [(0, 100), (36, 100)]


def test_numpy_numbers_and_per_head_tensors() -> None:
    policy = Policy(dense_first_steps=np.int64(1), min_tokens=np.int64(8), dense_layers=(np.int64(0),))
    assert [step for step in range(9) if policy.is_dense_step(step, 9)] == [0]
    assert Policy.from_json(policy.to_json()) == policy
    shares = [Policy(sparsity=TopK(torch.tensor([0.25, share]))) for share in (0.5, 0.5, 0.75)]
    assert shares[0] == shares[1] != shares[2]
    assert hash(shares[0]) == hash(shares[1])
