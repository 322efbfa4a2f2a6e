"""The exchange of tokens for heads among the Ulysses ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparge.distributed.communicator import Communicator


def check_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError unless heads divide evenly among ranks; several ranks may share a K/V head."""
    if heads % ranks:
        raise ValueError(
            f"query: expected a multiple of {ranks} heads for {ranks} Ulysses ranks, got {heads} (gather and ring take "
            "any number of heads; in a mesh only its Ulysses ranks divide them)"
        )
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(f"key: expected a multiple or a divisor of {ranks} heads for {ranks} ranks, got {kv_heads}")


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, ranks: Communicator, lengths: Sequence[int], order: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all tokens of this rank's heads, (B, H / ranks, S, D).

    Args:
        lengths: tokens of each rank.
        order: (H,), query heads in the order of ranks; None is their own order.
    """
    group = query.shape[1] // key.shape[1]
    if order is not None:
        query = query.index_select(1, order)
        key, value = (tensor.index_select(1, order[::group] // group) for tensor in (key, value))
    if key.shape[1] < ranks.size:  # ranks whose queries share a K/V head each get a copy
        copies = ranks.size // key.shape[1]
        key, value = (tensor.repeat_interleave(copies, 1) for tensor in (key, value))
    query, key, value = ranks.start_to_heads((query, key, value), lengths)()
    return query, key, value


def to_tokens(
    output: Tensor, lse: Tensor | None, ranks: Communicator, lengths: Sequence[int], order: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return this rank's tokens of all heads, and their LSE; the inverse of `to_heads`."""
    output = ranks.to_tokens(output, lengths)
    if lse is not None:
        lse = ranks.to_tokens(lse[..., None], lengths)[..., 0]
    if order is not None:
        inverse = order.argsort()
        output = output.index_select(1, inverse)
        lse = None if lse is None else lse.index_select(1, inverse)
    return output, lse
