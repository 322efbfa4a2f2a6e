"""Statistics per layer: separate counts, totals, the printed table, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import sparge
from conftest import SPARSE, make_qkv
from sparge.stats import LAYERS_PER_ALLOCATION, MAX_UNCOUNTED, LayerStats, counters


def test_layers_add_up() -> None:
    query, key, value = make_qkv(600)
    for topk, name in ((0.25, "first"), (0.5, "second"), (1.0, "")):
        with counters.for_layer(name):
            sparge.attention(query, key, value, sparsity=sparge.TopK(topk, min_blocks=1), backend="torch")
    with counters.for_layer("first"):
        sparge.attention(query, key, value)
    stats = sparge.stats()
    assert list(stats.layers) == ["first", "second"]
    assert stats.layers["first"] == LayerStats(2, 1, 1, {"sparse: torch": 1, "dense: below the crossover": 1}, 0.3)
    assert stats.layers["second"] == LayerStats(1, 1, 0, {"sparse: torch": 1}, 0.5)
    assert (stats.calls, stats.sparse, stats.dense) == (4, 3, 1)
    assert stats.density == (0.3 + 0.5 + 1.0) / 3
    sparge.reset_stats()
    assert sparge.stats() == sparge.Stats(0, 0, 0, {}, None)


def test_more_layers_than_fit_one_allocation() -> None:
    query, key, value = make_qkv(200)
    names = [f"layer {index}" for index in range(LAYERS_PER_ALLOCATION + 3)]
    for name in names:
        with counters.for_layer(name):
            sparge.attention(query, key, value, backend="torch", **SPARSE)
    layers = sparge.stats().layers
    assert set(layers) == set(names)
    assert {layer.density for layer in layers.values()} == {0.25}


def test_each_thread_has_its_own_current_layer() -> None:
    query, key, value = make_qkv(200)

    def run(index: int) -> None:
        with counters.for_layer(f"layer {index % 4}"):
            for _ in range(5):
                sparge.attention(query, key, value, topk=1, backend="torch")
                counters.record("dense: requested")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(run, range(16)))
    layers = sparge.stats().layers
    assert {name: (layer.sparse, layer.dense) for name, layer in layers.items()} == {
        f"layer {index}": (20, 20) for index in range(4)
    }


def test_every_call_of_every_thread_counts_once() -> None:
    def record(index: int) -> None:
        for call in range(MAX_UNCOUNTED + 5):
            counters.record(f"dense: {index % 2}", "layer")
            if call % 100 == index:
                sparge.stats()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(record, range(4)))
    count = 2 * (MAX_UNCOUNTED + 5)
    assert sparge.stats().reasons == sparge.stats().layers["layer"].reasons == {"dense: 0": count, "dense: 1": count}
    assert len(counters._uncounted) == 0
    counters.record("dense: 0")
    sparge.reset_stats()
    assert sparge.stats().calls == 0


def test_the_number_of_uncounted_calls_is_bounded() -> None:
    for _ in range(2 * MAX_UNCOUNTED + 1):
        counters.record("dense: decode")
        assert len(counters._uncounted) < MAX_UNCOUNTED
    assert sparge.stats().reasons == {"dense: decode": 2 * MAX_UNCOUNTED + 1}


def test_an_error_ends_the_layer() -> None:
    try:
        with counters.for_layer("one"), counters.for_layer("two"):
            raise ZeroDivisionError
    except ZeroDivisionError:
        counters.record("dense: after")
    assert sparge.stats().layers == {}
    assert sparge.stats().reasons == {"dense: after": 1}


def test_statistics_print_as_a_table() -> None:
    query, key, value = make_qkv(200)
    with counters.for_layer("blocks.0"):
        sparge.attention(query, key, value, topk=1, backend="torch")
    counters.record("dense: decode", "blocks.10")
    assert str(sparge.stats()).splitlines() == [
        "2 attention calls: 1 sparse, 1 dense; density 1.000",
        "  dense: decode       1",
        "  sparse: torch       1",
        "  layer           calls  sparse   dense  density",
        "  blocks.0            1       1       0    1.000",
        "  blocks.10           1       0       1",
    ]


class TestSkippedProducts:
    """Two of three blocks are kept. Scores of the second are 5 below the first for 64 of 128 queries, else equal."""

    @staticmethod
    def call(threshold: float | None, layer: str = "") -> None:
        query, key = torch.zeros(1, 1, 128, 8), torch.zeros(1, 1, 192, 8)
        query[:, :, :64, 0] = 1.0
        key[:, :, 64:, 0] = -5.0
        blocks = torch.tensor([[True, True, False]])
        with counters.for_layer(layer):
            sparge.block_sparse_attention(
                query, key, key, blocks, scale=1.0, pv_threshold=threshold, quantization="none", backend="torch"
            )

    def test_pv_skipped_and_sparsity(self) -> None:
        self.call(-4.9)
        stats = sparge.stats()
        assert (stats.density, stats.pv_skipped) == (2 / 3, 1 / 4)
        assert stats.sparsity == pytest.approx((2 * 1 + 0.5) / (2 * 3)), "one block, and P V of half a block"

    def test_pv_skipped_is_none_without_a_threshold(self) -> None:
        self.call(None)
        assert sparge.stats().pv_skipped is None
        assert sparge.stats().sparsity == pytest.approx(1 / 3)
        self.call(-5.1)
        assert sparge.stats().pv_skipped == 0.0
        sparge.reset_stats()
        assert (sparge.stats().pv_skipped, sparge.stats().sparsity) == (None, None)

    def test_pv_skipped_by_layer(self) -> None:
        self.call(-4.9, "one")
        self.call(None, "one")
        self.call(None, "two")
        stats = sparge.stats()
        assert (stats.layers["one"].pv_skipped, stats.layers["two"].pv_skipped) == (1 / 8, None)
        assert stats.pv_skipped == 1 / 12
        assert str(stats).splitlines() == [
            "3 attention calls: 3 sparse, 0 dense; density 0.667, P V skipped 0.083",
            "  sparse: torch       3",
            "  layer           calls  sparse   dense  density  P V skipped",
            "  one                 2       2       0    0.667        0.125",
            "  two                 1       1       0    0.667",
        ]

    def test_kernels_of_a_graph_count_after_a_reset(self) -> None:
        """A graph replayed after `reset_stats` adds to the block totals, but its calls are not recorded."""
        totals = counters.block_totals(torch.device("cpu"))
        assert totals is not None
        totals += torch.tensor([2, 3, 1])
        assert (sparge.stats().density, sparge.stats().pv_skipped) == (2 / 3, 1 / 4)


def test_block_totals_are_aligned() -> None:
    """Triton recompiles a kernel for a pointer that is not aligned to 16 bytes."""
    for layer in ("one", "two", "three"):
        with counters.for_layer(layer):
            totals = counters.block_totals(torch.device("cpu"))
        assert totals is not None and totals.data_ptr() % 16 == 0


def test_compiled_calls_count_in_the_totals() -> None:
    query, key, value = make_qkv(200)
    compiled = torch.compile(
        lambda *tensors: sparge.attention(*tensors, backend="torch"), fullgraph=True, backend="eager"
    )
    compiled(query, key, value)
    assert sparge.stats().reasons == {"sparse: torch": 1}


def test_statistics_ignore_the_default_device() -> None:
    query = torch.randn(1, 1, 256, 32)
    sparge.reset_stats()
    sparge.attention(query, query, query, backend="torch", topk=0.5)
    with torch.device("meta"):  # serving engines set a default device
        assert sparge.stats().density == 0.5
