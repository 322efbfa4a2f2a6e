"""Codes of Q, K and V against the specification's, and the other facts of the pass over Q."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from conftest import causality
from kernels.conftest import EPSILON, LOG2_E, assert_close, make_problem, random_bits, seen_tokens, visibility_of
from sparge import reference
from sparge.backends.triton.launch import padded
from sparge.backends.triton.quantize import QueryFacts, quantize_key_value, read_query
from sparge.backends.triton.statistics import summarize
from sparge.geometry import BLOCK_K, BLOCK_Q, Shape

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FP8_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Which token of each 16 stands where in the transposed FP8 values."""
EDGE = 1e-3
"""How near to the middle between two codes a number may round either way."""


def int8_codes(tokens: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """The specification's codes and scales (one per block) of a head, and which codes lie on a rounding edge."""
    codes, scales = reference.quantize_int8(tokens, block)
    edge = ((tokens / scales) % 1 - 0.5).abs() < EDGE
    return codes, scales[::block, 0], edge


def assert_int8(got: Tensor, got_scales: Tensor, tokens: Tensor, block: int) -> None:
    """Equal codes but for those on an edge; the rest of the buffer is 0."""
    codes, scales, edge = int8_codes(tokens, block)
    assert_close(got_scales, scales, 4 * EPSILON * scales.abs())
    known = scales.isfinite().repeat_interleave(block)[: len(tokens)]  # the codes of a NaN mean nothing
    length, width = tokens.shape
    off = (got[:length, :width].int() - codes.int()).abs()[known]
    assert not off[~edge[known]].any()
    assert not (off > 1).any()
    assert off.float().mean() < 4 * EDGE
    assert not got[length:].any()
    assert not got[:, width:][: length if known.all() else 0].any()


def key_value_codes(
    key: Tensor,
    value: Tensor,
    shape: Shape,
    quantization: str,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    seen = visibility_of(shape, is_causal, attn_mask)
    wanted = {"statistics": False, "smoothing": True, "value_scales": quantization == "int8_fp8", "judge": False}
    summary = summarize(key, value, shape, seen, scale=1.0, is_causal=is_causal, **wanted)
    return quantize_key_value(key, value, shape, seen, summary, quantization)


def assert_key_value(
    codes: tuple[Tensor, Tensor, Tensor],
    key: Tensor,
    value: Tensor,
    shape: Shape,
    quantization: str,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> None:
    key_codes, key_scales, value_codes = codes
    keys_seen, _ = seen_tokens(shape, is_causal, attn_mask)
    smoothed, _ = reference.smooth_key(key.double(), keys_seen)
    value = torch.where(keys_seen[..., None], value.double(), 0.0)
    rows = shape.kv_blocks * BLOCK_K
    for b in range(shape.batch):
        for h in range(shape.kv_heads):
            assert_int8(key_codes[b, h], key_scales[b, h], smoothed[b, h], BLOCK_K)
            if quantization == "int8_fp16":
                expected = reference.to_fp16(value[b, h]).half()
                width = padded(shape.value_dim)
                expected = F.pad(expected, (0, width - shape.value_dim, 0, rows - shape.kv_len))
                assert torch.equal(value_codes[b, h].nan_to_num(7.0), expected.nan_to_num(7.0))
                continue
            numbers, _ = reference.quantize_fp8(value[b, h])
            numbers = F.pad(numbers, (0, padded(shape.value_dim) - shape.value_dim, 0, rows - shape.kv_len))
            order = torch.arange(0, rows, 16)[:, None] + torch.tensor(FP8_ORDER)
            expected = numbers[order.flatten()].mT
            got = value_codes[b, h].float()
            assert_close(got, expected, expected.abs() / 8)  # E4M3 has three fraction bits: one code at most
            assert (got.nan_to_num() != expected.nan_to_num()).float().mean() < 4 * EDGE


class TestKeyValue:
    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    @pytest.mark.parametrize(
        "kv_len, dtype",
        [(1, torch.float32), (63, torch.bfloat16), (64, torch.float16), (65, torch.float32), (200, torch.bfloat16)],
        ids=str,
    )
    def test_lengths_and_dtypes(self, kv_len: int, dtype: torch.dtype, quantization: str) -> None:
        if quantization == "int8_fp16" and dtype == torch.float16:
            dtype = torch.bfloat16  # values that are FP16 already stay where they are
        _, key, value, shape = make_problem(1, kv_len, batch=2, heads=1, head_dim=24, value_dim=40, dtype=dtype)
        codes = key_value_codes(key, value, shape, quantization)
        assert_key_value(codes, key, value, shape, quantization)

    def test_fp16_values_are_not_copied(self) -> None:
        _, key, value, shape = make_problem(1, 100, heads=1, dtype=torch.float16)
        assert key_value_codes(key, value, shape, "int8_fp16")[2] is value

    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    @causality
    def test_hidden_tokens_are_zero(self, is_causal: bool, quantization: str) -> None:
        _, key, value, shape = make_problem(70, 130, batch=2, heads=4, kv_heads=2, head_dim=16)
        mask = random_bits(2, 4, 1, 130, share=0.4)
        hidden = ~seen_tokens(shape, is_causal, mask)[0][..., None]
        assert hidden.any()
        garbage = torch.tensor([math.nan, 1e30]).repeat(65)[:, None]
        key, value = torch.where(hidden, garbage, key), torch.where(hidden, garbage, value)
        codes = key_value_codes(key, value, shape, quantization, is_causal, mask)
        key = torch.where(hidden, 0.0, key)
        assert_key_value(codes, key, value, shape, quantization, is_causal, mask)

    def test_a_broken_key_marks_its_block_alone(self) -> None:
        _, key, value, shape = make_problem(1, 200, heads=1, head_dim=16)
        key[0, 0, 70, 3] = math.nan
        codes = key_value_codes(key, value, shape, "int8_fp8")
        assert codes[1].isnan().tolist() == [[[False, True, False, False]]]
        assert_key_value(codes, key, value, shape, "int8_fp8")

    @pytest.mark.parametrize("quantization", ["int8_fp8", "int8_fp16"])
    def test_values_out_of_range(self, quantization: str) -> None:
        """FP8 turns what is not finite into NaN; FP16 keeps it, and saturates at 65504."""
        _, key, value, shape = make_problem(1, 70, heads=1, head_dim=16)
        value[0, 0, 3, 0], value[0, 0, 4, 1], value[0, 0, 5, 2], value[0, 0, 6, 3] = math.nan, math.inf, -math.inf, 1e6
        codes = key_value_codes(key, value, shape, quantization)
        assert_key_value(codes, key, value, shape, quantization)

    def test_a_constant_key_has_codes_of_zero(self) -> None:
        _, key, value, shape = make_problem(1, 70, heads=1, head_dim=16)
        key[:] = 3.0
        value[:] = 0.0
        key_codes, key_scales, value_codes = key_value_codes(key, value, shape, "int8_fp8")
        assert not key_codes.any()
        assert (key_scales == 1).all()
        assert not value_codes.float().any()


def facts_of(
    query: Tensor, key_mean: Tensor, shape: Shape, scale: float, is_causal: bool, attn_mask: Tensor | None
) -> QueryFacts:
    return read_query(
        query,
        key_mean,
        shape,
        visibility_of(shape, is_causal, attn_mask),
        scale=scale,
        is_causal=is_causal,
        codes=True,
        mean=True,
        similarity=True,
    )


def assert_query(
    facts: QueryFacts,
    query: Tensor,
    key_mean: Tensor,
    shape: Shape,
    scale: float,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> None:
    _, queries_seen = seen_tokens(shape, is_causal, attn_mask)
    query = torch.where(queries_seen[..., None], query.double(), 0.0)
    for b in range(shape.batch):
        for h in range(shape.heads):
            flat, seen, tokens = b * shape.heads + h, queries_seen[b, h], query[b, h]
            signed = tokens if scale > 0 else -tokens
            assert_int8(facts.codes[b, h], facts.scale[flat].double() / (abs(scale) * LOG2_E), signed, BLOCK_Q)
            mean = key_mean[b * shape.kv_heads + h // shape.group, : shape.head_dim].double()
            tolerance = 16 * EPSILON * abs(scale) * (tokens.abs() @ mean.abs())
            assert_close(facts.lse_shift[flat], scale * (tokens @ mean), tolerance)
            means, _ = reference.pool(tokens, seen, BLOCK_Q)
            sizes, _ = reference.pool(tokens.abs(), seen, BLOCK_Q)
            assert_close(facts.mean[flat, :, : shape.head_dim], means, 16 * EPSILON * sizes)
            assert not facts.mean[flat, :, shape.head_dim :].any()
            assert_close(facts.similarity[flat], reference.self_similarity(tokens, seen, BLOCK_Q), 1e-5)


class TestQuery:
    @pytest.mark.parametrize(
        "q_len, dtype",
        [(1, torch.float32), (127, torch.bfloat16), (129, torch.float16), (300, torch.float32)],
        ids=str,
    )
    def test_lengths_and_dtypes(self, q_len: int, dtype: torch.dtype) -> None:
        query, key, _, shape = make_problem(q_len, 70, batch=2, heads=2, kv_heads=1, head_dim=40, dtype=dtype)
        key_mean = F.pad(key.float().mean(2).flatten(0, 1), (0, 24))
        facts = facts_of(query, key_mean, shape, 0.3, False, None)
        assert_query(facts, query, key_mean, shape, 0.3)

    def test_the_sign_of_the_scale_is_in_the_codes(self) -> None:
        query, key, _, shape = make_problem(130, 70, heads=1, head_dim=16)
        facts = facts_of(query, key.mean(2)[0], shape, -0.5, False, None)
        assert_query(facts, query, key.mean(2)[0], shape, -0.5)
        nothing = facts_of(query, key.mean(2)[0], shape, 0.0, False, None)
        assert not nothing.scale.any()
        assert not nothing.lse_shift.any()
        assert torch.equal(nothing.codes, -facts.codes)

    @pytest.mark.parametrize("masked", [False, True], ids=["no mask", "padding"])
    def test_queries_that_see_nothing_count_as_zero(self, masked: bool) -> None:
        """With more queries than keys, the first ones of causal attention; with left padding, some more."""
        query, key, _, shape = make_problem(200, 60, heads=2, kv_heads=1, head_dim=16)
        mask = (torch.arange(60) >= torch.tensor([5, 11])[:, None])[None, :, None] if masked else None
        hidden = ~seen_tokens(shape, True, mask)[1]
        assert hidden.any()
        query[hidden] = math.nan
        facts = facts_of(query, key.mean(2)[0], shape, 0.3, True, mask)
        assert_query(facts, query, key.mean(2)[0], shape, 0.3, True, mask)

    def test_a_broken_query_marks_its_block_alone(self) -> None:
        query, key, _, shape = make_problem(200, 60, heads=1, head_dim=16)
        query[0, 0, 150, 3] = math.nan
        facts = facts_of(query, key.mean(2)[0], shape, 0.3, False, None)
        assert facts.scale.isnan().tolist() == [[False, True]]
        assert facts.lse_shift.isnan().nonzero().tolist() == [[0, 150]]
        assert_query(facts, query, key.mean(2)[0], shape, 0.3)

    def test_strided_heads(self) -> None:
        query, key, _, shape = make_problem(130, 60, batch=2, heads=2, head_dim=16)
        view = query.transpose(1, 2).contiguous().transpose(1, 2)
        assert not view.is_contiguous()
        key_mean = key.mean(2).flatten(0, 1)
        assert_query(facts_of(view, key_mean, shape, 0.3, False, None), query, key_mean, shape, 0.3)
