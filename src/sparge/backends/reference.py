"""The specification (`sparge.reference`) as a slow and exact backend, for tests and experiments."""

from __future__ import annotations

import torch
from torch import Tensor

from sparge import reference
from sparge.backends.base import ALWAYS, Backend, Crossover, add_to_totals
from sparge.call import Call
from sparge.masks.block_mask import BlockMask


class ReferenceBackend(Backend):
    """Computes in float64. "auto" never selects this backend."""

    name = "reference"
    summary = "the specification, in float64"
    quantizations = ("none", "int8_fp8", "int8_fp8_fast", "int8_fp16")

    def unavailable_reason(self, device: torch.device) -> str | None:
        return "expected a device with float64, got 'mps'" if device.type == "mps" else None

    def why_not_auto(self, device: torch.device) -> str | None:  # noqa: ARG002
        return "it is slow"

    def crossover(self, device_type: str, dtype: torch.dtype) -> Crossover:  # noqa: ARG002
        return ALWAYS

    def predict(self, query: Tensor, key: Tensor, call: Call) -> BlockMask:
        return reference.predict(query, key, call)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, call: Call, *, totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        result = reference.attention(query, key, value, mask, call)
        add_to_totals(totals, mask, result.pv_skipped)
        return result.output.to(query.dtype), result.lse.float()


BACKEND = ReferenceBackend()
