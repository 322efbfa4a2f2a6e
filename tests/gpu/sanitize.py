"""Awkward calls for a memory checker: ``compute-sanitizer --tool memcheck python tests/gpu/sanitize.py``.

Run it once without the checker first: that compiles the kernels. Every allocation is freed and made anew by the driver
(no caching), so that reads beyond a tensor's end are seen.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import sparge

LENGTHS = [(1, 1), (1, 200), (129, 321), (330, 129), (257, 257)]
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (64, 64, {"topk": 0.5, "quantization": "int8_fp8"}),
    (128, 128, {"topk": 0.5, "quantization": "int8_fp8", "is_causal": True}),
    (72, 40, {"topk": 0.5, "quantization": "int8_fp16", "always_keep": [(0, 1)]}),
    (128, 128, {"topk": 0.5, "quantization": "none", "is_causal": True}),
    (100, 24, {"sparsity": sparge.TopCdf(0.8, min_blocks=1), "score": "mean", "quantization": "none"}),
    (64, 64, {"sparsity": sparge.TopK(0.4, similarity_threshold=0.02, pv_threshold=-4.0), "quantization": "int8_fp8"}),
    (128, 64, {"sparsity": sparge.Dense(), "quantization": "int8_fp8", "is_causal": True}),
    (64, 64, {"topk": 0.5, "quantization": "int8_fp16", "padded": True, "is_causal": True}),
]


def main() -> None:
    calls = 0
    for head_dim, value_dim, options in CASES:
        padded = options.pop("padded", False)
        for q_len, kv_len in LENGTHS:
            query, key, value = (
                torch.randn(2, heads, length, width, device="cuda", dtype=torch.bfloat16)
                for heads, length, width in ((4, q_len, head_dim), (2, kv_len, head_dim), (2, kv_len, value_dim))
            )
            last_seen = torch.tensor([kv_len, max(1, kv_len // 3)], device="cuda")[:, None]
            mask = (torch.arange(kv_len, device="cuda") < last_seen)[:, None, None] if padded else None
            call = {"attn_mask": mask, "enable_gqa": True, "return_lse": True, "backend": "triton", **options}
            sparge.attention(query, key, value, **call)
            calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls, density {sparge.stats().density:.3f}")


if __name__ == "__main__":
    main()
