"""Lines of source that assign scalar expressions to names, and how Triton spells functions."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from torchweft.core.expressions.expr import Expr, leaf, reachable
from torchweft.core.expressions.program import Operand, Output, Program
from torchweft.core.expressions.rewrite import rebuilt
from torchweft.core.printing.dialect import Dialect
from torchweft.core.printing.schedule import schedule
from torchweft.reductions.formula.lowering import operand
from torchweft.reductions.formula.node import Node

__all__ = ["FORMATS", "assign", "assigned", "loads", "text"]

FORMATS = {
    "same": "({})",
    "plus": "({} + {})",
    "exp2": "tl.exp2({})",
    "log": "tl.log({})",
    "cos": "tl.cos({})",
    "sin": "tl.sin({})",
    "asin": "asin({})",
    "acos": "acos({})",
    "atan": "atan({})",
    "sqrt": "tl.sqrt({})",
    "rsqrt": "tl.rsqrt(tl.where({0} == 0, float('inf'), {0}))",
    "reciprocal": "(1.0 / {})",
    "abs": "tl.abs({})",
    "sign": "(({0} > 0).to(NUMBER) - ({0} < 0).to(NUMBER))",
    "floor": "tl.floor({})",
    "round": "nearest({})",
    "step": "({} >= 0).to(NUMBER)",
    "xlogx": "xlogx({})",
    "sinxdivx": "sinxdivx({})",
    "divide": "({} / {})",
    "power": "power({}, {}, NUMBER)",
    "atan2": "atan2({}, {})",
    "equal": "({} == {}).to(NUMBER)",
    "less": "({} < {}).to(NUMBER)",
    "less_equal": "({} <= {}).to(NUMBER)",
    "ifelse": "tl.where({} >= 0, {}, {})",
}
"""How Triton spells functions; NUMBER is the dtype of a formula."""


def text(e: Expr) -> str:
    """The name of a leaf, or a number."""
    return "{}{}".format(*e.data) if e.kind == "leaf" else repr(e.data)


def assigned(expressions: Iterable[Expr], dialect: Dialect) -> tuple[list[str], list[str]]:
    """The lines that compute expressions, and the name or number of each of them."""
    wanted = list(expressions)
    # emit gives a name to what varies with something alone
    free = [e for e in reachable(wanted) if e.kind == "leaf" and not e.axes]
    found = rebuilt(wanted, {e: leaf(e.data[0], e.data[1], {"i"}) for e in free})
    computed = [found[e] for e in wanted if found[e].kind not in ("leaf", "const")]
    output = Output(Operand("z", len(computed), ("row",)), tuple(computed))
    steps, (result,) = schedule(Program("", (), (output,)))
    lines = [line for step in steps for line in step.lines(dialect)]
    names = dict(zip(computed, result.names, strict=True))
    return lines, [names.get(found[e]) or text(found[e]) for e in wanted]


def assign(part: Iterable[tuple[Expr, Expr]], dialect: Dialect) -> Iterator[str]:
    """The lines that compute expressions and give them the names of leaves."""
    targets, expressions = [a for a, _ in part], [e for _, e in part]
    lines, names = assigned(expressions, dialect)
    yield from lines
    yield from (f"{text(a)} = {name}" for a, name in zip(targets, names, strict=True))


def loads(
    variables: Iterable[Node],
    cat: int,
    expressions: Iterable[Expr],
    at: str,
    number: str,
    apart: Container[int] = (),
) -> Iterator[str]:
    """The lines that load those components of variables of a category that expressions read.

    Args:
        variables: of any category.
        cat: the category.
        expressions: what is computed.
        at: the index of a row or column; of a parameter "".
        number: the dtype, as a kernel names it.
        apart: the indices of variables that are stored by component.
    """
    leaves = {e.data for e in reachable(expressions) if e.kind == "leaf"}
    for v in variables:
        index, dim, own = v.data
        for c in range(dim):
            if own == cat and (operand(index), c) in leaves:
                place = f"{at} * {dim} + {c}" if at else f"{c}"
                if index in apart:
                    place = f"{c} * v{index}_pitch + {'lanes' if cat == 1 else at}"
                yield f"v{index}_{c} = tl.load(v{index}_ptr + {place}).to({number})"
