"""Which blocks are kept, when a call runs dense, and the statistics."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

import sparge
from conftest import (
    SPARSE,
    assert_within_budget,
    backends,
    causality,
    exact_attention,
    make_qkv,
    plain_attention,
    relative_l1,
)
from sparge import Dense, Policy, TopK
from sparge.dispatch import dense_rules
from sparge.dispatch.reasons import Reason
from sparge.evaluate.inputs import text_like
from sparge.integrations import decisions
from sparge.integrations.layers import Layer

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.timeout(120)]


class TestSelection:
    @backends
    @causality
    def test_always_keep_keeps_its_blocks(self, backend: str, is_causal: bool) -> None:
        query, key, value = make_qkv(512, 1024, head_dim=16)
        value.zero_()
        value[:, :, 700] = 1.0
        options = {
            "is_causal": is_causal,
            "sparsity": TopK(0.3, min_blocks=1, sink=False, diagonal=False),
            "backend": backend,
        }
        plain = sparge.predict(query, key, **options)
        kept = sparge.predict(query, key, always_keep=[(100, 130), (700, 701)], **options)
        dense, visible = kept.to_dense(), sparge.predict(query, key, is_causal=is_causal, sparsity=Dense()).to_dense()
        for column in (1, 2, 10):
            assert torch.equal(dense[..., column], visible[..., column])
            assert not torch.equal(plain.to_dense()[..., column], visible[..., column])
        assert torch.equal(kept.kv_num_blocks, plain.kv_num_blocks), "forced blocks count toward the budget"
        output = sparge.attention(query, key, value, always_keep=[(700, 701)], quantization="none", **options)
        sees = torch.arange(512) + 512 >= 700 if is_causal else torch.ones(512, dtype=torch.bool)
        assert (output[:, :, sees] > 0).all()
        assert (output[:, :, ~sees] == 0).all()

    @backends
    def test_sink_and_diagonal_by_default_when_causal(self, backend: str) -> None:
        query, key, _ = make_qkv(512, 1024, head_dim=16)
        thin = TopK(0.01, min_blocks=1)
        causal = sparge.predict(query, key, is_causal=True, sparsity=thin, backend=backend).to_dense()
        for row in range(4):
            expected = torch.zeros(16, dtype=torch.bool)
            expected[[0, 8 + 2 * row, 9 + 2 * row]] = True
            assert torch.equal(causal[:, :, row], expected.expand(1, 2, 16))
        free = sparge.predict(query, key, sparsity=thin, backend=backend)
        assert (free.kv_num_blocks == 1).all()

    @backends
    @pytest.mark.parametrize("rows", [1, 1024], ids=["keys", "entries"])
    def test_sink_of_a_padded_sequence_is_its_first_visible_block(self, backend: str, rows: int) -> None:
        """Batches for generation are padded on the left: the first token comes after the padding."""
        query, key, _ = make_qkv(1024, batch=2, head_dim=16)
        mask = torch.ones(2, 1, rows, 1024, dtype=torch.bool)
        mask[1, :, :, :300] = False
        blocks = sparge.predict(
            query,
            key,
            is_causal=True,
            attn_mask=mask,
            sparsity=TopK(0.01, min_blocks=1, diagonal=False),
            backend=backend,
        ).to_dense()
        assert blocks[0, :, :, 0].all()
        assert blocks[1, :, 3:, 4].all()
        assert (blocks[0].sum(-1) == 1).all()
        assert (blocks[1, :, 3:].sum(-1) == 1).all()

    @backends
    @pytest.mark.parametrize("score", ["moment", "mean"])
    @pytest.mark.parametrize("bias", [-math.inf, -65504.0, -1e4])
    def test_finite_bias_that_hides_keys_does_not_hide_their_block(self, backend: str, score: str, bias: float) -> None:
        """Padding given as (1 - mask) * -10000, or as float16's lowest number in a float32 mask."""
        query, key, _ = make_qkv(128, 1024, head_dim=16)
        direction = torch.randn(16, generator=torch.Generator().manual_seed(9))
        query += direction
        key[:, :, 960:1000] += 3 * direction  # the last block, 40 keys and 24 of padding, has nearly all the mass
        mask = torch.zeros(1024)
        mask[1000:] = bias
        mass = (query @ key.mT * 0.25 + mask).softmax(-1)[..., 960:].sum(-1)
        assert mass.mean() > 0.9
        sparsity = TopK(0.25, min_blocks=1)
        blocks = sparge.predict(query, key, attn_mask=mask, sparsity=sparsity, score=score, backend=backend)
        assert blocks.to_dense()[..., 15].all()

    @backends
    def test_per_head_budgets(self, backend: str) -> None:
        query, key, _ = make_qkv(256, 1280, heads=4, kv_heads=2, head_dim=16)
        shares = torch.tensor([0.1, 0.25, 0.5, 1.0])
        mask = sparge.predict(query, key, sparsity=TopK(shares, min_blocks=0), enable_gqa=True, backend=backend)
        assert mask.kv_num_blocks[0].tolist() == [[2, 2], [5, 5], [10, 10], [20, 20]]

    @pytest.mark.parametrize("score", ["moment", "mean"])
    def test_error_falls_as_density_rises(self, score: str) -> None:
        sample = text_like(2048, heads=2)
        exact, _ = exact_attention(sample.query, sample.key, sample.value, is_causal=True)
        errors, densities = [], []
        for topk in (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0):
            sparge.reset_stats()
            output = sparge.attention(
                sample.query,
                sample.key,
                sample.value,
                is_causal=True,
                sparsity=TopK(topk, min_blocks=1),
                score=score,
                backend="torch",
            )
            errors.append(relative_l1(output, exact))
            densities.append(sparge.stats().density)
        assert densities == sorted(densities) and densities[-1] == 1.0
        assert all(after < 1.02 * before for before, after in pairwise(errors)), errors
        assert errors[-1] < 1e-6 < 0.05 < errors[0]


class TestDenseDecision:
    @pytest.mark.parametrize(
        "heads, q_len, kv_len, is_causal, reason",
        [
            (32, 128, 2048, False, "sparse: torch"),
            (33, 128, 2047, False, "dense: below the crossover"),
            (33, 127, 2048, False, "dense: below the crossover"),
            (31, 128, 2048, False, "dense: below the crossover"),
            (1, 1, 4096, False, "dense: below the crossover"),
            (16, 256, 2176, True, "sparse: torch"),
            (16, 257, 2176, True, "dense: below the crossover"),
        ],
    )
    def test_crossover(self, heads: int, q_len: int, kv_len: int, is_causal: bool, reason: str) -> None:
        query, key, value = make_qkv(q_len, kv_len, heads=heads, head_dim=16)
        output = sparge.attention(query, key, value, topk=0.5, is_causal=is_causal)
        stats = sparge.stats()
        assert stats.reasons == {reason: 1}
        dense = reason.startswith("dense")
        assert (stats.calls, stats.sparse, stats.dense) == (1, int(not dense), int(dense))
        assert stats.density == (None if dense else 0.5)
        error = relative_l1(output, exact_attention(query, key, value, is_causal=is_causal)[0])
        assert error < 1e-5 if dense else error > 1e-3

    def test_crossover_of_model_calls_uses_the_mean_number_of_visible_keys(self) -> None:
        """Calls of models use the same crossover as `sparge.attention`, before any tensor is processed."""
        layer = Layer("", Policy())

        def runs_dense(q_len: int, kv_len: int, **kind: bool) -> bool:
            query, key = (torch.empty(1, 8, length, 16) for length in (q_len, kv_len))
            return decisions.runs_dense(layer, query, key, True, **kind)

        assert not runs_dense(3000, 3000)
        assert runs_dense(3000, 3000, is_causal=True)
        assert runs_dense(3000, 3000, is_language=True)
        assert not runs_dense(4096, 4096, is_causal=True)
        assert not runs_dense(1000, 3000, is_causal=True), "a chunk after a prefix sees 2500 keys on average"
        assert runs_dense(1000, 2047), "below the crossover of a full call"
        assert sparge.stats().reasons == {"dense: below the crossover": 3}

    def test_a_decision_applies_to_both_layouts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        decided, by_policy = [], dense_rules.by_policy

        def watched(policy: Policy, sizes: dense_rules.ModelSizes, **kind: bool) -> Reason | None:
            decided.append(sizes[2:])
            return by_policy(policy, sizes, **kind)

        monkeypatch.setattr(dense_rules, "by_policy", watched)
        query, key = torch.empty(2, 3, 100, 16), torch.empty(2, 1, 70, 16)
        layer = Layer("", Policy())
        for _ in range(3):
            assert decisions.runs_dense(layer, query, key)
            assert decisions.runs_dense(layer, query.transpose(1, 2), key.transpose(1, 2), tokens_first=True)
        assert decided == [(6, 100, 70)]

    @backends
    def test_named_backends_do_not_run_dense(self, backend: str) -> None:
        query, key, value = make_qkv(200)
        output = sparge.attention(query, key, value, backend=backend, skipped="drop", **SPARSE)
        assert sparge.stats().reasons == {f"sparse: {backend}": 1}
        mask = sparge.predict(query, key, backend=backend, **SPARSE)
        assert (mask.kv_num_blocks == 1).all()
        exact, _ = exact_attention(query, key, value, block_mask=mask.to_dense())
        assert_within_budget(output, exact, plain_attention(query, key, value, block_mask=mask.to_dense()))

    def test_counts_add_up(self) -> None:
        query, key, value = make_qkv(200)
        for _ in range(2):
            sparge.attention(query, key, value)
        sparge.attention(query, key, value, sparsity=Dense())
        half = torch.zeros(2, 4, dtype=torch.bool)
        half[:, :2] = True
        sparge.block_sparse_attention(query, key, value, half)
        sparge.predict(query, key)
        stats = sparge.stats()
        assert stats.reasons == {
            "dense: below the crossover": 2,
            "dense: sparsity=Dense()": 1,
            "sparse: torch": 1,
        }
        assert (stats.calls, stats.sparse, stats.dense, stats.density) == (4, 1, 3, 0.5)
        sparge.reset_stats()
        assert sparge.stats() == sparge.Stats(0, 0, 0, {}, None)

    def test_concurrent_calls(self) -> None:
        """Concurrent calls are counted exactly and return the same results as single calls."""
        jobs = []
        for index in range(24):
            query, key, value = make_qkv(200 + index, 300, seed=index)
            call = {"is_causal": index % 2 == 0, "backend": "torch", **SPARSE}
            jobs.append(lambda qkv=(query, key, value), call=call: sparge.attention(*qkv, **call))
        alone = [job() for job in jobs]
        serial = sparge.stats()
        sparge.reset_stats()
        with ThreadPoolExecutor(8) as pool:
            together = [future.result() for future in [pool.submit(job) for job in jobs]]
        assert sparge.stats() == serial
        assert serial.reasons == {"sparse: torch": 24}
        assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "mask"])
def test_pv_threshold_does_not_apply_to_dense_calls(masked: bool) -> None:
    query, key, value = (3 * tensor for tensor in make_qkv(1100, heads=4, kv_heads=4, head_dim=16))
    mask = torch.ones(1, 1, 1100, 1100, dtype=torch.bool).tril() if masked else None
    results = [
        sparge.attention(query, key, value, mask, sparsity=TopK(0.5, pv_threshold=threshold), return_lse=True)
        for threshold in (None, -1.0)
    ]
    assert sparge.stats().reasons == {"dense: below the crossover": 2}
    for plain, skipping in zip(*results, strict=True):
        assert torch.equal(plain, skipping)
