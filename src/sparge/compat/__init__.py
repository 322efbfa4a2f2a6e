"""The functions of the published SpargeAttention code and of FlashAttention, with their original signatures."""

from sparge.compat.flash_attention import flash_attn_func, flash_attn_varlen_func
from sparge.compat.spargeattn import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn_meansim_cuda,
    spas_sage_attn_meansim_topk_cuda,
)

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]
