"""The torch backend, for any device: gather the kept blocks and call torch's own attention on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparge.backends.base import Backend, Crossover
from sparge.backends.torch import blocks, dense, predict, processor
from sparge.backends.torch.predict import TorchCandidates
from sparge.call import Call
from sparge.masks.block_mask import BlockMask
from sparge.numerics.budget_allocation import RankPool


class TorchBackend(Backend):
    """Supports every device, and is optimized for CPUs."""

    name = "torch"
    summary = "gathers kept blocks for torch's own attention, on any device"
    quantizations = ("none", "int8_fp8", "int8_fp16")

    def unavailable_reason(self, device: torch.device) -> str | None:  # noqa: ARG002
        return None

    def crossover(self, device_type: str, dtype: torch.dtype) -> Crossover:
        return processor.crossover(device_type, dtype)

    def predict(self, query: Tensor, key: Tensor, call: Call) -> BlockMask:
        return predict.predict(query, key, call)

    def summarize_keys(self, key: Tensor, call: Call) -> tuple[Tensor, ...]:
        return predict.summarize_keys(key, call)

    def candidates(self, query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call) -> TorchCandidates:
        return TorchCandidates.of(query, keys, call)

    def choose_together(self, candidates: Sequence[TorchCandidates], kv_blocks: int, pool: RankPool) -> list[BlockMask]:
        return predict.choose_together(candidates, kv_blocks, pool)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return blocks.attention(query, key, value, mask, call, totals=totals)

    def dense(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, with_lse: bool, may_use_torch: bool
    ) -> tuple[Tensor, Tensor]:
        if call.is_quantized:
            return super().dense(query, key, value, call, with_lse=with_lse, may_use_torch=may_use_torch)
        return dense.attention(query, key, value, replace(call, exact_lse=with_lse))

    def dense_is_sdpa(self, query: Tensor, call: Call) -> bool:
        return dense.torch_serves(query, call) and call.shape.group == 1


BACKEND = TorchBackend()
