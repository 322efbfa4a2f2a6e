"""Splits over several GPUs: byte counts match the sent tensors, and parts of ranks form the whole output."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from benchmarks.scale import calls, measure, parts, plan, summary
from benchmarks.scale.parts import Attend, Inputs, heads_of_rank, make_inputs, ranges_of
from benchmarks.scale.plan import NETWORK, NVLINK, Cluster, Link, Sent, Split, Workload
from torch import Tensor

import sparge
from sparge.evaluate.metrics import relative_l1

FAST, SLOW = Link("fast", 100.0, 0.5, 0.25), Link("slow", 10.0, 0.5, 0.5)
"""Effective bandwidths of 50 and 5 bytes per second."""
ONE, TWO = Cluster("4 GPUs", 1, 4, FAST, SLOW), Cluster("2 x 2 GPUs", 2, 2, FAST, SLOW)
CLUSTERS = (Cluster("2 GPUs", 1, 2, NVLINK, NETWORK), Cluster("2 x 2 GPUs", 2, 2, NVLINK, NETWORK))
VIDEO = Workload("tiny video", 1, 1000, 6, 6, 16, is_causal=False)
TEXT = Workload("tiny text", 1, 1024, 4, 2, 16, is_causal=True)
"""As in the real workloads, 4 ranks do not divide 6 heads, and there are more ranks than key heads (2)."""


class Ranks:
    """All ranks of a cluster in one process. Counts the bytes of each tensor sent from one rank to another."""

    def __init__(self, workload: Workload, split: Split, cluster: Cluster) -> None:
        self.workload, self.split, self.cluster = workload, split, cluster
        self.inside: dict[int, int] = defaultdict(int)
        self.across: dict[int, int] = defaultdict(int)
        self.coordinates = [(shard, head) for shard in range(split.shards) for head in range(split.ulysses)]

    def node(self, rank: int) -> int:
        return rank // self.cluster.gpus

    def send(self, tensor: Tensor, source: int, target: int) -> Tensor:
        if source != target:
            counts = self.inside if self.node(source) == self.node(target) else self.across
            counts[source] += tensor.numel() * tensor.element_size()
        return tensor

    def sent(self, rank: int) -> Sent:
        return Sent(self.inside[rank], self.across[rank])

    def group(self, rank: int, along: int) -> list[int]:
        """Return the ranks that differ from ``rank`` only in their shard (along 0) or only in their heads (along 1)."""
        fixed = self.coordinates[rank][1 - along]
        return [other for other, coordinates in enumerate(self.coordinates) if coordinates[1 - along] == fixed]

    def exchange_heads(self, tokens: list[Tensor], heads: list[list[int]]) -> list[Tensor]:
        """Exchange tokens for heads: (n, H, D) on every rank -> (n * group size, heads of the rank, D)."""
        received = []
        for target, (_, part) in enumerate(self.coordinates):
            group = self.group(target, 1)
            received.append(torch.cat([self.send(tokens[one][:, heads[part]], one, target) for one in group]))
        return received

    def return_tokens(self, outputs: list[Tensor]) -> list[Tensor]:
        """Undo `exchange_heads` for queries."""
        received = []
        for target, (_, part) in enumerate(self.coordinates):
            back = {one: outputs[one].chunk(self.split.ulysses)[part] for one in self.group(target, 1)}
            received.append(torch.cat([self.send(piece, one, target) for one, piece in back.items()], 1))
        return received

    def gather(self, chunks: list[Tensor]) -> list[Tensor]:
        """All-gather the chunks of a group: once to every other node, then within the node."""
        known: list[dict[int, Tensor]] = [{self.coordinates[rank][0]: chunk} for rank, chunk in enumerate(chunks)]
        for stage in ("across", "inside"):
            before = [dict(one) for one in known]
            for target in range(len(known)):
                group = self.group(target, 0)
                for source in group:
                    is_inside = self.node(source) == self.node(target)
                    senders = [one for one in group if self.node(one) == self.node(source)]
                    receivers = [one for one in group if self.node(one) == self.node(target)]
                    has_same_local_rank = senders.index(source) == receivers.index(target)
                    if source == target or is_inside != (stage == "inside") or not (is_inside or has_same_local_rank):
                        continue
                    for shard, chunk in before[source].items():
                        known[target][shard] = self.send(chunk, source, target)
        return [torch.cat([by_shard[shard] for shard in sorted(by_shard)]) for by_shard in known]

    def pass_round(self, chunks: list[Tensor]) -> list[Tensor]:
        """Pass the chunks of a group around the ring."""
        current = [(self.coordinates[rank][0], chunk) for rank, chunk in enumerate(chunks)]
        received = [{shard: chunk} for shard, chunk in current]
        for _ in range(self.split.shards - 1):
            arriving = list(current)
            for target in range(len(chunks)):
                group = self.group(target, 0)
                source = group[group.index(target) - 1]
                shard, chunk = current[source]
                arriving[target] = (shard, self.send(chunk, source, target))
                received[target][shard] = chunk
            current = arriving
        return [torch.cat([by_shard[shard] for shard in sorted(by_shard)]) for by_shard in received]


def statistics_of(key: Tensor) -> Tensor:
    """Return the mean and variance of every 64 keys in float32, (blocks, 2, H, D)."""
    blocks = key.float().unflatten(0, (-1, 64))
    return torch.stack([blocks.mean(1), blocks.var(1)], 1)


SPLITS = [
    (ONE, Split(4)),
    (ONE, Split(shards=4, way="gather")),
    (ONE, Split(shards=4, way="ring")),
    (TWO, Split(4)),
    (TWO, Split(shards=4, way="gather")),
    (TWO, Split(shards=4, way="ring")),
    (TWO, Split(2, 2, "gather")),
    (TWO, Split(2, 2, "ring")),
]


@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 4), (8, 2)])
@pytest.mark.parametrize("cluster, split", SPLITS, ids=lambda one: one.name)
def test_byte_counts_match_the_sent_tensors(cluster: Cluster, split: Split, heads: int, kv_heads: int) -> None:
    workload = Workload("counted", 1, 1024, heads, kv_heads, 8, is_causal=False)
    ranks = Ranks(workload, split, cluster)
    query, key = (
        torch.arange(1024 * count * 8).view(1024, count, 8).to(torch.int16)  # same size as bfloat16
        for count in (heads, kv_heads)
    )
    order = [shard * split.ulysses + head for shard, head in ranks.coordinates]
    queries, keys = ([whole.chunk(split.ranks)[index] for index in order] for whole in (query, key))

    heads_of_part = [group.tolist() for group in torch.arange(heads).chunk(split.ulysses)]
    kv_heads_of_part = [sorted({head * kv_heads // heads for head in group}) for group in heads_of_part]
    exchanged = ranks.exchange_heads(queries, heads_of_part)
    for _ in ("key", "value"):
        chunks = ranks.exchange_heads(keys, kv_heads_of_part)
    for rank, (shard, part) in enumerate(ranks.coordinates):
        tokens = slice(shard * 1024 // split.shards, (shard + 1) * 1024 // split.shards)
        assert torch.equal(exchanged[rank], query[tokens][:, heads_of_part[part]])
        assert torch.equal(chunks[rank], key[tokens][:, kv_heads_of_part[part]])
    for got, expected in zip(ranks.return_tokens(exchanged), queries, strict=True):
        assert torch.equal(got, expected)
    by_exchange = [ranks.sent(rank) for rank in range(split.ranks)]
    if split.shards > 1:
        statistics = ranks.gather([statistics_of(chunk) for chunk in chunks])
        for _ in ("key", "value"):
            whole = ranks.gather(chunks) if split.way == "gather" else ranks.pass_round(chunks)
        for rank, (_, part) in enumerate(ranks.coordinates):
            assert torch.equal(whole[rank], key[:, kv_heads_of_part[part]])
            assert torch.equal(statistics[rank], statistics_of(key[:, kv_heads_of_part[part]]))

    all_sent = [ranks.sent(rank) for rank in range(split.ranks)]
    assert set(by_exchange) == {plan.ulysses_sent(workload, split, cluster)}
    assert max(all_sent, key=lambda one: one.across) == plan.sent(workload, split, cluster)
    if split.way == "gather":
        assert len(set(all_sent)) == 1, "all ranks send equal amounts"


def test_kv_heads_are_repeated_only_for_ranks_that_share_them() -> None:
    llama = plan.WORKLOADS[1]
    assert [plan.exchanged_kv_heads(llama, ranks) for ranks in (2, 8, 16)] == [8, 8, 16]
    assert [plan.can_exchange(plan.WORKLOADS[0], ranks) for ranks in (8, 16)] == [True, False]
    assert not plan.can_exchange(Workload("", 1, 1, 12, 6, 1, is_causal=True), 4), (
        "a rank would need half of a key head's group"
    )
    assert Split(16) in plan.splits(llama, plan.TWO_NODES)
    assert Split(16) not in plan.splits(plan.WORKLOADS[0], plan.TWO_NODES)


class TestSeconds:
    WORKLOAD = Workload("", 1, 64, 4, 4, 1, is_causal=False)
    """Each of 4 shards has 16 tokens; K and V of a shard have 256 bytes."""

    def test_head_exchange_is_bound_by_the_slower_link(self) -> None:
        # 16 tokens with one head of Q, K, V and O go to each of 3 ranks, 128 bytes per rank
        assert plan.ulysses_seconds(self.WORKLOAD, Split(4), ONE) == pytest.approx(3 * 128 / 50 + 4 * 0.25)
        assert plan.ulysses_seconds(self.WORKLOAD, Split(4), TWO) == pytest.approx(2 * 128 / 5 + 4 * 0.5)

    def test_ring_hides_transfers_behind_attention(self) -> None:
        split = Split(shards=4, way="ring")
        step = 256 / 50 + 0.25
        statistics = 3 * 256 / 32 / 50 + 0.25
        assert plan.exposed_seconds(self.WORKLOAD, split, ONE, 0.0) == pytest.approx(statistics + 3 * step)
        assert plan.exposed_seconds(self.WORKLOAD, split, ONE, 4 * 5.0) == pytest.approx(statistics + 3 * (step - 5))
        assert plan.exposed_seconds(self.WORKLOAD, split, ONE, 1e6) == pytest.approx(statistics)
        assert plan.ring_step_seconds(self.WORKLOAD, split, TWO) == pytest.approx(256 / 5 + 0.5), (
            "bound by the slowest link"
        )

    def test_gather_hides_transfers_except_the_first_heads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        split = Split(shards=4, way="gather")
        whole = 3 * 256 * 33 / 32 / 50 + 2 * 0.25
        assert plan.exposed_seconds(self.WORKLOAD, split, ONE, 1e6) == pytest.approx(whole)
        monkeypatch.setattr(plan, "GATHERED_BYTES", 256)  # one of four heads
        assert plan.head_chunks(self.WORKLOAD, split) == 4
        assert plan.exposed_seconds(self.WORKLOAD, split, ONE, 1e6) == pytest.approx(whole / 4)
        assert plan.exposed_seconds(self.WORKLOAD, split, ONE, 0.0) == pytest.approx(whole)


def concatenate_shards(way: str, variant: str, inputs: Inputs, workload: Workload, shards: int) -> Tensor:
    """Return the outputs of all shards in the order of the sequence."""
    make = parts.ring_part if way == "ring" else parts.gather_part
    output = torch.empty_like(inputs.query)
    for shard in range(shards):
        attend = Attend(variant, drops=workload.is_causal, merged="none")
        part = make(inputs, workload, shards, shard)(attend)
        ranges = ranges_of(workload, shards, shard)
        for (start, stop), piece in zip(ranges, part.split([b - a for a, b in ranges], 2), strict=True):
            output[:, :, start:stop] = piece
    return output


@pytest.mark.parametrize("workload", [VIDEO, TEXT], ids=lambda one: one.name)
class TestParts:
    def test_shards_form_the_whole_output(self, workload: Workload) -> None:
        inputs = make_inputs(workload, "cpu")
        exact = F.scaled_dot_product_attention(
            inputs.query, inputs.key, inputs.value, is_causal=workload.is_causal, enable_gqa=True
        )
        for way in ("gather", "ring"):
            for shards in (1, 2, 4):
                assert torch.allclose(concatenate_shards(way, "16 bits", inputs, workload, shards), exact, atol=1e-5)

    def test_ring_and_gather_keep_the_same_blocks(self, workload: Workload) -> None:
        inputs = make_inputs(workload, "cpu")
        ring, gather = (concatenate_shards(way, "0.25", inputs, workload, 4) for way in ("ring", "gather"))
        dense = concatenate_shards("gather", "16 bits", inputs, workload, 1)
        assert relative_l1(gather, dense) > 0.05
        assert torch.allclose(ring, gather, atol=1e-5)

    def test_heads_form_the_whole_output(self, workload: Workload) -> None:
        inputs = make_inputs(workload, "cpu")
        exact = concatenate_shards("gather", "16 bits", inputs, workload, 1)
        ranks = 4 if workload is TEXT else 2
        local = [heads_of_rank(inputs, workload, Split(ranks), rank) for rank in range(ranks)]
        assert local[0].key.shape[1] == max(workload.kv_heads // ranks, 1)
        whole = torch.cat([concatenate_shards("gather", "16 bits", one, workload, 1) for one in local], 1)
        assert torch.allclose(whole, exact, atol=1e-5)


class TestRows:
    def test_measured_part(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        variants = ("16 bits", "8 bits", "0.25")
        monkeypatch.setattr(measure, "VARIANTS", variants)
        rows = list(
            measure.all_rows("cpu", repeats=1, only=["Ulysses 2 x ring 2"], workloads=[TEXT], clusters=CLUSTERS)
        )
        attention = [row for row in rows if row["case"] == "attention"]
        assert [(row["shard"], row["variant"]) for row in attention] == [(s, v) for s in (0, 1) for v in variants]
        for row in attention[1:3]:
            share = 1.0 if row["variant"] == "8 bits" else float(row["variant"])
            assert share <= row["density"] < share + 0.25
            assert 0 < row["relative_l1"] < 0.15
        assert {row["case"] for row in rows} == {"attention", "exchange"}
        assert all(row["problem"] is None and row["ms"] > 0 for row in rows)
        assert "tiny text: Ulysses 2 x ring 2, exchange, shard 0\n" in capsys.readouterr().out

    def test_failures_have_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        part = next(part for part in measure.parts_of(VIDEO, CLUSTERS) if part.case == "attention")
        monkeypatch.setattr(measure, "VARIANTS", ("16 bits", "2.0", "0.25"))
        dense, wrong, sparse = measure.measure(part, make_inputs(VIDEO, "cpu"), 1)
        assert wrong["ms"] is None and wrong["problem"].startswith("ValueError: topk")
        assert dense["ms"] > 0 and sparse["relative_l1"] > 0

    def test_table(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from benchmarks import tables

        monkeypatch.setattr(tables, "RESULTS", tmp_path)
        page = "".join(f"<!-- table: {name} -->\n<!-- /table -->\n" for name in summary.SCALE_TABLES)
        assert "| Wan 14B, 75K | 8 GPUs | Ulysses 8 | not measured |" in tables.fill(page)
        rows = [
            *make_rows(8.0, "gather", attention=100.0),  # older
            *make_rows(8.0, "gather", attention=10.0),
            *make_rows(9.0, None, attention=8.0),
            {**make_rows(1.0, None, attention=1.0)[0], "ms": None, "problem": "RuntimeError: none"},
        ]
        (tmp_path / "scale.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        filled = tables.fill(page)
        # 1.02 ms of exchange and 9 ms of copies; the gather has two parts, and the second is hidden
        assert "| Wan 14B, 75K | 8 GPUs | Ulysses 8 | **0.32 + 0.40** |" not in filled
        assert "| Wan 14B, 75K | 8 GPUs | Ulysses 8 | 0.32 + 0.40 | not measured |" in filled
        assert "| Wan 14B, 75K | 8 GPUs | gather 8 | **0.40 + 0.08** | not measured |" in filled
        assert "bf16, B 1; NVIDIA H200; torch 2.11.0;" in filled

    def test_layer_time_is_that_of_its_slowest_shard(self) -> None:
        llama, split = plan.WORKLOADS[1], Split(shards=8, way="gather")
        rows = {}
        for part in measure.parts_of(llama):
            if part.split == split:
                row = {**part.fields(), "ms": 5.0 + part.shard}
                rows[summary._key(row, "0.5" if part.case == "attention" else None)] = row
        layer = summary.layer_of(rows, llama, split, plan.ONE_NODE, "0.5")
        assert layer is not None
        assert math.isclose(layer.attention, 12e-3) and math.isclose(layer.copies, 5e-3)
        assert summary.layer_of(rows, llama, split, plan.ONE_NODE, "0.25") is None


def make_rows(copies: float, way: str | None, *, attention: float) -> list[dict[str, Any]]:
    """Return rows of Wan on 8 GPUs, dense in 16 bits."""
    machine = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "commit": "0123456789"}
    split = Split(8) if way is None else Split(shards=8, way="gather")
    rows = []
    for part in measure.parts_of(plan.WORKLOADS[0]):
        if part.split == split:
            is_attention = part.case == "attention"
            row = {"variant": "16 bits" if is_attention else None, "ms": attention if is_attention else copies}
            rows.append({**part.fields(), **row, "relative_l1": None, "problem": None, **machine})
    return rows


@pytest.mark.parametrize("workload", [VIDEO, TEXT], ids=lambda workload: workload.name)
@pytest.mark.parametrize("mode", list(calls.MODES))
def test_mirror_replaces_the_data_of_other_ranks(mode: str, workload: Workload) -> None:
    inputs = make_inputs(workload, "cpu")
    sparge.reset_stats()
    output = calls.rank_call(mode, workload, (inputs.query, inputs.key, inputs.value), 0.5, ranks=2)()
    assert output.shape[1] == workload.heads and output.isfinite().all()
    stats = sparge.stats()
    assert stats.calls == 1 and set(stats.reasons) == {"dense: below the crossover"}
