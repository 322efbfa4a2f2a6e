"""Which backend and which arithmetic a device gets, and what the refusals say."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from sparge import dispatch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200, as far as dispatch asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)


needs_triton = pytest.mark.usefixtures("gpu", "triton_installed")


@pytest.fixture
def triton_installed() -> None:
    pytest.importorskip("triton")


def test_triton_refuses_a_cpu() -> None:
    """In a process of its own: whether kernels are interpreted is decided when Triton is imported."""
    pytest.importorskip("triton")
    program = """
import torch, sparge
q = torch.randn(1, 1, 64, 16)
for call in (lambda: sparge.attention(q, q, q, backend="triton"), lambda: sparge.predict(q, q, backend="triton")):
    try:
        call()
    except NotImplementedError as error:
        print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    message = "backend 'triton': expected a CUDA device (or TRITON_INTERPRET=1), got 'cpu'"
    assert done.stdout.splitlines() == [message, message]


class TestChooseBackend:
    def test_a_cpu_gets_torch(self) -> None:
        assert dispatch.choose_backend("auto", CPU).backend == "torch"

    @needs_triton
    @pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)])
    def test_a_gpu_gets_triton(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        missing = f"expected compute capability 9.0, got {capability[0]}.{capability[1]}"
        choice = dispatch.choose_backend("auto", CUDA)
        assert choice == dispatch.Choice("triton", f"block-sparse kernels; not 'hopper': {missing}")
        assert dispatch.choose_backend("triton", CUDA) == dispatch.Choice("triton", "asked for by name")
        with pytest.raises(NotImplementedError) as raised:
            dispatch.choose_backend("hopper", CUDA)
        assert str(raised.value) == f"backend 'hopper': {missing}"

    @needs_triton
    def test_a_hopper_gpu_gets_its_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert dispatch.choose_backend("auto", CUDA).backend == "hopper"
        assert dispatch.choose_backend("hopper", CUDA) == dispatch.Choice("hopper", "asked for by name")

    @needs_triton
    def test_a_triton_without_what_the_kernel_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import triton

        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(triton, "__version__", "3.5.1")
        missing = "expected Triton 3.6 or newer, got 3.5.1"
        choice = dispatch.choose_backend("auto", CUDA)
        assert choice == dispatch.Choice("triton", f"block-sparse kernels; not 'hopper': {missing}")
        with pytest.raises(NotImplementedError, match=r"backend 'hopper': expected Triton 3\.6 or newer"):
            dispatch.choose_backend("hopper", CUDA)

    @needs_triton
    def test_a_gluon_that_moved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.delitem(sys.modules, "sparge.backends.hopper.gluon", raising=False)
        monkeypatch.delattr(sys.modules.get("sparge.backends.hopper", dispatch), "gluon", raising=False)
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
        missing = dispatch.hopper_missing("cuda", 0)
        assert missing is not None
        assert missing.startswith("expected Gluon for Hopper in Triton ")
        assert dispatch.choose_backend("auto", CUDA).backend == "triton"

    def refused(self, device: torch.device, missing: str) -> None:
        """By name it raises, "auto" takes torch; both say what is missing."""
        choice = dispatch.choose_backend("auto", device)
        assert choice.backend == "torch"
        assert choice.reason == f"runs on any device; not 'triton': {missing}"
        with pytest.raises(NotImplementedError) as raised:
            dispatch.choose_backend("triton", device)
        assert str(raised.value) == f"backend 'triton': {missing}"

    @needs_triton
    def test_an_old_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        self.refused(CUDA, "expected compute capability 8.0 or newer, got 7.5")

    @needs_triton
    def test_rocm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.2")
        self.refused(CUDA, "expected an NVIDIA GPU, got ROCm (untested)")

    @needs_triton
    def test_an_old_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import triton

        monkeypatch.delattr(triton, "knobs")
        self.refused(CUDA, f"expected Triton 3.4 or newer, got {triton.__version__}")

    @pytest.mark.usefixtures("gpu")
    def test_no_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "triton", None)
        missing = dispatch.triton_missing("cuda", 0)
        assert missing is not None
        assert missing.startswith("expected Triton to be installed, got ModuleNotFoundError(")
        self.refused(CUDA, missing)
        with pytest.raises(NotImplementedError, match="expected Triton to be installed"):
            dispatch.choose_backend("triton", CPU)

    @needs_triton
    def test_another_device(self) -> None:
        with pytest.raises(NotImplementedError, match=r"^backend 'triton': expected a CUDA device, got 'xpu'$"):
            dispatch.choose_backend("triton", torch.device("xpu"))
        choice = dispatch.choose_backend("auto", torch.device("xpu"))
        assert choice == dispatch.Choice("torch", "runs on any device; no kernels for 'xpu' in this version")


class TestQuantization:
    @pytest.mark.parametrize(
        ("dtype", "quantization", "has_mask", "kernels"),
        [
            (torch.bfloat16, "none", False, "hopper"),
            (torch.float32, "int8_fp8_codes", False, "hopper"),
            (torch.float32, "none", False, "triton"),
            (torch.bfloat16, "int8_fp8", True, "triton"),
        ],
    )
    def test_triton_takes_what_hopper_has_no_kernel_for(
        self, dtype: torch.dtype, quantization: str, has_mask: bool, kernels: str
    ) -> None:
        assert dispatch.kernels_for("hopper", dtype, quantization, has_mask=has_mask) == kernels
        assert dispatch.kernels_for("torch", dtype, quantization, has_mask=has_mask) == "torch"

    def test_hopper_takes_codes_unless_there_is_a_mask(self) -> None:
        assert dispatch.resolve_quantization("auto", "hopper", CUDA) == "int8_fp8_codes"
        assert dispatch.resolve_quantization("auto", "hopper", CUDA, has_mask=True) == "int8_fp8"
        assert dispatch.resolve_quantization("int8_fp8", "hopper", CUDA) == "int8_fp8"
        with pytest.raises(NotImplementedError, match=r"expected no attn_mask \('int8_fp8' takes one\)"):
            dispatch.resolve_quantization("int8_fp8_codes", "hopper", CUDA, has_mask=True)

    def test_who_has_codes(self) -> None:
        assert dispatch.resolve_quantization("int8_fp8_codes", "reference", CPU, has_mask=True) == "int8_fp8_codes"
        for backend in ("triton", "torch"):
            with pytest.raises(NotImplementedError, match="expected backend 'hopper' or 'reference', got"):
                dispatch.resolve_quantization("int8_fp8_codes", backend, CPU)

    @pytest.mark.parametrize("asked", ["auto", "none", "int8_fp8", "int8_fp16"])
    @pytest.mark.parametrize("backend", ["torch", "reference"])
    def test_other_backends_quantise_when_told_to(self, backend: str, asked: str) -> None:
        expected = "none" if asked == "auto" else asked
        assert dispatch.resolve_quantization(asked, backend, CPU) == expected

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
    def test_triton_takes_the_fastest(
        self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fastest: str
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        assert dispatch.resolve_quantization("auto", "triton", CUDA) == fastest
        assert dispatch.resolve_quantization("none", "triton", CUDA) == "none"
        assert dispatch.resolve_quantization("int8_fp16", "triton", CUDA) == "int8_fp16"
        if fastest == "int8_fp8":
            assert dispatch.resolve_quantization("int8_fp8", "triton", CUDA) == "int8_fp8"
            return
        with pytest.raises(NotImplementedError) as raised:
            dispatch.resolve_quantization("int8_fp8", "triton", CUDA)
        got = ".".join(map(str, capability))
        expected = f"expected compute capability 8.9 or newer, got {got} ('int8_fp16' works there)"
        assert str(raised.value) == f"quantization 'int8_fp8': {expected}"

    def test_the_interpreter_has_every_arithmetic(self) -> None:
        assert dispatch.resolve_quantization("auto", "triton", CPU) == "int8_fp8"
        assert dispatch.resolve_quantization("int8_fp8", "triton", CPU) == "int8_fp8"
