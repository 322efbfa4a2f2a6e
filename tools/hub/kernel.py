"""Sparse and quantised attention without training, as a kernel of the Hugging Face hub.

    attention, predict, block_sparse_attention      calls of their own, with a budget
    varlen_attention                                packed sequences
    flash_attn_func, flash_attn_varlen_func         FlashAttention's names, for programs that look for them
    stats, reset_stats                              what happened to the calls

Calls below a measured length run dense: `stats` says so. There is no backward pass. What turns whole models on
(``sparge.enable``, policies, calibration) is in the library: ``pip install sparge``.
"""

from sparge._version import __version__
from sparge.api import attention, block_sparse_attention, predict
from sparge.compat.flash_attention import flash_attn_func, flash_attn_varlen_func
from sparge.masks.block_mask import BlockMask
from sparge.options.rules import Budget, Dense, TopCdf, TopK
from sparge.options.scores import Mean, Moment, Spread
from sparge.stats import LayerStats, Stats, reset_stats, stats
from sparge.varlen import varlen_attention

__all__ = [
    "BlockMask",
    "Budget",
    "Dense",
    "LayerStats",
    "Mean",
    "Moment",
    "Spread",
    "Stats",
    "TopCdf",
    "TopK",
    "__version__",
    "attention",
    "block_sparse_attention",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "predict",
    "reset_stats",
    "stats",
    "varlen_attention",
]
