"""Formulas of many components as kernels loop over them: inner sums, and results in blocks.

    s = Σ_k t(u_k, v_k)    a scalar product, a distance or a sum of more than LONG components
    f_e = g(s, u_e, v_e)   a result of more than BLOCK components, all by the same expression

In a formula the sums become numbers of a pair, computed first; a result is taken in blocks.  So
neither code nor the time to compile it grows with either dimension.  What varies with one axis
alone and is made of long vectors is a new variable, computed by torch: pairs then meet the
components of variables and of nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    expand,
    node,
    reachable,
    substitute,
    var,
    variables,
)

__all__ = ["BLOCK", "LONG", "Inner", "Looped", "Made", "looped", "parts"]

LONG = 16
"""Components of a sum that is printed term by term, and kept in registers."""

BLOCK = 8
"""Components of a result that one program sums."""


class Inner(NamedTuple):
    """Σ_k of a term.

    Args:
        dim: how many components there are.
        term: one of them, in which the variables of `of` have dimension 1: their component k.
        of: the variables that are met component by component.
    """

    dim: int
    term: Node
    of: tuple[Node, ...]


class Made(NamedTuple):
    """A variable that is computed beforehand.

    Args:
        number: its index.
        formula: of the variables that there are.
        blocked: whether a program takes only a block of its components.
    """

    number: int
    formula: Node
    blocked: bool


class Looped(NamedTuple):
    """Formulas with `inner` nodes, each the number of one of the sums.

    Args:
        formulas: the formula and its weight, if it has one; the last one of a block of components.
        inner: the sums.
        made: further variables.
        blocks: how many blocks the result has, 0 where it is taken whole.
    """

    formulas: tuple[Node, ...]
    inner: tuple[Inner, ...]
    made: tuple[Made, ...]
    blocks: int


def parts(f: Node, size: int = BLOCK) -> tuple[Node, ...]:
    """The formula in parts of which each is taken whole or in blocks."""
    return f.args if f.op == "concat" and any(_in_blocks(a, size) for a in f.args) else (f,)


@functools.lru_cache(maxsize=256)
def looped(*formulas: Node, size: int = BLOCK) -> Looped:
    """Formulas of one kernel, as it computes them; the last one's result is in blocks of a size."""
    made = _MadeOf(formulas)
    found = [made.apart(f) for f in formulas]
    sums = {n: s for f in found for n in reachable(f) if (s := _inner(n, made)) is not None}
    numbered = {n: node("inner", data=number) for number, n in enumerate(sums)}
    found = [substitute(f, numbered) for f in found]
    blocks = 0
    if _in_blocks(found[-1], size):
        blocks = -(-found[-1].dim // size)
        found[-1] = _block(found[-1], made, size)
    return Looped(tuple(found), tuple(sums.values()), tuple(made.found.values()), blocks)


class _MadeOf:
    """The variables that are made of some formulas."""

    def __init__(self, formulas: tuple[Node, ...]) -> None:
        given = [v.data[0] for f in formulas for v in variables(f)]
        self.first = 1 + max(given, default=0)
        self.found: dict[tuple[Node, bool], Made] = {}

    def made(self, f: Node, size: int = 0) -> Node:
        """The variable that holds f, or a block of so many of its components."""
        whole = next(
            (m.formula for m in self.found.values() if f.op == "var" and f.data[0] == m.number), f
        )
        key = whole, size > 0
        made = self.found.setdefault(key, Made(self.first + len(self.found), *key))
        cat = next((cat for cat in (0, 1) if cat in f.cats), 2)
        return var(made.number, size or f.dim, cat)

    def apart(self, f: Node) -> Node:
        """f with the largest parts of one axis that have long variables made."""
        replaced = {n: self.made(n) for n in _outermost(f) if _is_made(n)}
        return substitute(f, replaced)


def _outermost(f: Node) -> Iterator[Node]:
    """Nodes from f inwards, without what is in a part that would be made."""
    stack, seen = [f], {f}
    while stack:
        n = stack.pop()
        yield n
        new = [] if _is_made(n) else [a for a in n.args if a not in seen]
        seen.update(new)
        stack.extend(new)


def _is_made(n: Node) -> bool:
    """Whether it varies with one axis, has long variables, and is not much longer than they are."""
    if n.op == "var" or not _of_one_axis(n):
        return False
    longest = max(v.dim for v in variables(n))
    return longest > LONG and n.dim <= 2 * longest


def _of_one_axis(n: Node) -> bool:
    return bool(n.cats) and not {0, 1} <= n.cats


def _inner(n: Node, made: _MadeOf) -> Inner | None:
    """The sum that a node is, if its components are alike; else None."""
    if not {0, 1} <= n.cats or not n.args or n.args[0].dim <= LONG:
        return None
    if n.op == "sqdist":
        summed = node("pow", node("sub", *n.args), data=2)
    elif n.op == "einsum" and n.data[1] == n.data[3] and not n.data[4]:
        summed = node("mul", *n.args)
    elif n.op == "sum":
        summed = n.args[0]
    else:
        return None
    if not _alike(summed):
        return None
    outside = {m: made.made(m) for m in reachable(summed) if m.dim == 1 and _computed(m)}
    summed = substitute(summed, outside)
    of = tuple(v for v in variables(summed) if v.dim > 1)
    return Inner(summed.dim, _component(summed), of)


def _computed(m: Node) -> bool:
    return m.op != "var" and _of_one_axis(m)


def _alike(f: Node) -> bool:
    """Whether all components are one expression of components, and of numbers of one axis."""
    if f.dim == 1:
        return not {0, 1} <= f.cats
    return f.op in ("var", "expand") or (PRIMITIVES[f.op].pointwise and all(map(_alike, f.args)))


def _component(f: Node) -> Node:
    """One component, in which variables have one."""
    if f.dim == 1:
        return f
    if f.op == "var":
        return var(f.data[0], 1, f.data[2])
    if f.op == "expand":
        return f.args[0]
    return node(f.op, *map(_component, f.args), data=f.data)


def _in_blocks(f: Node, size: int) -> bool:
    """Whether a result is taken in blocks of a size."""
    return f.dim > size and bool(f.cats) and _same_kind(f)


def _same_kind(f: Node) -> bool:
    """Whether all components are one expression of components, and of any numbers."""
    if f.dim == 1 or f.op in ("var", "expand"):
        return True
    return PRIMITIVES[f.op].pointwise and all(map(_same_kind, f.args))


def _block(f: Node, made: _MadeOf, size: int) -> Node:
    """As many of its components."""
    if f.dim == 1:
        return f
    if f.op == "var":
        return made.made(f, size)
    if f.op == "expand":
        return expand(f.args[0], size)
    return node(f.op, *(_block(a, made, size) for a in f.args), data=f.data)
