"""Universal, training-free sparse and quantised attention for PyTorch.

>>> import torch, sparge
>>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
>>> out = sparge.attention(q, k, v, topk=0.25)

An independent implementation of SpargeAttention (Zhang et al., ICML 2025).
"""

from sparge._version import __version__
from sparge.api import attention, block_sparse_attention, predict
from sparge.block_mask import BlockMask
from sparge.config import Dense, Mean, Moment, TopCdf, TopK
from sparge.integrations import disable, enable, register, replace_sdpa
from sparge.policy import Policy
from sparge.stats import LayerStats, Stats, reset_stats, stats

__all__ = [
    "BlockMask",
    "Dense",
    "LayerStats",
    "Mean",
    "Moment",
    "Policy",
    "Stats",
    "TopCdf",
    "TopK",
    "__version__",
    "attention",
    "block_sparse_attention",
    "disable",
    "enable",
    "predict",
    "register",
    "replace_sdpa",
    "reset_stats",
    "stats",
]
