"""The block geometry that every stage uses, and the sizes of one attention call.

A mask block is 128 queries by 64 keys on every backend. Causal attention is aligned bottom-right: query ``i`` sees keys
``0 .. i + kv_len - q_len``.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_Q = 128
BLOCK_K = 64
ROW_GROUP = 64
"""Queries that skip P V together (the rows of a Hopper warpgroup)."""


def ceil_div(numerator: int, denominator: int) -> int:
    """Divide integers and round up."""
    return -(-numerator // denominator)


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention call in heads-first order: query (B, H, Sq, D), key and value (B, Hkv, Sk, D | Dv)."""

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
        """Return the number of query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def causal_offset(self) -> int:
        """Return the position of query 0 on the key axis under bottom-right alignment."""
        return self.kv_len - self.q_len
