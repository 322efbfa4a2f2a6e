"""The attention functions of `spas_sage_attn`, under the published module name."""

from typing import Any

from spas_sage_attn import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn_meansim_cuda,
    spas_sage_attn_meansim_topk_cuda,
)
from spas_sage_attn._missing import raise_missing

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]


def __getattr__(name: str) -> Any:
    return raise_missing(__name__, name, "one of the five functions, or sparge.attention, which has their options")
