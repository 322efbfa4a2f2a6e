"""mkdocs hooks that adapt the repository's Markdown to the site: pages outside docs/, links that leave it, formulas.

The same files are rendered by a code host and on the site. A link such as ``../src/sparge/api.py`` leads to the file on
the code host. On the site it leads to the file below ``repo_url`` of mkdocs.yml, or becomes plain text without one.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File

PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "comfyui/README.md": "quickstart/comfyui.md",
    "compat/README.md": "compat.md",
    "examples/README.md": "examples.md",
}
"""Files outside docs/ that are pages of the site, and their pages."""

SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"```.*?```|`[^`\n]*`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)", re.DOTALL)
"""A link or image, with three groups; or code, with none."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
IMAGE_SOURCE = re.compile(r'\b(src|srcset)="([^":]+)"')
PICTURE = re.compile(r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*<img ([^>]*?)src="([^"]+)">\s*</picture>')


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live outside docs/."""
    root = os.path.dirname(config.config_file_path)
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=os.path.join(root, source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Make links point to where their targets are on the site."""
    own = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(own, f"docs/{own}"))

    def linked(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if target is None:
            return found[0]
        path, _, place = target.partition("#")
        if not path or ":" in path:
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith("../"):  # a page of the code host, such as a badge
            return ""
        inside = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            repository = config.repo_url
            return f"[{label}]({repository.rstrip('/')}/blob/main/{path})" if repository else label
        shown = posixpath.relpath(inside, posixpath.dirname(own) or ".")
        return f"{image}[{label}]({shown}{'#' if place else ''}{place})"

    def shown_from(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2])).removeprefix("docs/")
        return f'{found[1]}="{posixpath.relpath(path, posixpath.dirname(own) or ".")}"'

    return IMAGE_SOURCE.sub(shown_from, LINK.sub(linked, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Render formulas as MathML, and let images follow the theme's switch."""

    def drawn(found: re.Match[str]) -> str:
        text = found[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        return convert(text, display="block" if found[1] == "div" else "inline")

    html = PICTURE.sub(r'<img \2src="\3#only-light"><img \2src="\1#only-dark">', html)
    return FORMULA.sub(drawn, html)


class ExampleSections(griffe.Extension):
    """Rename the section "Example:" of this library's docstrings to "Examples:", which the parser supports."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
