"""Serving engines. vLLM and vLLM-Omni call these two by their entry points, in every process, whatever is served.

So nothing happens here but that a name is made known: the modules with the classes, which import the engine, are
imported when somebody selects the name. An engine is imported nowhere else. What they raise would end the engine, also
for those who never asked for this library: versions without such names are left alone.
"""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

VLLM_BACKEND = "sparge.serving.vllm.SpargeBackend"
VLLM_OMNI_BACKEND = "sparge.serving.vllm_omni.SpargeBackend"
VLLM_OMNI_NAME = "SPARGE"
"""What ``--diffusion-attention-backend`` takes."""


def register_vllm() -> None:
    """Make ``--attention-backend CUSTOM`` this library's, unless another plug-in has taken the name."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:  # before 0.14 it lay elsewhere
        _log.info("sparge: expected vLLM 0.20 or newer, so there is no attention backend CUSTOM: %s", error)
        return
    member = AttentionBackendEnum.CUSTOM
    if member.is_overridden() and member.get_path() != VLLM_BACKEND:
        _log.info("sparge: the attention backend CUSTOM of vLLM is %s, and stays so", member.get_path())
        return
    register_backend(member, VLLM_BACKEND)


def register_vllm_omni() -> None:
    """Make ``--diffusion-attention-backend SPARGE`` known to vLLM-Omni.

    Its enumeration has no free name, and no function to add one: a member is added by hand. Where vLLM-Omni has one of
    that name already, it is left alone.
    """
    try:
        from vllm_omni.diffusion.attention.backends.registry import DiffusionAttentionBackendEnum
    except ImportError as error:
        _log.info("sparge: expected vLLM-Omni 0.30 or newer, so there is no backend %s: %s", VLLM_OMNI_NAME, error)
        return
    names = DiffusionAttentionBackendEnum
    if VLLM_OMNI_NAME in names.__members__:
        return
    member = object.__new__(names)
    member._name_, member._value_ = VLLM_OMNI_NAME, VLLM_OMNI_BACKEND
    names._member_map_[VLLM_OMNI_NAME] = member
    names._value2member_map_[VLLM_OMNI_BACKEND] = member
    names._member_names_.append(VLLM_OMNI_NAME)
