"""The published helpers of masks and thresholds, which are not here: their names say what does their work in sparge."""

from typing import Any

from spas_sage_attn._missing import refuse


def __getattr__(name: str) -> Any:
    return refuse(__name__, name, "sparge.predict for masks of blocks, and sparge.evaluate for errors")
