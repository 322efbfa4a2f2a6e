"""The building blocks of the modes: merging, sharding, the rectangles of a ring, load balancing."""

from __future__ import annotations

import pytest
import torch

import sparge
from sparge.distributed import shard, split_lengths
from sparge.distributed.agreement import describe
from sparge.distributed.balance import snake_order
from sparge.distributed.request import rule_for_heads
from sparge.distributed.ring import rectangles
from sparge.distributed.sharding import Piece, token_sharding
from sparge.numerics.merge import merge


def partial(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and LSE over some keys. As in kernels, queries without visible keys give 0 and -inf."""
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4], ids=["even", "sharp", "exp overflows"])
def test_merging_parts_equals_attention_over_all_keys(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = size * torch.randn(2, 3, 5, 60, dtype=torch.float64, generator=generator)
    values = torch.randn(60, 8, dtype=torch.float64, generator=generator)
    scores[0, 0, 0, :20] = -torch.inf  # no visible key in the first part
    scores[0, 0, 1, 20:] = -torch.inf  # no visible key in the other parts
    scores[0, 0, 2] = -torch.inf  # no visible key
    parts = [partial(scores[..., cut], values[cut]) for cut in (slice(0, 20), slice(20, 50), slice(50, 60))]
    output, lse = torch.zeros(2, 3, 5, 8), torch.full((2, 3, 5), -torch.inf)
    for part in parts:
        merge(output, lse, *(tensor.float() for tensor in part))
    expected, expected_lse = partial(scores, values)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-6)
    assert lse[0, 0, 2] == -torch.inf and not output[0, 0, 2].any()


def test_merging_propagates_inf_and_nan() -> None:
    """The non-finite value is in the first or in the second part."""
    scores, values = torch.randn(3, 40), torch.randn(40, 4)
    for bad in (torch.inf, -torch.inf, torch.nan):
        for position in (5, 35):
            changed = values.clone()
            changed[position, 1] = bad
            output, lse = torch.zeros(3, 4), torch.full((3,), -torch.inf)
            for cut in (slice(0, 20), slice(20, 40)):
                merge(output, lse, *partial(scores[:, cut], changed[cut]))
            expected, expected_lse = scores.softmax(-1) @ changed, scores.logsumexp(-1)
            torch.testing.assert_close(output, expected, equal_nan=True)
            torch.testing.assert_close(lse, expected_lse)


def test_pieces_cover_a_sequence_once() -> None:
    for ranks in (1, 2, 3, 5):
        for sharding, lengths in (("contiguous", split_lengths(2000, ranks)), ("head_tail", (256,) * ranks)):
            split = token_sharding(lengths, sharding)
            flat = sorted(piece for pieces in split.pieces for piece in pieces)
            assert [piece.start for piece in flat] == [0, *(piece.stop for piece in flat[:-1])]
            assert flat[-1].stop == split.total == sum(lengths)
            tokens = torch.arange(split.total)[None, None, :, None]
            held = [shard(tokens, rank, ranks, sharding=sharding, lengths=lengths) for rank in range(ranks)]
            assert torch.equal(split.sort(torch.cat(held, 2)), tokens)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_head_tail_gives_ranks_equal_work(ranks: int) -> None:
    split = token_sharding((256,) * ranks, "head_tail")
    work = [sum(end * (end + 1) - start * (start + 1) for start, end in pieces) // 2 for pieces in split.pieces]
    assert max(work) - min(work) < split.total  # small relative to the total of split.total ** 2 / 2


def test_split_lengths_are_whole_blocks_except_the_last() -> None:
    assert split_lengths(1024, 4) == (256, 256, 256, 256)
    assert split_lengths(130, 2) == (128, 2)
    assert sum(split_lengths(75600, 8)) == 75600 and all(n % 128 == 0 for n in split_lengths(75600, 8)[:-1])
    with pytest.raises(ValueError, match="a block of 128 tokens or more for each of 3 ranks, got 256"):
        split_lengths(256, 3)
    with pytest.raises(ValueError, match="lengths: expected 10 tokens in total, got 12"):
        shard(torch.zeros(1, 1, 10, 1), 0, 2, lengths=(6, 6))
    with pytest.raises(ValueError, match="expected a multiple of 4 tokens, got 10"):
        shard(torch.zeros(1, 1, 10, 1), 0, 2, sharding="head_tail")


def test_ring_rectangles_cover_every_visible_block_once() -> None:
    for sharding in ("contiguous", "head_tail"):
        split = token_sharding((256,) * 4, sharding)
        for is_causal in (False, True):
            seen = torch.zeros(8, 8, dtype=torch.int32)  # blocks of 128
            for q_pieces in split.pieces:
                for k_pieces in split.pieces:
                    for queries, keys, is_local in rectangles(q_pieces, k_pieces, is_causal):
                        _mark(seen, q_pieces[queries.start :], k_pieces[: keys.stop], is_local)
            expected = torch.ones(8, 8, dtype=torch.int32)
            assert torch.equal(seen, expected.tril() if is_causal else expected)
    assert len(list(rectangles(*split.pieces[1:3], True))) == 1  # a single call suffices here


def _mark(seen: torch.Tensor, queries: tuple[Piece, ...], keys: tuple[Piece, ...], is_causal: bool) -> None:
    """Add the blocks that the call of a rectangle computes. Causality is relative to the tokens on their ranks."""
    rows, columns = (torch.cat([torch.arange(p.start // 128, p.stop // 128) for p in side]) for side in (queries, keys))
    block = torch.ones(len(rows), len(columns), dtype=torch.int32)
    seen[rows[:, None], columns] += block.tril() if is_causal else block


def test_options_are_described_by_their_values() -> None:
    """Ranks compare these texts, so they must not depend on addresses, hashes or the type of a number."""
    rule = sparge.TopK(torch.tensor([0.25, 0.5]), min_blocks=1)
    values = "torch.float32 tensor (2,)"
    fields = "min_blocks=1, similarity_threshold=None, pv_threshold=None, sink=None, diagonal=None, topk="
    assert describe(rule) == f"TopK({fields}{values})"
    assert describe(rule, with_values=True) == f"TopK({fields}{values} of [0.25, 0.5])"
    assert describe([(0, 100), (7, None)]) == describe(((0, 100.0), [7, None])) == "((0, 100), (7, None))"
    assert describe({"b": 1, "a": True}) == "(('a', True), ('b', 1))"
    assert describe(object()) == "object"


def test_snake_order_balances_costs() -> None:
    costs = torch.tensor([100, 90, 80, 70, 4, 3, 2, 1])
    order = snake_order(costs, 2)
    assert sorted(order.tolist()) == list(range(8))
    assert costs[order].view(2, 4).sum(1).tolist() == [175, 175]


def test_per_head_options_move_to_the_device_of_the_order() -> None:
    """The values may be on the host, and an index on a device cannot select from them."""
    rule = sparge.TopK(torch.linspace(0.1, 0.8, 8), pv_threshold=torch.linspace(-9, -2, 8))
    on_cpu, on_meta = (rule_for_heads(rule, torch.tensor([6, 1], device=device)) for device in ("cpu", "meta"))
    assert torch.equal(on_cpu.amount, rule.topk[[6, 1]]) and torch.equal(on_cpu.pv_threshold, rule.pv_threshold[[6, 1]])
    assert {on_meta.amount.device.type, on_meta.pv_threshold.device.type} == {"meta"}
