"""What the GPU backends share as backends: the pipeline of stages, and what the device and Triton must offer.

A backend adds its attention kernel (`CudaBackend.launcher`). Nothing of Triton is imported before a stage runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparge.backends.base import Backend, Candidates, Crossover, RecordedAttention
from sparge.backends.cuda.config_table import active_overrides
from sparge.backends.cuda.operands import AttentionLauncher
from sparge.block_mask import BlockMask
from sparge.call import Call
from sparge.config import Selection
from sparge.ordering import TokenOrder
from sparge.sharing import RankPool

CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
"""The first compute capability whose tensor cores multiply FP8 numbers."""
OLDEST_TRITON = (3, 4)
OLDEST_TRITON_WITH_GLUON = (3, 6)
"""The first Triton whose Gluon has all that the kernels for compute capability 9.0 need."""
CROSSOVER = Crossover(keys=4096, causal_keys=4096, queries=2048, scores=500_000_000)
"""Measured: docs/lab/triton.md, "Crossover on a GPU". 24 heads of 4608 tokens (images of 1024 x 1024) are above it."""
CROSSOVER_UNDER_MASK = Crossover(keys=0, causal_keys=0, queries=0, scores=2**30)
"""Of masks with an entry per query: docs/lab/models.md, "Masks in models"."""


class CudaBackend(Backend):
    """Stages in Triton, then the kernel of a tier."""

    packs = True

    @property
    @abstractmethod
    def launcher(self) -> AttentionLauncher:
        """What launches the tier's attention kernel; it is imported here, because it needs Triton."""

    def missing(self, device: torch.device) -> str | None:
        return triton_missing(device)

    def passed_over(self, device: torch.device) -> str | None:
        if device.type != "cuda":  # an interpreter may serve a CPU, and is asked for by name
            return f"expected a CUDA device, got {device.type!r}"
        return self.missing(device)

    def crossover(self, device_type: str, dtype: torch.dtype) -> Crossover:  # noqa: ARG002
        return CROSSOVER

    def crossover_under_mask(self, device_type: str) -> Crossover:  # noqa: ARG002
        return CROSSOVER_UNDER_MASK

    def predict(self, query: Tensor, key: Tensor, call: Call) -> BlockMask:
        from sparge.backends.cuda import pipeline

        return pipeline.predict(query, key, call)

    def summarize_keys(self, key: Tensor, call: Call) -> tuple[Tensor, ...]:
        from sparge.backends.cuda import rank_pipeline

        return rank_pipeline.summarize_keys(key, call)

    def candidates(self, query: Tensor, keys: tuple[Tensor, ...], call: Call) -> Candidates:
        from sparge.backends.cuda import rank_pipeline

        return rank_pipeline.CudaCandidates(query, keys, call)

    def candidates_of(self, query: Tensor, key: Tensor, call: Call) -> Candidates:
        from sparge.backends.cuda import rank_pipeline

        return rank_pipeline.CudaCandidates(query, key, call)

    def choose_together(
        self, candidates: Sequence[Candidates], rule: Selection, kv_blocks: int, pool: RankPool
    ) -> list[BlockMask]:
        from sparge.backends.cuda import rank_pipeline

        return rank_pipeline.choose_together(candidates, rule, kv_blocks, pool)

    def attend_part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        masks: Sequence[BlockMask] | None,
        columns: tuple[slice, ...],
        call: Call,
        output: Tensor,
        lse: Tensor,
        *,
        is_first: bool,
        totals: Tensor | None = None,
    ) -> None:
        from sparge.backends.cuda import rank_pipeline

        rank_pipeline.attend_part(
            query,
            key,
            value,
            masks,
            columns,
            call,
            output,
            lse,
            is_first=is_first,
            launcher=self.launcher,
            totals=totals,
        )

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from sparge.backends.cuda import pipeline

        return pipeline.attend(query, key, value, mask, call, launcher=self.launcher, totals=totals)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from sparge.backends.cuda import pipeline

        return pipeline.attention(query, key, value, call, launcher=self.launcher, totals=totals)

    def attention_in_order(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, order: TokenOrder, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if any(tensor.stride(3) != 1 for tensor in (query, key, value)):
            return super().attention_in_order(query, key, value, call, order, totals=totals)
        from sparge.backends.cuda import pipeline

        return pipeline.attention(query, key, value, call, launcher=self.launcher, totals=totals, order=order)

    def is_overridden(self) -> bool:
        return bool(active_overrides())

    def recorded_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        totals: Tensor | None,
        blocks: BlockMask | None = None,
        order: TokenOrder | None = None,
    ) -> RecordedAttention | None:
        from sparge.backends.cuda import pipeline

        options: dict[str, Any] = {"launcher": self.launcher, "totals": totals, "blocks": blocks, "order": order}
        return pipeline.recorded_attention(query, key, value, call, **options)

    def dense(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, with_lse: bool, may_use_torch: bool
    ) -> tuple[Tensor, Tensor]:
        from sparge.backends.cuda import dense, pipeline

        if may_use_torch:
            return dense.attention(query, key, value, call, launcher=self.launcher, with_lse=with_lse)
        return pipeline.attend(query, key, value, None, call, launcher=self.launcher)

    def dense_is_sdpa(self, query: Tensor, call: Call) -> bool:
        from sparge.backends.cuda import dense

        return dense.torch_serves(query, call)

    def move(self, tokens: Tensor, permutation: Tensor, start: int, moved: Tensor) -> None:
        if tokens.stride(3) != 1:
            super().move(tokens, permutation, start, moved)
            return
        from sparge.backends.cuda.stages import order

        order.move(tokens, permutation, start, moved)

    def move_all(
        self, tensors: Sequence[Tensor], permutation: Tensor, start: int, *, tokens_first: bool | None = None
    ) -> tuple[Tensor, ...]:
        if any(tokens.stride(3) != 1 for tokens in tensors):
            return super().move_all(tensors, permutation, start, tokens_first=tokens_first)
        from sparge.backends.cuda.stages import order

        return order.move_all(tensors, permutation, start, tokens_first)


def triton_missing(device: torch.device) -> str | None:
    """What keeps Triton's kernels from running on a device."""
    try:
        import triton
    except ImportError as error:
        return f"expected Triton to be installed, got {error!r}"
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpretedFunction

        from sparge.backends.cuda.primitives import is_finite

        is_interpreted = isinstance(is_finite, InterpretedFunction)
        return None if is_interpreted else "expected a CUDA device (or TRITON_INTERPRET=1), got 'cpu'"
    if device.type != "cuda":
        return f"expected a CUDA device, got {device.type!r}"
    if torch.version.hip is not None:
        return "expected an NVIDIA GPU, got ROCm (untested)"
    if not hasattr(triton, "knobs"):
        return f"expected Triton {_dotted(OLDEST_TRITON)} or newer, got {triton.__version__}"
    return capability_missing(device, CAPABILITY)


def gluon_missing() -> str | None:
    """What keeps Gluon kernels from being compiled."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if version < OLDEST_TRITON_WITH_GLUON:
        return f"expected Triton {_dotted(OLDEST_TRITON_WITH_GLUON)} or newer, got {triton.__version__}"
    try:
        from sparge.backends.cuda import gluon  # noqa: F401
    except (ImportError, AttributeError) as error:
        return f"expected Gluon for Hopper in Triton {triton.__version__}, got {error!r}"
    return None


def capability_missing(device: torch.device, least: tuple[int, int]) -> str | None:
    """Whether a CUDA device is older than a compute capability."""
    found = torch.cuda.get_device_capability(device)
    return None if found >= least else f"expected compute capability {_dotted(least)} or newer, got {_dotted(found)}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
