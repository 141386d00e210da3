"""Programs rewritten for their backends.

`hoisted`: slow functions of the inputs alone become inputs, which torch computes in vector lanes.
`split`: programs are cut at their sums over the features, for rows that are longer than a tile:

    s = Σ_f e(x)          one program for all sums of a level
    z = e'(x, s)          the remaining program, which reads them as an input of one number a row

No part needs more of a row than the tile it works on: sums over features are outputs only, which
tiles share, as sums over rows are outputs that rows share.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from torchweft.core.expressions.expr import (
    FUNCTIONS,
    Expr,
    add,
    apply,
    contract,
    multiply,
    operands_of,
    reachable,
    total,
)
from torchweft.core.expressions.program import Operand, Output, Program

__all__ = ["Hoisted", "hoisted", "rebuilt", "split"]


HOISTED_FUNCTIONS = ("exp", "normal_cdf", "sigmoid")

HOISTED_AXES = {"hoisted": ("row", "feature"), "shared": ("feature",)}
"""The axes of the additional inputs, by name."""


class Hoisted(NamedTuple):
    """A program whose last inputs are values of expressions of the other inputs.

    Args:
        program: the remaining program.
        values: the components of each additional input.
    """

    program: Program
    values: tuple[tuple[Expr, ...], ...]


@functools.lru_cache(maxsize=256)
def hoisted(program: Program) -> Hoisted:
    """The program with its slow functions of the inputs alone as additional inputs."""
    nodes = reachable(program.roots())
    pointwise: set[Expr] = set()
    for node in nodes:
        simple = node.kind in ("leaf", "const", "count", "add", "mul", *FUNCTIONS)
        if simple and pointwise.issuperset(node.args):
            pointwise.add(node)
    slow = [node for node in nodes if node.kind in HOISTED_FUNCTIONS and node in pointwise]
    operands: list[Operand] = []
    values: list[tuple[Expr, ...]] = []
    replaced: dict[Expr, Expr] = {}
    for name, axes in HOISTED_AXES.items():
        own = tuple(node for node in slow if node.axes == set(axes))
        if own:
            operand = Operand(name, len(own), axes)
            operands.append(operand)
            values.append(own)
            replaced.update(zip(own, operand.leaves(), strict=True))
    if not operands:
        return Hoisted(program, ())
    return Hoisted(_replaced(program, "hoisted", operands, replaced), tuple(values))


def _replaced(
    program: Program, step: str, operands: Iterable[Operand], replaced: dict[Expr, Expr]
) -> Program:
    """The program with additional inputs in place of some nodes."""
    found = rebuilt(program.roots(), replaced)
    outputs = tuple(
        Output(output.operand, tuple(found[e] for e in output.components))
        for output in program.outputs
    )
    return Program(f"{program.key} | {step}", (*program.inputs, *operands), outputs)


def rebuilt(roots: Iterable[Expr], replaced: dict[Expr, Expr]) -> dict[Expr, Expr]:
    """The new node for each node, where some are replaced."""
    found = dict(replaced)
    forms: dict[Expr, tuple[Expr, ...]] = {}
    nodes = reachable(roots)
    owns = [e for node in nodes if node.kind == "form" for e in node.data.own or ()]
    for node in reachable([*owns, *nodes]):
        if node in found:
            continue
        args = [found[arg] for arg in node.args] if node.kind not in ("form", "part") else []
        if node.kind == "form":
            form, slot, _ = node.data
            given = operands_of(node)
            operands = tuple(None if o is None else tuple(found[e] for e in o) for o in given)
            forms[node] = contract(form, slot, operands)
        elif node.kind == "part":
            found[node] = forms[node.args[0]][node.data]
        elif node.kind == "add":
            found[node] = add(*args)
        elif node.kind == "mul":
            found[node] = multiply(*args)
        elif node.kind == "total":
            found[node] = total(args[0], node.data)
        elif node.kind in FUNCTIONS:
            found[node] = apply(node.kind, *args)
        else:
            found[node] = node
    return found


FEATURES = {"feature"}


@functools.lru_cache(maxsize=256)
def split(program: Program) -> tuple[Program, ...]:
    """The parts in order; each reads the program's inputs, then the results of earlier parts."""
    found: list[Program] = []
    while sums := _first_sums(program):
        operand = Operand(_free(program), len(sums), ("row",))
        results = (Output(operand, sums),)
        found.append(Program(f"{program.key} | sums", program.inputs, results))
        replaced = dict(zip(sums, operand.leaves(), strict=True))
        program = _replaced(program, "rest", (operand,), replaced)
    return (*found, program)


def _first_sums(program: Program) -> tuple[Expr, ...]:
    """The sums over features that depend on no other."""
    waits: set[Expr] = set()
    sums = []
    for node in reachable(program.roots()):
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
