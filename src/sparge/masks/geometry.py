"""The block sizes of all stages, and `Shape`, the sizes of one attention call.

A mask block is 128 queries x 64 keys on every backend. Causal attention is aligned bottom-right: query ``i`` sees keys
``0 .. i + kv_len - q_len``.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_Q = 128
BLOCK_K = 64
ROW_GROUP = 64
"""Number of queries for which P V is skipped together (the rows of a Hopper warpgroup)."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide integers and round up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention call: query (B, H, S_q, D), key (B, H_kv, S_k, D) and value (B, H_kv, S_k, D_v)."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int

    @property
    def q_blocks(self) -> int:
        return ceil_div(self.q_len, BLOCK_Q)

    @property
    def kv_blocks(self) -> int:
        return ceil_div(self.kv_len, BLOCK_K)

    @property
    def group(self) -> int:
        """The number of query heads per K/V head."""
        return self.heads // self.kv_heads

    @property
    def causal_offset(self) -> int:
        """The key position of query 0 under bottom-right alignment."""
        return self.kv_len - self.q_len
