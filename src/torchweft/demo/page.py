"""One HTML file that needs nothing else: text, code, tables, pictures inside, light and dark."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from torchweft.demo.style import STYLE
from torchweft.errors import BackendError

__all__ = [
    "NARROW",
    "SHORT",
    "WIDE",
    "Chapter",
    "cards",
    "code",
    "details",
    "documentation",
    "figure",
    "formula",
    "leads",
    "make_folder",
    "page",
    "paragraph",
    "ratio",
    "require_matplotlib",
    "table",
    "times",
]

WIDE, NARROW = 8.4, 3.7  # inches of a picture on a desk and on a phone
OURS = "torchweft"
SHORT = " On so few points the times below are mostly those of the calls, not of the sums."


class Chapter(NamedTuple):
    """A section of a page, with its line in the table of contents."""

    family: str
    title: str
    blocks: tuple[str, ...]  # HTML, from the functions below


def page(
    title: str, lead: str, chapters: Sequence[Chapter], facts: Sequence[tuple[str, str]]
) -> str:
    """The whole page; `facts` say what it was made with."""
    body = "".join(
        f'<section id="{_anchor(c)}"><p class="family">{escape(c.family)}</p>'
        f"<h2>{escape(c.title)}</h2>{''.join(c.blocks)}</section>"
        for c in chapters
    )
    contents = "".join(
        f'<li><a href="#{_anchor(c)}">{escape(c.title)}</a> <span>{escape(c.family)}</span></li>'
        for c in chapters
    )
    made = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(lead)}</p></header>"
        f"<nav><h3>Contents</h3><ol>{contents}</ol></nav>{body}"
        f"<footer><h3>Made with</h3><dl>{made}</dl></footer></main></body></html>\n"
    )


def _anchor(chapter: Chapter) -> str:
    return re.sub(r"\W+", "-", chapter.family.lower())


def paragraph(text: str) -> str:
    """Text; what stands between backticks is code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", f"<p>{escape(text)}</p>")


def formula(html: str) -> str:
    """A line of mathematics, given as HTML."""
    return f'<div class="formula">{html}</div>'


def cards(numbers: Sequence[tuple[str, str]]) -> str:
    """(number, what it is), in large letters; the last one stands out."""
    inner = "".join(f"<div><b>{escape(n)}</b><span>{escape(w)}</span></div>" for n, w in numbers)
    columns = len(numbers) if len(numbers) < 6 else (len(numbers) + 1) // 2
    return f'<div class="cards" style="--columns: {columns}">{inner}</div>'


def figure(draw: Callable[[float], bytes], caption: str) -> str:
    """A picture for wide and one for narrow screens, both carried inside the page.

    Args:
        draw: a PNG file of so many inches width.
        caption: below it.
    """
    wide, narrow = (_data(draw(width)) for width in (WIDE, NARROW))
    return (
        f'<figure><picture><source media="(max-width: 640px)" srcset="{narrow}">'
        f'<img src="{wide}" alt="{escape(caption)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _data(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], best: int = -1) -> str:
    """A table whose first column is words and whose others are numbers; row `best` stands out."""
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr{' class=best' if number == best else ''}>"
        + "".join(f"<td>{escape(_number(cell))}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="table"><figcaption>{escape(caption)}</figcaption><div class="scroll">'
        f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div></div>"
    )


def _number(cell: str) -> str:
    """With a minus that no line ends at."""
    return re.sub(r"(?<=\de)-", "−", cell)


def times(caption: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """Milliseconds of torchweft and of other libraries, with their time over ours; a row a task."""
    others = [*dict.fromkeys(name for ms in found.values() for name in ms if name != OURS)]
    rows = []
    for what, ms in found.items():
        cells = (f"{ms[o]:.1f} ({ratio(ms[o], ms[OURS])})" if o in ms else "–" for o in others)
        rows.append((what, f"{ms[OURS]:.1f}", *cells))
    caption += " In brackets: the time over that of torchweft."
    return table(caption, ["milliseconds", OURS, *others], rows)


def ratio(theirs: float, ours: float) -> str:
    """How many times as long another way takes."""
    digits = 1 if theirs >= ours else 2
    return f"{theirs / ours:.{digits}f}\N{NO-BREAK SPACE}×"


def leads(found: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """Cards: the time of the first other library over ours, for each task of `times`."""
    first = {what: next(name for name in ms if name != OURS) for what, ms in found.items()}
    return [
        (
            ratio(found[what][other], found[what][OURS]),
            f"{what}: time of {other} / time of torchweft",
        )
        for what, other in first.items()
    ]


def details(summary: str, *blocks: str) -> str:
    """Blocks that are folded away until a reader opens them."""
    return f"<details><summary>{escape(summary)}</summary>{''.join(blocks)}</details>"


def code(text: str) -> str:
    """Text of fixed width."""
    return f"<pre>{escape(text)}</pre>"


def documentation(pages: Mapping[str, str]) -> str:
    """Links to pages of the documentation, by what they are; without a checkout, their names."""
    root = Path(__file__).resolve().parents[3] / "docs"
    found = []
    for what, name in pages.items():
        built, text = root / f"_build/html/{name}.html", root / f"{name}.md"
        path = built if built.is_file() else text
        link = f'<a href="{path.as_uri()}">{escape(what)}</a>'
        found.append(link if path.is_file() else f"{escape(what)} (docs/{name}.md)")
    return f'<p class="more">Read more: {" · ".join(found)}</p>'


def require_matplotlib() -> None:
    """Raise unless matplotlib is installed.

    Raises:
        BackendError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(
            "matplotlib is not installed: the pictures are drawn with it. Run pip install "
            "'torchweft[demo]', for all that the commands demo and inspect need."
        )


def make_folder(out: Path) -> None:
    """The folder of a page, made before the work, which a wrong name would cost.

    Raises:
        NotADirectoryError: it cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        writable = os.access(out, os.W_OK)
        reason = "it may not be written"
    except OSError as error:
        writable, reason = False, str(error.strerror).lower()
    if not writable:
        raise NotADirectoryError(
            f"--out is {out}: a folder for the page is needed, and {reason}. Pass another --out."
        )
