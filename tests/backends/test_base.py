"""Selection of the backend and the quantization for a device, and the error messages."""

from __future__ import annotations

import os
import sys

import pytest
import torch

import sparge
from sparge.backends import base
from sparge.backends.gpu.requirements import triton_unavailable_reason
from sparge.call import Call
from sparge.masks.geometry import Shape
from sparge.options.common import BACKENDS

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the GPU is an H200."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)


@pytest.fixture(autouse=True)
def empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the cache of selected backends, because each test simulates another GPU."""
    monkeypatch.setattr(base, "_BEST_ON_GPUS", {})


needs_triton = pytest.mark.usefixtures("gpu", "triton_installed")


@pytest.fixture
def triton_installed() -> None:
    pytest.importorskip("triton")


@pytest.mark.usefixtures("triton_installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs kernels on a CPU")
def test_triton_rejects_a_cpu() -> None:
    query = torch.randn(1, 1, 64, 16)
    message = "^backend 'triton': expected a CUDA device \\(or TRITON_INTERPRET=1\\), got 'cpu'$"
    with pytest.raises(NotImplementedError, match=message):
        sparge.attention(query, query, query, backend="triton")
    with pytest.raises(NotImplementedError, match=message):
        sparge.predict(query, query, backend="triton")


class TestResolve:
    def test_cpu_uses_torch(self) -> None:
        assert base.resolve("auto", CPU) == "torch"

    @needs_triton
    @pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
    def test_gpu_without_a_hopper_kernel_uses_triton(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        reason = f"expected compute capability 9.0, got {capability[0]}.{capability[1]}"
        assert base.resolve("auto", CUDA) == "triton"
        assert base.explain(CUDA) == f"block-sparse kernels in Triton; not 'hopper': {reason}"
        assert base.resolve("triton", CUDA) == "triton"
        with pytest.raises(NotImplementedError) as raised:
            base.resolve("hopper", CUDA)
        assert str(raised.value) == f"backend 'hopper': {reason}"

    @needs_triton
    def test_hopper_gpu_uses_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert base.resolve("auto", CUDA) == "hopper"
        assert base.resolve("hopper", CUDA) == "hopper"

    @needs_triton
    def test_triton_too_old_for_hopper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import triton

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(triton, "__version__", "3.5.1")
        reason = "expected Triton 3.6 or newer, got 3.5.1"
        assert base.resolve("auto", CUDA) == "triton"
        assert base.explain(CUDA) == f"block-sparse kernels in Triton; not 'hopper': {reason}"
        with pytest.raises(NotImplementedError, match=r"backend 'hopper': expected Triton 3\.6 or newer"):
            base.resolve("hopper", CUDA)

    @needs_triton
    def test_gluon_without_the_required_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.delitem(sys.modules, "sparge.backends.gpu.gluon", raising=False)
        monkeypatch.delattr(sys.modules.get("sparge.backends.gpu", base), "gluon", raising=False)
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
        reason = base.get("hopper").unavailable_reason(CUDA)
        assert reason is not None
        assert reason.startswith("expected Gluon for Hopper in Triton ")
        assert base.resolve("auto", CUDA) == "triton"

    def assert_unavailable(self, device: torch.device, reason: str) -> None:
        """Check that 'triton' raises and that 'auto' selects torch, both with the reason."""
        assert base.resolve("auto", device) == "torch"
        assert base.explain(device) == f"{base.get('torch').summary}; not 'triton': {reason}"
        with pytest.raises(NotImplementedError) as raised:
            base.resolve("triton", device)
        assert str(raised.value) == f"backend 'triton': {reason}"

    @needs_triton
    def test_gpu_without_required_capability(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        self.assert_unavailable(CUDA, "expected compute capability 8.0 or newer, got 7.5")

    @needs_triton
    def test_rocm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.2")
        self.assert_unavailable(CUDA, "expected an NVIDIA GPU, got ROCm (untested)")

    @needs_triton
    def test_triton_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import triton

        monkeypatch.delattr(triton, "knobs")
        self.assert_unavailable(CUDA, f"expected Triton 3.4 or newer, got {triton.__version__}")

    @pytest.mark.usefixtures("gpu")
    def test_triton_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "triton", None)
        reason = triton_unavailable_reason(CUDA)
        assert reason is not None
        assert reason.startswith("expected Triton to be installed, got ModuleNotFoundError(")
        self.assert_unavailable(CUDA, reason)
        with pytest.raises(NotImplementedError, match="expected Triton to be installed"):
            base.resolve("triton", CPU)

    @needs_triton
    def test_unsupported_device(self) -> None:
        with pytest.raises(NotImplementedError, match=r"^backend 'triton': expected a CUDA device, got 'xpu'$"):
            base.resolve("triton", torch.device("xpu"))
        assert base.resolve("auto", torch.device("xpu")) == "torch"
        assert base.explain(torch.device("xpu")).endswith("not 'triton': expected a CUDA device, got 'xpu'")

    def test_unknown_backend_name(self) -> None:
        with pytest.raises(ValueError, match=r"^backend: expected one of 'auto', 'hopper', .*, got 'cuda'$"):
            base.resolve("cuda", CPU)

    @pytest.mark.parametrize("name", BACKENDS)
    def test_every_backend_has_a_summary(self, name: str) -> None:
        pytest.importorskip("triton")
        backend = base.get(name)
        assert backend.name == name
        assert backend.summary
        assert "none" in backend.quantizations


class TestQuantization:
    @pytest.mark.parametrize(
        ("dtype", "quantization", "has_mask", "backend"),
        [
            (torch.bfloat16, "none", False, "hopper"),
            (torch.float32, "int8_fp8_fast", False, "hopper"),
            (torch.float32, "none", False, "triton"),
            (torch.bfloat16, "int8_fp8", True, "triton"),
        ],
    )
    def test_triton_serves_calls_without_a_hopper_kernel(
        self, dtype: torch.dtype, quantization: str, has_mask: bool, backend: str
    ) -> None:
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if has_mask else None
        call = Call(Shape(1, 1, 1, 1, 1, 8, 8), False, 1.0, quantization=quantization, attn_mask=mask)
        assert base.get("hopper").serving(call, dtype).name == backend
        assert base.get("torch").serving(call, dtype).name == "torch"

    def test_hopper_selects_int8_fp8_fast_unless_there_is_a_mask(self) -> None:
        assert base.resolve_quantization("auto", "hopper", CUDA) == "int8_fp8_fast"
        assert base.resolve_quantization("auto", "hopper", CUDA, has_mask=True) == "int8_fp8"
        assert base.resolve_quantization("int8_fp8", "hopper", CUDA) == "int8_fp8"
        with pytest.raises(NotImplementedError, match=r"expected no attn_mask \('int8_fp8' takes one\)"):
            base.resolve_quantization("int8_fp8_fast", "hopper", CUDA, has_mask=True)

    def test_backends_that_support_int8_fp8_fast(self) -> None:
        assert base.resolve_quantization("int8_fp8_fast", "reference", CPU, has_mask=True) == "int8_fp8_fast"
        for backend in ("triton", "torch"):
            with pytest.raises(NotImplementedError, match="expected backend 'hopper' or 'reference', got"):
                base.resolve_quantization("int8_fp8_fast", backend, CPU)

    @pytest.mark.parametrize("requested", ["auto", "none", "int8_fp8", "int8_fp16"])
    @pytest.mark.parametrize("backend", ["torch", "reference"])
    def test_cpu_backends_quantize_only_on_request(self, backend: str, requested: str) -> None:
        expected = "none" if requested == "auto" else requested
        assert base.resolve_quantization(requested, backend, CPU) == expected

    @pytest.mark.parametrize(
        "capability, fastest",
        [
            ((8, 0), "int8_fp16"),
            ((8, 6), "int8_fp16"),
            ((8, 9), "int8_fp8"),
            ((9, 0), "int8_fp8"),
            ((10, 0), "int8_fp8"),
        ],
    )
    def test_triton_selects_the_fastest_quantization(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fastest: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        assert base.resolve_quantization("auto", "triton", CUDA) == fastest
        assert base.resolve_quantization("none", "triton", CUDA) == "none"
        assert base.resolve_quantization("int8_fp16", "triton", CUDA) == "int8_fp16"
        if fastest == "int8_fp8":
            assert base.resolve_quantization("int8_fp8", "triton", CUDA) == "int8_fp8"
            return
        with pytest.raises(NotImplementedError) as raised:
            base.resolve_quantization("int8_fp8", "triton", CUDA)
        got = ".".join(map(str, capability))
        expected = f"expected compute capability 8.9 or newer, got {got} ('int8_fp16' works there)"
        assert str(raised.value) == f"quantization 'int8_fp8': {expected}"

    def test_interpreter_supports_every_quantization(self) -> None:
        assert base.resolve_quantization("auto", "triton", CPU) == "int8_fp8"
        assert base.resolve_quantization("int8_fp8", "triton", CPU) == "int8_fp8"
