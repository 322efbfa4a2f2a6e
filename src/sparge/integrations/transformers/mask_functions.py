"""Variables that transformers' mask functions have captured."""

from __future__ import annotations

from typing import Any


def captured(function: Any, maker: str, *arguments: Any) -> dict[str, Any]:
    """Return the captured variables of a mask function by name; nothing if another function made it.

    Args:
        function: the mask function.
        maker: the name of the function in ``transformers.masking_utils`` that makes functions of this kind.
        arguments: arguments for ``maker``; all functions that it makes have the same code.
    """
    from transformers import masking_utils

    make = getattr(masking_utils, maker, None)
    code = getattr(function, "__code__", None)
    if make is None or code is None or make(*arguments).__code__ is not code:
        return {}
    return dict(zip(code.co_freevars, (cell.cell_contents for cell in function.__closure__), strict=True))
