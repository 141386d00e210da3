"""A picture of leads: a bar of GPU time and one of wall time for each line of a table."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Lead", "picture"]

LABEL, WIDTH, LINE, HEAD = 380, 380, 28, 34  # pixels
FEWEST, MOST = 0.25, 256.0  # leads at the ends of the axis
COLOURS = {"GPU": "#2a7fba", "wall": "#e0a030"}
GREY = "#777777"


class Lead(NamedTuple):
    """How many times as long the fastest right peer takes, by GPU time and by wall time."""

    label: str
    gpu: float
    wall: float | None


def picture(leads: Sequence[Lead]) -> str:
    """An SVG with a logarithmic axis."""
    height = HEAD + LINE * len(leads) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 60}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    ]
    parts += _axis(height)
    for n, lead in enumerate(leads):
        top = HEAD + n * LINE
        parts.append(_text(LABEL - 8, top + 17, html.escape(lead.label), "end"))
        if lead.wall is None:
            parts += _bar(top + 8, lead.gpu, "GPU")
        else:
            parts += _bar(top + 2, lead.gpu, "GPU") + _bar(top + 14, lead.wall, "wall")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axis(height: int) -> list[str]:
    parts = []
    for power in range(int(math.log2(FEWEST)), int(math.log2(MOST)) + 1):
        x, wide = _place(2.0**power), 2 if power == 0 else 0.5
        parts.append(
            f'<line x1="{x}" x2="{x}" y1="{HEAD - 4}" y2="{height}" stroke="{GREY}" '
            f'stroke-width="{wide}"/>'
        )
        parts.append(_text(x, HEAD - 8, f"{2.0**power:g}", "middle"))
    for n, (name, colour) in enumerate(COLOURS.items()):
        parts.append(f'<rect x="{8 + 60 * n}" y="8" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(24 + 60 * n, 18, name, "start"))
    return parts


def _bar(top: int, lead: float, kind: str) -> list[str]:
    begin, end = sorted((_place(1.0), _place(lead)))
    return [
        f'<rect x="{begin}" y="{top}" width="{end - begin:.1f}" height="10" '
        f'fill="{COLOURS[kind]}"/>',
        _text(max(begin, end) + 4, top + 10, f"{lead:.3g}", "start"),
    ]


def _place(lead: float) -> float:
    part = math.log2(min(max(lead, FEWEST), MOST) / FEWEST) / math.log2(MOST / FEWEST)
    return round(LABEL + WIDTH * part, 1)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" fill="{GREY}" text-anchor="{anchor}">{text}</text>'
