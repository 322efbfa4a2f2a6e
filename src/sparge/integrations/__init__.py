"""Turn sparse attention on in a model: `enable`, `disable`, `register`, `replace_sdpa`.

Frameworks are imported on first use.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Literal

from sparge.integrations.hooks import without_compile
from sparge.integrations.layers import check_policy
from sparge.integrations.sdpa import replace_sdpa
from sparge.options import checks
from sparge.options.extras import install_command
from sparge.policy import Policy

if TYPE_CHECKING:
    from sparge.profile import Profile

__all__ = ["disable", "enable", "register", "replace_sdpa"]

FRAMEWORKS = ("transformers", "diffusers")


def enable(model: Any, policy: Policy | Profile | None = None, *, scheduler: Any = None) -> None:
    """Turn sparse attention on in a model.

    Calls that need gradients run dense. In training mode, layers through which no gradient flows (a frozen body with a
    trainable head) run sparse, with one warning. A model can be enabled before or after ``torch.compile``. A copied or
    pickled model stays enabled, also in another process. If the policy has rules about steps, call `enable` again for
    the pipeline of the copy.

    Args:
        model: a transformers model, or a transformers pipeline; a diffusers pipeline or its transformer. Other parts of
            a pipeline (text encoders, VAE) are not changed. Enabling a model again replaces its policy.
        policy: decides which calls go sparse; ``Policy()`` by default. A `Profile` from `sparge.calibrate` provides its
            policy.
        scheduler: the scheduler of a transformer that is enabled without its pipeline, for rules about steps.

    Raises:
        TypeError: the model is neither a transformers nor a diffusers model.
        NotImplementedError: the model is not supported.
        ValueError: the policy has a rule that cannot be applied to the model.

    Example:
        >>> import sparge
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64,
        ...                                      num_hidden_layers=2, num_attention_heads=2)).eval()
        >>> sparge.enable(model, sparge.Policy(topk=0.4, min_tokens=4096))
        >>> model.config._attn_implementation
        'sparge'
        >>> sparge.disable(model)
    """
    profile: Any = policy if hasattr(policy, "check_model") else None
    policy = check_policy(policy if profile is None else profile.policy)
    model = _unwrap(model)
    integration = _integration_of(model)
    if profile is not None:
        profile.check_model(model)
    integration.enable(model, policy, scheduler)


def disable(model: Any) -> None:
    """Restore the attention that a model had before `enable`; its output is bitwise equal to the original.

    Raises:
        TypeError: the model is neither a transformers nor a diffusers model.
        ValueError: the model is not enabled.
    """
    model = _unwrap(model)
    integration = _integration_of(model)
    if not integration.is_enabled(model):
        raise ValueError(f"model: expected an enabled model (call sparge.enable first), got {type(model).__name__}")
    integration.disable(model)


def register(policy: Policy | None = None, framework: Literal["transformers", "diffusers"] = "transformers") -> None:
    """Register the attention "sparge" with a framework, for models that choose their attention by name.

    transformers: ``from_pretrained(..., attn_implementation="sparge")``. diffusers:
    ``transformer.set_attention_backend("sparge")``, for models that use its dispatcher (Flux, Wan, LTX, HunyuanVideo).
    The dispatcher provides neither the layer, the step nor the positions of the text tokens of a call. `enable`
    provides them and gives each model its own policy.

    Raises:
        ImportError: the framework is missing, too old, or cannot be extended.
        ValueError: the policy has rules about steps or, for diffusers, layers.
    """
    policy = check_policy(policy)
    checks.check_choice("framework", framework, FRAMEWORKS)
    if not _is_installed(framework):
        raise ImportError(f"expected {framework} to be installed, got none: {install_command(framework)}")
    if framework == "transformers":
        from sparge.integrations.transformers import attention

        attention.register(policy)
        return
    from sparge.integrations.diffusers import backend

    if policy.has_step_rules or policy.has_layer_rules:
        raise ValueError(f"policy: expected no rules about steps or layers (sparge.enable supports them), got {policy}")
    if backend.register(policy) is None:
        raise ImportError("diffusers: expected a version whose attention backends can be extended (0.42 can)")


def _unwrap(model: Any) -> Any:
    """Return the model inside a PEFT model, a compiled model or a transformers pipeline."""
    pipelines = sys.modules.get("transformers.pipelines.base")
    if pipelines is not None and isinstance(model, pipelines.Pipeline):
        return _unwrap(model.model)
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return _unwrap(model.get_base_model())
    return without_compile(model)


def _integration_of(model: Any) -> Any:
    """Return the module with `enable` and `disable` for a model. The model's framework is already imported."""
    library = sys.modules.get("transformers")
    if library is not None and isinstance(model, library.PreTrainedModel):
        from sparge.integrations.transformers import model as transformers_model

        return transformers_model
    library = sys.modules.get("diffusers")
    if library is not None and isinstance(model, (library.DiffusionPipeline, library.ModelMixin)):
        from sparge.integrations.diffusers import pipeline

        return pipeline
    missing = [name for name in FRAMEWORKS if not _is_installed(name)]
    hint = f"; for models of {' or '.join(missing)}: {install_command(*missing)}" if missing else ""
    raise TypeError(
        "model: expected a transformers model, a diffusers pipeline or its transformer "
        f"(use `with sparge.replace_sdpa(policy):` for any other model), got {type(model).__name__}{hint}"
    )


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
