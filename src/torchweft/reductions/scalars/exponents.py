"""Gaussian-like formulas: an exponential of a squared distance, times factors of i and of j.

    f_ij = concat of  exp(exponent) · r_i · c_j    and    exp(exponent) · r_i · c_j · (u_i − v_j)

with the exponent g |u_i − v_j|² + a_i + b_j.  The gradients of a sum of such are sums of such.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torchweft.reductions.formula.node import Node, const

__all__ = ["WIDEST", "Exponent", "Moments", "Term", "exponent", "factors", "moments"]

WIDEST = 128
"""Coordinates of a product."""


class Exponent(NamedTuple):
    """g |u − v|² + a + b."""

    factor: Node
    left: Node
    right: Node
    rows: Node
    columns: Node


class Term(NamedTuple):
    """exp(exponent) · rows · columns, if `sign` is not 0 times sign · (u − v)."""

    rows: Node
    columns: Node
    sign: int


class Moments(NamedTuple):
    """A formula: its exponent and the terms that it has one after the other."""

    exponent: Exponent
    terms: tuple[Term, ...]


@functools.lru_cache(maxsize=256)
def moments(f: Node) -> Moments | None:
    """The parts of a formula of several components, if it is of that kind."""
    parts = f.args if f.op == "concat" else (f,)
    found = [_term(part) for part in parts]
    exponentials = {None if t is None else t[0] for t in found}
    one = exponentials.pop()
    if exponentials or one is None or (of := exponent(one.args[0])) is None:
        return None
    terms = []
    for part, t in zip(parts, found, strict=True):
        assert t is not None
        _, rows, columns, difference = t
        ends: dict[tuple[Node, ...], int] = {(of.left, of.right): 1, (of.right, of.left): -1}
        sign = 0 if difference is None else ends.get(difference.args, 0)
        if difference is not None and (not sign or columns.dim > 1):
            return None
        if max(rows.dim, columns.dim, of.left.dim if sign else 1) != part.dim:
            return None
        terms.append(Term(rows, columns, sign))
    return Moments(of, tuple(terms))


def _term(f: Node) -> tuple[Node, Node, Node, Node | None] | None:
    """The exponential, factors of rows, of columns, and the difference of a product."""
    pairs = [n for n in factors(f) if {0, 1} <= n.cats]
    exponentials = [n for n in pairs if n.op == "exp"]
    rest = [n for n in pairs if n.op != "exp"]
    if len(exponentials) != 1 or len(rest) > 1 or any(n.op != "sub" for n in rest):
        return None
    rows, columns = const(1), const(1)
    for n in factors(f):
        if n not in pairs and 1 in n.cats:
            columns = columns * n
        elif n not in pairs:
            rows = rows * n
    return exponentials[0], rows, columns, rest[0] if rest else None


@functools.lru_cache(maxsize=256)
def exponent(f: Node) -> Exponent | None:
    """The parts of an exponent that is a multiple of one |u − v|² and terms of i and of j."""
    found, rows, columns = None, const(0), const(0)
    for factor, term in _terms(f):
        if not {0, 1} <= term.cats:
            if 1 in term.cats:
                columns = columns + factor * term
            else:
                rows = rows + factor * term
            continue
        number, distance = _distance(term)
        if found is not None or distance is None:
            return None
        left, right = distance.args if 0 in distance.args[0].cats else distance.args[::-1]
        if 1 in left.cats or 0 in right.cats or left.dim > WIDEST:
            return None
        found = (const(factor) * number, left, right)
    return None if found is None or f.dim != 1 else Exponent(*found, rows, columns)


def factors(f: Node) -> list[Node]:
    """What a formula is a product of."""
    if f.op == "mul":
        return [n for a in f.args for n in factors(a)]
    return [const(-1), *factors(f.args[0])] if f.op == "neg" else [f]


def _terms(f: Node) -> list[tuple[float, Node]]:
    """Numbers and terms of a sum."""
    if f.op in ("add", "sub"):
        sign = 1 if f.op == "add" else -1
        return [*_terms(f.args[0]), *((sign * c, n) for c, n in _terms(f.args[1]))]
    if f.op == "neg":
        return [(-c, n) for c, n in _terms(f.args[0])]
    if f.op == "mul" and f.args[0].op == "const":
        return [(f.args[0].data * c, n) for c, n in _terms(f.args[1])]
    return [(1.0, f)]


def _distance(term: Node) -> tuple[Node, Node | None]:
    """The factor of parameters, and the squared distance that it multiplies."""
    number, distance = const(1), None
    for n in factors(term):
        if n.op == "sqdist" and distance is None:
            distance = n
        elif n.cats <= {2}:
            number = number * n
        else:
            return number, None
    return number, distance
