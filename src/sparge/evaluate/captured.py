"""What attention received in trained models, as families: recorded by `benchmarks/capture.py`, kept in tests/data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparge.evaluate.capture import Captured, load
from sparge.evaluate.families import Family
from sparge.evaluate.family_inputs import Draw, Inputs

FOLDER = Path(__file__).parents[3] / "tests" / "data"
"""In a checkout; an installed package has none."""


@dataclass(frozen=True)
class Recorded:
    """Calls of one model.

    Attributes:
        file: its name in `FOLDER`.
        sizes: of every call, as `Family.make` takes them.
        is_causal: whether the calls were.
        limits: for each call, named by its layer, and by its step if it has one.
    """

    file: str
    sizes: dict[str, int]
    is_causal: bool
    limits: dict[str, float]


RECORDED = {
    "smollm2": Recorded(
        "smollm2_qkv.safetensors",
        {"q_len": 512, "kv_len": 1024, "heads": 3, "head_dim": 64, "kv_heads": 1},
        is_causal=True,
        limits={"1": 0.03, "18": 0.04, "27": 0.025},
    ),
    "tiny-video": Recorded(
        "tiny_video_qkv.safetensors",
        {"q_len": 1024, "kv_len": 5120, "heads": 1, "head_dim": 128, "kv_heads": 1},
        is_causal=False,
        limits={"1-4": 0.0053, "3-15": 0.02},
    ),
}
"""Limits lie up to a quarter above what was measured: to notice a change, not derived.

SmolLM2, on an H200: .0251, .0339, .0203. Layer 18 has most, because its rows weigh few keys, and logits reach 30 nats.
The video model, by the reference: .0043, .0161; in the second rows weigh four keys."""


def captured_names() -> tuple[str, ...]:
    """Of all families that are recorded, whether their files are here or not."""
    return tuple(f"{model}-{call}" for model, recorded in RECORDED.items() for call in recorded.limits)


def recorded_of(name: str) -> Recorded | None:
    """What the family of this name was recorded with; None for one that was not."""
    return next((recorded for model, recorded in RECORDED.items() if name.startswith(f"{model}-")), None)


def captured_families(folder: Path = FOLDER) -> tuple[Family, ...]:
    """One family for each recorded call, of exactly its sizes (fewer queries: the last ones); none without the files.

    Example:
        >>> [family.name for family in captured_families()]
        ['smollm2-1', 'smollm2-18', 'smollm2-27', 'tiny-video-1-4', 'tiny-video-3-15']
    """
    families = []
    for model, recorded in RECORDED.items():
        calls = load(folder / recorded.file) if (folder / recorded.file).exists() else []
        for call in calls:
            place = _place(call)
            draw = partial(_recorded, call=call, sizes=recorded.sizes)
            families.append(
                Family(f"{model}-{place}", "captured", draw, recorded.limits[place], may_be_causal=recorded.is_causal)
            )
    return tuple(families)


def layer_number(call: Captured) -> int:
    """18 of 'model.layers.18.self_attn'."""
    found = re.search(r"\.(\d+)\.", call.layer)
    assert found, call.layer
    return int(found[1])


def _place(call: Captured) -> str:
    """'18', and '4-12' of layer 4 at step 12."""
    return f"{layer_number(call)}" if call.step is None else f"{layer_number(call)}-{call.step}"


def _recorded(draw: Draw, call: Captured, sizes: dict[str, int]) -> Inputs:
    given = {name: getattr(draw, name) for name in sizes}
    if given != {**sizes, "q_len": draw.q_len} or draw.q_len > sizes["q_len"]:
        raise ValueError(f"expected the recorded sizes {sizes} or fewer queries, got {given}")
    query, key, value = (tensor.to(draw.device).float() for tensor in (call.query, call.key, call.value))
    return query[:, :, -draw.q_len :], key, value
