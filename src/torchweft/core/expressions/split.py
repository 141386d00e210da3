"""Programs cut at their sums over the features, for rows that are longer than a tile.

    s = Σ_f e(x)          one program for all sums of a level
    z = e'(x, s)          the rest, which reads them as an input of one number a row

No part needs more of a row than the tile it works on: sums over features are outputs alone, which
tiles share, as sums over rows are outputs that rows share.
"""

from __future__ import annotations

import functools
import itertools

from torchweft.core.expressions.expr import Expr, reachable
from torchweft.core.expressions.hoist import rebuilt
from torchweft.core.expressions.program import Operand, Output, Program

__all__ = ["split"]

FEATURES = {"feature"}


@functools.lru_cache(maxsize=256)
def split(program: Program) -> tuple[Program, ...]:
    """The parts, in order: each reads the program's inputs, then the results of those before."""
    found: list[Program] = []
    while sums := _first_sums(program):
        operand = Operand(_free(program), len(sums), ("row",))
        results = (Output(operand, sums),)
        found.append(Program(f"{program.key} | sums", program.inputs, results))
        roots = [e for output in program.outputs for e in output.components]
        new = rebuilt(roots, dict(zip(sums, operand.leaves(), strict=True)))
        outputs = tuple(
            Output(output.operand, tuple(new[e] for e in output.components))
            for output in program.outputs
        )
        program = Program(f"{program.key} | rest", (*program.inputs, operand), outputs)
    return (*found, program)


def _first_sums(program: Program) -> tuple[Expr, ...]:
    """The sums over features that wait for no other."""
    waits: set[Expr] = set()
    sums = []
    for node in reachable(e for output in program.outputs for e in output.components):
        late = not waits.isdisjoint(node.args)
        if node.kind == "total" and node.data == FEATURES and not late:
            sums.append(node)
        if late or (node.kind == "total" and node.data == FEATURES):
            waits.add(node)
    return tuple(sums)


def _free(program: Program) -> str:
    """A name that no operand of the program has."""
    taken = {o.name for o in (*program.inputs, *(output.operand for output in program.outputs))}
    return next(name for n in itertools.count(1) if (name := "s" * n) not in taken)
