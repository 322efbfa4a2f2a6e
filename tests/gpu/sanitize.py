"""Awkward calls for a memory checker: ``compute-sanitizer --tool memcheck python tests/gpu/sanitize.py``.

Every allocation is freed and made anew by the driver (no caching), so that reads beyond a tensor's end are seen.
"""

from __future__ import annotations

import itertools
import os

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

import sparge

LENGTHS = [(1, 1), (1, 200), (129, 321), (330, 129), (257, 257)]
WIDTHS = [(64, 64), (72, 40), (128, 128)]


def main() -> None:
    calls = 0
    for (q_len, kv_len), (head_dim, value_dim), is_causal, quantization in itertools.product(
        LENGTHS, WIDTHS, (False, True), ("none", "int8_fp8", "int8_fp16")
    ):
        query = torch.randn(2, 4, q_len, head_dim, device="cuda", dtype=torch.bfloat16)
        key = torch.randn(2, 2, kv_len, head_dim, device="cuda", dtype=torch.bfloat16)
        value = torch.randn(2, 2, kv_len, value_dim, device="cuda", dtype=torch.bfloat16)
        padding = (
            torch.arange(kv_len, device="cuda") < torch.tensor([kv_len, max(1, kv_len // 3)], device="cuda")[:, None]
        )
        for options in (
            {"sparsity": sparge.TopK(0.4, min_blocks=1, similarity_threshold=0.02)},
            {"sparsity": sparge.TopCdf(0.8, min_blocks=1, pv_threshold=-4.0), "score": "mean"},
            {"topk": 0.5, "attn_mask": padding[:, None, None], "always_keep": [(0, 1)]},
            {"sparsity": sparge.Dense()},
        ):
            sparge.attention(
                query,
                key,
                value,
                is_causal=is_causal,
                enable_gqa=True,
                quantization=quantization,
                backend="triton",
                return_lse=True,
                **options,
            )
            calls += 1
    torch.cuda.synchronize()
    print(f"{calls} calls, density {sparge.stats().density:.3f}")


if __name__ == "__main__":
    main()
