"""When an attention kernel looks for peaks: keys so far above their neighbours that FP8 does not hold both."""

from __future__ import annotations

ASKED_KEYS = 4096
"""Keys up to which every tile is asked. The keys around a peak, 127 at most, are 3 % of so many."""


def way_with_peaks(quantization: str, kv_len: int, *, has_threshold: bool = False) -> str:
    """What an attention kernel does about peaks: they are "ignored", "asked" about in every tile, or "known".

    A threshold skips tiles by their maximum, and leaves them whole.
    """
    if quantization not in ("int8_fp8", "int8_fp8_fast") or has_threshold:
        return "ignored"
    return "asked" if kv_len <= ASKED_KEYS else "known"
