"""vLLM's attention backend CUSTOM, which extends the classes of vLLM's FlashAttention backend.

Long prefills run sparse, and everything else runs on FlashAttention.

    SpargeMetadataBuilder   once per step: find the long requests, by lengths that only the builder has on the host
    SpargeImpl              per layer: run the long requests sparse, and the others in one call of FlashAttention
    SpargeBackend           the interface that vLLM calls

The keys and values of a long request are arguments of the call. If the request has context (a later chunk, a cached
prefix), they are gathered from pages of the cache instead. Any unrecognized metadata falls back to FlashAttention for
the whole batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from sparge.dispatch import dense_rules, reasons
from sparge.dispatch.reasons import Reason
from sparge.integrations import calls, layers
from sparge.integrations.model_call import ModelCall
from sparge.masks.geometry import BLOCK_Q
from sparge.serving.options import check_served, layer_of, policy_from
from sparge.serving.pages import Layout, gather, layout_of
from sparge.serving.plan import Request, rows_of, split, to_device, why_short

STEP = "sparge"
"""Attribute of vLLM's metadata: the `Step`."""
SOURCE = "additional_config['sparge']"
KNOWN_FIELDS = {
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "scheduler_metadata",
    "prefix_scheduler_metadata",
    "max_num_splits",
    "causal",
}
"""Fields of `FlashAttentionMetadata` that this backend supports. All others (cascades, context parallelism, masks of
images, reference windows, fields of later versions) must have one of the `UNSET` values."""
UNSET = (None, False, 0, (-1, -1))
UNQUANTIZED_CACHES = ("auto", "float16", "bfloat16")
"""Values of ``kv_cache_dtype`` for caches without quantization."""


@dataclass
class Step:
    """Data of one step that all layers share.

    Attributes:
        layer_of: returns the `Layer` of vLLM's layer name, and the rule that cannot be applied to it, if any.
        long: requests that run sparse, in layers that support it.
        others: the other requests.
        reason: why the longest of the other requests runs dense.
        obstacle: the part of the metadata that only FlashAttention supports, if any.
    """

    layer_of: Callable[[str], tuple[layers.Layer, str | None]]
    long: tuple[Request, ...] = ()
    others: tuple[Request, ...] = ()
    reason: Reason = Reason.DECODE
    obstacle: str | None = None
    _rest: tuple[slice | Tensor, FlashAttentionMetadata] | None = field(default=None, init=False)

    def rest_of(self, metadata: FlashAttentionMetadata) -> tuple[slice | Tensor, FlashAttentionMetadata]:
        """Return the queries and the metadata of the other requests; computed once."""
        if self._rest is not None:
            return self._rest
        others, device = self.others, metadata.seq_lens.device
        lengths = torch.tensor([0] + [request.stop - request.start for request in others], device="cpu")
        index = to_device(torch.tensor([request.index for request in others], device="cpu"), device)
        rest = copy.copy(metadata)
        setattr(rest, STEP, None)
        rest.num_actual_tokens = int(lengths.sum())
        rest.max_query_len = int(lengths.max())
        rest.query_start_loc = to_device(lengths.cumsum(0).to(metadata.query_start_loc.dtype), device)
        rest.max_seq_len = max(request.kv_len for request in others)
        rest.seq_lens = metadata.seq_lens.index_select(0, index)
        rest.block_table = metadata.block_table.index_select(0, index)
        rest.scheduler_metadata = None  # computed for the whole batch; FlashAttention recomputes it
        self._rest = rows_of(others, device), rest
        return self._rest


class SpargeMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds FlashAttention's metadata and adds the long requests of each step.

    The policy is read from ``--additional-config '{"sparge": {"topk": 0.4}}'``, else from the environment variable
    ``SPARGE_POLICY``; the default is ``Policy()``.

    Raises:
        TypeError, ValueError: the policy is invalid, or has rules that vLLM cannot apply.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        options = vllm_config.additional_config
        policy = policy_from(options.get("sparge") if isinstance(options, dict) else None, SOURCE)
        total = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
        check_served(policy, SOURCE, has_steps=False, total=total)
        names = [_name_of(name) for name in vllm_config.compilation_config.static_forward_context]
        if set(policy.budgets or ()).isdisjoint(names):  # a pipeline-parallel rank has some of the layers
            policy.check_layers(names)
        drafts = getattr(vllm_config.speculative_config, "num_speculative_tokens", None) or 0
        # A decode step has up to drafts + 1 queries, and its lengths on the host are not exact, so it must not be long.
        self._min_queries = max(BLOCK_Q, 2 * drafts + 2)
        self._policy, self._device, self._dtype = policy, torch.device(device), vllm_config.model_config.dtype
        self._new_step = functools.partial(Step, functools.cache(lambda name: layer_of(_name_of(name), policy, total)))

    def _why_dense(self, q_len: int, kv_len: int) -> Reason | None:
        """Return why a sequence runs dense."""
        sizes = dense_rules.ModelSizes(self._device, self._dtype, self.num_heads_q, q_len, kv_len)
        return dense_rules.by_policy(
            self._policy,
            sizes,
            is_self=True,
            is_language=True,
            is_causal=True,
            is_cross=False,
            is_dense_layer=False,
        )

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return support for graphs of decode steps only: the kernels of a prefill depend on its lengths."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(support, AttentionCGSupport.UNIFORM_BATCH, key=lambda level: level.value)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        setattr(metadata, STEP, self._step(common_attn_metadata, metadata))
        return metadata

    def update_block_table(
        self, metadata: FlashAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> FlashAttentionMetadata:
        updated = super().update_block_table(metadata, blk_table, slot_mapping)
        step: Step | None = getattr(metadata, STEP, None)
        setattr(updated, STEP, None if step is None else replace(step))
        return updated

    def _step(self, common: CommonAttentionMetadata, metadata: FlashAttentionMetadata) -> Step:
        if common.max_query_len < self._min_queries:  # the other lengths may not have reached the host yet
            return self._new_step(reason=why_short(common.max_query_len))
        if type(self).build is not SpargeMetadataBuilder.build:
            # vLLM's subclasses for static sinks, chunked attention and cross-attention change lengths and pages only on
            # the device.
            return self._new_step(reason=Reason.UNSUPPORTED, obstacle="a subclass of the metadata builder")
        kv_lens = common.seq_lens_cpu_upper_bound
        if kv_lens is None:
            return self._new_step(reason=Reason.UNSUPPORTED, obstacle="no lengths on the host")
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
        requests = split(starts, kv_lens[: common.num_reqs].tolist(), self._why_dense, self._min_queries)
        return self._new_step(*requests, _unsupported_field(metadata))


def _name_of(layer_name: str) -> str:
    """Return the name of a layer in transformers, which profiles of `sparge.calibrate` use."""
    return layer_name.removesuffix(".attn")


def _unsupported_field(metadata: FlashAttentionMetadata) -> str | None:
    """Return the first part of FlashAttention's metadata that is not supported here."""
    if metadata.causal is not True:
        return "not causal"
    assert is_dataclass(metadata)
    for name in (part.name for part in fields(metadata)):
        value = getattr(metadata, name)
        if name not in KNOWN_FIELDS and (isinstance(value, Tensor) or value not in UNSET):
            return name
    return None


class SpargeImpl(FlashAttentionImpl):
    """Attention of one layer: long prefills run sparse, the other requests on FlashAttention.

    The arguments are those of FlashAttention.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._obstacle = self._why_dense()
        self._layout: Layout | None = layout_of(getattr(FlashAttentionBackend, "get_kv_cache_shape", None))

    def _why_dense(self) -> str | None:
        """Return a property of this layer that only FlashAttention supports, if any."""
        kind = getattr(self.attn_type, "value", self.attn_type)
        properties = {
            f"attention of type {kind}": kind != "decoder",
            "sliding window": self.sliding_window not in (None, (-1, -1)),
            "capped scores": bool(self.logits_soft_cap),
            "ALiBi": self.alibi_slopes is not None,
            "attention sinks": self.sinks is not None,
            f"KV cache of {self.kv_cache_dtype}": self.kv_cache_dtype not in UNQUANTIZED_CACHES,
            "context parallelism": max(self.dcp_world_size, getattr(self, "pcp_world_size", 1)) > 1,
        }
        return next((name for name, is_set in properties.items() if is_set), None)

    def forward(
        self,
        layer: nn.Module,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute a batch, and return ``output``.

        Args:
            query: (tokens, heads, head_dim), packed requests; padding may follow.
            key, value: (tokens, kv heads, head_dim); None if a fused operator wrote them to the cache only.
            kv_cache: pages, which already contain the keys and values of this step.
            attn_metadata: None in vLLM's profiling run.
            output: (tokens, heads, head_dim), to which the result is written.
        """
        dense = functools.partial(super().forward, layer)
        whole = functools.partial(
            dense, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
        )
        step: Step | None = getattr(attn_metadata, STEP, None)
        if attn_metadata is None or step is None:
            return whole()
        policy_layer, obstacle = step.layer_of(getattr(layer, "layer_name", ""))
        if not step.long and step.reason is not Reason.UNSUPPORTED:
            reasons.count(step.reason, policy_layer.name)
            return whole()
        if policy_layer.dense:
            reasons.count(Reason.LAYER, policy_layer.name)
            return whole()
        if output_scale is not None or output_block_scale is not None:
            obstacle = "quantized output"
        # Some layers read the cache of another layer, which also has the keys of this step.
        step_key = None if self.kv_sharing_target_layer_name is not None else key
        needs_pages = step_key is None or any(request.has_context for request in step.long)
        obstacle = obstacle or step.obstacle or self._obstacle
        if needs_pages and self._layout is None:
            obstacle = obstacle or "layout of the KV cache"
        if obstacle is not None:
            layers.refuse(policy_layer, obstacle)
            return whole()
        parts = self._attend(policy_layer, query, step_key, value, kv_cache, attn_metadata, step.long)
        if parts is None:
            return whole()
        if step.others:
            reasons.count(step.reason, policy_layer.name)
            rows, rest = step.rest_of(attn_metadata)
            tensors = [tensor if tensor is None else tensor[rows] for tensor in (query, key, value)]
            rest_output = output[rows]  # a view of a slice, else a copy
            dense(*tensors, kv_cache, rest, rest_output)
            if not isinstance(rows, slice):
                output[rows] = rest_output
        for request, part in zip(step.long, parts, strict=True):
            output[request.start : request.stop].view(part.shape).copy_(part)
        return output

    def _attend(
        self,
        policy_layer: layers.Layer,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        metadata: FlashAttentionMetadata,
        long: tuple[Request, ...],
    ) -> list[Tensor] | None:
        """Return the outputs (queries, heads, head_dim) of the long requests; None if one of them cannot be sparse.

        Without ``key``, all keys and values are read from the cache.
        """
        parts = []
        for request in long:
            rows = slice(request.start, request.stop)
            if key is None or value is None or request.has_context:
                assert self._layout is not None
                table = metadata.block_table[request.index]
                keys_values = [gather(pages, table, request.kv_len) for pages in self._layout(kv_cache, self.head_size)]
            else:
                keys_values = [key[rows], value[rows]]
            q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query[rows], *keys_values))
            part = calls.attend(
                policy_layer,
                ModelCall(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True, is_self=True, is_language=True),
            )
            if part is None:
                return None
            parts.append(part[0].transpose(0, 1))
        return parts


class SpargeBackend(FlashAttentionBackend):
    """``--attention-backend CUSTOM``."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SpargeImpl]:
        return SpargeImpl

    @staticmethod
    def get_builder_cls() -> type[SpargeMetadataBuilder]:
        return SpargeMetadataBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return False: the kept blocks depend on how a prompt is chunked, which depends on the batch."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return False: lengths on the host determine the queries of long requests."""
        return False
