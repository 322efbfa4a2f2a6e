"""Launch the Hopper kernel: TMA descriptors of the operands, one program per SM."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sparge.backends.gpu.gluon import TensorDescriptor, gl
from sparge.backends.gpu.launch import (
    first_key,
    launch,
    multiprocessors,
    padded,
    per_head_tensor,
    power_of_two,
    strides_of,
    zeros_like,
)
from sparge.backends.gpu.operands import Operands
from sparge.backends.gpu.peak_handling import peak_handling
from sparge.backends.gpu.stages.arguments import list_pointers, result_buffers, sizes_of, spec_of, tensor_or
from sparge.backends.gpu.stages.order import unpack
from sparge.backends.hopper import configs
from sparge.backends.hopper.aggregates import CounterPointers, ExactPointers, ResultPointers, ScalePointers
from sparge.backends.hopper.kernel import attention_kernel
from sparge.backends.hopper.spec import Spec
from sparge.call import Call
from sparge.masks import geometry
from sparge.masks.block_mask import BlockMask

MIN_WIDTH = 64
"""Minimum head width of the kernel; missing channels are copied as 0."""
MAX_SLICE = 128
"""Maximum value channels of a tile with FP8 values: two wider accumulators do not fit in registers."""
COPY_ALIGNMENT = 16
"""Alignment of TMA's addresses and strides in bytes."""


def attend(
    operands: Operands, mask: BlockMask | None, call: Call, *, totals: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention over a mask's blocks, or over all visible ones: see `operands.AttentionLauncher`."""
    query, key, value, placeholder = operands.query, operands.key, operands.value, operands.query
    shape, segments = call.shape, call.segments
    if segments is not None and not call.is_quantized:
        query, key, value = unpack(query, key, value, call)
    if not call.is_quantized:
        query = _copyable(-query if call.scale < 0 else query)  # the kernel takes the row maximum before scaling
        key = _copyable(key)
    first_value = 0
    if not call.has_fp8_values:
        if segments is None and first_key(call) % geometry.BLOCK_K:  # unseen values of the first block may be NaN
            first_value = first_key(call)
            value = value[:, :, first_value:]
        value = _copyable(value)
    means = operands.means
    mean_key, mean_value = (key, value) if means is None else (means.key, means.value)
    threshold = per_head_tensor(call.pv_threshold, shape, query.device)
    output, lse, num_q_blocks = result_buffers(operands, call)
    spec, config = _spec(operands, call, all_blocks=mask is None, counts_blocks=totals is not None)
    num_tiles = num_q_blocks * spec.value_slices
    launch(
        attention_kernel,
        min(num_tiles, multiprocessors(query)),
        query_desc=_descriptor(query, geometry.BLOCK_Q, spec.chunk, spec.key_smem_layout),
        key_desc=_descriptor(key, geometry.BLOCK_K, spec.chunk, spec.key_smem_layout),
        value_desc=_descriptor(value, spec.value_rows, spec.value_columns, spec.value_smem_layout),
        mean_key_desc=_descriptor(mean_key, geometry.BLOCK_K, spec.chunk, spec.key_smem_layout),
        mean_value_desc=_descriptor(mean_value, spec.value_rows, spec.value_columns, spec.value_smem_layout),
        scale_ptrs=ScalePointers(
            query=operands.query_scale,
            key=operands.key_scale,
            mean_key=placeholder if means is None else means.key_scale,
            value=operands.value_scale,
            lse_shift=operands.lse_shift,
        ),
        exact_ptrs=ExactPointers(
            operands.exact_query, operands.exact_key, placeholder if means is None else means.exact_key
        ),
        list_ptrs=list_pointers(operands, mask, call),
        mean_bias_ptr=placeholder if means is None else means.bias,
        counter_ptrs=CounterPointers(tensor_or(totals, placeholder), zeros_like(placeholder, 1, dtype=torch.int32)),
        threshold_ptr=tensor_or(threshold, placeholder),
        result_ptrs=ResultPointers(output, lse),
        exact_query_strides=strides_of(operands.exact_query),
        exact_key_strides=strides_of(operands.exact_key),
        softmax_scale=call.scale,
        **sizes_of(call),
        first_value=first_value,
        num_tiles=num_tiles,
        bias_columns=0 if means is None else means.bias.shape[1],
        total_q=0 if segments is None else segments.total_q,
        SPEC=spec,
        CONSUMER_REGISTERS=config.registers,
        PRODUCER_REGISTERS=configs.PRODUCER_REGISTERS,
        num_warps=4,
    )
    return output, lse


def _spec(
    operands: Operands, call: Call, *, all_blocks: bool, counts_blocks: bool
) -> tuple[Spec, configs.HopperConfig]:
    """Return the compile-time parameters and the launch configuration of a call."""
    shape, has_threshold = call.shape, call.pv_threshold is not None
    head_width = max(MIN_WIDTH, power_of_two(shape.head_dim))
    value_width = max(MIN_WIDTH, power_of_two(shape.value_dim))
    value_slices = max(1, value_width // MAX_SLICE) if call.has_fp8_values else 1
    config = configs.hopper_config(call.quantization, max(head_width, value_width), has_threshold=has_threshold)
    spec = Spec(
        quantized=call.is_quantized,
        fp8_values=call.has_fp8_values,
        exponential_free=call.quantization == "int8_fp8_fast",
        **spec_of(call),
        is_causal=call.is_causal,
        has_threshold=has_threshold,
        all_blocks=all_blocks,
        counts_blocks=counts_blocks,
        means=operands.means is not None,
        ordered=operands.order is not None,
        tokens_first=operands.tokens_first,
        peaks=peak_handling(call),
        head_dim=head_width,
        exact_dim=shape.head_dim,
        value_dim=value_width // value_slices,
        output_dim=shape.value_dim,
        value_scale_stride=padded(shape.value_dim),
        value_slices=value_slices,
        blocks=config.blocks,
        stages=config.stages,
        query_stages=config.query_stages,
    )
    return spec, config


def _copyable(tensor: Tensor) -> Tensor:
    """Return the tensor if TMA can read it, else an aligned copy without expanded dimensions."""
    unit = COPY_ALIGNMENT // tensor.element_size()
    strides = [stride for size, stride in zip(tensor.shape[:3], tensor.stride()[:3], strict=True) if size > 1]
    if tensor.data_ptr() % COPY_ALIGNMENT == 0 and all(stride > 0 and stride % unit == 0 for stride in strides):
        return tensor
    width = -(-tensor.shape[3] // unit) * unit
    copy = tensor.new_zeros(*tensor.shape[:3], width)
    copy[..., : tensor.shape[3]] = tensor
    return copy


def _descriptor(tensor: Tensor, rows: int, columns: int, layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """Return the TMA descriptor of a tensor (B, H, S, D), copied in boxes of ``rows`` x ``columns``."""
    strides, unit = list(tensor.stride()), COPY_ALIGNMENT // tensor.element_size()
    for dimension in range(3):
        if tensor.shape[dimension] == 1:  # torch allows any stride there, TMA does not
            strides[dimension] = unit
    return TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, columns], replace(layout, rank=4))
