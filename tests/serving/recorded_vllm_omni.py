"""The part of vLLM-Omni's interface that `sparge.serving.vllm_omni` uses: installed, or recorded from 0.30.0.

Names, fields and arguments come from vLLM-Omni's source. SDPA stands in for the platform's default backend.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

RECORDED = "0.30.0"
IMPL = (
    *("num_heads", "head_size", "softmax_scale", "causal", "num_kv_heads", "prefix", "qkv_layout"),
    *("backend_kwargs", "extra_impl_args"),
)
FORWARD = ("query", "key", "value", "attn_metadata")
METADATA = (
    *("attn_mask", "joint_attn_mask", "joint_query", "joint_key", "joint_value", "joint_strategy", "extra"),
    *("full_attn_spans", "query_ranges", "video_layout", "packed_padding"),
)
SDPA = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"


class Platform:
    """A platform that reports a GPU, on a CPU."""

    device_name = "cuda"

    def is_cuda(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda: False
        raise AttributeError(name)

    def get_diffusion_attn_backend_cls(
        self, selected_backend: str | None, head_size: int, allow_trtllm_default: bool = True
    ) -> str:
        del head_size, allow_trtllm_default
        assert selected_backend is None
        return SDPA


def modules() -> dict[str, ModuleType]:
    """Return vLLM-Omni's modules, and vLLM's module that resolves names."""
    names = (
        *("vllm", "vllm.utils", "vllm.utils.import_utils", "vllm_omni", "vllm_omni.platforms", "vllm_omni.diffusion"),
        *("vllm_omni.diffusion.config", "vllm_omni.diffusion.forward_context", "vllm_omni.diffusion.attention"),
        *("vllm_omni.diffusion.attention.backends", "vllm_omni.diffusion.attention.backends.abstract"),
        *("vllm_omni.diffusion.attention.backends.sdpa", "vllm_omni.diffusion.attention.backends.registry"),
    )
    made = {name: ModuleType(name) for name in names}
    for module in made.values():
        module.__path__ = []  # type: ignore[attr-defined]

    class AttentionBackend:
        supports_piecewise_spans = supports_paged_kv = supports_prefix_kv_slicing = False
        supported_platforms: tuple[str, ...] | None = None

        @classmethod
        def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
            del attention_spec
            return False

        @classmethod
        def supports_head_size(cls, head_size: int) -> bool:
            sizes = cls.get_supported_head_sizes()  # type: ignore[attr-defined]
            return not sizes or head_size in sizes

    @dataclass(frozen=True)
    class VideoTokenSpan:
        start: int
        latent_grid: tuple[int, int, int]
        role: str

    @dataclass(frozen=True)
    class VideoTokenLayout:
        prefix_len: int | None = None
        latent_grid: tuple[int, int, int] | None = None
        used_len: int | None = None
        video_spans: tuple[VideoTokenSpan, ...] = ()

    @dataclass
    class AttentionMetadata:
        attn_mask: Tensor | None = None
        joint_attn_mask: Tensor | None = None
        joint_query: Tensor | None = None
        joint_key: Tensor | None = None
        joint_value: Tensor | None = None
        joint_strategy: str = "front"
        extra: dict[str, Any] = field(default_factory=dict)
        full_attn_spans: list[list[tuple[int, int]]] | None = None
        query_ranges: tuple[Any, ...] | None = None
        video_layout: VideoTokenLayout | None = None
        packed_padding: Any = None

    class AttentionImpl:
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            softmax_scale: float,
            causal: bool = False,
            num_kv_heads: int | None = None,
            prefix: str = "",
            qkv_layout: str | None = None,
            backend_kwargs: dict[str, Any] | None = None,
            **extra_impl_args: Any,
        ) -> None: ...

        def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
            assert made["vllm_omni.platforms"].current_omni_platform.is_cuda()  # type: ignore[attr-defined]
            return self.forward_cuda(query, key, value, attn_metadata)

        def forward_cuda(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
            raise NotImplementedError

    class SDPAImpl(AttentionImpl):
        def __init__(
            self, num_heads: int, head_size: int, softmax_scale: float, causal: bool = False, **_: Any
        ) -> None:
            del num_heads, head_size
            self.softmax_scale, self.causal = softmax_scale, causal

        def forward_cuda(self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: Any = None) -> Tensor:
            mask = None if attn_metadata is None else attn_metadata.attn_mask
            mask = mask[:, None, None].bool() if mask is not None and mask.ndim == 2 else mask
            q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
            grouped = q.shape[1] != k.shape[1]
            arguments: Any = {"is_causal": self.causal, "scale": self.softmax_scale, "enable_gqa": grouped}
            return F.scaled_dot_product_attention(q, k, v, mask, **arguments).transpose(1, 2)

    class SDPABackend(AttentionBackend):
        @classmethod
        def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
            del attention_spec
            return True

        @staticmethod
        def get_impl_cls() -> type[SDPAImpl]:
            return SDPAImpl

    class DiffusionAttentionBackendEnum(Enum):
        FLASH_ATTN = "vllm_omni.diffusion.attention.backends.flash_attn.FlashAttentionBackend"
        TORCH_SDPA = SDPA

        def get_path(self, include_classname: bool = True) -> str:
            del include_classname
            return str(self.value)

    def resolve_obj_by_qualname(qualname: str) -> Any:
        module, _, name = qualname.rpartition(".")
        return getattr(importlib.import_module(module), name)

    state = SimpleNamespace(context=None)

    def get_forward_context() -> Any:
        return state.context

    def is_forward_context_available() -> bool:
        return state.context is not None

    vars(made["vllm.utils.import_utils"]).update(resolve_obj_by_qualname=resolve_obj_by_qualname)
    vars(made["vllm_omni.platforms"]).update(current_omni_platform=Platform())
    vars(made["vllm_omni.diffusion.config"]).update(get_current_diffusion_config_or_none=lambda: None)
    vars(made["vllm_omni.diffusion.forward_context"]).update(
        get_forward_context=get_forward_context, is_forward_context_available=is_forward_context_available, state=state
    )
    backends = "vllm_omni.diffusion.attention.backends"
    vars(made[f"{backends}.abstract"]).update(
        AttentionBackend=AttentionBackend,
        AttentionImpl=AttentionImpl,
        AttentionMetadata=AttentionMetadata,
        VideoTokenLayout=VideoTokenLayout,
        VideoTokenSpan=VideoTokenSpan,
    )
    vars(made[f"{backends}.sdpa"]).update(SDPABackend=SDPABackend)
    vars(made[f"{backends}.registry"]).update(DiffusionAttentionBackendEnum=DiffusionAttentionBackendEnum)
    return made


class Engine:
    """One version of vLLM-Omni, with `sparge.serving.vllm_omni` imported on top of it."""

    def __init__(self, version: str) -> None:
        backends = "vllm_omni.diffusion.attention.backends"
        self.version = version
        self.sparge: Any = importlib.import_module("sparge.serving.vllm_omni")
        self.abstract: Any = importlib.import_module(f"{backends}.abstract")
        self.sdpa: Any = importlib.import_module(f"{backends}.sdpa")
        self.registry: Any = importlib.import_module(f"{backends}.registry")

    @property
    def is_installed(self) -> bool:
        return self.version != RECORDED

    def impl(self, heads: int = 2, head_dim: int = 16, scale: float = 0.3, **others: Any) -> Any:
        return self.sparge.SpargeImpl(heads, head_dim, scale, **others)

    @contextmanager
    def step(self, index: int | None, total: int | None) -> Iterator[None]:
        """Set the forward context of a denoising step."""
        context = SimpleNamespace(denoise_step_idx=index, total_denoise_steps=total)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.sparge, "is_forward_context_available", lambda: True)
            patch.setattr(self.sparge, "get_forward_context", lambda: context)
            yield


INSTALLED = ["installed"] if importlib.util.find_spec("vllm_omni") else []


@pytest.fixture(params=[RECORDED, *INSTALLED])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Load the recorded version, and the installed version if there is one."""
    monkeypatch.delitem(sys.modules, "sparge.serving.vllm_omni", raising=False)
    if request.param == "installed":
        import vllm_omni.version

        made = Engine(f"installed {vllm_omni.version.__version__}")
        for name in ("abstract", "sparge"):
            monkeypatch.setattr(getattr(made, name), "current_omni_platform", Platform())
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "vllm_omni")]:
            monkeypatch.delitem(sys.modules, name)
        for name, module in modules().items():
            monkeypatch.setitem(sys.modules, name, module)
        made = Engine(RECORDED)
    yield made
    sys.modules.pop("sparge.serving.vllm_omni", None)
