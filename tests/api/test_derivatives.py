"""Sparse attention has no derivatives: every torch API that computes them raises an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, linearize, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import sparge
from conftest import make_qkv

pytestmark = pytest.mark.timeout(120)

QUERY, KEY, VALUE = make_qkv(130, head_dim=8)
Attention = Callable[[Tensor], Tensor]


def attend(query: Tensor, **options: Any) -> Tensor:
    return sparge.attention(query, KEY, VALUE, **options)


def forward_ad_dual(function: Attention) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(QUERY, QUERY))).tangent


TRANSFORMS: dict[str, Callable[[Attention], Any]] = {
    "forward_ad_dual": forward_ad_dual,
    "jvp": lambda function: jvp(function, (QUERY,), (QUERY,))[1],
    "jacfwd": lambda function: jacfwd(lambda query: function(query).sum())(QUERY),
    "linearize": lambda function: linearize(function, QUERY)[1](QUERY),
    "hessian": lambda function: hessian(lambda shift: function(QUERY + shift).sum())(torch.zeros(())),
    "grad": lambda function: grad(lambda query: function(query).sum())(QUERY),
    "jvp of vmap": lambda function: jvp(vmap(function), (QUERY[None],), (QUERY[None],))[1],
    "grad of vmap": lambda function: grad(lambda query: vmap(function)(query).sum())(QUERY[None]),
    "vmap of grad": lambda function: vmap(grad(lambda query: function(query).sum()))(QUERY[None]),
    "vmap under autograd": lambda function: vmap(function)(QUERY[None].clone().requires_grad_()),
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@transforms
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_derivatives_raise(transform: Callable[[Attention], Any], backend: str) -> None:
    with pytest.raises(NotImplementedError, match="expected inputs without gradients"):
        transform(lambda query: attend(query, backend=backend))


@pytest.mark.parametrize("name", ["jvp", "jacfwd"])
def test_derivatives_of_compiled_functions_raise(name: str) -> None:
    with pytest.raises(NotImplementedError, match="expected inputs without gradients"):
        torch.compile(lambda: TRANSFORMS[name](attend), backend="eager")()


@pytest.mark.parametrize(
    "name", ["forward_ad_dual", "jvp", "jacfwd", "grad", "grad of vmap", "vmap of grad", "jvp of vmap"]
)
def test_derivatives_of_the_dense_fallback_are_exact(name: str) -> None:
    def exact(query: Tensor) -> Tensor:
        weights = torch.softmax(query @ KEY.mT * 8**-0.5, -1)
        return weights @ VALUE

    with sdpa_kernel(SDPBackend.MATH):  # torch's other kernels do not support forward-mode derivatives
        got = TRANSFORMS[name](lambda query: attend(query, on_unsupported="dense"))
    torch.testing.assert_close(got, TRANSFORMS[name](exact), rtol=1e-4, atol=1e-5)
    assert set(sparge.stats().reasons) == {"dense: unsupported (gradients)"}


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_transforms_without_derivatives_run_sparse(backend: str) -> None:
    expected = attend(QUERY, backend=backend)
    batch = vmap(lambda query: attend(query, backend=backend))(torch.stack([QUERY, 2 * QUERY]))
    assert torch.equal(batch, torch.stack([expected, attend(2 * QUERY, backend=backend)]))
    value, tangent = jvp(lambda query: attend(query.detach(), backend=backend) + query, (QUERY,), (QUERY,))
    assert torch.equal(value, expected + QUERY)
    assert torch.equal(tangent, QUERY)
    assert torch.equal(grad(lambda query: (attend(query.detach(), backend=backend) * query).sum())(QUERY), expected)


class TestReentrantCheckpoints:
    """The forward pass runs without gradients and is recomputed with gradients, so both must take the dense path."""

    def test_forward_is_dense_where_backward_is(self) -> None:
        query, key, value = make_qkv(600)
        query.requires_grad_()
        options = {"sparsity": sparge.TopK(0.1, min_blocks=1), "on_unsupported": "dense", "quantization": "int8_fp16"}
        exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        got = checkpoint(lambda query: sparge.attention(query * 1, key, value, **options), query, use_reentrant=True)
        assert isinstance(got, Tensor)
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
        (expected,) = torch.autograd.grad(exact.square().sum(), query)
        got.square().sum().backward()
        torch.testing.assert_close(query.grad, expected, rtol=1e-4, atol=1e-5)
        assert sparge.stats().reasons == {"dense: unsupported (gradients)": 2}

    def test_no_grad_and_inference_mode_are_sparse(self) -> None:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                sparge.attention(*make_qkv(300), quantization="int8_fp16", on_unsupported="dense")
        assert sparge.stats().reasons == {"sparse: torch": 2}
