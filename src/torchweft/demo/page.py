"""One HTML file that needs nothing else: text, tables, pictures inside, light and dark."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from torchweft.errors import BackendError

__all__ = [
    "Chapter",
    "cards",
    "code",
    "figure",
    "formula",
    "make_folder",
    "page",
    "paragraph",
    "require_matplotlib",
    "table",
    "times",
]


class Chapter(NamedTuple):
    """One family at work."""

    family: str
    title: str
    blocks: tuple[str, ...]  # HTML, from the functions below


def page(
    title: str, lead: str, chapters: Sequence[Chapter], facts: Sequence[tuple[str, str]]
) -> str:
    """The whole page; `facts` say what it was made with."""
    body = "".join(
        f'<section><p class="family">{escape(c.family)}</p><h2>{escape(c.title)}</h2>'
        f"{''.join(c.blocks)}</section>"
        for c in chapters
    )
    made = "".join(f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p>{escape(lead)}</p></header>{body}"
        f"<footer><h3>Made with</h3><dl>{made}</dl></footer></main></body></html>\n"
    )


def paragraph(text: str) -> str:
    """Text; what stands between backticks is code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", f"<p>{escape(text)}</p>")


def formula(html: str) -> str:
    """A line of mathematics, given as HTML."""
    return f'<div class="formula">{html}</div>'


def cards(numbers: Sequence[tuple[str, str]]) -> str:
    """(number, what it is), in large letters; the last one stands out."""
    inner = "".join(f"<div><b>{escape(n)}</b><span>{escape(w)}</span></div>" for n, w in numbers)
    return f'<div class="cards">{inner}</div>'


def figure(png: bytes, caption: str) -> str:
    """A picture, carried inside the page."""
    data = base64.b64encode(png).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(caption)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]], best: int = -1) -> str:
    """A table whose first column is words and whose others are numbers; row `best` stands out."""
    titles = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr{' class=best' if number == best else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for number, row in enumerate(rows)
    )
    return (
        f'<div class="table"><table><caption>{escape(caption)}</caption>'
        f"<thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def times(caption: str, found: Mapping[str, Mapping[str, float]]) -> str:
    """Milliseconds of "torchweft" and "torch", and how many times faster, a row a task."""
    rows = [
        (
            what,
            f"{ms['torchweft']:.1f}",
            f"{ms['torch']:.1f}",
            f"{ms['torch'] / ms['torchweft']:.2f} ×",
        )
        for what, ms in found.items()
    ]
    return table(caption, ["milliseconds", "torchweft", "plain torch", "ratio"], rows)


def code(text: str) -> str:
    """Text of fixed width."""
    return f"<pre>{escape(text)}</pre>"


_STYLE = """
:root { color-scheme: light dark; --ground: #fbfaf8; --text: #22262b; --soft: #6a727b;
  --line: #e2dfd9; --panel: #f3f1ec; --accent: #b8481a; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --text: #e4e2de; --soft: #98a0a8;
  --line: #30343a; --panel: #1e2126; --accent: #f08a55; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 17px/1.6 "Charter", "Iowan Old Style", "Source Serif 4", Georgia, serif; }
main { max-width: 940px; margin: 0 auto; padding: 56px 28px 72px; }
h1, h2, h3, .family, .cards, table, figcaption, dl, header p {
  font-family: system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 40px; line-height: 1.1; letter-spacing: -0.02em; margin: 0 0 10px; }
header p { color: var(--soft); font-size: 18px; margin: 0; max-width: 44em; }
section { margin-top: 52px; border-top: 1px solid var(--line); padding-top: 30px; }
.family { margin: 0; color: var(--accent); font-weight: 650; font-size: 14px;
  letter-spacing: 0.04em; }
h2 { font-size: 27px; line-height: 1.2; letter-spacing: -0.01em; margin: 4px 0 14px; }
h3 { font-size: 15px; margin: 0 0 10px; }
p { max-width: 42em; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 26px 0; }
.cards div { background: var(--panel); border-radius: 10px; padding: 16px 18px; }
.cards b { display: block; font-size: 28px; line-height: 1.15; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 14px; line-height: 1.35; display: block;
  margin-top: 4px; }
.cards div:last-child b { color: var(--accent); }
.formula { background: var(--panel); border-radius: 10px; padding: 18px 24px; margin: 24px 0;
  font-size: 19px; line-height: 1.7; overflow-x: auto; white-space: nowrap; }
figure { margin: 30px 0; }
img { width: 100%; display: block; }
figcaption { color: var(--soft); font-size: 14px; line-height: 1.45; margin-top: 8px; }
.table { overflow-x: auto; margin: 30px 0; }
table { border-collapse: collapse; width: 100%; font-size: 15px; line-height: 1.4;
  font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); font-size: 14px; padding-bottom: 8px; }
th, td { text-align: right; padding: 7px 0 7px 20px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: 13px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
.best td { font-weight: 650; color: var(--accent); }
code { font-size: 0.85em; }
pre, code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { background: var(--panel); border-radius: 10px; padding: 16px 20px; overflow-x: auto;
  font-size: 13px; line-height: 1.5; }
footer { margin-top: 56px; border-top: 1px solid var(--line); padding-top: 26px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 24px; margin: 0;
  font-size: 14px; }
dt { color: var(--soft); }
dd { margin: 0; }
"""


def require_matplotlib() -> None:
    """Raise unless matplotlib is installed.

    Raises:
        BackendError: it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BackendError(
            "matplotlib is not installed: pages take their pictures from it, and the demo its "
            "elevation model. Run pip install matplotlib ase rich scipy."
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
