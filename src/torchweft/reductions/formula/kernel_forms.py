"""Formulas of the forms that kernels treat in special ways: inner sums, blocks, Gaussians.

Formulas of many components have

    s = Σ_k t(u_k, v_k)    a scalar product, a distance or a sum of more than LONG components
    f_e = g(s, u_e, v_e)   a result of more than BLOCK components, all by the same expression

In a formula the sums become numbers of a pair, computed first; a result is computed in blocks.  So
neither the code nor its compile time grows with either dimension.  What varies with one axis alone
and is computed from long vectors becomes a new variable, computed by torch: the loop over pairs
then reads components of variables only.

`Loops` prints the sums:

    s = zeros
    for k, two at a time: s += term(u_k of the rows, v_k of the columns) + term(u_k+1, v_k+1)

Sums of one length share a loop and its loads.  Sums of many components are added up in shares, so
that in float32 the error stays that of a dozen additions.  Variables are stored component by
component: a warp loads neighbouring columns, and a thread one value for each of its rows and
columns.

Gaussian-like formulas are exponentials of squared distances, times factors of i and of j:

    f_ij = concat of  exp(exponent) · r_i · c_j    and    exp(exponent) · r_i · c_j · (u_i − v_j)

with the exponent g |u_i − v_j|² + a_i + b_j.  Gradients of their sums have the same form.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchweft.core.expressions.expr import Expr, leaf
from torchweft.core.expressions.expr import reachable as reachable_expressions
from torchweft.core.expressions.rewrite import rebuilt
from torchweft.core.printing.dialect import Dialect
from torchweft.reductions.formula.lowering import CATEGORY_AXES, assigned, operand, scalars, text
from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    const,
    expand,
    node,
    reachable,
    substitute,
    var,
    variables,
)

__all__ = [
    "BLOCK",
    "LONG",
    "LONGEST",
    "WIDEST",
    "Exponent",
    "Inner",
    "Looped",
    "Loops",
    "MadeVariable",
    "Moments",
    "Term",
    "exponent",
    "factors",
    "looped",
    "moments",
    "parts",
]

LONG = 16
"""Components of a sum that is printed term by term, and kept in registers."""

BLOCK = 8
"""Components of a result that one program sums."""

SHARE_LENGTH = 32
"""Components that a share adds up in float32."""

LONGEST = SHARE_LENGTH + 1
"""Components from which float32 adds up shares."""

TILE_SHAPE = "[BLOCK_N // LANES, BLOCK_M, LANES]"


class Inner(NamedTuple):
    """Σ_k of a term.

    Args:
        dim: number of components.
        term: component k of the summand, in which the variables of `of` have dimension 1.
        of: the variables that are read component by component.
    """

    dim: int
    term: Node
    of: tuple[Node, ...]


class MadeVariable(NamedTuple):
    """A variable that is computed before the kernel.

    Args:
        number: its index.
        formula: its value.
        blocked: whether a program reads only a block of its components.
    """

    number: int
    formula: Node
    blocked: bool


class Looped(NamedTuple):
    """Formulas with `inner` nodes, each the number of one of the sums.

    Args:
        formulas: the formula and its weight, if any; of the last one, a block of components.
        inner: the sums.
        made: further variables.
        blocks: number of blocks of the result; 0 if it is computed whole.
    """

    formulas: tuple[Node, ...]
    inner: tuple[Inner, ...]
    made: tuple[MadeVariable, ...]
    blocks: int


def parts(f: Node, size: int = BLOCK) -> tuple[Node, ...]:
    """The formula in parts, each of which is computed whole or in blocks."""
    return f.args if f.op == "concat" and any(_in_blocks(a, size) for a in f.args) else (f,)


@functools.lru_cache(maxsize=256)
def looped(*formulas: Node, size: int = BLOCK) -> Looped:
    """Formulas of one kernel as it computes them, the last one in blocks of `size` components."""
    made = _Hoisted(formulas)
    found = [made.hoisted(f) for f in formulas]
    sums = {n: s for f in found for n in reachable(f) if (s := _inner(n, made)) is not None}
    numbered = {n: node("inner", data=number) for number, n in enumerate(sums)}
    found = [substitute(f, numbered) for f in found]
    blocks = 0
    if _in_blocks(found[-1], size):
        blocks = -(-found[-1].dim // size)
        found[-1] = _components(found[-1], size, made)
    return Looped(tuple(found), tuple(sums.values()), tuple(made.found.values()), blocks)


class _Hoisted:
    """The variables that are computed before the kernel of some formulas."""

    def __init__(self, formulas: tuple[Node, ...]) -> None:
        given = [v.data[0] for f in formulas for v in variables(f)]
        self.first = 1 + max(given, default=0)
        self.found: dict[tuple[Node, bool], MadeVariable] = {}

    def made(self, f: Node, size: int = 0) -> Node:
        """The variable that holds f, or a block of `size` of its components."""
        whole = next(
            (m.formula for m in self.found.values() if f.op == "var" and f.data[0] == m.number), f
        )
        key = whole, size > 0
        made = self.found.setdefault(key, MadeVariable(self.first + len(self.found), *key))
        cat = next((cat for cat in (0, 1) if cat in f.cats), 2)
        return var(made.number, size or f.dim, cat)

    def hoisted(self, f: Node) -> Node:
        """f with a variable for each largest part that `_is_made`."""
        replaced = {n: self.made(n) for n in _outermost(f) if _is_made(n)}
        return substitute(f, replaced)


def _outermost(f: Node) -> Iterator[Node]:
    """Nodes from f inwards, without the arguments of those that `_is_made`."""
    stack, seen = [f], {f}
    while stack:
        n = stack.pop()
        yield n
        new = [] if _is_made(n) else [a for a in n.args if a not in seen]
        seen.update(new)
        stack.extend(new)


def _is_made(n: Node) -> bool:
    """Whether it varies with one axis, has long variables, and is at most twice as long."""
    if n.op == "var" or not _of_one_axis(n):
        return False
    longest = max(v.dim for v in variables(n))
    return longest > LONG and n.dim <= 2 * longest


def _of_one_axis(n: Node) -> bool:
    return bool(n.cats) and not {0, 1} <= n.cats


def _inner(n: Node, made: _Hoisted) -> Inner | None:
    """The inner sum of a node, if its components are alike."""
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
    if not _alike(summed, numbers_of_pairs=False):
        return None
    of_rows = [m for m in reachable(summed) if m.dim == 1 and m.op != "var" and _of_one_axis(m)]
    summed = substitute(summed, {m: made.made(m) for m in of_rows})
    of = tuple(v for v in variables(summed) if v.dim > 1)
    return Inner(summed.dim, _components(summed, 1), of)


def _alike(f: Node, numbers_of_pairs: bool) -> bool:
    """Whether all components are one expression of components of variables, and of numbers."""
    if f.dim == 1:
        return numbers_of_pairs or not {0, 1} <= f.cats
    if f.op in ("var", "expand"):
        return True
    return PRIMITIVES[f.op].pointwise and all(_alike(a, numbers_of_pairs) for a in f.args)


def _in_blocks(f: Node, size: int) -> bool:
    """Whether a result is computed in blocks of `size` components."""
    return f.dim > size and bool(f.cats) and _alike(f, numbers_of_pairs=True)


def _components(f: Node, size: int, made: _Hoisted | None = None) -> Node:
    """`size` components of f, read from blocks of variables that are `made`, if given."""
    if f.dim == 1:
        return f
    if f.op == "var":
        return made.made(f, size) if made else var(f.data[0], size, f.data[2])
    if f.op == "expand":
        return expand(f.args[0], size)
    return node(f.op, *(_components(a, size, made) for a in f.args), data=f.data)


class Loops:
    """The loops of a kernel's inner sums.

    Args:
        inner: the sums, by number.
        number: the dtype, as the kernel spells it.
        dialect: how functions are spelled.
    """

    def __init__(self, inner: Sequence[Inner], number: str, dialect: Dialect) -> None:
        self.inner, self.number, self.dialect = inner, number, dialect
        self.terms = [_term(s) for s in inner]
        self.variables = {v.data[0]: v for s in inner for v in s.of}

    def leaves(self) -> list[Expr]:
        """The leaves of terms that are no components."""
        read = {operand(index) for index in self.variables}
        found = [e for e in reachable_expressions(self.terms) if e.kind == "leaf"]
        return [e for e in found if _operand_of(e.data[0]) not in read]

    def pointers(self) -> list[Node]:
        """The variables of rows and parameters that are read component by component."""
        return [v for v in self.variables.values() if v.data[2] != 1]

    def functions(self) -> Iterator[str]:
        """A function for each term."""
        for n, term in enumerate(self.terms):
            lines, (name,) = assigned([term], self.dialect)
            yield ""
            yield ""
            yield "@triton.jit"
            yield f"def term{n}({', '.join(_names(term))}):"
            yield from (f"    {line}" for line in (*lines, f"return {name}"))

    def lines(self) -> Iterator[str]:
        """The loops, inside `pairs`."""
        for dim in dict.fromkeys(s.dim for s in self.inner):
            numbers = [n for n, s in enumerate(self.inner) if s.dim == dim]
            of = list(dict.fromkeys(v for n in numbers for v in self.inner[n].of))
            yield from (f"s{n} = tl.zeros({TILE_SHAPE}, {self.number})" for n in numbers)
            yield from (f"u{v.data[0]}_ptr = v{v.data[0]}_ptr" for v in of)
            shared = dim >= LONGEST and self.number == "tl.float32"
            step = 4 if shared else 2  # by 2 takes few registers, with shares it spills
            whole = dim // step * step
            if not shared:
                yield f"for k in tl.range(0, {whole}, {step}):"
                yield from (f"    {line}" for line in self._step(numbers, of, step, "s"))
            else:
                yield f"for first in tl.range(0, {whole}, {SHARE_LENGTH}):"
                yield from (f"    part{n} = tl.zeros({TILE_SHAPE}, {self.number})" for n in numbers)
                yield f"    for k in tl.range(first, min(first + {SHARE_LENGTH}, {whole}), {step}):"
                yield from (f"        {line}" for line in self._step(numbers, of, step, "part"))
                yield from (f"    s{n} += part{n}" for n in numbers)
            yield from self._step(numbers, of, dim - whole, "s")

    def _step(
        self, numbers: Sequence[int], of: Sequence[Node], count: int, target: str
    ) -> Iterator[str]:
        """The lines of `count` components, two by two."""
        for first in range(0, count, 2):
            pair = range(min(2, count - first))
            for v in of:
                index, _, cat = v.data
                at = (" + tl.arange(0, BLOCK_M)[None, :, None]", " + lanes", "")[cat]
                for k in pair:
                    place = f"u{index}_ptr + {first + k} * {_stride(v)}{at}"
                    yield f"u{index}_{k} = tl.load({place}).to({self.number})"
            for n in numbers:
                terms = (f"term{n}({', '.join(_names(self.terms[n], k))})" for k in pair)
                yield f"{target}{n} += {' + '.join(terms)}"
        if count:
            yield from (f"u{v.data[0]}_ptr += {count} * {_stride(v)}" for v in of)


def _stride(v: Node) -> str:
    """The distance between components."""
    return "1" if v.data[2] == 2 else f"v{v.data[0]}_pitch"


def _term(s: Inner) -> Expr:
    """The term, with components named u."""
    (term,) = scalars(s.term)
    components = {
        leaf(operand(index), 0, CATEGORY_AXES[cat]): leaf(f"u{index}_", 0, CATEGORY_AXES[cat])
        for index, _, cat in (v.data for v in s.of)
    }
    return rebuilt([term], components)[term]


def _operand_of(name: str) -> str:
    """The operand of a component's name."""
    return "v" + name[1:] if name.startswith("u") else name


def _names(term: Expr, k: int = 0) -> list[str]:
    """The names of what a term reads; of components, the first or second of a pair."""
    leaves = [e for e in reachable_expressions([term]) if e.kind == "leaf"]
    return [f"{e.data[0]}{k}" if _operand_of(e.data[0]) != e.data[0] else text(e) for e in leaves]


# Gaussians

WIDEST = 128
"""Most coordinates of u and v."""


class Exponent(NamedTuple):
    """g |u − v|² + a + b."""

    factor: Node
    left: Node
    right: Node
    rows: Node
    columns: Node


class Term(NamedTuple):
    """exp(exponent) · rows · columns, times sign · (u − v) unless `sign` is 0."""

    rows: Node
    columns: Node
    sign: int


class Moments(NamedTuple):
    """The exponent and the concatenated terms of a formula."""

    exponent: Exponent
    terms: tuple[Term, ...]


@functools.lru_cache(maxsize=256)
def moments(f: Node) -> Moments | None:
    """The parts of a Gaussian-like formula, else None."""
    parts = f.args if f.op == "concat" else (f,)
    found = [g for part in parts if (g := _gaussian(part)) is not None]
    exponentials = {exponential for exponential, *_ in found}
    if len(found) < len(parts) or len(exponentials) > 1:
        return None
    if (of := exponent(exponentials.pop().args[0])) is None:
        return None
    terms = []
    for part, (_, rows, columns, difference) in zip(parts, found, strict=True):
        ends: dict[tuple[Node, ...], int] = {(of.left, of.right): 1, (of.right, of.left): -1}
        sign = 0 if difference is None else ends.get(difference.args, 0)
        if difference is not None and (not sign or columns.dim > 1):
            return None
        if max(rows.dim, columns.dim, of.left.dim if sign else 1) != part.dim:
            return None
        terms.append(Term(rows, columns, sign))
    return Moments(of, tuple(terms))


def _gaussian(f: Node) -> tuple[Node, Node, Node, Node | None] | None:
    """The exponential, the factors of rows and of columns, and the difference, of a product."""
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
    """The parts of an exponent: a multiple of one |u − v|², and terms of i or of j; else None."""
    found, rows, columns = None, const(0), const(0)
    for factor, term in _summands(f):
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
    """The factors of a product."""
    if f.op == "mul":
        return [n for a in f.args for n in factors(a)]
    return [const(-1), *factors(f.args[0])] if f.op == "neg" else [f]


def _summands(f: Node) -> list[tuple[float, Node]]:
    """The terms of a sum, as (number, term)."""
    if f.op in ("add", "sub"):
        sign = 1 if f.op == "add" else -1
        return [*_summands(f.args[0]), *((sign * c, n) for c, n in _summands(f.args[1]))]
    if f.op == "neg":
        return [(-c, n) for c, n in _summands(f.args[0])]
    if f.op == "mul" and f.args[0].op == "const":
        return [(f.args[0].data * c, n) for c, n in _summands(f.args[1])]
    return [(1.0, f)]


def _distance(term: Node) -> tuple[Node, Node | None]:
    """The factor of parameters and the squared distance of their product, None if it is another."""
    number, distance = const(1), None
    for n in factors(term):
        if n.op == "sqdist" and distance is None:
            distance = n
        elif n.cats <= {2}:
            number = number * n
        else:
            return number, None
    return number, distance
