"""Apply a policy to a pipeline with `sparge.enable`, or with `replace_sdpa` if `enable` does not support the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from sparge import integrations
from sparge.evaluate.variants import enabled
from sparge.policy import Policy

DENOISERS = ("transformer", "transformer_2", "unet", "prior", "decoder")
"""Parts of a pipeline that run at every step. All other parts (text encoders, VAE) stay dense."""


def is_supported(pipe: Any) -> bool:
    """Return whether `sparge.enable` supports the pipeline.

    Raises:
        ValueError: the pipeline is already enabled, so there is no dense pipeline to compare with.
    """
    from sparge.integrations.diffusers import pipeline

    try:
        if pipeline.is_enabled(pipe):
            raise ValueError("pipeline: expected a dense pipeline, got an enabled one (call sparge.disable first)")
    except NotImplementedError:
        return False
    return True


@contextmanager
def applied_to_pipeline(pipe: Any, policy: Policy) -> Iterator[None]:
    """Apply the policy to the pipeline within the context.

    Raises:
        ValueError: the policy has rules about steps or layers, and `sparge.enable` does not support the model.
    """
    if is_supported(pipe):
        with enabled(pipe, policy):
            yield
        return
    if policy.has_step_rules or policy.has_layer_rules:
        raise ValueError(
            f"{type(pipe).__name__}: expected a policy without rules about steps or layers (sparge.enable does not "
            f"support this model, and SDPA calls have no layer names), got {policy.to_json()}"
        )
    scope = integrations.replace_sdpa(policy)
    models = denoisers(pipe)
    with ExitStack() as stack:
        if not models:
            stack.enter_context(scope)
        for model in models:
            forward = vars(model).get("forward")  # an attribute of the instance if the model is offloaded
            stack.callback(setattr if forward else delattr, model, "forward", *([forward] if forward else []))
            model.forward = scope(model.forward)
        yield


def denoisers(pipe: Any) -> list[Any]:
    """Return the models that run at every step."""
    models = (getattr(pipe, name, None) for name in DENOISERS)
    return [model for model in models if isinstance(model, nn.Module)]
