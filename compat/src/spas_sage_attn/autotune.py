"""The published tuner is not provided: all of its names raise an error that names the replacement in sparge."""

from typing import Any

from spas_sage_attn._missing import raise_missing


def __getattr__(name: str) -> Any:
    return raise_missing(
        __name__,
        name,
        "sparge.calibrate(model, inputs) and sparge.enable(model, profile) for budgets by layer; pass thresholds "
        "that were tuned before to spas_sage2_attn_meansim_cuda, one tensor (heads,) each",
    )
