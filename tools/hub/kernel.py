"""Training-free sparse and quantized attention, as a kernel of the Hugging Face Hub.

    attention, predict, block_sparse_attention      attention calls with a budget
    varlen_attention                                packed sequences
    flash_attn_func, flash_attn_varlen_func         FlashAttention's names and signatures
    stats, reset_stats                              counts of sparse and dense calls

Calls below a measured length run dense, which `stats` reports. There is no backward pass. The library contains the
functions that enable whole models (``sparge.enable``, policies, calibration): ``pip install sparge``.
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
