"""The Hopper backend: a warp-specialized Gluon attention kernel with TMA copies, for compute capability 9.0.

docs/hopper.md describes the kernel.
"""

from __future__ import annotations

import torch

from sparge.backends import base
from sparge.backends.gpu.backend import GpuBackend
from sparge.backends.gpu.operands import AttentionLauncher
from sparge.backends.gpu.requirements import gluon_unavailable_reason
from sparge.call import Call

CAPABILITY = (9, 0)


class HopperBackend(GpuBackend):
    """Supports every quantization. Calls with a mask and unquantized float32 calls run on the Triton backend."""

    name = "hopper"
    summary = "a warp-specialized kernel for compute capability 9.0"
    quantizations = ("none", "int8_fp8", "int8_fp8_fast", "int8_fp16")

    @property
    def launcher(self) -> AttentionLauncher:
        from sparge.backends.hopper.launcher import attend

        return attend

    def unavailable_reason(self, device: torch.device) -> str | None:
        reason = super().unavailable_reason(device)
        if reason is not None:
            return reason
        if device.type != "cuda":
            return f"expected a CUDA device, got {device.type!r}"
        capability = torch.cuda.get_device_capability(device)
        if capability != CAPABILITY:
            return f"expected compute capability 9.0, got {capability[0]}.{capability[1]}"
        return gluon_unavailable_reason()

    def quantization_unavailable_reason(self, quantization: str, device: torch.device, *, has_mask: bool) -> str | None:
        if quantization == "int8_fp8_fast" and has_mask:
            return "expected no attn_mask ('int8_fp8' takes one)"
        return super().quantization_unavailable_reason(quantization, device, has_mask=has_mask)

    def fastest_quantization(self, device: torch.device, *, has_mask: bool) -> str:  # noqa: ARG002
        return "int8_fp8" if has_mask else "int8_fp8_fast"

    def serving(self, call: Call, dtype: torch.dtype) -> base.Backend:
        is_plain_float32 = not call.is_quantized and dtype == torch.float32
        return self.portable() if call.attn_mask is not None or is_plain_float32 else self

    def portable(self) -> base.Backend:
        return base.get("triton")


BACKEND = HopperBackend()
