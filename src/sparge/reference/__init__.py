"""Every stage of the method in plain PyTorch, slow and obvious: the specification and the oracle of the tests.

    shared       which keys each query sees, smoothing
    prediction   block statistics -> scores -> probabilities -> selection -> BlockMask
    softmax      8-bit codes (`eight_bits`) -> online softmax over the kept blocks -> output, LSE

docs/algorithm.md has the mathematics. Shapes follow `geometry.Shape`: query (B, H, Sq, D), key (B, Hkv, Sk, D), value
(B, Hkv, Sk, Dv). Everything is computed in float64 unless a step is a low-precision one by definition. Memory is
quadratic in the length.
"""

from sparge.reference.prediction import predict
from sparge.reference.softmax import AttentionResult, attention

__all__ = ["AttentionResult", "attention", "predict"]
