"""The published function names, called in the same way as by SGLang's diffusion backend.

pip install . ./compat        # installs the module spas_sage_attn
python examples/published_names.py --tokens 8192 --topk 0.5
"""

import argparse

import torch

try:
    from spas_sage_attn import spas_sage2_attn_meansim_topk_cuda  # the package in compat/
except ImportError:
    from sparge.compat import spas_sage2_attn_meansim_topk_cuda  # the same function without that package

import sparge

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tokens", type=int, default=8192)
parser.add_argument("--topk", type=float, default=0.5)
args = parser.parse_args()

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
q, k, v = (torch.randn(1, args.tokens, 8, 64, device=device, dtype=dtype) for _ in range(3))  # NHD
out = spas_sage2_attn_meansim_topk_cuda(q, k, v, is_causal=False, scale=0.125, tensor_layout="NHD", topk=args.topk)
assert out.shape == q.shape
print(sparge.stats())
