"""Add a score and a selection rule from outside the library: each needs one table entry and one function."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import pytest
import torch

import sparge
from conftest import make_qkv
from sparge.call import Call
from sparge.dispatch import ops
from sparge.masks.geometry import Shape
from sparge.options import rules, scores
from sparge.options.rules import Selection
from sparge.options.scores import Score
from sparge.reference import prediction


@dataclass(frozen=True)
class Nearest(Score):
    """Score that prefers the key blocks closest to the query block."""

    name = "nearest"
    slope: float = 1.0

    @property
    def numbers(self) -> list[float]:
        return [self.slope]


@dataclass(frozen=True)
class EveryOther(Selection):
    """Rule that keeps every n-th candidate of a query block."""

    name = "every_other"
    amount_field = "step"
    step: float = 2.0


def score_nearest(head: prediction.HeadSummary, score: Score) -> prediction.Scores:
    assert isinstance(score, Nearest)
    rows, columns = -(-len(head.query) // 128), len(head.key_means)
    distance = torch.arange(columns).double() - 2 * torch.arange(rows)[:, None]
    return -score.slope * distance.abs()[:, None], None


@pytest.fixture
def registered_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scores.SCORES, "nearest", Nearest)
    monkeypatch.setitem(prediction.SCORES, Nearest, score_nearest)
    monkeypatch.setitem(rules.SELECTIONS, "every_other", EveryOther)
    every_other = prediction.by_q_block(lambda q_block: q_block.candidates[:: int(q_block.amount)])
    monkeypatch.setitem(prediction.SELECTIONS, EveryOther, every_other)


@pytest.mark.usefixtures("registered_extensions")
class TestExtending:
    def test_custom_score(self) -> None:
        query, key, _ = make_qkv(512, head_dim=16)
        rule = sparge.TopK(0.25, min_blocks=0)
        for score in ("nearest", Nearest(3.0)):
            kept = sparge.predict(query, key, sparsity=rule, score=score, backend="reference").to_dense()
            for row in range(4):
                assert kept[0, 0, row].nonzero().flatten().tolist() == [max(2 * row - 1, 0), max(2 * row, 1)]

    def test_custom_selection_rule(self) -> None:
        query, key, value = make_qkv(512, head_dim=16)
        rule = EveryOther(3.0, min_blocks=0)
        options = {"backend": "reference", "quantization": "none", "skipped": "drop"}
        output = sparge.attention(query, key, value, sparsity=rule, **options)
        mask = torch.zeros(4, 8, dtype=torch.bool)
        mask[:, ::3] = True
        expected = sparge.block_sparse_attention(query, key, value, mask, backend="reference", quantization="none")
        kept = sparge.predict(query, key, sparsity=rule, backend="reference").to_dense()[0, 0]
        best = kept & ~mask  # the minimum: one block, the most probable
        assert (best.sum(1) <= 1).all()
        assert (kept & mask).equal(mask)
        rows = (best.sum(1) == 0).repeat_interleave(128)
        assert torch.equal(output[0, 0, rows], expected[0, 0, rows])

    def test_policy_accepts_a_custom_score(self) -> None:
        policy = sparge.Policy(sparsity=sparge.TopK(0.5), score="nearest")
        assert sparge.Policy.from_json(policy.to_json()) == policy


def test_operators_pass_every_field_of_a_rule() -> None:
    """A field that `ops.pack` does not pass would be lost silently."""
    others = {"min_blocks": 3, "similarity_threshold": 0.25, "pv_threshold": -7.0, "sink": True, "diagonal": False}
    shape = Shape(1, 2, 2, 256, 256, 16, 16)
    for kind in rules.SELECTIONS.values():
        rule = kind(**{field.name: others.get(field.name, 0.375) for field in fields(kind)})
        call = Call(shape, False, 0.25, rule, pv_threshold=rule.pv_threshold)
        arrived, _ = ops.unpack(shape, ops.pack(call, "torch"))
        assert arrived.pv_threshold == rule.pv_threshold, "pv_threshold is a field of the call, not of the rule"
        assert arrived.sparsity == replace(rule, pv_threshold=None), kind


@dataclass(frozen=True)
class Unlisted(Selection):
    name = "unlisted"
    amount_field = "share"
    share: float = 0.5


def test_unregistered_rules_and_scores_are_rejected() -> None:
    query, key, _ = make_qkv(200, head_dim=16)
    for sparsity in (Unlisted(), Selection()):
        with pytest.raises(TypeError, match="sparsity: expected"):
            sparge.predict(query, key, sparsity=sparsity)
        with pytest.raises(TypeError, match="sparsity: expected"):
            sparge.Policy(sparsity=sparsity)
    for score in (Nearest(), Score()):
        with pytest.raises(TypeError, match="score: expected"):
            sparge.predict(query, key, score=score)


@pytest.mark.usefixtures("registered_extensions")
def test_backends_without_a_custom_score_or_rule_raise() -> None:
    query, key, _ = make_qkv(200, head_dim=16)
    with pytest.raises(NotImplementedError, match="score on the torch backend: expected 'moment' or 'mean'"):
        sparge.predict(query, key, score="nearest", backend="torch")
    with pytest.raises(NotImplementedError, match="sparsity on the torch backend: expected 'topk' or 'topcdf' or"):
        sparge.predict(query, key, sparsity=EveryOther(), backend="torch")
