"""A ComfyUI node that makes the attention of a model sparse. `sparge.integrations.comfyui` implements it."""

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
    """A node (MODEL -> MODEL) that clones the model and sets an attention override on the clone."""

    CATEGORY = "model/patch"
    DESCRIPTION = (
        "Computes only the important blocks of the attention map, which are predicted for every call. "
        "Place it last, right before the sampler."
    )
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        share = "Percentage of blocks to compute. Lower is faster. 100 computes all blocks, quantized on GPUs."
        start = "Attention is dense before this point of the schedule, while the layout of the image forms."
        end = "Attention is dense after this point of the schedule."
        blocks = {"default": "", "tooltip": "Transformer blocks that are always dense, such as 0, 1, -1 or 0-3, -1."}
        tokens = "Calls with fewer tokens are dense. Calls that are faster dense are dense in any case."
        return {
            "required": {
                "model": ("MODEL",),
                "keep_percent": number_input("FLOAT", 50.0, 1.0, 100.0, 1.0, share),
                "start_percent": number_input("FLOAT", 0.2, 0.0, 1.0, 0.01, start),
                "end_percent": number_input("FLOAT", 1.0, 0.0, 1.0, 0.01, end),
                "dense_blocks": ("STRING", blocks),
                "min_tokens": number_input("INT", 0, 0, 1 << 20, 512, tokens),
            }
        }

    def patch(self, model: Any, **values: Any) -> tuple[Any]:
        """Return a clone of the model with the override; ``values`` are the other inputs."""
        try:
            from sparge.integrations.comfyui import sparsify
        except ImportError as error:
            raise ImportError(MISSING) from error
        return (sparsify(model, **values),)


def number_input(
    kind: str, default: float, minimum: float, maximum: float, step: float, tooltip: str
) -> tuple[str, Any]:
    """Return the specification of a numeric input of the node."""
    return kind, {"default": default, "min": minimum, "max": maximum, "step": step, "tooltip": tooltip}


NODE_CLASS_MAPPINGS = {"SpargeAttention": SpargeAttention}
NODE_DISPLAY_NAME_MAPPINGS = {"SpargeAttention": "Sparse attention (sparge)"}
