"""Properties for random inputs: a full mask is dense, backends agree, rules keep their budgets, parts can be merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sparge
from conftest import (
    BLOCK_K,
    BLOCK_Q,
    assert_exact,
    assert_within_budget,
    exact_attention,
    make_qkv,
    plain_attention,
    visible_elements,
)
from sparge import Budget, Dense, TopCdf, TopK
from sparge.backends.torch.blocks import attend, merge
from sparge.options.rules import Selection
from sparge.reference import prediction


def examples(count: int) -> Any:
    return settings(max_examples=count, deadline=None, derandomize=True)


TIE = 1e-6

inputs = st.fixed_dictionaries(
    {
        "q_len": st.integers(1, 300),
        "kv_len": st.integers(1, 700),
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 2),
        "group": st.integers(1, 3),
        "head_dim": st.sampled_from([8, 16, 24]),
        "value_dim": st.sampled_from([8, 16]),
        "seed": st.integers(0, 10**6),
    }
)


def build(sizes: dict[str, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    sizes = dict(sizes)
    heads = sizes.pop("group") * sizes["kv_heads"]
    return make_qkv(**sizes, heads=heads, dtype=dtype)


def build_mask(kind: str, query: Tensor, key: Tensor, seed: int) -> Tensor | None:
    """Return an attention mask of a given kind, with empty blocks and some empty rows."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    if kind == "none":
        return None
    if kind == "padding":
        length = torch.randint(0, kv_len + 1, (batch, 1, 1, 1), generator=generator)
        return torch.arange(kv_len) < length
    if kind == "per head":
        mask = torch.rand(batch, heads, q_len, kv_len, generator=generator) < 0.7
        mask[..., : kv_len // 3] &= torch.rand(1, heads, 1, 1, generator=generator) < 0.5
        return mask
    bias = torch.randn(q_len, kv_len, generator=generator)
    return bias.masked_fill(torch.rand(q_len, kv_len, generator=generator) < 0.3, -math.inf)


def visible_blocks(seen: Tensor) -> Tensor:
    """Reduce an element mask (B, H, S_q, S_k) to the blocks that contain a visible element."""
    q_len, kv_len = seen.shape[2:]
    padded = torch.nn.functional.pad(seen, (0, -kv_len % BLOCK_K, 0, -q_len % BLOCK_Q))
    return padded.unflatten(3, (-1, BLOCK_K)).any(-1).unflatten(2, (-1, BLOCK_Q)).any(3)


@examples(40)
@given(
    sizes=inputs,
    is_causal=st.booleans(),
    kind=st.sampled_from(["none", "padding", "per head", "additive"]),
    backend=st.sampled_from(["torch", "reference"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_full_mask_is_dense(
    sizes: dict[str, int], is_causal: bool, kind: str, backend: str, dtype: torch.dtype
) -> None:
    query, key, value = build(sizes, dtype)
    attn_mask = build_mask(kind, query, key, sizes["seed"])
    call = {"is_causal": is_causal, "attn_mask": attn_mask}
    options = {"enable_gqa": True, "return_lse": True, "backend": backend, "quantization": "none"}
    everything = torch.ones(1, 1, dtype=torch.bool)
    got = sparge.block_sparse_attention(query, key, value, everything, **call, **options)
    assert_exact(got, query, key, value, **call)
    assert_exact(sparge.attention(query, key, value, sparsity=Dense(), **call, **options), query, key, value, **call)


sparsities = st.builds(
    lambda kind, share, **rules: kind(share, **rules),
    kind=st.sampled_from([TopK, TopCdf]),
    share=st.floats(0.05, 0.95),
    min_blocks=st.integers(0, 3),
    similarity_threshold=st.one_of(st.none(), st.floats(0.02, 0.2)),
    sink=st.sampled_from([None, True, False]),
    diagonal=st.sampled_from([None, True, False]),
)


def recorded_predict(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the kept blocks and the block probabilities of the reference, both (B, H, q_blocks, kv_blocks)."""
    rows: list[Tensor] = []
    apply_rule = prediction.apply_rule

    def record(rule: Selection, of_batch: Sequence[prediction.QBlock]) -> list[Tensor]:
        rows.extend(row.probabilities for row in of_batch)
        return apply_rule(rule, of_batch)

    with patch.object(prediction, "apply_rule", record):
        mask = sparge.predict(*tensors, backend="reference", **options)
    return mask.to_dense(), torch.stack(rows).view(mask.shape)


def is_tie(probabilities: Tensor, one: Tensor, other: Tensor, cdf: float | None) -> bool:
    """Return whether two selections differ only in blocks of equal probability, or at a sum that equals ``cdf``."""
    differing = probabilities[one ^ other]
    if int(one.sum()) == int(other.sum()):
        return bool(differing.max() - differing.min() <= TIE)
    sums = probabilities.sort(descending=True).values.cumsum(0)
    return cdf is not None and len(differing) == 1 and bool((sums - cdf * sums[-1]).abs().min() <= TIE)


@examples(60)
@given(
    sizes=inputs,
    is_causal=st.booleans(),
    kind=st.sampled_from(["none", "padding", "per head", "additive"]),
    sparsity=sparsities,
    score=st.sampled_from(["moment", "mean", sparge.Moment(3)]),
    scale=st.sampled_from([None, 1.0]),
    keep=st.booleans(),
    pv_threshold=st.sampled_from([None, -2.0, -6.0]),
)
def test_backends_agree(
    sizes: dict[str, int],
    is_causal: bool,
    kind: str,
    sparsity: TopK | TopCdf,
    score: Any,
    scale: float | None,
    keep: bool,
    pv_threshold: float | None,
) -> None:
    query, key, value = build(sizes)
    call = {
        "is_causal": is_causal,
        "attn_mask": build_mask(kind, query, key, sizes["seed"]),
        "scale": scale,
        "enable_gqa": True,
    }
    choice = {
        "sparsity": sparsity,
        "score": score,
        "always_keep": [(key.shape[2] // 2, key.shape[2] // 2 + 1)] if keep else None,
    }
    expected, probabilities = recorded_predict(query, key, **call, **choice)
    mask = sparge.predict(query, key, backend="torch", **call, **choice)
    cdf = sparsity.cdf if isinstance(sparsity, TopCdf) else None
    for indices in (mask.to_dense() ^ expected).any(-1).nonzero().tolist():
        row = tuple(indices)
        assert is_tie(probabilities[row], mask.to_dense()[row], expected[row], cdf)

    ours, theirs = (
        sparge.block_sparse_attention(
            query, key, value, mask, pv_threshold=pv_threshold, return_lse=True, backend=backend, **call
        )
        for backend in ("torch", "reference")
    )
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-5)


@examples(30)
@given(
    sizes=inputs,
    is_causal=st.booleans(),
    kind=st.sampled_from(["none", "padding", "per head"]),
    sparsity=st.sampled_from([Budget(0.1), TopK(0.1, min_blocks=1), TopCdf(0.3, min_blocks=1)]),
    backend=st.sampled_from(["torch", "reference"]),
)
def test_exact_queries_are_dense(
    sizes: dict[str, int], is_causal: bool, kind: str, sparsity: Selection, backend: str
) -> None:
    query, key, value = build(sizes)
    middle = query.shape[2] // 2
    call = {"is_causal": is_causal, "attn_mask": build_mask(kind, query, key, sizes["seed"]), "enable_gqa": True}
    options = {"return_lse": True, "backend": backend, "quantization": "none", **call}
    got = sparge.attention(query, key, value, sparsity=sparsity, exact_queries=[(middle, middle + 1)], **options)
    dense = sparge.attention(query, key, value, sparsity=Dense(), **options)
    rows = slice(middle // BLOCK_Q * BLOCK_Q, (middle // BLOCK_Q + 1) * BLOCK_Q)
    for ours, theirs in zip(got, dense, strict=True):
        torch.testing.assert_close(ours[:, :, rows], theirs[:, :, rows], rtol=0, atol=1e-5)


def unfinished_blocks(q_len: int, kv_len: int, is_causal: bool) -> Tensor:
    """Return the blocks that extend past the last visible key of a query block, (q_blocks, kv_blocks).

    They are always kept and never scored.
    """
    blocks = torch.zeros(-(-q_len // BLOCK_Q), -(-kv_len // BLOCK_K), dtype=torch.bool)
    for i in range(blocks.shape[0] if is_causal else 0):
        last = min((i + 1) * BLOCK_Q, q_len) - 1 + kv_len - q_len
        for j in range(blocks.shape[1]):
            keys = range(j * BLOCK_K, min((j + 1) * BLOCK_K, kv_len))
            blocks[i, j] = keys[0] <= last < keys[-1]
    return blocks


def predicted_probabilities(query: Tensor, key: Tensor, score: str, is_causal: bool, samples: int = 16) -> Tensor:
    """Compute the block probabilities of docs/algorithm.md in float64, without masks: (B, H, q_blocks, kv_blocks)."""
    seen, _ = visible_elements(query, key, is_causal=is_causal)
    scored = visible_blocks(seen) & ~unfinished_blocks(query.shape[2], key.shape[2], is_causal)
    group = query.shape[1] // key.shape[1]
    query, key = query.double(), key.double().repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5
    key = key - key.mean(2, keepdim=True)
    means = torch.stack([block.mean(2) for block in key.split(BLOCK_K, 2)], 2)
    variances = torch.stack([block.var(2, correction=0) for block in key.split(BLOCK_K, 2)], 2)
    rows = []
    for i, block in enumerate(query.split(BLOCK_Q, 2)):
        sees = seen[0, 0, i * BLOCK_Q : (i + 1) * BLOCK_Q].any(-1)
        block = block[:, :, sees] if sees.any() else block[:, :, :1]
        count = block.shape[2]
        if score == "mean":
            scores = block.mean(2, keepdim=True) @ means.mT * scale
        else:
            picked = block[:, :, [(2 * s + 1) * count // (2 * samples) for s in range(samples)]]
            scores = picked @ means.mT * scale + picked.square() @ variances.mT * scale**2 / 4
        hidden = ~scored[:, :, i : i + 1]
        shares = scores.masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)
        rows.append(shares.mean(2) if score == "mean" else shares.square().mean(2).sqrt())
    return torch.stack(rows, 2)


@examples(60)
@given(
    sizes=inputs,
    is_causal=st.booleans(),
    percent=st.integers(1, 100),
    min_blocks=st.integers(0, 5),
    sink=st.booleans(),
    diagonal=st.booleans(),
    score=st.sampled_from(["moment", "mean"]),
    backend=st.sampled_from(["torch", "reference"]),
)
def test_topk_keeps_exactly_its_budget_and_the_best_blocks(
    sizes: dict[str, int],
    is_causal: bool,
    percent: int,
    min_blocks: int,
    sink: bool,
    diagonal: bool,
    score: str,
    backend: str,
) -> None:
    query, key, _ = build(sizes)
    mask = sparge.predict(
        query,
        key,
        is_causal=is_causal,
        sparsity=TopK(percent / 100, min_blocks=min_blocks, sink=sink, diagonal=diagonal),
        score=score,
        enable_gqa=True,
        backend=backend,
    )
    q_len, kv_len = query.shape[2], key.shape[2]
    visible = visible_blocks(visible_elements(query, key, is_causal=is_causal)[0])
    at_position = torch.zeros(q_len, kv_len, dtype=torch.bool)  # the key at each query's own position
    for i in range(q_len):
        if 0 <= i + kv_len - q_len < kv_len:
            at_position[i, i + kv_len - q_len] = True
    forced = visible_blocks(at_position[None, None]) if diagonal else torch.zeros_like(visible)
    forced = forced.expand_as(visible).clone()
    forced[..., 0] |= sink
    forced |= unfinished_blocks(q_len, kv_len, is_causal)
    forced &= visible
    kept = mask.to_dense()
    assert torch.equal(mask.visible_num_blocks, visible.sum(-1).int())
    assert (kept | ~forced).all()
    probabilities = predicted_probabilities(query, key, score, is_causal)
    for indices in visible.any(-1).nonzero().tolist():
        row = tuple(indices)
        sees = int(visible[row].sum())
        budget = min(max(math.ceil(Fraction(percent, 100) * sees), min_blocks, 1), sees)
        assert int(kept[row].sum()) == max(budget, int(forced[row].sum()))
        chosen = probabilities[row][kept[row] & ~forced[row]]
        rest = probabilities[row][visible[row] & ~kept[row]]
        if len(chosen) and len(rest):
            assert chosen.min() >= rest.max() - TIE


@examples(60)
@given(
    sizes=inputs,
    is_causal=st.booleans(),
    percent=st.integers(1, 100),
    score=st.sampled_from(["moment", "mean"]),
    backend=st.sampled_from(["torch", "reference"]),
)
def test_budget_keeps_exactly_its_blocks_and_the_best_ones(
    sizes: dict[str, int], is_causal: bool, percent: int, score: str, backend: str
) -> None:
    query, key, _ = build(sizes)
    query = 2 * query
    mask = sparge.predict(
        query,
        key,
        is_causal=is_causal,
        sparsity=Budget(percent / 100, sink=False, diagonal=False),
        score=score,
        enable_gqa=True,
        backend=backend,
    )
    kept = mask.to_dense()
    visible = visible_blocks(visible_elements(query, key, is_causal=is_causal)[0]).expand_as(kept)
    forced = unfinished_blocks(query.shape[2], key.shape[2], is_causal).expand_as(kept) & visible
    probabilities = predicted_probabilities(query, key, score, is_causal)
    own_share = (Fraction(percent, 200) * sees for sees in visible.sum(-1).flatten().tolist())
    guaranteed = torch.tensor([math.ceil(share) for share in own_share]).view(kept.shape[:3])
    guaranteed = torch.maximum(torch.maximum(guaranteed, forced.sum(-1)), visible.any(-1).long())
    assert (kept.sum(-1) >= guaranteed).all(), "a query block is guaranteed half of an equal share, and one block"
    for batch in range(len(kept)):
        budget = math.ceil(Fraction(percent, 100) * int(visible[batch].sum()))
        assert int(kept[batch].sum()) == max(budget, int(guaranteed[batch].sum()))
        dropped = probabilities[batch][visible[batch] & ~kept[batch]]
        if len(dropped):
            level = max(
                float(dropped.max()) * 7 / 8, 2**-6 / kept.shape[-1]
            )  # blocks on the same level are interchangeable
            below = kept[batch] & (probabilities[batch] < level - TIE)
            assert (below.sum(-1) <= guaranteed[batch]).all(), "only guaranteed blocks are worse than a dropped block"


@examples(60)
@given(
    sizes=inputs,
    is_causal=st.booleans(),
    cdf=st.floats(0.05, 0.99),
    score=st.sampled_from(["moment", "mean"]),
    backend=st.sampled_from(["torch", "reference"]),
)
def test_topcdf_covers_its_mass_with_the_fewest_blocks(
    sizes: dict[str, int], is_causal: bool, cdf: float, score: str, backend: str
) -> None:
    query, key, _ = build(sizes)
    query = 2 * query
    mask = sparge.predict(
        query,
        key,
        is_causal=is_causal,
        sparsity=TopCdf(cdf, min_blocks=1, sink=False, diagonal=False),
        score=score,
        enable_gqa=True,
        backend=backend,
    )
    kept = mask.to_dense()
    probabilities = predicted_probabilities(query, key, score, is_causal)
    visible = visible_blocks(visible_elements(query, key, is_causal=is_causal)[0])
    unfinished = unfinished_blocks(query.shape[2], key.shape[2], is_causal)
    assert (kept | ~unfinished).all()
    visible = visible & ~unfinished
    for indices in visible.any(-1).nonzero().tolist():
        row = tuple(indices)
        chosen = probabilities[row][kept[row] & visible[row]]
        rest = probabilities[row][visible[row] & ~kept[row]]
        mass = cdf * float(probabilities[row][visible[row]].sum())
        assert chosen.sum() >= mass - TIE, "the block that crosses the threshold is included"
        assert len(chosen) == 1 or chosen.sum() - chosen.min() < mass + TIE
        assert len(rest) == 0 or chosen.min() >= rest.max() - TIE


@examples(30)
@given(
    rows=st.integers(1, 130),
    keys=st.integers(2, 200),
    share=st.floats(0.01, 0.99),
    value_dim=st.sampled_from([16, 8]),
    hide=st.sampled_from(["nothing", "one half", "everything"]),
    seed=st.integers(0, 10**6),
)
def test_merging_two_halves_of_the_keys_is_exact(
    rows: int, keys: int, share: float, value_dim: int, hide: str, seed: int
) -> None:
    query, key, value = make_qkv(rows, keys, heads=3, head_dim=16, value_dim=value_dim, seed=seed)
    cut = min(max(int(share * keys), 1), keys - 1)
    bias = torch.zeros(3, rows, keys)
    if hide != "nothing":
        bias[:, ::2, cut:] = -math.inf
    if hide == "everything":
        bias[:, ::2] = -math.inf
    seen = bias == 0
    parts = []
    for half in (slice(0, cut), slice(cut, keys)):
        output, lse = attend(query[0], key[0, :, half], value[0, :, half], bias[..., half], scale=0.25)
        parts += [output, lse.masked_fill(~seen[..., half].any(-1), -math.inf)]
    got = merge(*parts)
    assert_exact((got[0][None], got[1][None]), query, key, value, attn_mask=seen[None], scale=0.25)


@examples(20)
@given(sizes=inputs, is_causal=st.booleans(), backend=st.sampled_from(["torch", "reference"]))
def test_merging_two_block_masks_equals_their_union(sizes: dict[str, int], is_causal: bool, backend: str) -> None:
    """The LSE is exact enough to merge partial results, as in ring attention."""
    query, key, value = build(sizes)
    generator = torch.Generator().manual_seed(sizes["seed"])
    blocks = (-(-query.shape[2] // BLOCK_Q), -(-key.shape[2] // BLOCK_K))
    first = torch.rand(blocks, generator=generator) < 0.5
    second = ~first & (torch.rand(blocks, generator=generator) < 0.8)
    options = {"is_causal": is_causal, "enable_gqa": True, "backend": backend, "quantization": "none"}
    parts = [
        tensor
        for mask in (first, second)
        for tensor in sparge.block_sparse_attention(query, key, value, mask, return_lse=True, **options)
    ]
    output, _ = merge(*parts)
    call = {"is_causal": is_causal, "block_mask": first | second}
    exact, _ = exact_attention(query, key, value, **call)
    plain = plain_attention(query, key, value, **call)
    # Each part is rounded once before the sum.
    assert_within_budget(output, exact, plain, magnitude=exact.abs() + sum(part.abs() for part in parts[::2]))
