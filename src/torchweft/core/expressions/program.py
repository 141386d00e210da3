"""Programs: named operands in, expressions of them out, and their derivatives as programs again.

One operator that runs programs is therefore closed under differentiation: the gradient of a call is
a call, to any order.  A program is known by its key, a string that says how it was derived:

    "chain 1,1,1 | vjp 101 1"     gradients by inputs 0 and 2, the cotangent of output 0 given
    "chain 1,1,1 | jvp 10"        the change of the outputs along a tangent of input 0
"""

from __future__ import annotations

import functools
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from torchweft.core.expressions.expr import Expr, gradients, leaf, reachable

__all__ = ["Operand", "Output", "Program", "derive", "jvp", "mask", "vjp"]


T = TypeVar("T")


class Operand(NamedTuple):
    """A tensor of a program: (components, *lengths of its axes).

    Args:
        name: a Python identifier that does not end with a digit.
        size: how many components.
        axes: the named axes behind the components, in order.
    """

    name: str
    size: int
    axes: tuple[str, ...]

    def leaves(self) -> tuple[Expr, ...]:
        """Its components."""
        return tuple(leaf(self.name, c, self.axes) for c in range(self.size))


class Output(NamedTuple):
    """A result: the operand it becomes, and the expression of each component."""

    operand: Operand
    components: tuple[Expr, ...]


class Program(NamedTuple):
    """output components = expressions of the inputs' components, at every position of the axes."""

    key: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Output, ...]

    def used(self) -> set[str]:
        """The names of the inputs that some output depends on."""
        nodes = reachable(e for output in self.outputs for e in output.components)
        return {node.data[0] for node in nodes if node.kind == "leaf"}

    def reads(self) -> tuple[bool, ...]:
        """Which inputs these are."""
        names = self.used()
        return tuple(operand.name in names for operand in self.inputs)

    def steps(self) -> int:
        """Sums and products."""
        every = (e for output in self.outputs for e in output.components)
        return sum(node.kind in ("add", "mul") for node in reachable(every))


def mask(flags: Sequence[bool]) -> str:
    """True and False as "1" and "0"."""
    return "".join("1" if flag else "0" for flag in flags)


def vjp(program: Program, needed: str, given: str) -> Program:
    """The gradients of Σ ⟨cotangent, output⟩ by the inputs marked in `needed`.

    Its inputs are those of the program, then the cotangents of the outputs marked in `given`.
    """
    every = _pullback(program, given)
    key = f"{program.key} | vjp {needed} {given}"
    return Program(key, every.inputs, tuple(_marked(every.outputs, needed)))


@functools.lru_cache(maxsize=64)
def _pullback(program: Program, given: str) -> Program:
    """The gradients by all inputs, which cost no more than those by one."""
    shown = _marked(program.outputs, given)
    cotangents = _named("g", program, [output.operand for output in shown])
    outputs = [e for output in shown for e in output.components]
    directions = [e for cotangent in cotangents for e in cotangent.leaves()]
    leaves = [e for operand in program.inputs for e in operand.leaves()]
    found = iter(gradients(outputs, directions, leaves))
    results = tuple(
        Output(
            operand._replace(name=f"d{operand.name}"),
            tuple(next(found) for _ in range(operand.size)),
        )
        for operand in program.inputs
    )
    return Program("", (*program.inputs, *cotangents), results)


def jvp(program: Program, given: str) -> Program:
    """The change of every output along tangents of the inputs marked in `given`.

    Its inputs are those of the program, then the tangents.  A derivative is linear in its
    cotangent: the gradient, by the cotangent, of ⟨tangent, gradient⟩ is the change.
    """
    tangents = _named("v", program, _marked(program.inputs, given))
    turned = vjp(program, given, "1" * len(program.outputs))
    cotangents = turned.inputs[len(program.inputs) :]
    pulled = [e for output in turned.outputs for e in output.components]
    directions = [e for tangent in tangents for e in tangent.leaves()]
    found = iter(gradients(pulled, directions, [e for o in cotangents for e in o.leaves()]))
    results = tuple(
        Output(output.operand, tuple(next(found) for _ in output.components))
        for output in program.outputs
    )
    return Program(f"{program.key} | jvp {given}", (*program.inputs, *tangents), results)


def derive(key: str, root: Callable[[str], Program]) -> Program:
    """The program with a key; `root` gives those that are not derived from another."""
    source, bar, step = key.rpartition(" | ")
    if not bar:
        return root(key)
    program = derive(source, root)
    rule, *flags = step.split(" ")
    return vjp(program, *flags) if rule == "vjp" else jvp(program, *flags)


def _marked(items: Sequence[T], flags: str) -> list[T]:
    return [item for item, flag in zip(items, flags, strict=True) if flag == "1"]


def _named(prefix: str, program: Program, operands: Sequence[Operand]) -> list[Operand]:
    """Operands like these, with names that no input has: prefix and a letter."""
    taken = {operand.name for operand in program.inputs}
    names = (f"{prefix}{letter}" for letter in string.ascii_lowercase)
    free = (name for name in names if name not in taken)
    return [operand._replace(name=next(free)) for operand in operands]
