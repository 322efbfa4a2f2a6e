"""A tiny model for every class of diffusers that attends to what it denoises, and why the others have none."""

from families import controlnets, others, pictures, unets, videos

PARTS = (pictures, videos, unets, controlnets, others)
FAMILIES = {name: build for part in PARTS for name, build in part.FAMILIES.items()}
"""By class, with a variant behind a comma."""
WITHOUT = {name: reason for part in PARTS for name, reason in part.WITHOUT.items()}


def class_of(name: str) -> str:
    """The class of a family."""
    return name.partition(",")[0]
