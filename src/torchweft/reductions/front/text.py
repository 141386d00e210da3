"""Formulas as people read them: "exp(-sqdist(x0, y1) / p2)", x of i, y of j, p parameters."""

from __future__ import annotations

from torchweft.reductions.formula.node import PRIMITIVES, Node, read
from torchweft.reductions.front.traced import Formula

__all__ = ["shown"]

LONGEST = 300
"""Characters of a text; one that is longer is cut."""


def shown(f: Formula) -> str:
    """The formula in ordinary notation, cut where it is long."""
    text, _ = _shown(read(f) if isinstance(f, str) else f, {})
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _shown(f: Node, found: dict[Node, tuple[str, int]]) -> tuple[str, int]:
    """The text, and how strongly it binds; what occurs again and again is written once."""
    if f not in found:
        text, strength = _written(f, [_shown(a, found) for a in f.args])
        # what is cut in the end anyway must not double at each operation
        found[f] = text[: LONGEST + 1], strength
    return found[f]


def _written(f: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
    if f.op == "var":
        index, _, cat = f.data
        return f"{'xyp'[cat]}{index}", 4
    if f.op == "const":
        return f"{f.data:g}" if isinstance(f.data, int | float) else str(f.data), 4
    if (infix := PRIMITIVES[f.op].sign) is not None:
        sign, strength = infix
        (a, weak), (b, other) = args
        left = f"({a})" if weak < strength else a
        right = f"({b})" if other <= strength else b
        return f"{left} {sign} {right}", strength
    if f.op == "neg":
        ((a, weak),) = args
        return f"-({a})" if weak < 2 else f"-{a}", 2
    data = [] if f.data is None else [str(f.data)]
    return f"{f.op}({', '.join([*(a for a, _ in args), *data])})", 4
