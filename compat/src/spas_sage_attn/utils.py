"""The published helpers are not provided: all of their names raise an error that names the replacement in sparge."""

from typing import Any

from spas_sage_attn._missing import raise_missing


def __getattr__(name: str) -> Any:
    return raise_missing(__name__, name, "sparge.predict for masks of blocks, and sparge.evaluate for errors")
