"""Render self-contained HTML pages from the Jinja2 templates in ``sparge/templates``, which share one stylesheet."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from sparge.evaluate.block_colors import DARK, LIGHT
from sparge.evaluate.variants import spaced

TEMPLATES = Path(__file__).parents[1] / "templates"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(light=LIGHT, dark=DARK, spaced=spaced)
    return environment


def render(template: str, **values: Any) -> str:
    """Return a page as text; all values except `markupsafe.Markup` are escaped."""
    return _environment().get_template(template).render(**values)
