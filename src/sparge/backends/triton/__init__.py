"""CUDA GPUs from compute capability 8.0: the portable attention kernel, in Triton."""

from __future__ import annotations

import torch

from sparge.backends.gpu.backend import GpuBackend
from sparge.backends.gpu.operands import AttentionLauncher
from sparge.backends.gpu.requirements import FP8_CAPABILITY, capability_unavailable_reason


class TritonBackend(GpuBackend):
    """Supports every quantization except "int8_fp8_fast"; "int8_fp8" needs FP8 tensor cores."""

    name = "triton"
    summary = "block-sparse kernels in Triton"
    quantizations = ("none", "int8_fp8", "int8_fp16")

    @property
    def launcher(self) -> AttentionLauncher:
        from sparge.backends.triton.attention import attend

        return attend

    def quantization_unavailable_reason(self, quantization: str, device: torch.device, *, has_mask: bool) -> str | None:
        reason = super().quantization_unavailable_reason(quantization, device, has_mask=has_mask)
        if reason is None and quantization == "int8_fp8" and device.type == "cuda":
            reason = capability_unavailable_reason(device, FP8_CAPABILITY)
            return None if reason is None else f"{reason} ('int8_fp16' works there)"
        return reason

    def fastest_quantization(self, device: torch.device, *, has_mask: bool) -> str:
        reason = self.quantization_unavailable_reason("int8_fp8", device, has_mask=has_mask)
        return "int8_fp8" if reason is None else "int8_fp16"


BACKEND = TritonBackend()
