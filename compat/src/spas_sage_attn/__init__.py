"""The import name of the published SpargeAttention code, with the functions of `sparge.compat`.

This is not the published package. It is for programs that import ``spas_sage_attn`` and cannot be changed, such as
SGLang's diffusion backend. Both packages have the same import name, so only one of them can be installed.

>>> import torch
>>> from spas_sage_attn import spas_sage2_attn_meansim_topk_cuda
>>> q, k, v = (torch.randn(1, 512, 8, 64) for _ in range(3))  # (batch, tokens, heads, head_dim)
>>> out = spas_sage2_attn_meansim_topk_cuda(q, k, v, is_causal=False, scale=0.125, tensor_layout="NHD", topk=0.5)
"""

from sparge.compat import (
    block_sparse_sage2_attn_cuda,
    spas_sage2_attn_meansim_cuda,
    spas_sage2_attn_meansim_topk_cuda,
    spas_sage_attn_meansim_cuda,
    spas_sage_attn_meansim_topk_cuda,
)

__all__ = [
    "block_sparse_sage2_attn_cuda",
    "spas_sage2_attn_meansim_cuda",
    "spas_sage2_attn_meansim_topk_cuda",
    "spas_sage_attn_meansim_cuda",
    "spas_sage_attn_meansim_topk_cuda",
]
