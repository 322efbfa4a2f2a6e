"""An HTML parser that checks that pages are well-formed and self-contained, and extracts their text."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Parse a page and collect its tags, addresses and text. Fail on an element that is closed out of order."""

    VOID = frozenset({"meta", "br", "hr", "img", "link", "input"})

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        names = ("src", "href", "xlink:href", "srcset", "data")
        self.addresses += [value or "" for name, value in attrs if name in names]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def check(self) -> None:
        """Check that the page is well-formed and loads no external files."""
        assert self.open == []
        assert "http" not in self.source and "@import" not in self.source and "xmlns" not in self.source
        assert not self.tags & {"script", "link", "iframe", "object", "embed"}
        assert all(address.startswith(("data:image/", "#")) for address in self.addresses)
        assert all(address.startswith(("data:image/", "#")) for address in re.findall(r"url\(([^)]*)\)", self.source))
        assert not re.findall(r"#abcd\w\w", self.source), "no placeholder color is left"
        assert "{{" not in self.source and "{%" not in self.source
