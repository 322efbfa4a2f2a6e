"""Every stage of the reference, compared with independent float64 formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import sparge
from conftest import make_qkv
from sparge import Dense, Mean, Moment, Spread, TopCdf, TopK, reference
from sparge.call import Call
from sparge.evaluate.metrics import relative_l1
from sparge.masks.geometry import Shape
from sparge.reference import prediction, shared


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_seen(length: int) -> torch.Tensor:
    return torch.ones(length, dtype=torch.bool)


def test_causal_elements_are_aligned_bottom_right():
    allowed = shared.element_mask(Call(Shape(1, 1, 1, 3, 5, 8, 8), True, 1.0), torch.device("cpu")).allowed[0, 0]
    assert allowed.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    allowed = shared.element_mask(Call(Shape(1, 1, 1, 5, 3, 8, 8), True, 1.0), torch.device("cpu")).allowed[0, 0]
    assert allowed.int().tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_smoothing_preserves_the_softmax_and_ignores_hidden_and_non_finite_tokens():
    key, query = gaussian(1, 1, 40, 8), gaussian(1, 1, 7, 8, seed=1)
    key[0, 0, 3] = 1e30
    seen = torch.ones(1, 1, 40, dtype=torch.bool)
    seen[0, 0, 3] = False
    smoothed, mean = shared.smooth_key(key, seen)
    others = [i for i in range(40) if i != 3]
    torch.testing.assert_close(mean[0, 0, 0], key[0, 0, others].mean(0))
    before, after = ((query @ k[:, :, others].mT).softmax(-1) for k in (key, smoothed))
    torch.testing.assert_close(after, before)
    key[0, 0, 5] = math.nan
    _, mean_without_nan = shared.smooth_key(key, seen)
    torch.testing.assert_close(mean_without_nan[0, 0, 0], key[0, 0, [i for i in others if i != 5]].mean(0))


@pytest.mark.parametrize("length", [1, 63, 64, 100, 130])
def test_self_similarity_is_the_mean_cosine_over_all_pairs_of_valid_tokens(length):
    tokens = gaussian(length, 16) + 1.0
    got = prediction.self_similarity(tokens, all_seen(length), 64)
    for block, part in zip(got, tokens.split(64), strict=True):
        cosine = torch.nn.functional.cosine_similarity(part[:, None], part[None], dim=-1)
        assert block.item() == pytest.approx(cosine.mean().item(), abs=1e-12)
    assert ((got >= 0) & (got <= 1 + 1e-12)).all()


def test_pooling_counts_valid_tokens_only():
    tokens, seen = gaussian(100, 4), all_seen(100)
    seen[10:90] = False
    tokens[~seen] = math.nan
    means, variances = prediction.pool(tokens, seen, 64)
    torch.testing.assert_close(means[0], tokens[:10].mean(0))
    torch.testing.assert_close(means[1], tokens[90:].mean(0))
    torch.testing.assert_close(variances[1], tokens[90:].var(0, correction=0))


def test_sampled_queries_are_evenly_spaced_among_the_visible_queries():
    assert prediction.sample_queries(all_seen(128), 8)[0].tolist() == [8, 24, 40, 56, 72, 88, 104, 120]
    assert prediction.sample_queries(all_seen(131), 2).tolist() == [[32, 96], [128, 130]]
    assert prediction.sample_queries(all_seen(1), 8)[0].tolist() == [0] * 8
    seen = all_seen(128)
    seen[:100] = False
    assert prediction.sample_queries(seen, 2)[0].tolist() == [107, 121]


def test_moment_score_adds_a_quarter_of_the_variance():
    """The keys are all corners of a 6-cube, whose channels are exactly uncorrelated."""
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=torch.float64)] * 6)  # 64 keys
    keys = corners * torch.linspace(0.5, 2, 6, dtype=torch.float64) + 0.3
    means, variances = prediction.pool(keys, all_seen(64), 64)
    query = gaussian(1, 1, 6)
    unmasked = torch.ones(1, 64, dtype=torch.bool), torch.zeros(1, 64, dtype=torch.float64)
    for scale in (0.1, 1.0):
        logits = query[0] @ keys.mT * scale
        head = prediction.HeadSummary(query[0], all_seen(1), means, variances, scale, *unmasked)
        mean = prediction.score_mean(head, Mean())[0].item()
        assert mean == pytest.approx(logits.mean().item())
        expected = mean + logits.var(correction=0).item() / 4
        assert prediction.score_moment(head, Moment(1))[0].item() == pytest.approx(expected)


def test_means_of_parts_exclude_hidden_queries():
    """130 queries in parts of 32. A part without visible queries gets the mean of its block."""
    query, seen = gaussian(130, 4), all_seen(130)
    seen[5:20] = False
    seen[32:64] = False
    query[~seen] = math.nan
    got = prediction.part_means(query, seen, 4)
    assert got.shape == (2, 4, 4)
    torch.testing.assert_close(got[0, 0], torch.cat([query[:5], query[20:32]]).mean(0))
    torch.testing.assert_close(got[0, 1], query[:128][seen[:128]].mean(0))
    torch.testing.assert_close(got[0, 2:], torch.stack([query[64:96].mean(0), query[96:128].mean(0)]))
    torch.testing.assert_close(got[1], query[128:].mean(0).expand(4, 4))
    assert not prediction.part_means(query, torch.zeros_like(seen), 2).any()


def test_spread_score_of_a_worked_example():
    """The query is 2. One block has keys 1 and 3, the other has keys 2. Only the second mean is exact."""
    keys = torch.cat([torch.tensor([1.0, 3.0]).repeat(32), torch.full((64,), 2.0)])[:, None].double()
    means, variances = prediction.pool(keys, all_seen(128), 64)
    assert means.flatten().tolist() == [2.0, 2.0]
    assert variances.flatten().tolist() == [1.0, 0.0]
    query = torch.full((1, 1), 2.0, dtype=torch.float64)
    unmasked = torch.ones(1, 128, dtype=torch.bool), torch.zeros(1, 128, dtype=torch.float64)
    head = prediction.HeadSummary(query, all_seen(1), means, variances, 0.5, *unmasked)
    # scale q . mean = 2; a quarter of scale^2 q^2 variance = 1/4
    scores, weights = prediction.score_spread(head, Spread(2))
    assert weights.tolist() == [[[0.25, 0.0]] * 2]
    assert scores.tolist() == [[[2.25, 2.0]] * 2]
    eligible = torch.ones(1, 2, dtype=torch.bool)
    got, broken = prediction.block_probabilities(scores, eligible, 2, weights)
    share = 1 / (1 + math.exp(-0.25))
    assert got[0, 0].item() == pytest.approx(math.sqrt(share * 0.25) / 8)
    assert got[0, 1].item() == 0
    assert not broken.any()


def test_spread_selects_blocks_with_inaccurate_means():
    """The first block gets more attention, but its keys are equal and its mean is exact."""
    query, key = torch.ones(1, 1, 128, 8), torch.zeros(1, 1, 256, 8)
    key[:, :, :64] = 1.0
    key[:, :, 64:96], key[:, :, 96:128] = 2.5, -2.5
    call = Call(Shape(1, 1, 1, 128, 256, 8, 8), False, 0.35, sparsity=TopK(0.25, min_blocks=0))
    chosen = {}
    for score in (Mean(), Spread(), Spread(1)):
        kept = reference.predict(query, key, replace(call, score=score)).to_dense()
        chosen[score] = kept.flatten().nonzero().flatten().tolist()
    assert chosen == {Mean(): [0], Spread(): [1], Spread(1): [1]}


def test_scores_add_the_log_mean_exp_of_the_visible_bias():
    """A bias of -10 000 on part of a block hides those keys but hardly changes the score of the block."""
    allowed = torch.ones(1, 1, 100, dtype=torch.bool)
    bias = gaussian(1, 1, 100)
    bias[..., 10:30] = -10_000
    allowed[..., 70:] = False
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    query = torch.zeros(1, 1, 4, dtype=torch.float64)
    expected = torch.stack([bias[..., part].exp().mean().log() for part in (slice(0, 64), slice(64, 70))])
    head = prediction.HeadSummary(query[0], all_seen(1), zeros, zeros, 1.0, allowed[0], bias[0])
    moment = prediction.score_moment(head, Moment(1))[0].flatten()
    torch.testing.assert_close(moment, expected)
    assert moment.abs().max() < 1
    torch.testing.assert_close(prediction.score_mean(head, Mean())[0].flatten(), expected)
    torch.testing.assert_close(prediction.score_spread(head, Spread(1))[0].flatten(), expected)


def test_probabilities_average_one_softmax_per_query_and_flag_non_finite_scores():
    scores = torch.tensor([[[0.0, 1.0, 2.0], [5.0, 0.0, math.nan]]], dtype=torch.float64)
    eligible = torch.tensor([[True, True, True]])
    got, broken = prediction.block_probabilities(scores, eligible)
    first = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64).softmax(0)
    second = torch.cat([torch.tensor([5.0, 0.0], dtype=torch.float64).softmax(0), torch.zeros(1, dtype=torch.float64)])
    torch.testing.assert_close(got[0], (first + second) / 2)
    assert broken.tolist() == [[False, False, True]]
    nothing, _ = prediction.block_probabilities(scores, torch.zeros_like(eligible))
    assert nothing.tolist() == [[0, 0, 0]]
    squares, _ = prediction.block_probabilities(scores, eligible, exponent=2)
    torch.testing.assert_close(squares[0], ((first.square() + second.square()) / 2).sqrt())
    far, _ = prediction.block_probabilities(torch.tensor([[[0.0, -41.0, -43.0]]], dtype=torch.float64), eligible)
    assert (far > 0).tolist() == [[True, True, False]], "negligible probabilities are 0"


@pytest.mark.parametrize(
    ("topk", "visible", "floor", "expected"),
    [
        (0.5, 10, 0, 5),
        (0.5, 11, 0, 6),
        (0.1, 1280, 0, 128),
        (float(torch.tensor(0.1)), 1280, 0, 128),
        (0.3, 10, 0, 3),
        (0.01, 10, 0, 1),
        (0.01, 10, 4, 4),
        (0.01, 3, 16, 3),
        (1.0, 7, 0, 7),
        (0.5, 0, 16, 0),
    ],
)
def test_topk_budget(topk, visible, floor, expected):
    assert prediction.topk_budget(topk, visible, floor) == expected


def select(rule, probabilities, **flagged):
    flags = {name: torch.zeros(len(probabilities), dtype=torch.bool) for name in ("forced", "dissimilar", "hidden")}
    for name, where in flagged.items():
        flags[name][where] = True
    blocks = (torch.tensor(probabilities), ~flags["hidden"], flags["forced"], flags["dissimilar"])
    [kept] = prediction.apply_rule(rule, [prediction.QBlock(*blocks, rule.amount, rule.min_blocks)])
    return kept.nonzero().flatten().tolist()


def test_topcdf_includes_the_crossing_block():
    assert select(TopCdf(0.6, min_blocks=0), [0.5, 0.3, 0.15, 0.05]) == [0, 1]
    assert select(TopCdf(0.5, min_blocks=0), [0.5, 0.3, 0.15, 0.05]) == [0]
    assert select(TopCdf(0.81, min_blocks=0), [0.5, 0.3, 0.15, 0.05]) == [0, 1, 2]
    assert select(TopCdf(1.0, min_blocks=0), [1.0, 0.0, 0.0, 0.0]) == [0, 1, 2, 3]


def test_forced_blocks_count_towards_the_budget_and_dissimilar_ones_are_added():
    row = [0.1, 0.4, 0.3, 0.2]
    assert select(TopK(0.5, min_blocks=0), row) == [1, 2]
    assert select(TopK(0.5, min_blocks=0), row, forced=[0]) == [0, 1]
    assert select(TopK(0.5, min_blocks=0), row, forced=[0, 2, 3]) == [0, 2, 3]
    assert select(TopK(0.5, min_blocks=0), row, dissimilar=[0]) == [0, 1, 2]
    assert select(TopK(0.5, min_blocks=0), row, forced=[1], hidden=[1]) == [2, 3]
    assert select(TopK(0.5, min_blocks=0), [0.25] * 4) == [0, 1]  # ties go to the lower index


def test_causal_topk_with_a_minimum_keeps_523_of_1056_blocks():
    """4096 tokens, 40 % of the visible blocks, sink and diagonal, at least 16 blocks per query block."""
    query, key = gaussian(1, 1, 4096, 8).float(), gaussian(1, 1, 4096, 8, seed=1).float()
    shape = Shape(1, 1, 1, 4096, 4096, 8, 8)
    mask = reference.predict(query, key, Call(shape, sparsity=TopK(0.4), score=Mean(), is_causal=True, scale=0.3))
    assert int(mask.visible_num_blocks.sum()) == 1056
    assert int(mask.kv_num_blocks.sum()) == 523
    kept = mask.to_dense()[0, 0]
    assert kept[:, 0].all()
    for i in range(32):
        assert kept[i, 2 * i : 2 * i + 2].all()
        assert not kept[i, 2 * i + 2 :].any()


def test_dissimilar_query_and_key_blocks_are_kept():
    query, key = torch.ones(1, 1, 256, 16), torch.ones(1, 1, 256, 16)
    query[:, :, 128:] = gaussian(1, 1, 128, 16).float()
    key[:, :, 64:128] = gaussian(1, 1, 64, 16, seed=1).float() * 3
    key[:, :, 192:] *= -1  # smoothing must not leave zeros in the other blocks
    shape = Shape(1, 1, 1, 256, 256, 16, 16)
    for score in (Mean(), Moment()):
        options = {"score": score, "is_causal": False, "scale": 0.25}
        rule = TopK(0.25, min_blocks=0, similarity_threshold=0.3)
        kept = reference.predict(query, key, Call(shape, sparsity=rule, **options)).to_dense()[0, 0]
        assert kept[1].all(), "the dissimilar query block keeps all key blocks"
        assert kept[0, 1], "the dissimilar key block is kept by every query block"
        assert kept[0].sum() == 2
        without = reference.predict(query, key, Call(shape, sparsity=TopK(0.25, min_blocks=0), **options))
        assert without.kv_num_blocks.flatten().tolist() == [1, 1]


def test_per_head_thresholds_apply_to_their_heads():
    query, key = gaussian(1, 2, 640, 8).float(), gaussian(1, 2, 640, 8, seed=1).float()
    shape = Shape(1, 2, 2, 640, 640, 8, 8)
    options = {"score": Moment(), "is_causal": False, "scale": 0.3}
    rule = TopK(torch.tensor([0.2, 0.7]), min_blocks=0)
    mask = reference.predict(query, key, Call(shape, sparsity=rule, **options))
    assert mask.kv_num_blocks[0].tolist() == [[2] * 5, [7] * 5]
    mask = reference.predict(
        query, key, Call(shape, sparsity=TopCdf(torch.tensor([1e-6, 1.0]), min_blocks=0), **options)
    )
    assert mask.kv_num_blocks[0].tolist() == [[1] * 5, [10] * 5]


def test_two_level_accumulation_keeps_fp8_accurate():
    query, key = gaussian(1, 1, 2, 16).float() * 0.1, gaussian(1, 1, 32768, 16, seed=1).float()
    value = gaussian(1, 1, 32768, 16, seed=2).float() + 1
    shape = Shape(1, 1, 1, 2, 32768, 16, 16)
    mask = reference.predict(query, key, Call(shape, sparsity=Dense(), score=Mean(), is_causal=False, scale=0.25))
    exact = (query.double() @ key.double().mT * 0.25).softmax(-1) @ value.double()

    def error(accumulation: str) -> float:
        call = Call(shape, False, 0.25, quantization="int8_fp8")
        return relative_l1(reference.attention(query, key, value, mask, call, accumulation=accumulation).output, exact)

    assert error("two_level") < 0.0015
    assert error("single_level") > 0.3


def test_pv_threshold_is_in_nats_and_skips_groups_of_64_queries():
    """The scores of block 1 are 5 below those of block 0 for queries 0..63, and equal to them for queries 64..127."""
    query = torch.zeros(1, 1, 128, 8)
    query[:, :, :64, 0] = 1.0
    query[:, :, :, 1] = 1.0
    key = torch.zeros(1, 1, 128, 8)
    key[:, :, 64:, 0] = -5.0
    value = gaussian(1, 1, 128, 8).float()
    shape = Shape(1, 1, 1, 128, 128, 8, 8)
    mask = reference.predict(query, key, Call(shape, sparsity=Dense(), score=Mean(), is_causal=False, scale=1.0))

    def run(threshold: float | None) -> reference.AttentionResult:
        return reference.attention(query, key, value, mask, Call(shape, False, 1.0, pv_threshold=threshold))

    assert run(None).pv_skipped.item() == 0
    assert run(-5.1).pv_skipped.item() == 0
    skipped = run(-4.9)
    assert skipped.pv_skipped.item() == 1
    torch.testing.assert_close(skipped.output[0, 0, 0], value[0, 0, :64].double().mean(0))
    torch.testing.assert_close(skipped.output[0, 0, 64], value[0, 0].double().mean(0))


@pytest.mark.parametrize("is_causal", [False, True])
def test_p_without_exp2_is_as_accurate_as_with_exp2(is_causal):
    """Both "int8_fp8_fast" (without exp2) and "int8_fp8" round P to E4M3.

    "int8_fp8_fast" also adds the rounded P to the row sum, so the bias of its rounding cancels in the division.
    """
    query, key, value = make_qkv(300, 500, heads=2, kv_heads=1, head_dim=32, dtype=torch.float32)
    call = {"is_causal": is_causal, "topk": 1.0, "enable_gqa": True, "return_lse": True, "backend": "reference"}
    exact, exact_lse = sparge.attention(query, key, value, quantization="none", **call)
    errors, moved = {}, {}
    for quantization in ("int8_fp8", "int8_fp8_fast"):
        output, lse = sparge.attention(query, key, value, quantization=quantization, **call)
        errors[quantization] = relative_l1(output, exact.double())
        moved[quantization] = float((lse - exact_lse).abs().mean())
    assert errors["int8_fp8_fast"] < 1.2 * errors["int8_fp8"] < 0.1
    assert moved["int8_fp8_fast"] < 1e-2


@pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp8_fast", "int8_fp16"])
@pytest.mark.parametrize("logits", [1e4, 1e6])
def test_huge_logits_select_one_key(logits, quantization):
    """Each query equals its own key. INT8 changes the logits by thousands, and the largest logit is still the same."""
    key, value = math.sqrt(logits / 8) * gaussian(1, 1, 200, 64).float(), gaussian(1, 1, 200, 64, seed=1).float()
    output, lse = sparge.attention(
        *(key, key, value),
        sparsity=Dense(),
        quantization=quantization,
        backend="reference",
        return_lse=True,
    )
    assert relative_l1(output, value.double()) < 0.05
    torch.testing.assert_close(lse, key.square().sum(-1) / 8, rtol=0.02, atol=0)
