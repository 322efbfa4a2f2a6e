"""The part of vLLM's interface that `sparge.serving.vllm` uses: vLLM if it is installed, else recorded signatures.

Names, fields and arguments come from vLLM's source at the versions in `RECORDED`. In both cases SDPA, called for each
request over its pages, replaces FlashAttention, because no kernel of vLLM runs on a CPU.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

BASIC = ("num_actual_tokens", "max_query_len", "query_start_loc", "max_seq_len", "seq_lens", "block_table")
CASCADE = ("use_cascade", "common_prefix_len", "cu_prefix_query_lens", "prefix_kv_lens", "suffix_kv_lens")
PARALLEL = ("max_dcp_context_kv_len", "dcp_context_kv_lens")
SPLIT = ("num_decode_reqs", "num_prefill_reqs", "num_decode_tokens", "num_prefill_tokens")
REFERENCE_WINDOW = ("rswa_prefix_lens", "rswa_window", "rswa_window_tensor")
SCHEDULE = ("scheduler_metadata", "max_num_splits")


@dataclass(frozen=True)
class Recorded:
    """The parts of the interface in which versions of vLLM differ.

    Attributes:
        fields: fields of ``FlashAttentionMetadata``, in order.
        layout: layout of the KV cache: "planes first", "planes second" or "side by side".
        has_cache_shape: whether the backend has ``get_kv_cache_shape``.
    """

    fields: tuple[str, ...]
    layout: str
    has_cache_shape: bool = True


RECORDED = {
    "0.20.0": Recorded(
        (*BASIC, "slot_mapping", *CASCADE, *PARALLEL, *SCHEDULE, "prefix_scheduler_metadata", "causal"), "planes first"
    ),
    "0.24.0": Recorded(
        (
            *(*BASIC, "slot_mapping", *CASCADE, *PARALLEL, *SCHEDULE),
            *("prefix_scheduler_metadata", "causal", "mm_prefix_range_tensor"),
        ),
        "planes second",
    ),
    "0.27.1": Recorded(
        (
            *(*BASIC, "slot_mapping", *CASCADE, *PARALLEL, *SPLIT, *SCHEDULE),
            *("prefix_scheduler_metadata", "causal", "sliding_window", "mm_prefix_range_tensor", *REFERENCE_WINDOW),
        ),
        "side by side",
    ),
    "0.33.0": Recorded(
        (
            *(*BASIC, "slot_mapping", *PARALLEL, *SPLIT, *SCHEDULE),
            *("causal", "mm_prefix_query_range_tensor", *REFERENCE_WINDOW),
        ),
        "side by side",
        has_cache_shape=False,
    ),
}
DEFAULTS = {**dict.fromkeys(SPLIT, 0), "max_num_splits": 0, "use_cascade": False, "common_prefix_len": 0}
FORWARD = (
    *("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    *("output_scale", "output_block_scale"),
)
IMPL = (
    *("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window", "kv_cache_dtype"),
    *("logits_soft_cap", "attn_type", "kv_sharing_target_layer_name", "sinks"),
)
BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
BUILDER = ("kv_cache_spec", "layer_names", "vllm_config", "device")

CACHES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "planes first": lambda key, value: torch.stack([key, value]),
    "planes second": lambda key, value: torch.stack([key, value], 1),
    "side by side": lambda key, value: torch.cat([key, value], -1).transpose(1, 2).contiguous(),
}
SPLITS: dict[str, Callable[[Tensor, int], tuple[Tensor, ...]]] = {
    "planes first": lambda cache, _: cache.unbind(0),
    "planes second": lambda cache, _: cache.unbind(1),
    "side by side": lambda cache, head_dim: cache.transpose(1, 2).split(head_dim, dim=-1),
}


def cache_shape(layout: str, pages: int, page: int, heads: int, head_dim: int) -> tuple[int, ...]:
    empty = torch.empty(pages, page, heads, head_dim, device="meta")
    return tuple(CACHES[layout](empty, empty).shape)


@dataclass
class FlashAttention:
    """Stand-in for vLLM's kernel on a paged cache. ``calls`` records the query lengths of every call."""

    calls: list[list[int]] = field(default_factory=list)

    def __call__(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        cu_seqlens_q: Tensor,
        seqused_k: Tensor,
        block_table: Tensor,
        softmax_scale: float,
        causal: bool,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **others: Any,
    ) -> Tensor:
        del others
        starts, lengths = cu_seqlens_q.tolist(), seqused_k.tolist()
        assert starts[-1] == len(q) and len(starts) == len(lengths) + 1 == len(block_table) + 1
        self.calls.append([stop - start for start, stop in itertools.pairwise(starts)])
        assert max(self.calls[-1]) == max_seqlen_q and max(lengths) <= max_seqlen_k
        for start, stop, tokens, table in zip(starts, starts[1:], lengths, block_table, strict=False):
            key, value = (pages[table.long()].flatten(0, 1)[:tokens] for pages in (k, v))
            out[start:stop] = dense(q[start:stop], key, value, softmax_scale, causal=causal)
        return out


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = True) -> Tensor:
    """Return dense attention (S, H, D) of one request, whose queries align with its last keys."""
    mask = torch.ones(len(query), len(key), dtype=torch.bool)
    mask = mask.tril(len(key) - len(query)) if causal else mask
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


class CGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


def modules_of(version: str) -> dict[str, ModuleType]:
    """Return the modules of a version of vLLM by name."""
    recorded = RECORDED[version]
    names = ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backend", "vllm.v1.attention.backends")
    leaves = ("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.registry")
    made = {name: ModuleType(name) for name in (*names, *leaves)}
    for name in names:
        made[name].__path__ = []  # type: ignore[attr-defined]

    @dataclass
    class CommonAttentionMetadata:
        query_start_loc: Tensor
        query_start_loc_cpu: Tensor
        seq_lens: Tensor
        num_reqs: int
        num_actual_tokens: int
        max_query_len: int
        max_seq_len: int
        block_table_tensor: Tensor
        slot_mapping: Tensor
        causal: Any = True
        seq_lens_cpu_upper_bound: Tensor | None = None

    FlashAttentionMetadata: Any = make_dataclass(
        "FlashAttentionMetadata", [(name, Any, DEFAULTS.get(name)) for name in recorded.fields]
    )

    class FlashAttentionBackend:
        @staticmethod
        def get_name() -> str:
            return "FLASH_ATTN"

        @classmethod
        def is_sparse(cls) -> bool:
            return False

        @classmethod
        def supports_batch_invariance(cls) -> bool:
            return True

        if recorded.has_cache_shape:

            @staticmethod
            def get_kv_cache_shape(
                num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
            ) -> tuple[int, ...]:
                del cache_dtype_str
                if block_size % 16 != 0:
                    raise ValueError("Block size must be a multiple of 16.")
                return cache_shape(recorded.layout, num_blocks, block_size, num_kv_heads, head_size)

    class FlashAttentionMetadataBuilder:
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
            self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
            self.vllm_config, self.device = vllm_config, device
            self.num_heads_q = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> CGSupport:
            del vllm_config, kv_cache_spec
            return CGSupport.ALWAYS

        def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
            del common_prefix_len, fast_build
            common = common_attn_metadata
            arguments = {
                "num_actual_tokens": common.num_actual_tokens,
                "max_query_len": common.max_query_len,
                "query_start_loc": common.query_start_loc,
                "max_seq_len": common.max_seq_len,
                "seq_lens": common.seq_lens,
                "block_table": common.block_table_tensor,
                "slot_mapping": common.slot_mapping,
                "scheduler_metadata": torch.arange(4),
                "causal": common.causal,
            }
            if "sliding_window" in recorded.fields:
                arguments["sliding_window"] = (-1, -1)
            return FlashAttentionMetadata(**arguments)

        def update_block_table(self, metadata: Any, blk_table: Tensor, slot_mapping: Tensor) -> Any:
            values = {name: getattr(metadata, name) for name in recorded.fields}
            return FlashAttentionMetadata(**{**values, "block_table": blk_table, "slot_mapping": slot_mapping})

    class FlashAttentionImpl:
        dcp_world_size = pcp_world_size = 1

        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: list[float] | None,
            sliding_window: int | None,
            kv_cache_dtype: str,
            logits_soft_cap: float | None = None,
            attn_type: str = "decoder",
            kv_sharing_target_layer_name: str | None = None,
            sinks: Tensor | None = None,
        ) -> None:
            self.num_heads, self.head_size, self.scale, self.num_kv_heads = num_heads, head_size, scale, num_kv_heads
            self.alibi_slopes, self.kv_cache_dtype, self.sinks = alibi_slopes, kv_cache_dtype, sinks
            self.sliding_window = (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
            self.logits_soft_cap, self.attn_type = logits_soft_cap or 0, attn_type
            self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
            output_scale: Tensor | None = None,
            output_block_scale: Tensor | None = None,
        ) -> Tensor:
            del layer, key, value
            if output_scale is not None or output_block_scale is not None:
                raise NotImplementedError("fused output quantization")
            if attn_metadata is None:
                return output.fill_(0)
            scheduled = attn_metadata.scheduler_metadata
            assert scheduled is None or len(attn_metadata.seq_lens) == attn_metadata.slot_mapping.numel()
            tokens = attn_metadata.num_actual_tokens
            keys, values = SPLITS[recorded.layout](kv_cache, self.head_size)
            made["vllm.v1.attention.backends.flash_attn"].flash_attn_varlen_func(  # type: ignore[attr-defined]
                q=query[:tokens],
                k=keys,
                v=values,
                out=output[:tokens],
                cu_seqlens_q=attn_metadata.query_start_loc,
                max_seqlen_q=attn_metadata.max_query_len,
                seqused_k=attn_metadata.seq_lens,
                max_seqlen_k=attn_metadata.max_seq_len,
                softmax_scale=self.scale,
                causal=attn_metadata.causal,
                block_table=attn_metadata.block_table,
            )
            return output

    overrides: dict[Any, str] = {}

    class AttentionBackendEnum(Enum):
        FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
        CUSTOM = None

        def get_path(self, include_classname: bool = True) -> str:
            del include_classname
            return overrides.get(self, self.value)

        def is_overridden(self) -> bool:
            return self in overrides

    def register_backend(backend: Any, class_path: str | None = None, is_mamba: bool = False) -> Any:
        del is_mamba
        assert class_path is not None
        overrides[backend] = class_path
        return lambda cls: cls

    vars(made["vllm.v1.attention.backend"]).update(
        CommonAttentionMetadata=CommonAttentionMetadata, AttentionCGSupport=CGSupport
    )
    vars(made[leaves[0]]).update(
        FlashAttentionBackend=FlashAttentionBackend,
        FlashAttentionImpl=FlashAttentionImpl,
        FlashAttentionMetadata=FlashAttentionMetadata,
        FlashAttentionMetadataBuilder=FlashAttentionMetadataBuilder,
    )
    vars(made[leaves[1]]).update(AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend)
    return made


class Engine:
    """One version of vLLM, with `sparge.serving.vllm` imported on top of it."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.sparge: Any = importlib.import_module("sparge.serving.vllm")
        self.flash_attn: Any = importlib.import_module("vllm.v1.attention.backends.flash_attn")
        self.backend: Any = importlib.import_module("vllm.v1.attention.backend")
        self.registry: Any = importlib.import_module("vllm.v1.attention.backends.registry")
        self.kernel = FlashAttention()

    @property
    def is_installed(self) -> bool:
        return self.version not in RECORDED

    @property
    def layout(self) -> str:
        shape_of = getattr(self.flash_attn.FlashAttentionBackend, "get_kv_cache_shape", None)
        shape = None if shape_of is None else tuple(shape_of(5, 16, 3, 8))
        return next((name for name in CACHES if cache_shape(name, 5, 16, 3, 8) == shape), "side by side")

    def config(self, heads: int, options: Any = None, layers: int = 4, drafts: int | None = None) -> Any:
        """Return an object with the fields of ``VllmConfig`` that builders read."""
        text = SimpleNamespace(num_hidden_layers=layers, model_type="llama")
        names = [f"model.layers.{index}.self_attn.attn" for index in range(layers)]
        return SimpleNamespace(
            additional_config={} if options is None else {"sparge": options},
            speculative_config=None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts),
            model_config=SimpleNamespace(
                get_num_attention_heads=lambda _: heads,
                get_num_kv_heads=lambda _: heads // 2,
                get_head_size=lambda: 16,
                dtype=torch.float32,
                hf_text_config=text,
                hf_config=text,
                rswa_window=None,
                is_mm_prefix_lm=False,
            ),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, cp_kv_cache_interleave_size=1),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            compilation_config=SimpleNamespace(
                cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: False),
                max_cudagraph_capture_size=0,
                static_forward_context=dict.fromkeys(names),
            ),
            attention_config=SimpleNamespace(),
            kernel_config=SimpleNamespace(enable_jit_warmup=False),
            scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=8192),
        )

    def builder(self, config: Any, kv_heads: int, head_dim: int, kind: Any = None) -> Any:
        spec: Any = SimpleNamespace(
            num_kv_heads=kv_heads, head_size=head_dim, block_size=16, dtype=torch.float32, sliding_window=None
        )
        if self.is_installed:
            from vllm.v1.kv_cache_interface import FullAttentionSpec

            spec = FullAttentionSpec(block_size=16, num_kv_heads=kv_heads, head_size=head_dim, dtype=torch.float32)
        kind = kind or self.sparge.SpargeMetadataBuilder
        return kind(spec, list(config.compilation_config.static_forward_context), config, torch.empty(0).device)

    def impl(self, heads: int, head_dim: int, scale: float, kv_heads: int, **others: Any) -> Any:
        arguments = {"alibi_slopes": None, "sliding_window": None, "kv_cache_dtype": "auto", **others}
        made = self.sparge.SpargeImpl(heads, head_dim, scale, kv_heads, **arguments)
        made.vllm_flash_attn_version = 2  # vLLM finds none on a CPU
        return made


INSTALLED = ["installed"] if importlib.util.find_spec("vllm") else []


@pytest.fixture(params=[*RECORDED, *INSTALLED])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Load every recorded version, and the installed version if there is one."""
    yield from load_engine(request.param, monkeypatch)


@pytest.fixture(params=["0.33.0", *INSTALLED])
def newest(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Load the newest recorded version, and the installed version if there is one."""
    yield from load_engine(request.param, monkeypatch)


def load_engine(version: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if version == "installed":
        vllm = importlib.import_module("vllm")
        monkeypatch.delitem(sys.modules, "sparge.serving.vllm", raising=False)
        made = Engine(f"installed {vllm.__version__}")
    else:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "sparge.serving.vllm", raising=False)
        for name, module in modules_of(version).items():
            monkeypatch.setitem(sys.modules, name, module)
        made = Engine(version)
    monkeypatch.setattr(made.flash_attn, "flash_attn_varlen_func", made.kernel, raising=False)
    yield made
    sys.modules.pop("sparge.serving.vllm", None)


def arguments_of(function: Any) -> tuple[str, ...]:
    """Return the argument names of a method."""
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
