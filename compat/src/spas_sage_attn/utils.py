"""The names of the published helpers for masks and thresholds raise an error that names their replacement."""

from typing import Any

from spas_sage_attn._missing import raise_missing


def __getattr__(name: str) -> Any:
    return raise_missing(__name__, name, "sparge.predict for masks of blocks, and sparge.evaluate for errors")
