"""Printed loops over components, for the inner sums of kernels.

    s = zeros
    for k, two at a time: s += term(u_k of the rows, v_k of the columns) + term(u_k+1, v_k+1)

Sums of one length share a loop and its loads.  Many components are added up by shares, so that in
float32 the error stays that of a dozen additions.  Variables are stored by component, so a
warp loads neighbouring columns, and a thread one value for each of its rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchweft.core.expressions.expr import Expr, leaf, reachable
from torchweft.core.expressions.rewrite import rebuilt
from torchweft.core.printing.dialect import Dialect
from torchweft.reductions.formula.lowering import AXES, operand
from torchweft.reductions.formula.node import Node
from torchweft.reductions.scalars.inner_sums import Inner
from torchweft.reductions.scalars.lines import assigned, text
from torchweft.reductions.scalars.scalars import scalars

__all__ = ["LONGEST", "Loops"]

SHARE = 32
LONGEST = SHARE + 1
"""Components from which float32 adds them up by shares."""

SHAPE = "[BLOCK_N // LANES, BLOCK_M, LANES]"


class Loops:
    """The loops of a kernel's inner sums.

    Args:
        inner: the sums, by their number.
        number: the dtype, as a kernel names it.
        dialect: how functions are spelled.
    """

    def __init__(self, inner: Sequence[Inner], number: str, dialect: Dialect) -> None:
        self.inner, self.number, self.dialect = inner, number, dialect
        self.terms = [_term(s) for s in inner]
        self.variables = {v.data[0]: v for s in inner for v in s.of}

    def leaves(self) -> list[Expr]:
        """What terms read beside components."""
        met = {operand(index) for index in self.variables}
        found = [e for e in reachable(self.terms) if e.kind == "leaf"]
        return [e for e in found if _met(e.data[0]) not in met]

    def pointers(self) -> list[Node]:
        """The variables of rows and parameters that are met component by component."""
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
            yield from (f"s{n} = tl.zeros({SHAPE}, {self.number})" for n in numbers)
            yield from (f"u{v.data[0]}_ptr = v{v.data[0]}_ptr" for v in of)
            shared = dim >= LONGEST and self.number == "tl.float32"
            step = 4 if shared else 2  # by 2 takes few registers, with shares it spills
            whole = dim // step * step
            if not shared:
                yield f"for k in tl.range(0, {whole}, {step}):"
                yield from (f"    {line}" for line in self._some(numbers, of, step, "s"))
            else:
                yield f"for first in tl.range(0, {whole}, {SHARE}):"
                yield from (f"    part{n} = tl.zeros({SHAPE}, {self.number})" for n in numbers)
                yield f"    for k in tl.range(first, min(first + {SHARE}, {whole}), {step}):"
                yield from (f"        {line}" for line in self._some(numbers, of, step, "part"))
                yield from (f"    s{n} += part{n}" for n in numbers)
            yield from self._some(numbers, of, dim - whole, "s")

    def _some(
        self, numbers: Sequence[int], of: Sequence[Node], count: int, target: str
    ) -> Iterator[str]:
        """So many components, two by two."""
        for first in range(0, count, 2):
            pair = range(min(2, count - first))
            for v in of:
                index, _, cat = v.data
                at = (" + tl.arange(0, BLOCK_M)[None, :, None]", " + lanes", "")[cat]
                for k in pair:
                    place = f"u{index}_ptr + {first + k} * {_step(v)}{at}"
                    yield f"u{index}_{k} = tl.load({place}).to({self.number})"
            for n in numbers:
                terms = (f"term{n}({', '.join(_names(self.terms[n], k))})" for k in pair)
                yield f"{target}{n} += {' + '.join(terms)}"
        if count:
            yield from (f"u{v.data[0]}_ptr += {count} * {_step(v)}" for v in of)


def _step(v: Node) -> str:
    """From one component to the next."""
    return "1" if v.data[2] == 2 else f"v{v.data[0]}_pitch"


def _term(s: Inner) -> Expr:
    """The term, with components called u."""
    (term,) = scalars(s.term)
    components = {
        leaf(operand(index), 0, AXES[cat]): leaf(f"u{index}_", 0, AXES[cat])
        for index, _, cat in (v.data for v in s.of)
    }
    return rebuilt([term], components)[term]


def _met(name: str) -> str:
    """The variable of a component's name."""
    return "v" + name[1:] if name.startswith("u") else name


def _names(term: Expr, k: int = 0) -> list[str]:
    """What it reads; of components, the first or second of a pair."""
    leaves = [e for e in reachable([term]) if e.kind == "leaf"]
    return [f"{e.data[0]}{k}" if _met(e.data[0]) != e.data[0] else text(e) for e in leaves]
