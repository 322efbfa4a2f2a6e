"""Entry points of vLLM and vLLM-Omni, which call these two functions in every process.

They only register a name. The modules with the backend classes import the engine, so they are imported only when the
name is selected. An exception here would stop the engine for every user, so nothing is registered in versions without a
registry.
"""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

VLLM_BACKEND = "sparge.serving.vllm.SpargeBackend"
VLLM_OMNI_BACKEND = "sparge.serving.vllm_omni.SpargeBackend"
VLLM_OMNI_NAME = "SPARGE"
"""The value of ``--diffusion-attention-backend``."""


def register_vllm() -> None:
    """Register this library as ``--attention-backend CUSTOM``, unless another plug-in has registered that name."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as error:  # before 0.14 it was in another module
        _log.info("sparge: expected vLLM 0.20 or newer, so there is no attention backend CUSTOM: %s", error)
        return
    member = AttentionBackendEnum.CUSTOM
    if member.is_overridden() and member.get_path() != VLLM_BACKEND:
        _log.info("sparge: the attention backend CUSTOM of vLLM is already %s", member.get_path())
        return
    register_backend(member, VLLM_BACKEND)


def register_vllm_omni() -> None:
    """Register ``--diffusion-attention-backend SPARGE`` with vLLM-Omni.

    vLLM-Omni's enumeration of backends has no free name and no API to add one, so a member is added directly. An
    existing member of that name is left unchanged.
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
