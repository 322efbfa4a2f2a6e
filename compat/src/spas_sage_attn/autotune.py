"""The published tuner, which is not here: its names say what does its work in sparge."""

from typing import Any

from spas_sage_attn._missing import refuse


def __getattr__(name: str) -> Any:
    return refuse(
        __name__,
        name,
        "sparge.calibrate(model, inputs) and sparge.enable(model, profile) for budgets by layer; thresholds that were "
        "tuned before go into spas_sage2_attn_meansim_cuda, one tensor (heads,) each",
    )
