"""Training-free sparse and quantized attention for PyTorch.

>>> import torch, sparge
>>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
>>> out = sparge.attention(q, k, v, topk=0.25)

An independent implementation of SpargeAttention (Zhang et al., ICML 2025).
"""

import importlib
from typing import TYPE_CHECKING, Any

from sparge._version import __version__
from sparge.api import attention, block_sparse_attention, predict
from sparge.masks.block_mask import BlockMask
from sparge.options.rules import Budget, Dense, TopCdf, TopK
from sparge.options.scores import Mean, Moment, Spread
from sparge.stats import LayerStats, Stats, reset_stats, stats

if TYPE_CHECKING:
    from sparge.calibration import calibrate
    from sparge.integrations import disable, enable, register, replace_sdpa
    from sparge.policy import Policy
    from sparge.profile import Profile
    from sparge.varlen import varlen_attention

__all__ = [
    "BlockMask",
    "Budget",
    "Dense",
    "LayerStats",
    "Mean",
    "Moment",
    "Policy",
    "Profile",
    "Spread",
    "Stats",
    "TopCdf",
    "TopK",
    "__version__",
    "attention",
    "block_sparse_attention",
    "calibrate",
    "disable",
    "enable",
    "predict",
    "register",
    "replace_sdpa",
    "reset_stats",
    "stats",
    "varlen_attention",
]

_LAZY_MODULES = {
    "Policy": ".policy",
    "Profile": ".profile",
    "calibrate": ".calibration",
    **dict.fromkeys(("disable", "enable", "register", "replace_sdpa"), ".integrations"),
    "varlen_attention": ".varlen",
}


def __getattr__(name: str) -> Any:
    """Import rarely used modules on first access: they take a third of the import time."""
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY_MODULES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_MODULES})
