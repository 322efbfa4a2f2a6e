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
        share = "Share of the map to compute. Less is faster; 100: all, quantized on GPUs."
        start = "Sparse from here on; dense before, where the layout of the image forms."
        blocks = {"default": "", "tooltip": "Blocks that stay dense, e.g. 0, 1, -1 or 0-3, -1."}
        tokens = "Shorter calls stay dense. With 0, only calls for which dense is faster do."
        return {
            "required": {
                "model": ("MODEL",),
                "keep_percent": number("FLOAT", 50.0, 1.0, 100.0, 1.0, share),
                "start_percent": number("FLOAT", 0.2, 0.0, 1.0, 0.01, start),
                "end_percent": number("FLOAT", 1.0, 0.0, 1.0, 0.01, "Dense from here on."),
                "dense_blocks": ("STRING", blocks),
                "min_tokens": number("INT", 0, 0, 1 << 20, 512, tokens),
            }
        }

    def patch(self, model: Any, **values: Any) -> tuple[Any]:
        """Return the model with the override; ``values`` are those of the other inputs."""
        try:
            from sparge.integrations.comfyui import sparsify
        except ImportError as error:
            raise ImportError(MISSING) from error
        return (sparsify(model, **values),)


def number(kind: str, default: float, least: float, most: float, step: float, tooltip: str) -> tuple[str, Any]:
    """Return the form of an input of the node."""
    return kind, {"default": default, "min": least, "max": most, "step": step, "tooltip": tooltip}


NODE_CLASS_MAPPINGS = {"SpargeAttention": SpargeAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"SpargeAttention": "Sparse attention (sparge)"}
