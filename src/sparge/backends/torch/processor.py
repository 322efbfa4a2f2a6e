"""What this machine's CPU multiplies fast, and from which sizes on sparse attention pays on it.

Products of 16-bit numbers are one of three things to torch's CPU attention:

    MATRIX    the processor multiplies tiles of them (AMX), several times as fast as float32: they stay as they are
    VECTOR    it has instructions for them; what they are worth to sparse attention was not measured
    NONE      they are emulated, up to a hundred times slower than float32 (docs/lab/cpu.md): blocks are widened as they
              are gathered

Nothing here is timed at run time: the same call gives the same numbers in every process on a machine.
"""

from __future__ import annotations

import functools
import platform
from enum import Enum

import torch
from torch import Tensor

from sparge.backends.base import NEVER, Crossover

FEW_THREADS = 2
"""That `CROSSOVERS` were measured with. More do not hurry a call's small operators, but all of SDPA."""
KEYS_OF_MANY, SCORES_PER_THREAD = 8192, 2**25
"""What pays with 16 threads of a Xeon at topk .5: 8 heads of 8192 tokens, 2^29 scores (4096: .68x to .88x)."""


class Units(Enum):
    """How a processor multiplies numbers of a dtype, as the module says; float32 has `NATIVE` ones."""

    NATIVE = "native"
    MATRIX = "matrix"
    VECTOR = "vector"
    NONE = "none"


CROSSOVERS: dict[tuple[str, Units], Crossover] = {
    # Neoverse-N1, 2 threads: at topk .5, causal gains a third at 4096.
    ("arm", Units.NATIVE): Crossover(keys=2048, causal_keys=4096, queries=128, scores=2**23),
    # Xeon, 2 threads: at topk .5, causal loses a tenth at 4096 and gains a tenth at 8192.
    ("x86", Units.NATIVE): Crossover(keys=2048, causal_keys=8192, queries=128, scores=2**23),
    # What is emulated is not faster than float32: what pays there pays here.
    ("arm", Units.NONE): Crossover(keys=2048, causal_keys=4096, queries=128, scores=2**23),
    ("x86", Units.NONE): Crossover(keys=2048, causal_keys=8192, queries=128, scores=2**23),
    # Xeon with AMX, 16 threads: at topk .5 .50x to .72x of SDPA at 8192, .74x to .94x at 16384 (.25: 1.13x to 1.39x).
    ("x86", Units.MATRIX): NEVER,
}
"""By architecture and units, each with its measured reason (docs/lab/cpu.md, "Crossover"); `NEVER` for all others."""


def crossover(device_type: str, dtype: torch.dtype) -> Crossover:
    """The sizes from which on a call pays on a device; other devices than CPUs, which nobody measured, are as Arm's."""
    if device_type != "cpu":
        return CROSSOVERS["arm", Units.NATIVE]
    return _crossover(dtype, torch.get_num_threads())


def dtype_of_products(query: Tensor, value: Tensor, *, exact_lse: bool) -> torch.dtype:
    """What gathered blocks are multiplied in: their own dtype on matrix units, float32 elsewhere.

    Torch's kernel for 16 bits has exponentials to match: good for such an output, but its LSE is off by up to 5e-5.
    """
    own = has_cpu_kernel(query, value) and units(query.dtype) is Units.MATRIX and not exact_lse
    return query.dtype if own else torch.float32


def dtype_of_dense(query: Tensor, *, exact_lse: bool) -> torch.dtype:
    """What torch's kernel is handed when nothing is skipped: as SDPA does it, but float32 for what it emulates."""
    own = query.device.type == "cpu" and units(query.dtype) is not Units.NONE and not exact_lse
    return query.dtype if own else torch.float32


def has_cpu_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch's CPU flash attention takes these: it wants one width for keys and values."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


@functools.cache
def units(dtype: torch.dtype) -> Units:
    """How this machine's CPU multiplies numbers of a dtype."""
    if dtype == torch.float32:
        return Units.NATIVE
    if architecture() == "arm":  # a Neoverse-N1 has float16 vectors, which torch's attention does not use
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
    """ "x86", "arm", or what else Python calls this machine."""
    name = platform.machine().lower()
    if name in ("x86_64", "amd64", "i386", "i686"):
        return "x86"
    return "arm" if name in ("aarch64", "arm64") else name


@functools.lru_cache(maxsize=64)
def _crossover(dtype: torch.dtype, threads: int) -> Crossover:
    found = CROSSOVERS.get((architecture(), units(dtype)), NEVER)
    if threads <= FEW_THREADS:
        return found
    keys, causal_keys = max(found.keys, KEYS_OF_MANY), max(found.causal_keys, KEYS_OF_MANY)
    return Crossover(keys, causal_keys, found.queries, max(found.scores, threads * SCORES_PER_THREAD))


def _cpu_has(feature: str) -> bool:
    """Whether torch finds an x86 feature; releases that cannot tell find none."""
    return bool(getattr(torch.cpu, f"_is_{feature}_supported", bool)())


def _onednn_has(name: str) -> bool:
    """Whether oneDNN multiplies numbers of a name without emulating them."""
    try:
        return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())
    except AttributeError:  # a torch without oneDNN
        return False
