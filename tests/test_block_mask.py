"""`BlockMask`: lists equal dense tensors, density is relative to visible blocks, conversions to FlexAttention."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexBlockMask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

import sparge
from conftest import BLOCK_K, BLOCK_Q, assert_exact, causality, make_qkv, visible_elements
from sparge import BlockMask

LENGTHS = [(1, 1), (128, 64), (200, 200), (129, 65), (300, 700), (700, 300), (512, 512)]
lengths = pytest.mark.parametrize("q_len, kv_len", LENGTHS)


def num_blocks(q_len: int, kv_len: int) -> tuple[int, int]:
    return -(-q_len // BLOCK_Q), -(-kv_len // BLOCK_K)


def visible_blocks(q_len: int, kv_len: int, is_causal: bool) -> Tensor:
    """Return a bool tensor of the blocks that contain a visible element, computed from the elements."""
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if is_causal:
        seen = seen.tril(kv_len - q_len)
    rows, columns = num_blocks(q_len, kv_len)
    padded = torch.zeros(rows * BLOCK_Q, columns * BLOCK_K, dtype=torch.bool)
    padded[:q_len, :kv_len] = seen
    return padded.view(rows, BLOCK_Q, columns, BLOCK_K).any(3).any(1)


def random_blocks(q_len: int, kv_len: int, *, batch: int = 2, share: float = 0.5, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(batch, 3, *num_blocks(q_len, kv_len), generator=generator) < share


def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def same_document(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query // 128 == key // 128


def window(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query - key).abs() < 100


def flex_elements(flex: FlexBlockMask) -> Tensor:
    """Return the elements that FlexAttention computes, (B, H, S_q, S_k). It applies mask_mod to partial blocks only."""
    q_len, kv_len = flex.seq_lengths
    rows, columns = torch.arange(q_len), torch.arange(kv_len)

    def listed(counts: Tensor, indices: Tensor) -> Tensor:
        dense = torch.zeros(indices.shape, dtype=torch.bool)
        for row, count, named in zip(
            dense.flatten(0, 2), counts.flatten().tolist(), indices.flatten(0, 2), strict=True
        ):
            row[named[:count].long()] = True
        return dense[:, :, rows // flex.BLOCK_SIZE[0]][..., columns // flex.BLOCK_SIZE[1]]

    partial = listed(flex.kv_num_blocks, flex.kv_indices)
    batches, heads = (torch.arange(size) for size in partial.shape[:2])
    cut = flex.mask_mod(batches[:, None, None, None], heads[:, None, None], rows[:, None], columns)
    return (partial & cut) | listed(flex.full_kv_num_blocks, flex.full_kv_indices)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    q_len=st.integers(1, 700),
    kv_len=st.integers(1, 700),
    is_causal=st.booleans(),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_from_dense_and_to_dense_round_trip(q_len: int, kv_len: int, is_causal: bool, share: float, seed: int) -> None:
    dense = random_blocks(q_len, kv_len, share=share, seed=seed)
    mask = BlockMask.from_dense(dense, q_len=q_len, kv_len=kv_len, is_causal=is_causal)
    visible = visible_blocks(q_len, kv_len, is_causal)
    kept = dense & visible
    assert torch.equal(mask.to_dense(), kept)
    assert torch.equal(mask.kv_num_blocks, kept.sum(-1).int())
    assert torch.equal(mask.visible_num_blocks, visible.sum(-1).int().expand(2, 3, -1))
    assert (mask.kv_num_blocks.dtype, mask.kv_indices.dtype) == (torch.int32, torch.int32)
    columns = kept.shape[-1]
    for count, indices in zip(mask.kv_num_blocks.flatten(), mask.kv_indices.flatten(0, 2), strict=True):
        named = indices[:count].tolist()
        assert named == sorted(named)
        assert sorted(indices.tolist()) == list(range(columns)), "the remaining entries are the other blocks"
    total = int(visible.sum()) * 6
    assert mask.density() == (int(kept.sum()) / total if total else 0.0)


@lengths
@causality
def test_density_is_relative_to_the_visible_blocks(q_len: int, kv_len: int, is_causal: bool) -> None:
    everything = torch.ones(1, 1, *num_blocks(q_len, kv_len), dtype=torch.bool)
    mask = BlockMask.from_dense(everything, q_len=q_len, kv_len=kv_len, is_causal=is_causal)
    assert mask.density() == 1.0
    assert torch.equal(mask.to_dense()[0, 0], visible_blocks(q_len, kv_len, is_causal))
    assert BlockMask.from_dense(~everything, q_len=q_len, kv_len=kv_len).density() == 0.0


def test_density_of_one_block_column() -> None:
    """With 512 causal tokens, the query blocks see 2, 4, 6 and 8 key blocks; the first column is 4 of these 20."""
    dense = torch.zeros(1, 1, 4, 8, dtype=torch.bool)
    dense[..., 0] = True
    assert BlockMask.from_dense(dense, q_len=512, kv_len=512, is_causal=True).density() == 0.2
    assert BlockMask.from_dense(dense, q_len=512, kv_len=512).density() == 0.125


def test_from_dense_with_explicit_visibility() -> None:
    visible = torch.zeros(2, 1, 2, 4, dtype=torch.bool)
    visible[0, ..., :2] = True
    mask = BlockMask.from_dense(torch.ones(2, 3, 2, 4, dtype=torch.bool), q_len=200, kv_len=200, visible=visible)
    assert torch.equal(mask.to_dense(), visible.expand(2, 3, 2, 4))
    assert mask.visible_num_blocks.tolist() == [[[2, 2]] * 3, [[0, 0]] * 3]
    assert mask.density() == 1.0


@pytest.mark.parametrize(
    "dense, error, message",
    [
        (torch.ones(1, 1, 2, 4), TypeError, "dense: expected a bool tensor, got torch.float32"),
        ([[True]], TypeError, "dense: expected a bool tensor, got list"),
        (
            torch.ones(1, 1, 4, 2, dtype=torch.bool),
            ValueError,
            r"dense: expected shape \(B, H, 2, 4\) for 200 queries and 200 keys in blocks of 128 x 64, "
            r"got \(1, 1, 4, 2\)",
        ),
        (torch.ones(2, 4, dtype=torch.bool), ValueError, r"dense: expected shape \(B, H, 2, 4\) .* got \(2, 4\)"),
    ],
)
def test_invalid_dense_tensors_are_rejected(dense: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BlockMask.from_dense(dense, q_len=200, kv_len=200)  # type: ignore[arg-type]


def test_move_to_another_device() -> None:
    dense = random_blocks(300, 700)
    mask = BlockMask.from_dense(dense, q_len=300, kv_len=700, is_causal=True)
    copy = mask.to("cpu")
    assert torch.equal(copy.to_dense(), mask.to_dense())
    assert torch.equal(copy.visible_num_blocks, mask.visible_num_blocks)
    assert (copy.q_len, copy.kv_len, copy.is_causal) == (300, 700, True)
    moved = mask.to(torch.device("meta"))
    for tensor in (moved.kv_num_blocks, moved.kv_indices, moved.visible_num_blocks):
        assert tensor.device.type == "meta"


def test_masks_are_immutable() -> None:
    mask = BlockMask.from_dense(random_blocks(200, 200), q_len=200, kv_len=200)
    with pytest.raises(AttributeError):
        mask.q_len = 3  # type: ignore[misc]
    assert mask.block_size == (128, 64)
    assert mask.shape == (2, 3, 2, 4)


class TestFlexAttention:
    @lengths
    @causality
    def test_to_flex_and_from_flex_round_trip(self, q_len: int, kv_len: int, is_causal: bool) -> None:
        mask = BlockMask.from_dense(random_blocks(q_len, kv_len), q_len=q_len, kv_len=kv_len, is_causal=is_causal)
        flex = mask.to_flex()
        assert isinstance(flex, FlexBlockMask)
        assert torch.equal(flex.to_dense().bool(), mask.to_dense())
        back = BlockMask.from_flex(flex)
        assert torch.equal(back.to_dense(), mask.to_dense())
        assert torch.equal(back.visible_num_blocks, mask.visible_num_blocks)
        assert (back.q_len, back.kv_len, back.is_causal) == (q_len, kv_len, is_causal)

    @lengths
    @causality
    def test_flex_elements_match_block_sparse_attention(self, q_len: int, kv_len: int, is_causal: bool) -> None:
        query, key, value = make_qkv(q_len, kv_len, heads=3)
        blocks = random_blocks(q_len, kv_len, batch=1, share=0.6)
        mask = BlockMask.from_dense(blocks, q_len=q_len, kv_len=kv_len, is_causal=is_causal)
        seen, _ = visible_elements(query, key, is_causal=is_causal, block_mask=blocks)
        assert torch.equal(flex_elements(mask.to_flex()), seen)
        back = BlockMask.from_flex(mask.to_flex())
        got = sparge.block_sparse_attention(query, key, value, back, return_lse=True, quantization="none")
        assert_exact(got, query, key, value, attn_mask=seen)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_eager_flex_attention_matches(self, is_causal: bool) -> None:
        """Eager FlexAttention evaluates only the mask_mod and ignores the block lists."""
        query, key, value = make_qkv(300, heads=3)
        blocks = (
            random_blocks(300, 300, batch=1, share=0.6) | torch.eye(3, dtype=torch.bool).repeat_interleave(2, 1)[:, :5]
        )
        mask = BlockMask.from_dense(blocks, q_len=300, kv_len=300, is_causal=is_causal)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch recommends compiling it
            got = flex_attention(query, key, value, block_mask=mask.to_flex())
        expected = sparge.block_sparse_attention(query, key, value, mask, quantization="none")
        torch.testing.assert_close(got, expected)

    def test_flex_mask_of_one_head_broadcasts(self) -> None:
        query, key, value = make_qkv(300, heads=3, batch=2)
        mask = BlockMask.from_flex(create_block_mask(causal, None, None, 300, 300, device="cpu"), is_causal=True)
        assert mask.shape[:2] == (1, 1)
        got = sparge.block_sparse_attention(query, key, value, mask, return_lse=True, quantization="none")
        assert_exact(got, query, key, value, is_causal=True)

    def test_blocks_cut_by_the_diagonal_or_the_end_are_partial(self) -> None:
        everything = torch.ones(1, 1, 2, 4, dtype=torch.bool)
        flex = BlockMask.from_dense(everything, q_len=250, kv_len=250, is_causal=True).to_flex()
        assert flex.kv_num_blocks.tolist() == [[[2, 2]]]
        assert flex.kv_indices[0, 0, :, :2].tolist() == [[0, 1], [2, 3]]
        assert flex.full_kv_num_blocks.tolist() == [[[0, 2]]]
        assert flex.full_kv_indices[0, 0, 1, :2].tolist() == [0, 1]

    @lengths
    def test_flex_blocks_of_128_x_128_without_mask_mod(self, q_len: int, kv_len: int) -> None:
        flex = create_block_mask(noop_mask, 1, 2, q_len, kv_len, device="cpu", BLOCK_SIZE=128)
        assert flex.BLOCK_SIZE == (128, 128)
        mask = BlockMask.from_flex(flex)
        assert mask.shape == (1, 2, *num_blocks(q_len, kv_len))
        assert mask.to_dense().all()
        assert mask.density() == 1.0
        assert not mask.is_causal

    @pytest.mark.parametrize("block_size", [128, (128, 64), (256, 128), (128, 192)], ids=str)
    @pytest.mark.parametrize("length", [128, 200, 512, 700])
    def test_from_flex_of_a_causal_mask(self, length: int, block_size: int | tuple[int, int]) -> None:
        flex = create_block_mask(causal, 1, 2, length, length, device="cpu", BLOCK_SIZE=block_size)
        mask = BlockMask.from_flex(flex, is_causal=True)
        assert torch.equal(mask.to_dense()[0, 1], visible_blocks(length, length, True))
        assert mask.density() == 1.0
        query, key, value = make_qkv(length)
        got = sparge.block_sparse_attention(query, key, value, mask, return_lse=True, quantization="none")
        assert_exact(got, query, key, value, is_causal=True)

    def test_padding_after_the_listed_blocks_is_ignored(self) -> None:
        """FlexAttention reads only the first ``kv_num_blocks`` indices; the rest is often filled with zeros."""
        counts = torch.tensor([[[2, 1, 0]]], dtype=torch.int32)
        indices = torch.tensor([[[[0, 2, 0, 0], [3, 0, 0, 0], [0, 0, 0, 0]]]], dtype=torch.int32)
        flex = FlexBlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=(128, 64), seq_lengths=(384, 256))
        expected = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
        expected[0, 0, 0, [0, 2]] = expected[0, 0, 1, 3] = True
        assert torch.equal(flex.to_dense().bool(), expected)
        assert torch.equal(BlockMask.from_flex(flex).to_dense(), expected)

    @pytest.mark.parametrize("block_size", [64, (128, 32), (192, 64), (128, 96)], ids=str)
    def test_from_flex_rejects_unsupported_block_sizes(self, block_size: int | tuple[int, int]) -> None:
        flex = create_block_mask(causal, 1, 1, 384, 384, device="cpu", BLOCK_SIZE=block_size)
        got = r"\({}, {}\)".format(*(block_size if isinstance(block_size, tuple) else (block_size, block_size)))
        message = rf"expected a FlexAttention block size that is a multiple of \(128, 64\), got {got}"
        with pytest.raises(ValueError, match=message):
            BlockMask.from_flex(flex, is_causal=True)

    def test_from_flex_rejects_partial_blocks_of_an_unknown_mask_mod(self) -> None:
        flex = create_block_mask(window, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=(128, 64))
        with pytest.raises(ValueError, match=r"expected .* whole blocks, got partial blocks with a mask_mod"):
            BlockMask.from_flex(flex)
        with pytest.raises(ValueError, match="is_causal=True if it is bottom-right causal"):
            BlockMask.from_flex(create_block_mask(causal, 1, 1, 512, 512, device="cpu"))

    def test_from_flex_accepts_an_unknown_mask_mod_without_partial_blocks(self) -> None:
        """The mask_mod aligns with the blocks, so the block lists describe the mask completely."""
        flex = create_block_mask(same_document, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=(128, 64))
        expected = torch.eye(4, dtype=torch.bool).repeat_interleave(2, 1)
        assert torch.equal(BlockMask.from_flex(flex).to_dense()[0, 0], expected)
