"""The description of one attention call of a model, which integrations create."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sparge.integrations.diffusers.shards import QueryShards


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a call over several ranks: some heads, some queries, or both.

    Attributes:
        sizes: query and key with the sizes of the whole call, equal on all ranks. Their values are not read.
        attention: `sparge.attention` for the part; a budget applies to all ranks together.
        query_shards: the split of the queries; None if they are not split.
        mask: the mask over all heads. Decisions are based on it, so that they are the same on all ranks.
    """

    sizes: tuple[Tensor, Tensor]
    attention: Callable[..., Tensor]
    query_shards: QueryShards | None = None
    mask: Tensor | None = None


@dataclass
class ModelCall:
    """An SDPA call of a model, heads first, with the integration's information about its tokens.

    Attributes:
        is_causal: aligned bottom-right, as in `sparge.attention`; may be combined with a mask.
        is_self: queries and keys belong to one sequence; None infers this from their lengths.
        is_language: the tokens are text in order, even if only the mask is causal. The rules for causal attention apply
            (sink, diagonal). If there are fewer queries than keys, the queries are a chunk after a prefix.
        window: the sliding window of a causal call, as in `sparge.attention`.
        text: token ranges that every query block keeps, in addition to the policy's ranges. Their queries
            see all keys if that is cheap.
        grid: sizes of the image or video that all other tokens form, in raster order.
        sinks: logits (H,) of attention sinks.
        max_keys: the largest number of keys that any query sees under the mask, if known.
        unsupported: why the integration cannot run the call sparsely; None if it can.
        part: this rank's part of a call over several ranks. The other fields describe the whole call.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    is_self: bool | None = None
    is_language: bool = False
    window: tuple[int | None, int | None] | None = None
    text: Sequence[tuple[int, int]] = ()
    grid: tuple[int, ...] | None = None
    sinks: Tensor | None = None
    max_keys: int | None = None
    unsupported: str | None = None
    part: RankPart | None = None

    @property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """Return the query and key whose sizes determine the decision, for all ranks together."""
        return (self.query, self.key) if self.part is None else self.part.sizes

    @property
    def query_shards(self) -> QueryShards | None:
        return None if self.part is None else self.part.query_shards


def with_four_dimensions(attn_mask: Tensor) -> Tensor:
    """Prepend dimensions of size 1 to a mask until it has 4."""
    return attn_mask[(None,) * (4 - attn_mask.ndim)]


def unexpanded(attn_mask: Tensor, query: Tensor) -> Tensor:
    """Undo `expand` of a mask along the batch, heads or queries, so that kernels read less memory."""
    for dim in range(-min(attn_mask.ndim, 4), -1):
        if attn_mask.stride(dim) == 0 and attn_mask.shape[dim] == query.shape[dim] > 1:
            attn_mask = attn_mask.narrow(dim, 0, 1)
    return attn_mask


def aligned_top_left(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, str | None]:
    """Drop the keys that no query sees under SDPA's top-left causality, which then equals bottom-right causality.

    Returns:
        The keys, the values, and None; or both unchanged, and the reason why this is impossible.
    """
    q_len, kv_len = query.shape[2], key.shape[2]
    if q_len > kv_len:
        return key, value, "causal with more queries than keys"
    if q_len < kv_len:
        key, value = key[:, :, :q_len], value[:, :, :q_len]
    return key, value, None
