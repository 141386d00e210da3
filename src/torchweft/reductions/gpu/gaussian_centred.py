"""Gaussian-like sums over points near each other: half the operations, less a tile's centre.

    g |u − v|² = α + ⟨X, w⟩ + β      t = u − m, w = v − m, X = −2 g t, α = g |t|², β = g |w|²

for the mean m of the u of a tile of rows.  So with p = 2^(⟨X, w⟩ + β), where X and α are of rows, w
and β of columns, and exponentials are powers of 2,

    Σ_j exp(g |u − v|²) r c = 2^α r Σ_j p c,      with u − v more:  2^α r (t Σ_j p c − Σ_j p c w)

An error of float32 in ⟨X, w⟩ and β is one of √|exponent| + 2 √|α| squared, so α is bounded: else
the differences of the plain kernel serve the tile.  Columns past the end of an interval have the
weight 0, so the last tile of one is like the others; each tile's columns are loaded one tile ahead.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchweft.core.expressions.expr import Expr, add, apply, const, leaf, multiply, reachable
from torchweft.core.expressions.rewrite import rebuilt
from torchweft.core.printing.dialect import Dialect, indented
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

__all__ = ["Near", "Printer", "near"]

LIMIT, LIMIT_OF_MOMENTS = 4.0, 0.5
"""|α| of a tile, in powers of 2; t Σ p c − Σ p c w loses digits as t grows (H200: cells two widths
of the kernel wide had 1.24 times the error that twice the noise of plain sums allows, 1.18 times
with 1.0; their tiles take differences now)."""

WIDEST = 8
"""Coordinates that rows keep in registers."""

MOST = 5
"""Sums that a kernel keeps."""

FAR = 3e38
"""|β| of columns whose exponential is 0, or no number, whatever the row."""

ZEROS = "tl.zeros([BLOCK_M, LANES], TOTAL)"

LEFT = leaf("left", 0, {"j"})
"""Columns behind this one: less than 0 past the end of an interval."""


class Near(NamedTuple):
    """What is computed for a tile.

    Args:
        points: the coordinates of a row, whose mean is the centre.
        spread: |α|, of a row and the centre.
        turned: whether a result takes t Σ p c − Σ p c w.
        terms: what is summed.
        results: components of the result, of the sums and a row.
    """

    points: Components
    spread: Expr
    turned: bool
    terms: Components
    results: Components

    @property
    def limit(self) -> float:
        """Of the spread."""
        return LIMIT_OF_MOMENTS if self.turned else LIMIT


@functools.lru_cache(maxsize=256)
def near(f: Node, first: int, last: int) -> Near | None:
    """The components first to last of a formula; None if it is of another kind, or too long."""
    found = moments(f)
    if found is None or found.exponent.left.dim > WIDEST:
        return None
    if not (is_zero(found.exponent.rows) and is_zero(found.exponent.columns)):
        return None
    made = _Made(found, first, last)
    return made.near if len(made.sums) <= MOST else None


class _Made:
    """The expressions of a formula."""

    def __init__(self, of: Moments, first: int, last: int) -> None:
        e = of.exponent
        points, others = scalars(e.left), scalars(e.right)
        centre = [leaf("m", c, ()) for c in range(len(points))]
        g = multiply(const(1 / math.log(2)), *scalars(e.factor))
        t = [u - m for u, m in zip(points, centre, strict=True)]
        w = [v - m for v, m in zip(others, centre, strict=True)]
        alpha, beta = (multiply(g, add(*(multiply(a, a) for a in p))) for p in (t, w))
        bounded = apply("ifelse", LEFT, const(FAR) - apply("abs", beta), const(-1))
        self.w = [apply("ifelse", bounded, a, const(0)) for a in w]
        x = [apply("same", multiply(const(-2), g, a)) for a in t]
        products = [multiply(*pair) for pair in zip(x, self.w, strict=True)]
        self.power = apply("exp2", add(_inside(beta), *products))
        self.sums: dict[Expr, Expr] = {}
        if g.kind == "const" and g.data:  # rows then keep x alone
            t = [multiply(const(-0.5 / g.data), a) for a in x]
            alpha = multiply(const(0.25 / g.data), add(*(multiply(a, a) for a in x)))
        results, places = [], _places(of)[first:last]
        for term, k in places:
            rows, columns = (_component(scalars(n), k) for n in (term.rows, term.columns))
            value = self._sum(_inside(columns))
            if term.sign:
                turned = self._sum(multiply(_inside(columns), self.w[k]))
                value = multiply(const(term.sign), multiply(t[k], value) - turned)
            results.append(multiply(value, rows, apply("exp2", alpha)))
        spread = apply("abs", alpha)
        terms, signed = tuple(self.sums), any(term.sign for term, _ in places)
        self.near = Near(points, spread, signed, terms, tuple(results))

    def _sum(self, columns: Expr) -> Expr:
        """Σ_j p · columns."""
        term = multiply(apply("same", columns), self.power)
        return self.sums.setdefault(term, leaf("sum", len(self.sums), {"i"}))


def _inside(columns: Expr) -> Expr:
    """What has no column past the end."""
    return apply("ifelse", LEFT, columns, const(0))


def _component(of: Components, k: int) -> Expr:
    return of[k if len(of) > 1 else 0]


def _places(of: Moments) -> list[tuple[Term, int]]:
    """For each component of the result its term, and its place in that."""
    found = []
    for term in of.terms:
        own = of.exponent.left.dim if term.sign else 1
        found += [(term, k) for k in range(max(own, term.rows.dim, term.columns.dim))]
    return found


class Printer:
    """The functions of a kernel that serve such tiles.

    Args:
        near: what they compute.
        variables: those that the kernel reads, none stored by component.
        dialect: how functions are spelled.
        bounds: the lines that say which columns of interval q are the task's; none where there is
            one interval.
    """

    def __init__(
        self,
        near: Near,
        variables: Sequence[Node],
        dialect: Dialect,
        bounds: Sequence[str],
    ) -> None:
        self.near, self.variables, self.dialect, self.bounds = near, variables, dialect, bounds
        self.parts = separated(near.terms)
        places = {e: a for a, e in self.parts.rows}
        found = rebuilt(near.results, places)
        self.outcome = [found[e] for e in near.results]
        self.columns = [v for v in variables if v.data[2] == 1]
        self.centre = [f"m{c}" for c in range(len(near.points))]
        leaves = [
            e for e in reachable([*near.terms, near.spread, *near.results]) if e.kind == "leaf"
        ]
        read = {operand(v.data[0]) for v in variables}
        self.read = [e for e in leaves if e.data[0] in read and "j" not in e.axes]
        self.loaded = [text(e) for e in leaves if e.data[0] in read and "j" in e.axes]

    def functions(self) -> Iterator[str]:
        """A tile's centre, its columns, the terms of its pairs, and their sums."""
        given = [text(e) for e in self.read]
        yield from _function("centre", [*given, "count", "BLOCK_M: tl.constexpr"], self._centre())
        pointers = [f"v{v.data[0]}_ptr" for v in self.columns]
        yield from _function("near_columns", [*pointers, "j", "left"], self._columns())
        yield from _function("near_pairs", [*self._passed(), "left0"], self._pairs())
        blocks = [f"{name}: tl.constexpr" for name in ("BLOCK_M", "BLOCK_N", "TILES")]
        names = [*given, *self.centre, *pointers, *self._task(), *blocks]
        yield from _function("near_sums", names, self._sums())

    def choice(self, others: int) -> Iterator[str]:
        """Up to the branch for other tiles, which have so many totals and are to be indented."""
        given = [text(e) for e in self.read]
        sums = range(len(self.near.terms))
        # a task without rows has a centre all the same
        yield "count = tl.maximum(tl.minimum(last_row - first_row, BLOCK_M), 1).to(tl.int32)"
        centre = f"centre({', '.join([*given, 'count', 'BLOCK_M'])})"
        yield f"{', '.join([*self.centre, 'spread'])} = {centre}"
        pointers = [f"v{v.data[0]}_ptr" for v in self.columns]
        arguments = [*given, *self.centre, *pointers, *self._task(), "BLOCK_M", "BLOCK_N", "TILES"]
        yield f"inside = spread <= {self.near.limit}"
        yield "if inside:"
        yield f"    {', '.join(f'total{n}' for n in sums)} = near_sums({', '.join(arguments)})"
        yield from (f"    total{n} = {ZEROS}" for n in range(len(sums), others))
        yield "else:"
        yield from (f"    total{n} = {ZEROS}" for n in range(others, len(sums)))

    def results(self, others: int) -> Iterator[str]:
        """Results of such tiles, beside those of others, whose sums are the first ones."""
        for n in range(others, len(self.near.terms)):
            yield f"sum{n} = tl.sum(total{n}, 1)[None, :, None]"
        yield from assign((*self.parts.constant, *self.parts.rows), self.dialect)
        lines, names = assigned(self.outcome, self.dialect)
        yield from lines
        for e, name in enumerate(names):
            yield f"result{e} = tl.where(inside, {name}, result{e})"

    def _task(self) -> list[str]:
        """Which columns there are."""
        if not self.bounds:
            return ["begin", "end"]
        names = [f"{end}_{what}" for what in ("interval", "place") for end in ("first", "last")]
        return ["intervals_ptr", *names]

    def _passed(self) -> list[str]:
        """What pairs are given: results of rows, parameters, the centre, columns."""
        computed = [*self.parts.pairs, *(e for _, e in self.parts.columns)]
        leaves = (e for e in reachable(computed) if e.kind == "leaf" and "j" not in e.axes)
        return [*(text(e) for e in leaves), *self.loaded]

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

    def _columns(self) -> Iterator[str]:
        for line in loads(self.columns, 1, self.near.terms, "j", "NUMBER"):
            yield line.replace(").to", ", mask=j < left, other=0).to")
        yield f"return {', '.join(self.loaded)}"

    def _pairs(self) -> Iterator[str]:
        yield from assign(self.parts.columns, self.dialect)
        lines, names = assigned(self.parts.pairs, self.dialect)
        yield from lines
        yield f"return {', '.join(names)}"

    def _sums(self) -> Iterator[str]:
        yield from assign((*self.parts.constant, *self.parts.rows), self.dialect)
        sums = range(len(self.near.terms))
        yield from (f"total{n} = {ZEROS}" for n in sums)
        inside = [
            "lanes = tl.arange(0, BLOCK_N // LANES)[:, None, None] * LANES",
            # one lane would add up the first columns of all intervals
            "turned = tl.arange(0, LANES) - (begin % LANES).to(tl.int32)",
            "lanes = lanes + (turned & (LANES - 1))[None, None, :]",
            *self._load("", "begin"),
            "for block in range(begin, end, TILES * BLOCK_N):",
            *indented(f"part{n} = {ZEROS}" for n in sums),
            "    block_end = tl.minimum(block + TILES * BLOCK_N, end)",
            "    for start in range(block, block_end, BLOCK_N):",
            *indented(self._tile(), 2),
            *indented(f"total{n} += part{n}" for n in sums),
        ]
        if self.bounds:
            yield "for q in range(first_interval, last_interval):"
            inside = list(indented([*self.bounds, *inside]))
        yield from inside
        yield f"return {', '.join(f'total{n}' for n in sums)}"

    def _load(self, prefix: str, start: str) -> Iterator[str]:
        names = ", ".join(prefix + name for name in self.loaded)
        pointers = [f"v{v.data[0]}_ptr + ({start}) * {v.dim}" for v in self.columns]
        yield f"left = (end - ({start})).to(tl.int32)"
        yield f"{names} = near_columns({', '.join(pointers)}, lanes, left)"

    def _tile(self) -> Iterator[str]:
        yield from self._load("next_", "start + BLOCK_N")
        names = ", ".join(f"f{n}" for n in range(len(self.near.terms)))
        left = "left + BLOCK_N - 1 - lanes"
        yield f"{names} = near_pairs({', '.join([*self._passed(), left])})"
        yield from (f"part{n} += tl.sum(f{n}, 0)" for n in range(len(self.near.terms)))
        yield from (f"{name} = next_{name}" for name in self.loaded)


def _function(name: str, parameters: Sequence[str], body: Iterator[str]) -> Iterator[str]:
    yield from ("", "", "@triton.jit", f"def {name}({', '.join(parameters)}):")
    yield from indented(body)
