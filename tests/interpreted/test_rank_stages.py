"""Kernels for calls over several ranks: the shared budget, lists of some columns, and the merge of partial results."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interpreted.conftest import call_of, random_bits
from sparge.backends.gpu.stages.budget import LEVELS, PARTS_AT_ONCE, SUMS
from sparge.backends.gpu.stages.rank_budget import blocks_of_level, own_totals, portions
from sparge.backends.gpu.stages.ring_part import cut_lists, merge
from sparge.masks.block_mask import BlockMask
from sparge.masks.geometry import Shape
from sparge.numerics.budget_allocation import allocate
from sparge.numerics.merge import merge as torch_merge

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def random_counts(batch: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the blocks each query block keeps at each level, non-increasing, and the visible blocks per batch item."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 3, (batch, rows, LEVELS.value + 1), generator=generator)
    kept = steps.flip(2).cumsum(2).flip(2).int()
    return kept, kept[:, :, 0].sum(1) + 40


@pytest.mark.parametrize("density", [0.01, 0.2, 0.5, 0.97, 1.0])
def test_portions_over_ranks_equal_a_single_process(density: float) -> None:
    """Two ranks have 5 and 4 query blocks, the first in pieces of 3 and 2. Query blocks of both are interleaved."""
    batch = 2
    rows = [random_counts(batch, size, seed) for seed, size in enumerate([3, 2, 4])]
    kept, visible = [each for each, _ in rows], torch.stack([each for _, each in rows]).sum(0)
    positions = torch.tensor([0, 3, 6, 1, 8, 2, 4, 5, 7, 2**40])  # positions in the whole sequence, the last is padding
    order = positions.argsort()
    whole = allocate(torch.cat(kept, 1)[:, order[:9]], visible, density)
    expected = torch.empty_like(whole).index_copy_(1, order[:9], whole)

    padded = [F.pad(each, (0, 2 * LEVELS.value - each.shape[2])).flatten(0, 1).contiguous() for each in kept]
    sums = torch.zeros(batch, PARTS_AT_ONCE.value + 3, SUMS.value, dtype=torch.int32)
    for offset, (each, seen) in zip((0, 5, PARTS_AT_ONCE.value + 1), rows, strict=True):
        sums[:, offset, : LEVELS.value + 1] = each.sum(1)
        sums[:, offset, LEVELS.value + 1] = seen
    totals = own_totals(sums)
    assert torch.equal(totals[:, : LEVELS.value + 1], torch.cat(kept, 1).sum(1))
    assert torch.equal(totals[:, -1], visible)
    levels = [blocks_of_level(pieces, totals, density, 5) for pieces in (padded[:2], padded[2:])]
    all_levels = torch.stack(levels)
    firsts = [0, 3, 5]
    got = [
        portions(each, totals, all_levels, order, density, first) for each, first in zip(padded, firsts, strict=True)
    ]
    assert torch.equal(torch.cat(got, 1).long(), expected)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_cut_lists_equal_from_dense(is_causal: bool) -> None:
    """There are two pieces of queries. The first has fewer key blocks than the selected columns."""
    shape = Shape(2, 2, 1, 384, 384, 16, 16)
    first, second = random_bits(2, 2, 1, 4), random_bits(2, 2, 2, 20, seed=6)
    columns = (slice(1, 4), slice(17, 20))
    kept = torch.cat([F.pad(first, (0, 16)), second], 2)
    dense = torch.cat([kept[..., cut] for cut in columns], 3)
    if is_causal:
        last = torch.tensor([127, 255, 383])
        dense &= torch.arange(6) * 64 <= last[:, None]
        first = F.pad(dense[:, :, :1, :3], (1, 0))
        second = second.clone()
        second[..., 1:4], second[..., 17:20] = dense[:, :, 1:, :3], dense[:, :, 1:, 3:]
    masks = [
        BlockMask.from_dense(each, q_len=128 * each.shape[2], kv_len=64 * each.shape[3]) for each in (first, second)
    ]
    got = cut_lists(masks, columns, call_of(shape, is_causal=is_causal))
    expected = BlockMask.from_dense(dense, q_len=384, kv_len=384, is_causal=is_causal)
    assert torch.equal(got.kv_num_blocks, expected.kv_num_blocks)
    assert torch.equal(got.kv_indices, expected.kv_indices)
    assert torch.equal(got.visible_num_blocks, expected.visible_num_blocks)
    assert got.window == expected.window


@pytest.mark.parametrize("width", [8, 24, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge_equals_torch(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = (2, 3, 150)
    output = torch.full((2, 3, 200, width), torch.nan)[:, :, 30:180]
    lse = torch.full((2, 3, 200), torch.nan)[:, :, 30:180]
    expected, expected_lse = torch.zeros(*sizes, width), torch.full(sizes, -torch.inf)
    for index in range(3):
        other = torch.randn(2, 150, 3, width, generator=generator).to(dtype).transpose(1, 2)
        other_lse = 8 * torch.randn(sizes, generator=generator)
        other_lse[:, :, index * 10 : 25] = -torch.inf
        other[:, :, index * 10 : 25] = 0
        other[0, 0, 40 + index], other[0, 0, 60 + index] = torch.nan, torch.inf
        other_lse[1, 1, 70 + index] = torch.nan
        merge(output, lse, other, other_lse, is_first=index == 0)
        torch_merge(expected, expected_lse, other, other_lse)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6, equal_nan=True)
