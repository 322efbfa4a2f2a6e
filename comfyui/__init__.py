"""A ComfyUI node: sparse attention for one model. `sparge.integrations.comfyui` implements it."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

MISSING = (
    "Sparse attention (sparge): the Python package sparge cannot be imported. Install it from a clone of its "
    f"repository into the Python that runs ComfyUI, and restart: {sys.executable} -m pip install PATH/TO/sparge. "
    "To run without, bypass the node."
)

if importlib.util.find_spec("sparge") is None:
    logging.error(MISSING)


class SpargeAttention:
    """A node MODEL -> MODEL that sets an attention override on a clone of the model."""

    CATEGORY = "model/patch"
    DESCRIPTION = (
        "Computes only the important blocks of the attention map, which are predicted for every call. "
        "Place it last, right before the sampler."
    )
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        percent = {"min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "model": ("MODEL",),
                "keep_percent": (
                    "FLOAT",
                    {
                        "default": 50.0,
                        "min": 1.0,
                        "max": 100.0,
                        "step": 1.0,
                        "tooltip": "Share of the map to compute. Less is faster; 100: all, quantized on GPUs.",
                    },
                ),
                "start_percent": (
                    "FLOAT",
                    {
                        "default": 0.2,
                        **percent,
                        "tooltip": "Sparse from here on; dense before, where the layout of the image forms.",
                    },
                ),
                "end_percent": ("FLOAT", {"default": 1.0, **percent, "tooltip": "Dense from here on."}),
                "dense_blocks": (
                    "STRING",
                    {"default": "", "tooltip": "Blocks that stay dense, e.g. 0, 1, -1 or 0-3, -1."},
                ),
                "min_tokens": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": 1 << 20,
                        "step": 512,
                        "tooltip": "Shorter calls stay dense. With 0, only calls for which dense is faster do.",
                    },
                ),
            }
        }

    def patch(
        self,
        model: Any,
        keep_percent: float,
        start_percent: float,
        end_percent: float,
        dense_blocks: str,
        min_tokens: int,
    ) -> tuple[Any]:
        try:
            from sparge.integrations.comfyui import sparsify
        except ImportError as error:
            raise ImportError(MISSING) from error
        patched = sparsify(
            model,
            keep_percent=keep_percent,
            start_percent=start_percent,
            end_percent=end_percent,
            dense_blocks=dense_blocks,
            min_tokens=min_tokens,
        )
        return (patched,)


NODE_CLASS_MAPPINGS = {"SpargeAttention": SpargeAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"SpargeAttention": "Sparse attention (sparge)"}
