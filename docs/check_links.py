"""Broken links between pages, and of the README and its kin: `python docs/check_links.py HTML`.

A link is broken whose file is not there, or whose file has no place of that name.  Addresses of
other sites are not asked for.  Prints a line for each broken link; the exit code is their number.
"""

import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).parents[1]
MARKDOWN_LINK = re.compile(r"\]\(([^()\s]+)\)")


class _Page(HTMLParser):
    """The links of a page, and the places that links may name."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name == "id" or (name, tag) == ("name", "a"):
                self.places.add(value or "")


@cache
def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _is_broken(link: str, page: Path) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return False
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.exists():
        return True
    wanted = unquote(parts.fragment)
    return target.suffix == ".html" and wanted not in {"", *_read(target).places}


def broken(html: Path) -> list[str]:
    """A line for each broken link."""
    found = [
        f"{page.relative_to(html)}: {link}"
        for page in sorted(html.rglob("*.html"))
        for link in dict.fromkeys(_read(page).links)
        if _is_broken(link, page)
    ]
    for page in sorted(ROOT.glob("*.md")):
        links = MARKDOWN_LINK.findall(page.read_text(encoding="utf-8"))
        found += [f"{page.name}: {link}" for link in links if _is_broken(link, page)]
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve()
    lines = broken(folder)
    pages = sum(1 for _ in folder.rglob("*.html"))
    print(*lines, f"{pages} pages, {len(lines)} broken links", sep="\n")  # noqa: T201
    sys.exit(min(len(lines), 100))
