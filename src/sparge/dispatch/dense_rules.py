"""Sparse or dense, and why. The API, the integrations and the statistics all ask here.

    by_arguments    the caller's own words, and the sizes         asked by `api`
    by_policy       a policy's rules, and the sizes               asked for each call of a model; reads no tensor
    in_eight_bits   where what a policy keeps dense is computed   asked behind it
    unsupported     what no sparse backend serves                 asked by `api`: raised, or run dense
    foreign, unsupported_call, costly_mask, ambiguous_mask        the same for calls that SDPA would take
    is_small_under_mask                                           the crossover of a mask with an entry per query

Each answers with a `Reason`; about unsupported calls with an `Obstacle` or a few words, which `sparge.stats` shows in
brackets; or with None: the call is sparse. `count` tells the statistics about a call that runs dense. What only an
integration knows (the place in a schedule) is a `Reason` too, and counted here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from sparge.backends import base
from sparge.dispatch.gradients import inside_autograd_function, needs_grad_of
from sparge.masks.geometry import Shape
from sparge.masks.window import Window, keys_of_query
from sparge.numerics import block_means
from sparge.options.rules import Dense, Sparsity
from sparge.stats import counters

if TYPE_CHECKING:
    from sparge.policy import Policy

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIN_HEAD_DIM, MAX_HEAD_DIM = 8, 256
SQUARE_MASK = "mask with an entry per query"
SHARING_HEADS = 4
"""So many heads share a mask with an entry per query that is worth reading on a GPU: to read an entry takes it as long
as SDPA takes for a score (docs/lab/models.md, "Masks in models")."""


class Reason(Enum):
    """Why a call runs dense. The value is what `sparge.stats` shows, behind "dense: ".

    Attributes:
        words: both together, made once.
    """

    def __init__(self, value: str) -> None:
        self.words = f"dense: {value}"

    ASKED = "sparsity=Dense()"
    CROSSOVER = "below the crossover"
    WINDOW = "inside the window"
    UNSUPPORTED = "unsupported"
    DECODE = "decode"
    CROSS_ATTENTION = "cross-attention"
    TEXT = "text alone"
    MIN_TOKENS = "fewer than min_tokens"
    LAYER = "dense layer"
    STEP = "dense step"
    UNKNOWN_SCHEDULE = "dense step, the schedule is unknown"
    NOTHING_VISIBLE = "nothing to see"
    INSIDE_MODULE = "inside nn.MultiheadAttention"
    OWN_ATTENTION = "the model's own attention"
    NOT_SDPA = "not through SDPA"


BY_RULE = (Reason.LAYER, Reason.STEP, Reason.UNKNOWN_SCHEDULE)
"""Why calls run dense that would be sparse but for a rule of the policy."""


def describe(reason: Reason, *, in_eight_bits: bool = False) -> str:
    """What `sparge.stats` counts a dense call as."""
    return f"dense in 8 bits: {reason.value}" if in_eight_bits else reason.words


def count(reason: Reason, layer: str | None = None, *, detail: str = "") -> None:
    """Count a call that runs dense, for the layer that this thread is within or the one that is named.

    In a compiled program nothing is counted here: a lock cannot be traced. (`ops` counts what becomes an operator.)
    """
    if not torch.compiler.is_compiling():
        counters.record(f"{reason.words} ({detail})" if detail else reason.words, layer)


@dataclass(frozen=True)
class Obstacle:
    """What keeps a call from being sparse: in a word for statistics, and as "expected X, got Y" for an error."""

    word: str
    message: str


def by_arguments(
    shape: Shape,
    window: Window,
    sparsity: Sparsity,
    quantization: str,
    backend: str,
    resolved: str,
    device: torch.device,
    dtype: torch.dtype,
) -> Reason | None:
    """Why `sparge.attention` runs a call dense that it could run sparse.

    A call whose window shows each query fewer keys than the crossover has is dense inside of it.

    Args:
        backend: as the caller named it; a named one is never left for dense attention.
        resolved: the backend that serves the call.
        device, dtype: those of the query.
    """
    if isinstance(sparsity, Dense):
        return Reason.ASKED
    if backend != "auto" or quantization not in ("auto", "none"):
        return None
    if base.prefers_dense(shape, window.right == 0, resolved, device, dtype):
        return Reason.CROSSOVER
    keys = keys_of_query(window, shape.kv_len)
    if keys < shape.kv_len and base.prefers_dense(shape, False, resolved, device, dtype, keys):
        return Reason.WINDOW
    return None


def by_policy(
    policy: Policy,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    q_len: int,
    kv_len: int,
    *,
    is_self: bool | None,
    is_language: bool,
    is_causal: bool,
    is_cross: bool,
    is_dense_layer: bool,
) -> Reason | None:
    """Why a policy has a call of a model run dense, wherever in a schedule it stands.

    Args:
        device, dtype: those of the query.
        heads: those of the whole batch.
        is_self: queries and keys are of one sequence; None goes by their lengths.
        is_language: the tokens are text in order, so that fewer queries than keys are a chunk behind a prefix.
        is_causal: a query sees no key behind it.
        is_cross: the layer is known to be cross-attention.
    """
    if q_len == 1 and is_language:
        return Reason.DECODE
    if policy.self_attention_only:
        of_one_sequence = (q_len == kv_len or is_language) if is_self is None else is_self
        if is_cross or not of_one_sequence:
            return Reason.CROSS_ATTENTION
    if kv_len < policy.min_tokens or (q_len < policy.min_tokens and not is_language):
        return Reason.MIN_TOKENS
    if policy.backend == "auto" and device.type != "meta":
        crossover = base.crossover_for(device.type, device.index, dtype)
        if base.is_below(crossover, heads, q_len, kv_len, is_causal):
            return Reason.CROSSOVER
    return Reason.LAYER if is_dense_layer else None


def in_eight_bits(policy: Policy, reason: Reason, device: torch.device) -> bool:
    """Whether a call that a policy has run dense is computed here, in 8 bits, and not by the framework.

    Raises:
        NotImplementedError: the policy names a backend that does not serve the device.
    """
    if policy.dense != "8bit" or reason not in BY_RULE or device.type == "meta":
        return False
    if policy.backend != "auto" and policy.quantization != "auto":
        return True
    return base.resolve_quantization("auto", base.resolve(policy.backend, device), device) != "none"


def unsupported(shape: Shape, dropout_p: float, needs_grad: bool) -> Obstacle | None:
    """What keeps every sparse backend from a call; ``needs_grad`` says that somebody wants its derivatives.

    Raises:
        TypeError, ValueError: dropout_p is no probability.
    """
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p: expected a number, got {type(dropout_p).__name__}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p: expected a value in [0, 1], got {dropout_p}")
    if dropout_p > 0:
        return Obstacle("dropout", f"dropout_p: expected 0.0 (sparse attention has no dropout), got {dropout_p}")
    if needs_grad:
        return Obstacle(
            "gradients",
            "expected inputs without gradients (sparse attention has no derivatives; use torch.no_grad() or "
            "detach()), got requires_grad=True under autograd, or tangents of forward-mode AD",
        )
    return _head_dims(shape.head_dim, shape.value_dim)


def no_means(attn_mask: Tensor | None, group: int) -> Obstacle | None:
    """What keeps skipped blocks from being replaced by their means under a mask of four dimensions."""
    unfit = block_means.unfit_for_means(attn_mask, group)
    return None if unfit is None else Obstacle("means under such a mask", unfit)


def _head_dims(head_dim: int, value_dim: int) -> Obstacle | None:
    for name, size in (("head_dim", head_dim), ("value head_dim", value_dim)):
        if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM:
            message = f"{name}: expected a value in [{MIN_HEAD_DIM}, {MAX_HEAD_DIM}], got {size}"
            return Obstacle(f"{name} {size}", message)
    return None


def foreign(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> str | None:
    """What keeps a call from being looked at: its tensors are not plain ones with numbers in them."""
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return f"{query.ndim} dimensions"
    if any(type(tensor) is not Tensor for tensor in (query, key, value)):
        return "tensor subclass"
    if attn_mask is not None and type(attn_mask) not in (Tensor, nn.Parameter):
        return "mask of a tensor subclass"
    if not torch.compiler.is_compiling() and any(map(is_functorch_wrapped_tensor, (query, key, value))):
        return "a transform of torch.func"
    if key.device != query.device or value.device != query.device or query.device.type == "meta":
        return "devices"
    if attn_mask is not None and attn_mask.device != query.device:
        return "devices"
    return None


def unsupported_call(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, enable_gqa: bool
) -> str | None:
    """What keeps a call that SDPA would take from being sparse, or SDPA from taking it; it raises its own errors."""
    if query.dtype not in DTYPES or key.dtype != query.dtype or value.dtype != query.dtype:
        return f"{query.dtype}".removeprefix("torch.") if query.dtype not in DTYPES else "several dtypes"
    batch, heads, _, head_dim = query.shape
    obstacle = _head_dims(head_dim, value.shape[3])
    if obstacle is not None:
        return obstacle.word
    fits = key.shape[0] == batch and key.shape[3] == head_dim and value.shape[:3] == key.shape[:3]
    groups = key.shape[1] == heads or (enable_gqa and heads % key.shape[1] == 0)
    if not (fits and groups) or 0 in query.shape or 0 in key.shape:
        return "shapes"
    if dropout_p:
        return "dropout"
    if needs_grad_of(query, key, value, attn_mask):
        return "gradients"
    if inside_autograd_function():
        return "inside an autograd function, as reentrant checkpoints are"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, *DTYPES):
        return f"mask of {attn_mask.dtype}"
    return None


def is_on_gpu(query: Tensor) -> bool:
    """Whether kernels of a GPU would read a call's mask."""
    return query.is_cuda


def costly_mask(query: Tensor, attn_mask: Tensor, *, over_all_blocks: bool) -> str | None:
    """What mask it is, if to read it costs a GPU more than sparsity saves, or nobody knows.

    Bool masks are worth it: those of keys cost little, those with an entry per query if heads share them. Additive
    masks, and computing all blocks under a mask with an entry per query, were not measured. Whether an additive mask
    only hides, which would make a bool mask of it, the host would have to wait for the device to know.
    """
    if attn_mask.dtype != torch.bool:
        return "additive mask"
    if not _has_entries(attn_mask):
        return None
    own_heads = attn_mask.shape[-3] if attn_mask.ndim > 2 else 1
    if query.shape[1] < SHARING_HEADS * own_heads:
        return f"mask that fewer than {SHARING_HEADS} heads share"
    return SQUARE_MASK if over_all_blocks else None


def is_small_under_mask(query: Tensor, key: Tensor, attn_mask: Tensor) -> bool:
    """Whether a mask has an entry per query, and a call is too small for that."""
    if not _has_entries(attn_mask):
        return False
    crossover = base.crossover_under_mask_for(query.device.type, query.device.index)
    return base.is_below(crossover, query.shape[0] * query.shape[1], query.shape[2], key.shape[2], False)


def _has_entries(attn_mask: Tensor) -> bool:
    """Whether a mask has an entry per query."""
    return attn_mask.ndim >= 2 and attn_mask.shape[-2] > 1


def ambiguous_mask(attn_mask: Tensor) -> str | None:
    """Rows of lowest numbers alone: SDPA weighs the keys they are on as if they were 0, `sparge.attention` hides them.

    To know of them the mask is read, which neither a GPU's queue nor a compiled program allows.
    """
    if attn_mask.dtype == torch.bool:
        return None
    if attn_mask.device.type != "cpu" or torch.compiler.is_compiling():
        return "additive mask"
    lowest = torch.finfo(attn_mask.dtype).min
    return "mask with rows of its lowest number" if bool((attn_mask.amax(-1) == lowest).any()) else None
