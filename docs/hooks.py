"""mkdocs hooks that adapt the repository's Markdown to the site: pages outside docs/, links that leave it, formulas.

The same files are rendered by a code host and on the site. On the site, a link to a file of the repository, such as
``../src/sparge/api.py``, becomes a link below ``repo_url`` of mkdocs.yml, or plain text without a ``repo_url``.
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
"""Pages of the site whose files are outside docs/."""

SOURCES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"```.*?```|`[^`\n]*`|(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)", re.DOTALL)
"""A link or image (three groups), or code (no group matches)."""
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
    uri = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(uri, f"docs/{uri}"))

    def resolve_link(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if target is None:
            return match[0]
        path, _, anchor = target.partition("#")
        if not path or ":" in path:
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith("../"):  # a badge of the code host
            return ""
        page_uri = PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if page_uri is None:
            repository = config.repo_url
            return f"[{label}]({repository.rstrip('/')}/blob/main/{path})" if repository else label
        shown = posixpath.relpath(page_uri, posixpath.dirname(uri) or ".")
        return f"{image}[{label}]({shown}{'#' if anchor else ''}{anchor})"

    def resolve_image(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2])).removeprefix("docs/")
        return f'{match[1]}="{posixpath.relpath(path, posixpath.dirname(uri) or ".")}"'

    return IMAGE_SOURCE.sub(resolve_image, LINK.sub(resolve_link, markdown))


def on_page_content(html: str, **_: Any) -> str:
    """Render formulas as MathML, and let images follow the theme's switch."""

    def to_mathml(match: re.Match[str]) -> str:
        text = match[2].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        return convert(text, display="block" if match[1] == "div" else "inline")

    html = PICTURE.sub(r'<img \2src="\3#only-light"><img \2src="\1#only-dark">', html)
    return FORMULA.sub(to_mathml, html)


class ExampleSections(griffe.Extension):
    """Rename the section "Example:" of this library's docstrings to "Examples:", which the parser supports."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
