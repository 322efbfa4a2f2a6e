"""Base class of the GPU backends: the pipeline of stages, and the requirements on device and Triton.

A subclass adds its attention kernel (`GpuBackend.launcher`). Triton is not imported before a stage runs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparge.backends.base import Backend, Crossover, KeptColumns, PartialResult, RecordedAttention
from sparge.backends.gpu.config_table import active_overrides
from sparge.backends.gpu.operands import AttentionLauncher
from sparge.backends.gpu.requirements import triton_unavailable_reason
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.masks.ordering import TokenOrder
from sparge.numerics.budget_allocation import RankPool

if TYPE_CHECKING:
    from sparge.backends.gpu.rank_pipeline import GpuCandidates

CROSSOVER = Crossover(keys=4096, causal_keys=4096, queries=2048, scores=500_000_000)
"""Measured: docs/lab/triton.md, "Crossover on a GPU". 24 heads of 4608 tokens (images of 1024 x 1024) are above it."""
CROSSOVER_UNDER_MASK = Crossover(keys=0, causal_keys=0, queries=0, scores=2**30)
"""For full (S_q x S_k) masks: docs/lab/models.md, "Masks in models"."""


class GpuBackend(Backend):
    """Stages in Triton, followed by the backend's own attention kernel."""

    packs = True

    @property
    @abstractmethod
    def launcher(self) -> AttentionLauncher:
        """Return the function that launches the attention kernel. It is imported on access, because it needs Triton."""

    def unavailable_reason(self, device: torch.device) -> str | None:
        return triton_unavailable_reason(device)

    def why_not_auto(self, device: torch.device) -> str | None:
        if device.type != "cuda":  # Triton's interpreter runs on CPUs, but only if the caller names the backend
            return f"expected a CUDA device, got {device.type!r}"
        return self.unavailable_reason(device)

    def crossover(self, device_type: str, dtype: torch.dtype) -> Crossover:  # noqa: ARG002
        return CROSSOVER

    def crossover_under_mask(self, device_type: str) -> Crossover:  # noqa: ARG002
        return CROSSOVER_UNDER_MASK

    def predict(self, query: Tensor, key: Tensor, call: Call) -> BlockMask:
        from sparge.backends.gpu import pipeline

        return pipeline.predict(query, key, call)

    def summarize_keys(self, key: Tensor, call: Call) -> tuple[Tensor, ...]:
        from sparge.backends.gpu import rank_pipeline

        return rank_pipeline.summarize_keys(key, call)

    def candidates(self, query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call) -> GpuCandidates:
        from sparge.backends.gpu import rank_pipeline

        return rank_pipeline.GpuCandidates(query, keys, call)

    def choose_together(self, candidates: Sequence[GpuCandidates], kv_blocks: int, pool: RankPool) -> list[BlockMask]:
        from sparge.backends.gpu import rank_pipeline

        return rank_pipeline.choose_together(candidates, kv_blocks, pool)

    def attend_part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kept: KeptColumns | None,
        call: Call,
        into: PartialResult,
        *,
        totals: Tensor | None = None,
    ) -> None:
        from sparge.backends.gpu import rank_pipeline

        rank_pipeline.attend_part(query, key, value, kept, call, into, launcher=self.launcher, totals=totals)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from sparge.backends.gpu import pipeline

        return pipeline.attend(query, key, value, mask, call, launcher=self.launcher, totals=totals)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from sparge.backends.gpu import pipeline

        return pipeline.attention(query, key, value, call, launcher=self.launcher, totals=totals)

    def attention_in_order(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, order: TokenOrder, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if any(tensor.stride(3) != 1 for tensor in (query, key, value)):
            return super().attention_in_order(query, key, value, call, order, totals=totals)
        from sparge.backends.gpu import pipeline

        return pipeline.attention(query, key, value, call, launcher=self.launcher, totals=totals, order=order)

    def is_overridden(self) -> bool:
        return bool(active_overrides())

    def recorded_attention(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, **options: Any
    ) -> RecordedAttention | None:
        from sparge.backends.gpu import pipeline

        return pipeline.recorded_attention(query, key, value, call, launcher=self.launcher, **options)

    def dense(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, with_lse: bool, may_use_torch: bool
    ) -> tuple[Tensor, Tensor]:
        from sparge.backends.gpu import pipeline

        options = {"with_lse": with_lse, "may_use_torch": may_use_torch}
        return pipeline.dense(query, key, value, call, launcher=self.launcher, **options)

    def dense_is_sdpa(self, query: Tensor, call: Call) -> bool:
        from sparge.backends.gpu import pipeline

        return pipeline.torch_serves(query, call)

    def move_all(
        self, tensors: Sequence[Tensor], permutation: Tensor, start: int, *, tokens_first: bool | None = None
    ) -> tuple[Tensor, ...]:
        if any(tokens.stride(3) != 1 for tokens in tensors):
            return super().move_all(tensors, permutation, start, tokens_first=tokens_first)
        from sparge.backends.gpu.stages import order

        return order.move_all(tensors, permutation, start, tokens_first)
