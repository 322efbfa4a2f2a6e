"""Detection of calls that need derivatives. Sparse attention has none, so these calls must not run sparse silently."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad


def needs_grad_of(*tensors: Tensor | None) -> bool:
    """Return whether a tensor is tracked by autograd, forward-mode AD or a torch.func transform."""
    inputs = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return True
    if torch.compiler.is_compiling():  # torch.compile supports tangents, but not wrapped tensors
        return forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(tensor).tangent is not None for tensor in inputs
        )
    if forward_ad._current_level < 0 and _functorch.peek_interpreter_stack() is None:
        return False
    return any(_needs_grad(tensor) for tensor in inputs)


def _needs_grad(tensor: Tensor) -> bool:
    """Return whether a tensor is tracked, or any of the tensors inside its torch.func wrappers."""
    while True:
        is_batched = _functorch.is_batchedtensor(tensor)  # unpack_dual cannot read a batched wrapper
        if not is_batched and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if torch.is_grad_enabled() and tensor.requires_grad:
            return True
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)


def inside_autograd_function() -> bool:
    """Return whether the forward of an ``autograd.Function`` is running, as in reentrant checkpointing.

    Gradients are disabled in this forward, but the backward of a reentrant checkpoint runs the same computation again
    with gradients. Unlike ``torch.no_grad()``, the forward of an ``autograd.Function`` also disables forward-mode AD,
    so it can be detected.
    """
    if torch.compiler.is_compiling() or torch._C._is_fwd_grad_enabled():
        return False
    return not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
