"""The dtypes that this machine's CPU multiplies fast, and the sizes from which sparse attention is faster on it.

torch's CPU attention multiplies 16-bit numbers in one of three ways:

    MATRIX    on matrix units (AMX), several times as fast as float32; gathered blocks keep their dtype
    VECTOR    with vector instructions; not measured for sparse attention
    NONE      by emulation, up to 100 times slower than float32 (docs/lab/cpu.md); gathered blocks are converted to
              float32

Nothing is timed at run time, so a call gives the same numbers in every process on a machine.
"""

from __future__ import annotations

import functools
import platform
from enum import Enum

import torch
from torch import Tensor

from sparge.backends.base import NEVER, Crossover

FEW_THREADS = 2
"""Number of threads for which `CROSSOVERS` were measured on CPUs without matrix units. More threads speed up SDPA, but
not the small operators of a sparse call."""
KEYS_OF_MANY, SCORES_PER_THREAD = 8192, 2**25
"""Minimum sizes with more than `FEW_THREADS` threads. On 16 threads of a Xeon, sparse attention is faster at topk 0.5
from 8 heads of 8192 tokens on, 2^29 scores (4096 tokens: 0.68x to 0.88x)."""


class Units(Enum):
    """Ways in which a CPU multiplies numbers of a dtype (see the module docstring). float32 is `NATIVE`."""

    NATIVE = "native"
    MATRIX = "matrix"
    VECTOR = "vector"
    NONE = "none"


CROSSOVERS: dict[tuple[str, Units], Crossover] = {
    # Neoverse-N1, 2 threads: at topk 0.5, causal gains a third at 4096.
    ("arm", Units.NATIVE): Crossover(keys=2048, causal_keys=4096, queries=128, scores=2**23),
    # Xeon, 2 threads: at topk 0.5, causal loses a tenth at 4096 and gains a tenth at 8192.
    ("x86", Units.NATIVE): Crossover(keys=2048, causal_keys=8192, queries=128, scores=2**23),
    # Emulated arithmetic is not faster than float32, so float32's crossover applies.
    ("arm", Units.NONE): Crossover(keys=2048, causal_keys=4096, queries=128, scores=2**23),
    ("x86", Units.NONE): Crossover(keys=2048, causal_keys=8192, queries=128, scores=2**23),
    # Xeon with AMX, 16 threads: 0.50x to 0.72x of SDPA at topk 0.5 and 8192 tokens, 0.74x to 0.94x at 16384 tokens
    # (topk 0.25: 1.13x to 1.39x).
    ("x86", Units.MATRIX): NEVER,
}
"""Crossover by architecture and units (docs/lab/cpu.md, "Crossover"); `NEVER` for missing entries."""


def crossover(device_type: str, dtype: torch.dtype) -> Crossover:
    """Return the crossover for a dtype. Devices other than CPUs were not measured and use that of Arm in float32."""
    if device_type != "cpu":
        return CROSSOVERS["arm", Units.NATIVE]
    few, threads = CROSSOVERS.get((architecture(), units(dtype)), NEVER), torch.get_num_threads()
    if threads <= FEW_THREADS:
        return few
    keys, causal_keys = max(few.keys, KEYS_OF_MANY), max(few.causal_keys, KEYS_OF_MANY)
    return Crossover(keys, causal_keys, few.queries, max(few.scores, threads * SCORES_PER_THREAD))


def dtype_of_products(query: Tensor, value: Tensor, *, exact_lse: bool) -> torch.dtype:
    """Return the dtype in which gathered blocks are multiplied: their own dtype on matrix units, otherwise float32.

    torch's 16-bit kernel has less precise exponentials. They suffice for a 16-bit output, but cause errors of up to
    5e-5 in the LSE, so float32 is used for an exact LSE.
    """
    keeps_dtype = has_cpu_kernel(query, value) and units(query.dtype) is Units.MATRIX and not exact_lse
    return query.dtype if keeps_dtype else torch.float32


def dtype_of_dense(query: Tensor, *, exact_lse: bool) -> torch.dtype:
    """Return the dtype in which dense calls run: the query's dtype on CPUs that multiply it fast, otherwise float32.

    An exact LSE needs float32.
    """
    keeps_dtype = query.device.type == "cpu" and units(query.dtype) is not Units.NONE and not exact_lse
    return query.dtype if keeps_dtype else torch.float32


def has_cpu_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's CPU flash attention supports the tensors. It requires equal widths of K and V."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


@functools.cache
def units(dtype: torch.dtype) -> Units:
    """Return how this machine's CPU multiplies numbers of a dtype."""
    if dtype == torch.float32:
        return Units.NATIVE
    if architecture() == "arm":  # torch's attention does not use the float16 vectors of a Neoverse-N1
        return Units.VECTOR if dtype == torch.bfloat16 and _onednn_has("bf16") else Units.NONE
    if dtype == torch.bfloat16:
        matrix, vector = _cpu_has("amx_tile"), _cpu_has("avx512_bf16")
    else:
        matrix, vector = _cpu_has("amx_fp16"), _onednn_has("fp16")
    if matrix and torch.backends.mkldnn.is_available():
        return Units.MATRIX
    return Units.VECTOR if vector else Units.NONE


@functools.cache
def architecture() -> str:
    """Return "x86", "arm", or the name that Python reports for another machine."""
    name = platform.machine().lower()
    if name in ("x86_64", "amd64", "i386", "i686"):
        return "x86"
    return "arm" if name in ("aarch64", "arm64") else name


def _cpu_has(feature: str) -> bool:
    """Return whether torch detects an x86 feature. Old releases cannot detect all of them; the result is then False."""
    return bool(getattr(torch.cpu, f"_is_{feature}_supported", bool)())


def _onednn_has(name: str) -> bool:
    """Return whether oneDNN multiplies numbers of a dtype, "bf16" or "fp16", without emulation."""
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except AttributeError:  # a torch without oneDNN
        return False
