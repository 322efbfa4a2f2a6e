"""A tiny model for every class of diffusers that attends to its latents, and why the other classes have none."""

from families import controlnets, images, others, unets, videos
from families.family import Tiny

PARTS = (images, videos, unets, controlnets, others)
FAMILIES = {name: family for part in PARTS for name, family in part.FAMILIES.items()}
"""Rows by class name; a variant follows a comma."""
WITHOUT = {name: reason for part in PARTS for name, reason in part.WITHOUT.items()}


def class_of(name: str) -> str:
    """Return the class name of a row."""
    return name.partition(",")[0]


def build(name: str) -> Tiny:
    """Return the model and the inputs of a row."""
    return FAMILIES[name].build(class_of(name))
