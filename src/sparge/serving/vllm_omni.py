"""vLLM-Omni's diffusion attention: ``--diffusion-attention-backend SPARGE``.

Calls that the policy keeps dense, or that cannot be sparse, run on the platform's default backend, or on vLLM-Omni's
SDPA backend if they have a mask that the default does not support.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend
from vllm_omni.diffusion.config import get_current_diffusion_config_or_none
from vllm_omni.diffusion.forward_context import get_forward_context, is_forward_context_available
from vllm_omni.platforms import current_omni_platform

from sparge.integrations.layers import Steps
from sparge.policy import Policy
from sparge.serving import VLLM_OMNI_NAME
from sparge.serving.options import check_served, layer_of, policy_from
from sparge.serving.sparse_attn import attend_tokens_first, steps_at, with_heads

SOURCE = "backend_kwargs"
Ranges = list[tuple[int, int]]


class SpargeBackend(AttentionBackend):
    """The interface that vLLM-Omni calls."""

    supported_platforms = ("cuda",)

    @staticmethod
    def get_name() -> str:
        return VLLM_OMNI_NAME

    @staticmethod
    def get_impl_cls() -> type[SpargeImpl]:
        return SpargeImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return no restriction: head sizes outside 8..256 run dense."""
        return []

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        del attention_spec
        return True


class SpargeImpl(AttentionImpl):
    """Attention of one layer.

    The policy is read from ``backend_kwargs`` (not in vLLM-Omni 0.30), else from the environment variable
    ``SPARGE_POLICY``; the default is ``Policy()``. The index of a layer is the first number in ``prefix``.

    Raises:
        TypeError, ValueError: the policy is invalid, or has rules that vLLM-Omni cannot apply; or ring attention is
            configured, which uses no backend.
    """

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
    ) -> None:
        policy = policy_from(backend_kwargs, SOURCE)
        check_served(policy, SOURCE, has_steps=True, total=None)
        _check_ring()
        self.policy, self.softmax_scale, self.causal = policy, softmax_scale, causal
        self._layer, self._unsupported = layer_of(prefix, policy, None)
        self._layer.is_cross = extra_impl_args.get("role") == "cross"
        if qkv_layout not in (None, "BSND"):
            self._unsupported = f"layout {qkv_layout}"
        sizes: dict[str, Any] = {"num_heads": num_heads, "head_size": head_size, "num_kv_heads": num_kv_heads}
        sizes |= {"softmax_scale": softmax_scale, "causal": causal, "prefix": prefix, "qkv_layout": qkv_layout}
        path = current_omni_platform.get_diffusion_attn_backend_cls(selected_backend=None, head_size=head_size)
        backend = resolve_obj_by_qualname(path)
        self._dense: AttentionImpl = backend.get_impl_cls()(**sizes)
        self._masked = self._dense
        if not backend.supports_attention_mask():
            self._masked = SDPABackend.get_impl_cls()(**sizes)

    def forward_cuda(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata | None = None
    ) -> Tensor:
        """Return the output (B, S, H, D) of query (B, S, H, D), key and value (B, S_k, H_kv, D)."""
        output = self._sparse(query, key, value, attn_metadata or AttentionMetadata())
        if output is not None:
            return output
        has_mask = attn_metadata is not None and attn_metadata.attn_mask is not None
        dense = self._masked if has_mask else self._dense
        result: Tensor = dense.forward(query, key, value, attn_metadata)
        return result

    def _sparse(self, query: Tensor, key: Tensor, value: Tensor, metadata: AttentionMetadata) -> Tensor | None:
        """Return the output, or None if the call runs dense."""
        tokens, mask = query.shape[1], metadata.attn_mask
        unsupported = self._unsupported
        if metadata.full_attn_spans is not None and mask is None:
            unsupported = unsupported or "spans of full attention"
        used, text, grid = tokens, _joint(metadata, tokens), None
        if tokens == key.shape[1] and (layout := metadata.video_layout) is not None:
            used, text, grid = _positions(layout, tokens, text)
            if used < tokens:  # with a layout, a mask hides only the tokens after it
                query, key, value, mask = query[:, :used], key[:, :used], value[:, :used], None
        if self.policy.has_step_rules:
            self._layer.steps = _steps(self.policy)
        call = (query, key, value, with_heads(mask), self.causal, self.softmax_scale)
        output = attend_tokens_first(self._layer, *call, text=text, grid=grid, unsupported=unsupported)
        return output if output is None or used == tokens else F.pad(output, (0, 0, 0, 0, 0, tokens - used))


def _check_ring() -> None:
    config = get_current_diffusion_config_or_none()
    degree = getattr(getattr(config, "parallel_config", None), "ring_degree", 1)
    if degree > 1:
        raise ValueError(f"ring_degree: expected 1 (ring attention uses no backend; use Ulysses), got {degree}")


def _steps(policy: Policy) -> Steps:
    """Return the position in the schedule; unknown if the model does not provide it, in which case calls run dense."""
    context = get_forward_context() if is_forward_context_available() else None
    index, total = (getattr(context, name, None) for name in ("denoise_step_idx", "total_denoise_steps"))
    return steps_at(policy, index, total)


def _joint(metadata: AttentionMetadata, tokens: int) -> Ranges:
    """Return the range of the joint tokens, which all Ulysses ranks share; these are the text."""
    if metadata.joint_key is None:
        return []
    count = min(metadata.joint_key.shape[1], tokens)
    return [(tokens - count, tokens) if metadata.joint_strategy == "rear" else (0, count)]


def _positions(layout: Any, tokens: int, text: Ranges) -> tuple[int, Ranges, tuple[int, ...] | None]:
    """Return the number of used tokens, the ranges outside videos, and the grid of the video if there is only one.

    If the layout does not fit the sequence, for example on one of several ranks, return all tokens, ``text``
    and no grid.
    """
    videos = [(span.start, tuple(span.latent_grid)) for span in layout.video_spans]
    if not videos and layout.latent_grid is not None:
        videos = [(layout.prefix_len or 0, tuple(layout.latent_grid))]
    spans = sorted((start, start + grid[0] * grid[1] * grid[2]) for start, grid in videos)
    used = layout.used_len if layout.used_len is not None else max((stop for _, stop in spans), default=tokens)
    if not 0 < used <= tokens or any(stop > used for _, stop in spans):
        return tokens, text, None
    edges = [0, *itertools.chain(*spans), used]
    outside = [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]
    return used, outside, videos[0][1] if len(videos) == 1 else None
