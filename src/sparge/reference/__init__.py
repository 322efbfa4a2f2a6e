"""Every stage of the method in plain PyTorch: the specification, which the tests compare the backends with.

    shared       visibility of keys, smoothing
    prediction   block statistics -> scores -> probabilities -> selection -> BlockMask
    softmax      quantization (`sparge.numerics.quantization`) -> online softmax over the kept blocks -> output, LSE

docs/algorithm.md explains the mathematics. Shapes follow `geometry.Shape`: query (B, H, Sq, D), key (B, Hkv, Sk, D),
value (B, Hkv, Sk, Dv). Arithmetic is float64, except for roundings that the method defines. Memory is quadratic in the
length.
"""

from sparge.reference.prediction import predict
from sparge.reference.softmax import AttentionResult, attention

__all__ = ["AttentionResult", "attention", "predict"]
