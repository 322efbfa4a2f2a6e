"""Base class of the GPU backends: requirements on the device, and whole calls, which are recorded and replayed.

A subclass adds its attention kernel (`GpuBackend.launcher`) to the stages of `pipeline`. Triton is imported when the
first stage runs. No method synchronizes with the device.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from sparge.backends.base import Backend, Crossover, KeptColumns, PartialResult, RecordedAttention
from sparge.backends.gpu.config_table import active_overrides
from sparge.backends.gpu.operands import AttentionLauncher
from sparge.backends.gpu.replay import lists_of, recorded, recordings_of, register_constant, replayed
from sparge.backends.gpu.requirements import triton_unavailable_reason
from sparge.backends.output_layout import is_tokens_first
from sparge.call import Call, interned
from sparge.masks.block_mask import BlockMask
from sparge.masks.ordering import TokenOrder, order_of
from sparge.masks.window import Window
from sparge.numerics.budget_allocation import RankPool
from sparge.options.rules import Dense

if TYPE_CHECKING:
    from sparge.backends.gpu.rank_pipeline import GpuCandidates

CROSSOVER = Crossover(keys=4096, causal_keys=4096, queries=2048, scores=500_000_000)
"""Measured: docs/lab/triton.md, "Crossover on a GPU". 24 heads of 4608 tokens (images of 1024 x 1024) are above it."""
CROSSOVER_UNDER_MASK = Crossover(keys=0, causal_keys=0, queries=0, scores=2**30)
"""For full (S_q x S_k) masks: docs/lab/models.md, "Masks in models"."""


class GpuBackend(Backend):
    """Stages in Triton, followed by the backend's own attention kernel."""

    packs = True

    @property
    @abstractmethod
    def launcher(self) -> AttentionLauncher:
        """Return the function that launches the attention kernel. It is imported on access, because it needs Triton."""

    def unavailable_reason(self, device: torch.device) -> str | None:
        return triton_unavailable_reason(device)

    def why_not_auto(self, device: torch.device) -> str | None:
        if device.type != "cuda":  # Triton's interpreter runs on CPUs, but only if the caller names the backend
            return f"expected a CUDA device, got {device.type!r}"
        return self.unavailable_reason(device)

    def crossover(self, device_type: str, dtype: torch.dtype) -> Crossover:  # noqa: ARG002
        return CROSSOVER

    def crossover_under_mask(self, device_type: str) -> Crossover:  # noqa: ARG002
        return CROSSOVER_UNDER_MASK

    def is_overridden(self) -> bool:
        return bool(active_overrides())

    def predict(self, query: Tensor, key: Tensor, call: Call) -> BlockMask:
        from sparge.backends.gpu.pipeline import prepare

        def run() -> tuple[Tensor, Tensor, Tensor]:
            _, mask = prepare(query, key, None, call, with_mask=True, with_operands=False)
            assert mask is not None
            return lists_of(mask)

        lists = replayed(recordings_of(call), "predict", (query, key, call.attn_mask), run)
        return BlockMask(*lists, call.shape.q_len, call.shape.kv_len, window=call.window)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: BlockMask | None,
        call: Call,
        *,
        totals: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.attend`. Without a mask, compute attention over every visible block."""
        from sparge.backends.gpu.pipeline import prepare

        launcher = self.launcher
        lists: tuple[Tensor, ...] = ()
        if mask is not None:  # made contiguous here, because a call in which torch copies a tensor cannot be replayed
            counts, indices, visible = lists = tuple([x.contiguous() for x in lists_of(mask)])
            mask = BlockMask(counts, indices, visible, mask.q_len, mask.kv_len, window=mask.window)

        def run() -> tuple[Tensor, Tensor]:
            operands, _ = prepare(query, key, value, call, with_mask=False, with_operands=True, mask=mask)
            assert operands is not None
            return launcher(operands, mask, call, totals=totals)

        inputs = (*inputs_of(query, key, value, call, totals), *lists)
        return replayed(recordings_of(call), (launcher, mask is None), inputs, run)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        totals: Tensor | None = None,
        order: TokenOrder | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Predict and attend with shared passes over K."""
        if order is not None and any(tensor.stride(3) != 1 for tensor in (query, key, value)):
            return super().attention(query, key, value, call, totals=totals, order=order)
        from sparge.backends.gpu.pipeline import prepare
        from sparge.backends.gpu.stages.order import moved_copy

        launcher = self.launcher
        # Created before recording starts, because torch computes it
        places = None if order is None else order_of(order.grid, order.name, query.device)

        def run() -> tuple[Tensor, Tensor]:
            q, k, v = query, key, value
            if order is not None and places is not None:
                register_constant(places.permutation)
                register_constant(places.inverse)
                q, k, v = (
                    moved_copy(tokens, places.permutation, order.start, tokens_first=is_tokens_first(tokens))
                    for tokens in (q, k, v)
                )
            operands, mask = prepare(q, k, v, call, with_mask=True, with_operands=True)
            assert operands is not None
            output, lse = launcher(operands, mask, call, totals=totals)
            if order is not None and places is not None:
                output = moved_copy(output, places.inverse, order.start, tokens_first=True)
            return output, lse

        kind = launcher if order is None else (launcher, order)
        return replayed(recordings_of(call), kind, inputs_of(query, key, value, call, totals), run)

    def dense(
        self, query: Tensor, key: Tensor, value: Tensor, call: Call, *, with_lse: bool, may_use_torch: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.dense`. The LSE is empty if torch's SDPA computes the output."""
        if may_use_torch:
            if call.is_causal and call.shape.q_len == 1:  # the only query is the last: causality hides no key from it
                call = interned(replace(call, is_causal=False, window=Window(call.window.left)))
            if not with_lse and self.dense_is_sdpa(query, call):
                output = F.scaled_dot_product_attention(
                    query, key, value, is_causal=call.is_causal, scale=call.scale, enable_gqa=call.shape.group > 1
                )
                return output, query.new_empty(0, dtype=torch.float32)
        return self.attend(query, key, value, None, call)

    def dense_is_sdpa(self, query: Tensor, call: Call) -> bool:
        """Return whether SDPA has a fast kernel for a call.

        SDPA aligns causality top-left, so bottom-right causality and windows would need a full (S_q x S_k) mask. Our
        kernel only visits the blocks inside of the window.
        """
        shape = call.shape
        return (
            query.is_cuda
            and query.dtype in (torch.float16, torch.bfloat16)
            and not call.is_quantized
            and call.attn_mask is None
            and (call.window == Window() or (call.window == Window(None, 0) and shape.q_len == shape.kv_len))
            and shape.head_dim == shape.value_dim
            and shape.head_dim % 8 == 0
        )

    def recorded_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        call: Call,
        *,
        totals: Tensor | None,
        blocks: BlockMask | None = None,
        order: TokenOrder | None = None,
    ) -> RecordedAttention | None:
        inputs, kind = inputs_of(query, key, value, call, totals), self.launcher
        if order is not None:
            return recorded(recordings_of(call), (kind, order), inputs)
        if blocks is not None:
            return recorded(recordings_of(call), (kind, False), (*inputs, *lists_of(blocks)))
        return recorded(recordings_of(call), (kind, True) if isinstance(call.sparsity, Dense) else kind, inputs)

    def move_all(
        self, tensors: Sequence[Tensor], permutation: Tensor, start: int, *, tokens_first: bool | None = None
    ) -> tuple[Tensor, ...]:
        if any(tokens.stride(3) != 1 for tokens in tensors):
            return super().move_all(tensors, permutation, start, tokens_first=tokens_first)
        from sparge.backends.gpu.stages import order

        return order.move_all(tensors, permutation, start, tokens_first)

    def summarize_keys(self, key: Tensor, call: Call) -> tuple[Tensor, ...]:
        from sparge.backends.gpu import rank_pipeline

        return rank_pipeline.summarize_keys(key, call)

    def candidates(self, query: Tensor, keys: Tensor | tuple[Tensor, ...], call: Call) -> GpuCandidates:
        from sparge.backends.gpu import rank_pipeline

        return rank_pipeline.GpuCandidates(query, keys, call)

    def choose_together(self, candidates: Sequence[GpuCandidates], kv_blocks: int, pool: RankPool) -> list[BlockMask]:
        from sparge.backends.gpu import rank_pipeline

        return rank_pipeline.choose_together(candidates, kv_blocks, pool)

    def attend_part(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kept: KeptColumns | None,
        call: Call,
        into: PartialResult,
        *,
        totals: Tensor | None = None,
    ) -> None:
        from sparge.backends.gpu.pipeline import prepare
        from sparge.backends.gpu.stages.ring_part import cut_lists, merge

        launcher = self.launcher
        masks = () if kept is None else kept.masks
        columns = () if kept is None else kept.columns
        output, lse, is_first = into

        def run() -> tuple[Tensor, Tensor]:
            mask = cut_lists(masks, columns, call) if masks else None
            operands, _ = prepare(query, key, value, call, with_mask=False, with_operands=True, mask=mask)
            assert operands is not None
            merge(output, lse, *launcher(operands, mask, call, totals=totals), is_first=is_first)
            return output, lse

        cuts = tuple([(cut.start, cut.stop) for cut in columns])
        kind = ("part", launcher, cuts, tuple([mask.shape for mask in masks]), is_first)
        lists = [x for mask in masks for x in (mask.kv_num_blocks, mask.kv_indices)]
        replayed(recordings_of(call), kind, (*inputs_of(query, key, value, call, totals), output, lse, *lists), run)


def inputs_of(
    query: Tensor, key: Tensor, value: Tensor, call: Call, totals: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the inputs of a recording: tensors that a call reads, and existing tensors that it writes to.

    A replay uses the tensors of the new call in their place.
    """
    tensors = query, key, value, call.attn_mask, totals
    return tensors if call.segments is None else (*tensors, call.segments.output, call.segments.lse)
