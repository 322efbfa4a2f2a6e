"""Shared fixtures and helpers: a float64 oracle, seeded inputs, the error budget, poisoned memory.

The oracle follows the definition of attention and uses none of sparge's arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sparge
from sparge.backends.base import Crossover
from sparge.backends.torch import TorchBackend
from sparge.call import forget_recordings
from sparge.dispatch import call_cache, run
from sparge.integrations import layers

collect_ignore = ["interpreter.py"]  # importing it switches Triton to its interpreter
BLOCK_Q, BLOCK_K = 128, 64
BACKENDS = ("torch", "reference")
backends = pytest.mark.parametrize("backend", BACKENDS)
causality = pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
modes = pytest.mark.parametrize("quantization", ["none", "int8_fp8", "int8_fp16"])
SPARSE = {"sparsity": sparge.TopK(0.25, min_blocks=1, sink=False, diagonal=False)}


def watch_attention(patch: pytest.MonkeyPatch, note: Callable[..., object]) -> None:
    """Pass the tensors and options of every call of `sparge.attention` and of the integrations to a function.

    The cache of resolved calls is bypassed.
    """
    resolve_and_run = run.resolve_and_run

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
        *tensors, options = args
        note(*tensors, **options._asdict())
        output, lse, _ = resolve_and_run(*args, **kwargs)
        return output, lse, None

    patch.setattr(run, "resolve_and_run", watched)


def tokens_first(tensor: Tensor) -> Tensor:
    """Return a (B, H, S, D) tensor with the same values in the memory layout (B, S, H, D)."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def unquantized_options(backend: str, **options: Any) -> dict[str, Any]:
    return {"backend": backend, "quantization": "none", "return_lse": True, "enable_gqa": True, **options}


def visible_elements(
    query: Tensor,
    key: Tensor,
    *,
    is_causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    attn_mask: Tensor | None = None,
    block_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a bool mask of the visible elements and the float64 bias on the scores, both (B, H, S_q, S_k)."""
    batch, heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    full = (batch, heads, q_len, kv_len)
    seen = torch.ones(full, dtype=torch.bool)
    bias = torch.zeros(full, dtype=torch.float64)
    if is_causal:
        seen &= torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    distance = torch.arange(kv_len) - torch.arange(q_len)[:, None] - (kv_len - q_len)
    left, right = window
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen &= attn_mask
    elif attn_mask is not None:
        seen &= attn_mask > torch.finfo(attn_mask.dtype).min
        bias = attn_mask.double().expand(full)
    if block_mask is not None:
        rows = torch.arange(q_len) // BLOCK_Q
        columns = torch.arange(kv_len) // BLOCK_K
        seen &= block_mask.expand(batch, heads, -1, -1)[:, :, rows][..., columns]
    return seen, bias


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    elements: tuple[Tensor, Tensor] | None = None,
    **masks: Any,
) -> tuple[Tensor, Tensor]:
    """Compute dense attention in float64: output (B, H, S_q, D_v) and natural-log LSE (B, H, S_q).

    Causality is aligned bottom-right. Additive masks hide with -inf or the lowest number of their dtype. ``block_mask``
    is a bool tensor of 128 x 64 blocks. A query without visible keys has output 0 and LSE -inf. ``elements`` is the
    result of `visible_elements` for the ``masks``, if already computed.
    """
    seen, bias = visible_elements(query, key, **masks) if elements is None else elements
    group = query.shape[1] // key.shape[1]
    query, key, value = query.double(), key.double().repeat_interleave(group, 1), value.double()
    value = value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.mT * scale + bias).masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(-1)
    empty = ~seen.any(-1, keepdim=True)
    probabilities = scores.softmax(-1).masked_fill(empty, 0.0)
    return probabilities @ value, lse


def plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    elements: tuple[Tensor, Tensor] | None = None,
    **masks: Any,
) -> Tensor:
    """Compute torch's attention in the dtype of the inputs: the plain low-precision path that sets error budgets."""
    seen, bias = visible_elements(query, key, **masks) if elements is None else elements
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    empty = ~seen.any(-1, keepdim=True)
    mask = bias.masked_fill(~seen, -math.inf).masked_fill(empty, 0.0).to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale).masked_fill(empty, 0.0)


def plain_lse(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    elements: tuple[Tensor, Tensor] | None = None,
    **masks: Any,
) -> Tensor:
    """Compute the LSE in float32, the plain path that sets the error budget of the LSE."""
    seen, bias = visible_elements(query, key, **masks) if elements is None else elements
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.float() @ key.mT * scale + bias.float()
    return scores.masked_fill(~seen, -math.inf).logsumexp(-1)


def budget(output_low: Tensor, exact: Tensor, magnitude: Tensor | None = None) -> Tensor:
    """Return the allowed error of each entry: twice the worst error of the plain low-precision path, plus one rounding.

    One rounding is eps times the entry, or eps times ``magnitude`` if the entry is a sum of larger terms that cancel.
    """
    finite = exact.isfinite()
    worst = torch.where(finite, (output_low.double() - exact).abs(), 0.0).amax()
    return 2 * worst + torch.finfo(output_low.dtype).eps * (exact.abs() if magnitude is None else magnitude)


def assert_equal_to_rounding(got: Tensor, expected: Tensor) -> None:
    """Check that float32 tensors differ by at most a few units of rounding at the size of the largest entry."""
    torch.testing.assert_close(got, expected, rtol=0, atol=float(20 * 2**-23 * expected.abs().max()))


def assert_within_budget(got: Tensor, exact: Tensor, output_low: Tensor, magnitude: Tensor | None = None) -> None:
    """Check that every entry is within `budget` of ``exact``, and that non-finite entries are equal."""
    assert got.dtype == output_low.dtype
    assert got.shape == exact.shape
    finite = exact.isfinite()
    assert torch.equal(got.double()[~finite], exact[~finite])
    excess = ((got.double() - exact).abs() - budget(output_low, exact, magnitude))[finite]
    assert not excess.isnan().any(), "NaN where the exact result is finite"
    assert excess.numel() == 0 or excess.max() <= 0, f"over the budget by {excess.max():.3g}"


def assert_exact(got: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, **call: Any) -> None:
    """Check the output (B, H, S, D) and the LSE of a call against the same call in float64.

    Scores and outputs are sums of terms that cancel: a score sums products of size |q_d k_d|, an output sums values of
    size |v|. Score and LSE are each rounded once to float32. An absolute error of either is a relative error of P.
    """
    scale = call.pop("scale", None)
    oracle: dict[str, Any] = {"scale": scale, "elements": visible_elements(query, key, **call)}
    both, lse = exact_attention(query, key, torch.cat((value, value.abs()), -1), **oracle)
    output, sizes = both.chunk(2, -1)
    scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
    spread = key.double().abs().repeat_interleave(query.shape[1] // key.shape[1], 1)
    products = (query.double().abs() @ spread.mT * scale).amax(-1)
    finite_lse = torch.where(lse.isfinite(), lse, 0.0).abs()
    plain = plain_attention(query, key, value, **oracle)
    shares = (products + finite_lse) * torch.finfo(torch.float32).eps / 2
    rounding = output.abs() + sizes * shares[..., None] / torch.finfo(plain.dtype).eps
    assert_within_budget(got[0], output, plain, rounding)
    assert_within_budget(got[1], lse, plain_lse(query, key, **oracle), torch.maximum(products, finite_lse))


def move_weights(*models: nn.Module) -> None:
    """Copy weights to new memory. A CPU's matrix product may sum in another order at the addresses of a loaded file."""
    for model in models:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()


def relative_l1(got: Tensor, exact: Tensor) -> float:
    """Return sum |got - exact| / sum |exact|."""
    return float((got.double() - exact).abs().sum() / exact.abs().sum())


def make_qkv(
    q_len: int = 200,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    heads: int = 2,
    kv_heads: int | None = None,
    head_dim: int = 32,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a Gaussian query (B, H, S_q, D), key and value (B, H_kv, S_k, D | D_v); keys have a channel offset."""
    generator = torch.Generator().manual_seed(seed)
    kv_len = q_len if kv_len is None else kv_len
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = head_dim if value_dim is None else value_dim
    query = torch.randn(batch, heads, q_len, head_dim, generator=generator)
    key = torch.randn(batch, kv_heads, kv_len, head_dim, generator=generator)
    key += torch.randn(batch, kv_heads, 1, head_dim, generator=generator)
    value = torch.randn(batch, kv_heads, kv_len, value_dim, generator=generator)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def enlarge_token(query: Tensor, key: Tensor, token: str) -> None:
    """Enlarge one token in two channels whose products cancel, so that no score depends on the factor.

    Args:
        token: tensor and factor, such as "query-1e4" or "key-1e3". The token is query 140 or key 100, inside a block.
    """
    name, factor = token.split("-")
    tokens, index, others = (query, 140, key) if name == "query" else (key, 100, query)
    others[..., 5] = -others[..., 2]
    tokens[:, :, index, 2] = tokens[:, :, index, 5] = float(factor)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Clear counters, caches and the record of warnings before every test, because tests patch what caches contain."""
    for forget in (sparge.reset_stats, call_cache.forget, forget_recordings, layers._WARNED.clear):
        forget()
    yield
    sparge.reset_stats()


@pytest.fixture(autouse=True, scope="session")
def fixed_crossover() -> Iterator[None]:
    """Use the same crossover on every processor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            TorchBackend, "crossover", lambda *_: Crossover(2048, causal_keys=4096, queries=128, scores=2**23)
        )
        yield


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill torch.empty and its variants with NaN (integers: the maximum), to detect reads of uninitialized memory."""
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    assert torch.zeros(4).new_empty(2, 2).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = fills
