"""Bytes that ranks send for one attention layer, their transfer time, and the part that attention does not hide.

Bytes are counted when they leave a rank. Ranks have equal parts of the tokens in 16 bits. Links are assumptions, with
their source stated here, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

BYTES = 2
"""Size of a 16-bit element."""
STATISTICS = 1 / 32
"""Size of key statistics relative to K and V: mean and variance of 64 keys in float32, 8 bytes per channel, relative to
64 keys and values of 2 bytes each."""
EXCHANGED = 4
"""Number of collectives of Ulysses: query, key, value, output."""
GATHERED = 2
"""Number of collectives of a gather: key and value."""
GATHERED_BYTES = 2**30
"""Maximum bytes of K and V that a gather fetches at a time, in whole heads."""

Way = Literal["gather", "ring"]


@dataclass(frozen=True)
class Workload:
    """One attention layer of a model, batch 1, and the number of layers in a forward pass."""

    name: str
    layers: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    is_causal: bool


@dataclass(frozen=True)
class Link:
    """Link between two GPUs: rated bytes per second in one direction, efficiency, and latency."""

    name: str
    rated: float
    efficiency: float
    latency: float

    def seconds(self, sent: float) -> float:
        """Return the seconds for a number of bytes, without latency."""
        return sent / (self.rated * self.efficiency)


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal size and their links."""

    name: str
    nodes: int
    gpus: int
    inside: Link
    across: Link

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus


@dataclass(frozen=True)
class Split:
    """Partition of a layer over ranks: ``ulysses`` parts of the heads times ``shards`` parts of the tokens.

    Inside a group of ``ulysses`` ranks, heads are exchanged for tokens. Shards keep their queries and need all keys.
    Heads are exchanged inside a node if possible.
    """

    ulysses: int = 1
    shards: int = 1
    way: Way = "gather"

    @property
    def ranks(self) -> int:
        return self.ulysses * self.shards

    @property
    def name(self) -> str:
        """Return the name in tables, with the part inside a node first."""
        names = [f"Ulysses {self.ulysses}"] if self.ulysses > 1 else []
        return " x ".join([*names, f"{self.way} {self.shards}"] if self.shards > 1 else names)


@dataclass(frozen=True)
class Sent:
    """Bytes that leave one rank, by link."""

    inside: float = 0.0
    across: float = 0.0


NVLINK = Link("NVLink 4", rated=450e9, efficiency=0.8, latency=20e-6)
"""H100 and H200: 900 GB/s in both directions together, by data sheet; efficiency and latency are assumed."""
NETWORK = Link("400 Gb/s a GPU", rated=50e9, efficiency=0.8, latency=50e-6)
"""A network adapter of 400 Gb/s per GPU; efficiency and latency are assumed."""
ONE_NODE = Cluster("8 GPUs", 1, 8, NVLINK, NETWORK)
TWO_NODES = Cluster("2 x 8 GPUs", 2, 8, NVLINK, NETWORK)
CLUSTERS = (ONE_NODE, TWO_NODES)

WORKLOADS = (
    Workload("Wan 14B, 75K", 40, 75600, 40, 40, 128, is_causal=False),
    Workload("Llama 8B, 128K", 32, 131072, 32, 8, 128, is_causal=True),
    Workload("Llama 8B, 1M", 32, 1048576, 32, 8, 128, is_causal=True),
)
"""Wan 2.1 14B: 81 frames of 1280 x 720. Llama 3.1 8B: prefill; 1M is beyond the length it was trained for."""


def splits(workload: Workload, cluster: Cluster) -> list[Split]:
    """Return the splits to compare: Ulysses, gather and ring over all ranks.

    With several nodes, also Ulysses inside each node, combined with gather or ring across nodes. Splits with Ulysses
    are left out if the heads cannot be divided (`can_exchange`).
    """
    ranks = cluster.ranks
    candidates = [Split(ranks)] if can_exchange(workload, ranks) else []
    candidates += [Split(shards=ranks, way="gather"), Split(shards=ranks, way="ring")]
    if cluster.nodes > 1 and can_exchange(workload, cluster.gpus):
        candidates += [Split(cluster.gpus, cluster.nodes, "gather"), Split(cluster.gpus, cluster.nodes, "ring")]
    return candidates


def can_exchange(workload: Workload, ulysses: int) -> bool:
    """Return whether ranks divide the heads evenly, with whole groups or repeated key heads."""
    kv_heads = workload.kv_heads
    return workload.heads % ulysses == 0 and (kv_heads % ulysses == 0 or ulysses % kv_heads == 0)


def exchanged_kv_heads(workload: Workload, ulysses: int) -> int:
    """Return the number of key heads that are sent; they are repeated if there are more ranks than heads."""
    return max(workload.kv_heads, ulysses)


def neighbors(split: Split, cluster: Cluster) -> tuple[int, int]:
    """Return the number of ranks within one node, in a group that exchanges heads and in a group of shards."""
    return min(split.ulysses, cluster.gpus), min(split.shards, max(1, cluster.gpus // split.ulysses))


def ulysses_sent(workload: Workload, split: Split, cluster: Cluster) -> Sent:
    """Return the bytes of query, key, value and output: for its tokens, a rank sends every other rank its heads."""
    kv_heads = exchanged_kv_heads(workload, split.ulysses)
    tokens = workload.tokens / split.ranks
    to_each = 2 * (workload.heads + kv_heads) / split.ulysses * tokens * workload.head_dim * BYTES
    together, _ = neighbors(split, cluster)
    return Sent((together - 1) * to_each, (split.ulysses - together) * to_each)


def chunk_bytes(workload: Workload, split: Split) -> float:
    """Return the bytes of K and V for one shard's tokens and one rank's heads."""
    kv_heads = exchanged_kv_heads(workload, split.ulysses) / split.ulysses
    return 2 * kv_heads * workload.tokens / split.shards * workload.head_dim * BYTES


def gather_sent(workload: Workload, split: Split, cluster: Cluster) -> Sent:
    """Return the bytes of K, V and statistics: once to each other node, then to all ranks inside a node."""
    _, together = neighbors(split, cluster)
    nodes = split.shards // together
    chunk = chunk_bytes(workload, split) * (1 + STATISTICS)
    return Sent((together - 1) * nodes * chunk, (nodes - 1) * chunk)


def ring_sent(workload: Workload, split: Split, cluster: Cluster) -> Sent:
    """Return the bytes of a ring: those of a gather, all sent to the next rank, which may be in another node."""
    sent = (split.shards - 1) * chunk_bytes(workload, split)
    statistics = gather_sent(workload, split, cluster)
    share = STATISTICS / (1 + STATISTICS)
    _, together = neighbors(split, cluster)
    is_inside = together == split.shards
    return Sent(
        statistics.inside * share + (sent if is_inside else 0.0),
        statistics.across * share + (0.0 if is_inside else sent),
    )


def sent(workload: Workload, split: Split, cluster: Cluster) -> Sent:
    """Return all bytes that a rank sends in one layer."""
    parts = [ulysses_sent(workload, split, cluster)] if split.ulysses > 1 else []
    if split.shards > 1:
        parts.append((gather_sent if split.way == "gather" else ring_sent)(workload, split, cluster))
    return Sent(sum(part.inside for part in parts), sum(part.across for part in parts))


def ulysses_seconds(workload: Workload, split: Split, cluster: Cluster) -> float:
    """Return the seconds of a head exchange, which uses both links at once and does not overlap with attention."""
    if split.ulysses == 1:
        return 0.0
    volume = ulysses_sent(workload, split, cluster)
    latency = cluster.across.latency if volume.across else cluster.inside.latency
    return max(cluster.inside.seconds(volume.inside), cluster.across.seconds(volume.across)) + EXCHANGED * latency


def gather_seconds(workload: Workload, split: Split, cluster: Cluster) -> float:
    """Return the seconds of a gather, across nodes first, then inside."""
    if split.shards == 1:
        return 0.0
    volume = gather_sent(workload, split, cluster)
    latency = cluster.across.latency if volume.across else cluster.inside.latency
    return cluster.inside.seconds(volume.inside) + cluster.across.seconds(volume.across) + GATHERED * latency


def ring_step_seconds(workload: Workload, split: Split, cluster: Cluster) -> float:
    """Return the seconds of one ring step, determined by the slowest link."""
    _, together = neighbors(split, cluster)
    link = cluster.inside if together == split.shards else cluster.across
    return link.seconds(chunk_bytes(workload, split)) + link.latency


def statistics_seconds(workload: Workload, split: Split, cluster: Cluster) -> float:
    """Return the seconds of gathering key statistics before a ring."""
    volume = gather_sent(workload, split, cluster)
    share = STATISTICS / (1 + STATISTICS)
    link = cluster.across if volume.across else cluster.inside
    return share * (cluster.inside.seconds(volume.inside) + cluster.across.seconds(volume.across)) + link.latency


def head_chunks(workload: Workload, split: Split) -> int:
    """Return the number of chunks in which a gather fetches the heads of K and V."""
    heads = exchanged_kv_heads(workload, split.ulysses) // split.ulysses
    of_head = split.shards * chunk_bytes(workload, split) / heads
    return ceil(heads / max(1, min(heads, GATHERED_BYTES // of_head)))


def exposed_seconds(workload: Workload, split: Split, cluster: Cluster, attention: float) -> float:
    """Return the seconds of exchange per layer that attention does not hide.

    A ring sends the next chunk during attention to the current one, so a step takes the longer of the two. A gather in
    chunks of heads does the same from its second chunk on.

    Args:
        attention: seconds of a rank's attention, including merges.
    """
    exposed = ulysses_seconds(workload, split, cluster)
    if split.shards == 1:
        return exposed
    if split.way == "ring":
        waiting = max(0.0, ring_step_seconds(workload, split, cluster) - attention / split.shards)
        return exposed + statistics_seconds(workload, split, cluster) + (split.shards - 1) * waiting
    chunks = head_chunks(workload, split)
    one = gather_seconds(workload, split, cluster) / chunks
    return exposed + one + (chunks - 1) * max(0.0, one - attention / chunks)
