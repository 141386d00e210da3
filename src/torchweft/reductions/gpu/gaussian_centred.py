"""Gaussian-like sums over points near each other: half the operations, less a tile's centre.

    g |u − v|² = α + ⟨X, w⟩ + β      t = u − m, w = v − m, X = −2 g t, α = g |t|², β = g |w|²

for the mean m of the u of a tile of rows.  So with p = 2^(⟨X, w⟩ + β), where X and α are of rows, w
and β of columns, and exponentials are powers of 2,

    Σ_j exp(g |u − v|²) r c = 2^α r Σ_j p c,    with a factor u − v:  2^α r (t Σ_j p c − Σ_j p c w)

An error of float32 in ⟨X, w⟩ and β is one of √|exponent| + 2 √|α| squared, so α is bounded: else
the differences of the plain kernel serve the tile.  Columns past the end of an interval have the
weight 0, so the last tile of one is like the others; each tile's columns are prefetched one tile
ahead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchweft.core.expressions.expr import Expr, add, apply, const, leaf, multiply, reachable
from torchweft.core.expressions.rewrite import rebuilt
from torchweft.core.printing.dialect import Dialect, indented
from torchweft.core.printing.kernel import Frame
from torchweft.reductions.formula.kernel_forms import Moments, Term, moments
from torchweft.reductions.formula.lowering import (
    Components,
    assign,
    assigned,
    loads,
    operand,
    scalars,
    separated,
    text,
)
from torchweft.reductions.formula.node import Node, is_zero

__all__ = ["BLOCKS", "ZEROS", "CentredPrinter", "Near", "centred"]

LARGEST_ALPHA, LARGEST_ALPHA_OF_MOMENTS = 4.0, 0.5
"""Largest |α| of a tile, as a power of 2; t Σ p c − Σ p c w loses digits as t grows (H200: with 4.0
cells two widths of the kernel wide had 1.24 times the error that the bound of plain sums allows,
with 1.0 1.18 times)."""

MOST_CENTRED_COORDINATES = 8
"""Coordinates that rows keep in registers."""

MOST_CENTRED_SUMS = 5

FAR = 3e38
"""|β| of columns whose exponential is 0, or no number, whatever the row."""

BLOCKS = ("BLOCK_M: tl.constexpr", "BLOCK_N: tl.constexpr", "TILES: tl.constexpr")
"""The last parameters of a kernel."""

ZEROS = "tl.zeros([BLOCK_M, LANES], TOTAL)"

LEFT = leaf("left", 0, {"j"})
"""Columns behind this one: less than 0 past the end of an interval."""


class Near(NamedTuple):
    """The expressions of a tile.

    Args:
        points: the coordinates of a row, whose mean is the centre.
        spread: |α|, of a row and the centre.
        turned: whether a result takes t Σ p c − Σ p c w.
        terms: summands of pairs.
        results: components of the result, of the sums and a row.
    """

    points: Components
    spread: Expr
    turned: bool
    terms: Components
    results: Components

    @property
    def limit(self) -> float:
        """Largest spread."""
        return LARGEST_ALPHA_OF_MOMENTS if self.turned else LARGEST_ALPHA


@functools.lru_cache(maxsize=256)
def centred(f: Node, first: int, last: int) -> Near | None:
    """The components first to last of a formula; None if it is of another kind, or too long."""
    found = moments(f)
    if found is None or found.exponent.left.dim > MOST_CENTRED_COORDINATES:
        return None
    if not (is_zero(found.exponent.rows) and is_zero(found.exponent.columns)):
        return None
    made = _near(found, first, last)
    return made if len(made.terms) <= MOST_CENTRED_SUMS else None


def _near(of: Moments, first: int, last: int) -> Near:
    e = of.exponent
    points, others = scalars(e.left), scalars(e.right)
    centre = [leaf("m", c, ()) for c in range(len(points))]
    g = multiply(const(1 / math.log(2)), *scalars(e.factor))
    t = [u - m for u, m in zip(points, centre, strict=True)]
    w = [v - m for v, m in zip(others, centre, strict=True)]
    alpha, beta = (multiply(g, add(*(multiply(a, a) for a in p))) for p in (t, w))
    bounded = apply("ifelse", LEFT, const(FAR) - apply("abs", beta), const(-1))
    w = [apply("ifelse", bounded, a, const(0)) for a in w]
    x = [apply("same", multiply(const(-2), g, a)) for a in t]
    products = [multiply(*pair) for pair in zip(x, w, strict=True)]
    power = apply("exp2", add(_inside(beta), *products))
    if g.kind == "const" and g.data:  # rows then keep x alone
        t = [multiply(const(-0.5 / g.data), a) for a in x]
        alpha = multiply(const(0.25 / g.data), add(*(multiply(a, a) for a in x)))
    sums: dict[Expr, Expr] = {}

    def sum_of(columns: Expr) -> Expr:
        """Σ_j p · columns."""
        term = multiply(apply("same", columns), power)
        return sums.setdefault(term, leaf("sum", len(sums), {"i"}))

    results, places = [], _places(of)[first:last]
    for term, k in places:
        rows, columns = (_component(scalars(n), k) for n in (term.rows, term.columns))
        value = sum_of(_inside(columns))
        if term.sign:
            turned = sum_of(multiply(_inside(columns), w[k]))
            value = multiply(const(term.sign), multiply(t[k], value) - turned)
        results.append(multiply(value, rows, apply("exp2", alpha)))
    signed = any(term.sign for term, _ in places)
    return Near(points, apply("abs", alpha), signed, tuple(sums), tuple(results))


def _inside(columns: Expr) -> Expr:
    """An expression of columns, 0 past the end of an interval."""
    return apply("ifelse", LEFT, columns, const(0))


def _component(of: Components, k: int) -> Expr:
    return of[k if len(of) > 1 else 0]


def _places(of: Moments) -> list[tuple[Term, int]]:
    """The term of each component of the result, and the component of the term."""
    found = []
    for term in of.terms:
        own = of.exponent.left.dim if term.sign else 1
        found += [(term, k) for k in range(max(own, term.rows.dim, term.columns.dim))]
    return found


class CentredPrinter:
    """The functions of a kernel that serve such tiles.

    Args:
        near: what they compute.
        variables: the variables that the kernel reads, none stored by component.
        dialect: how functions are spelled.
        frame: the language of the kernel.
        bounds: the lines that say which columns of interval q are the task's; none where there is
            one interval.
    """

    def __init__(
        self,
        near: Near,
        variables: Sequence[Node],
        dialect: Dialect,
        frame: Frame,
        bounds: Sequence[str],
    ) -> None:
        self.near, self.dialect, self.frame, self.bounds = near, dialect, frame, bounds
        self.sums = range(len(near.terms))
        self.parts = separated(near.terms)
        self.rows = (*self.parts.constant, *self.parts.rows)
        found = rebuilt(near.results, {e: a for a, e in self.parts.rows})
        self.outcome = [found[e] for e in near.results]
        self.columns = [v for v in variables if v.data[2] == 1]
        self.centre = [f"m{c}" for c in range(len(near.points))]
        every = reachable([*near.terms, near.spread, *near.results])
        read = {operand(v.data[0]) for v in variables}
        leaves = [e for e in every if e.kind == "leaf" and e.data[0] in read]
        self.given = [text(e) for e in leaves if "j" not in e.axes]
        self.loaded = [text(e) for e in leaves if "j" in e.axes]
        pointers = [f"v{v.data[0]}_ptr" for v in self.columns]
        # which columns the task has
        task = ["begin", "end"]
        if bounds:
            whats = ("interval", "place")
            task = ["intervals_ptr", *(f"{end}_{w}" for w in whats for end in ("first", "last"))]
        self.arguments = [*self.given, *self.centre, *pointers, *task]
        # of near_pairs: results of rows, parameters, the centre, columns
        computed = [*self.parts.pairs, *(e for _, e in self.parts.columns)]
        leaves = [e for e in reachable(computed) if e.kind == "leaf" and "j" not in e.axes]
        self.passed = [*(text(e) for e in leaves), *self.loaded]

    def functions(self) -> Iterator[str]:
        """A tile's centre, its columns, the terms of its pairs, and their sums."""
        pointers = [f"v{v.data[0]}_ptr" for v in self.columns]
        loaded = loads(self.columns, 1, self.near.terms, "j", "NUMBER")
        columns = [line.replace(").to", ", mask=j < left, other=0).to") for line in loaded]
        lines, names = assigned(self.parts.pairs, self.dialect)
        pairs = [*assign(self.parts.columns, self.dialect), *lines, f"return {', '.join(names)}"]
        columns.append(f"return {', '.join(self.loaded)}")
        function = self.frame.function
        yield from function("centre", [*self.given, "count", BLOCKS[0]], self._centre())
        yield from function("near_columns", [*pointers, "j", "left"], columns)
        yield from function("near_pairs", [*self.passed, "left0"], pairs)
        yield from function("near_sums", [*self.arguments, *BLOCKS], self._sums())

    def choice(self, others: int) -> Iterator[str]:
        """Lines up to the branch of other tiles, which have `others` totals."""
        # a task without rows has a centre all the same
        yield "count = tl.maximum(tl.minimum(last_row - first_row, BLOCK_M), 1).to(tl.int32)"
        centre = f"centre({', '.join([*self.given, 'count', 'BLOCK_M'])})"
        yield f"{', '.join([*self.centre, 'spread'])} = {centre}"
        arguments = ", ".join([*self.arguments, "BLOCK_M", "BLOCK_N", "TILES"])
        yield f"inside = spread <= {self.near.limit}"
        yield "if inside:"
        yield f"    {self._totals()} = near_sums({arguments})"
        yield from (f"    total{n} = {ZEROS}" for n in range(len(self.sums), others))
        yield "else:"
        yield from (f"    total{n} = {ZEROS}" for n in range(others, len(self.sums)))

    def results(self, others: int) -> Iterator[str]:
        """Results of such tiles; `others` is the number of sums of other tiles."""
        for n in self.sums[others:]:
            yield f"sum{n} = tl.sum(total{n}, 1)[None, :, None]"
        yield from assign(self.rows, self.dialect)
        lines, names = assigned(self.outcome, self.dialect)
        yield from lines
        for e, name in enumerate(names):
            yield f"result{e} = tl.where(inside, {name}, result{e})"

    def _totals(self) -> str:
        return ", ".join(f"total{n}" for n in self.sums)

    def _centre(self) -> Iterator[str]:
        lines, names = assigned(self.near.points, self.dialect)
        yield from lines
        # rows past the last stand for it and would draw the mean to it
        yield "there = tl.arange(0, BLOCK_M)[None, :, None] < count"
        for m, name in zip(self.centre, names, strict=True):
            yield f"{m} = tl.sum(tl.where(there, {name}, 0.0), 1)[:, None, :] / count"
        lines, (spread,) = assigned([self.near.spread], self.dialect)
        yield from lines
        yield f"return {', '.join([*self.centre, f'tl.max({spread})'])}"

    def _sums(self) -> Iterator[str]:
        yield from assign(self.rows, self.dialect)
        yield from (f"total{n} = {ZEROS}" for n in self.sums)
        inside = [
            "lanes = tl.arange(0, BLOCK_N // LANES)[:, None, None] * LANES",
            # one lane would add up the first columns of all intervals
            "turned = tl.arange(0, LANES) - (begin % LANES).to(tl.int32)",
            "lanes = lanes + (turned & (LANES - 1))[None, None, :]",
            *self._load("", "begin"),
            "for block in range(begin, end, TILES * BLOCK_N):",
            *indented(f"part{n} = {ZEROS}" for n in self.sums),
            "    block_end = tl.minimum(block + TILES * BLOCK_N, end)",
            "    for start in range(block, block_end, BLOCK_N):",
            *indented(self._tile(), 2),
            *indented(f"total{n} += part{n}" for n in self.sums),
        ]
        if self.bounds:
            yield "for q in range(first_interval, last_interval):"
            inside = list(indented([*self.bounds, *inside]))
        yield from inside
        yield f"return {self._totals()}"

    def _load(self, prefix: str, start: str) -> Iterator[str]:
        names = ", ".join(prefix + name for name in self.loaded)
        pointers = [f"v{v.data[0]}_ptr + ({start}) * {v.dim}" for v in self.columns]
        yield f"left = (end - ({start})).to(tl.int32)"
        yield f"{names} = near_columns({', '.join(pointers)}, lanes, left)"

    def _tile(self) -> Iterator[str]:
        yield from self._load("next_", "start + BLOCK_N")
        names = ", ".join(f"f{n}" for n in self.sums)
        passed = ", ".join([*self.passed, "left + BLOCK_N - 1 - lanes"])
        yield f"{names} = near_pairs({passed})"
        yield from (f"part{n} += tl.sum(f{n}, 0)" for n in self.sums)
        yield from (f"{name} = next_{name}" for name in self.loaded)
