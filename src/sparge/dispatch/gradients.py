"""Whether somebody will ask for the derivatives of a call: sparse attention has none and must not pass as constant."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad


def needs_grad_of(*tensors: Tensor | None) -> bool:
    """Whether autograd, forward-mode AD or one of torch.func's transforms follows one of the tensors."""
    given = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return True
    if torch.compiler.is_compiling():  # it knows tangents, and nothing of wrapped tensors
        return forward_ad._current_level >= 0 and any(
            forward_ad.unpack_dual(tensor).tangent is not None for tensor in given
        )
    if forward_ad._current_level < 0 and _functorch.peek_interpreter_stack() is None:
        return False
    return any(_is_followed(tensor) for tensor in given)


def _is_followed(tensor: Tensor) -> bool:
    """The same, looked up in every tensor that vmap, grad and jvp have wrapped around one another."""
    while True:
        is_batched = _functorch.is_batchedtensor(tensor)  # it says nothing of what it holds
        if not is_batched and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if torch.is_grad_enabled() and tensor.requires_grad:
            return True
        if not _functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)


def inside_autograd_function() -> bool:
    """Whether an ``autograd.Function`` is running its forward, as reentrant checkpointing does.

    What it computes is computed again, with gradients, in its backward. Gradients are off in it, as under
    ``torch.no_grad()``; unlike that, and unlike inference mode, it switches forward-mode AD off as well.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return False
    return not torch._C._is_fwd_grad_enabled()
