"""Tiny models of all diffusers classes that attend to their latents, and the reasons why other classes have none."""

from families import controlnets, images, others, unets, videos
from families.family import Tiny

PARTS = (images, videos, unets, controlnets, others)
FAMILIES = {name: family for part in PARTS for name, family in part.FAMILIES.items()}
"""Rows by class name; the name of a variant follows a comma."""
WITHOUT = {name: reason for part in PARTS for name, reason in part.WITHOUT.items()}


def class_of(name: str) -> str:
    """Return the class name in the name of a row."""
    return name.partition(",")[0]


def build(name: str) -> Tiny:
    """Return the model and the inputs of a row."""
    return FAMILIES[name].build(class_of(name))
