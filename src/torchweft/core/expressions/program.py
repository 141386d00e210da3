"""Programs: operands in, expressions of them out; their derivatives, and their values in torch.

An operator that runs programs is closed under differentiation: the gradient of a call is a call, to
any order.  A program is identified by its key, a string that says how it was derived:

    "chain 1,1,1 | vjp 101 1"     gradients by inputs 0 and 2, the cotangent of output 0 given
    "chain 1,1,1 | jvp 10"        the change of the outputs along a tangent of input 0

`run` evaluates a program in plain torch, on any device, over chunks of rows that stay in cache.  A
row's results depend on that row alone and sums over rows are added chunk by chunk, so a chunk is a
program on fewer rows.  Values are (rows, features), of length 1 where they are constant; they are
freed after their last use.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchweft.core.expressions.expr import (
    FUNCTIONS,
    SHRINK,
    SLOTS,
    Expr,
    Form,
    gradients,
    leaf,
    operands_of,
    reachable,
)

__all__ = [
    "CHUNK",
    "Operand",
    "Output",
    "Program",
    "accumulator",
    "derive",
    "evaluate",
    "jvp",
    "lengths",
    "mask",
    "run",
    "vjp",
]


T = TypeVar("T")


class Operand(NamedTuple):
    """A tensor of a program: (components, *lengths of its axes).

    Args:
        name: a Python identifier that does not end with a digit.
        size: number of components.
        axes: the named axes after the components, in order.
    """

    name: str
    size: int
    axes: tuple[str, ...]

    def leaves(self) -> tuple[Expr, ...]:
        """The expressions of its components."""
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

    def roots(self) -> tuple[Expr, ...]:
        """The components of all outputs."""
        return tuple(e for output in self.outputs for e in output.components)

    def used(self) -> set[str]:
        """The names of the inputs that some output depends on."""
        return {node.data[0] for node in reachable(self.roots()) if node.kind == "leaf"}

    def reads(self) -> tuple[bool, ...]:
        """For each input, whether some output depends on it."""
        names = self.used()
        return tuple(operand.name in names for operand in self.inputs)

    def steps(self) -> int:
        """Number of sums and products."""
        return sum(node.kind in ("add", "mul") for node in reachable(self.roots()))


def mask(flags: Sequence[bool]) -> str:
    """True and False as "1" and "0"."""
    return "".join("1" if flag else "0" for flag in flags)


def vjp(program: Program, needed: str, given: str) -> Program:
    """The gradients of Σ ⟨cotangent, output⟩ with respect to the inputs marked in `needed`.

    Inputs are those of the program, then the cotangents of the outputs marked in `given`.
    """
    every = _pullback(program, given)
    key = f"{program.key} | vjp {needed} {given}"
    return Program(key, every.inputs, tuple(_marked(every.outputs, needed)))


@functools.lru_cache(maxsize=64)
def _pullback(program: Program, given: str) -> Program:
    """The gradients with respect to all inputs, which cost no more than those of one."""
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

    Inputs are those of the program, then the tangents.  A gradient is linear in its cotangent: the
    derivative of ⟨tangent, gradient⟩ with respect to the cotangent is the change.
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
    """The program with a key; `root` returns programs that are not derived from another."""
    source, bar, step = key.rpartition(" | ")
    if not bar:
        return root(key)
    program = derive(source, root)
    rule, *flags = step.split(" ")
    return vjp(program, *flags) if rule == "vjp" else jvp(program, *flags)


def _marked(items: Sequence[T], flags: str) -> list[T]:
    return [item for item, flag in zip(items, flags, strict=True) if flag == "1"]


def _named(prefix: str, program: Program, operands: Sequence[Operand]) -> list[Operand]:
    """Operands like these under new names, a prefix and a letter."""
    taken = {operand.name for operand in program.inputs}
    names = (f"{prefix}{letter}" for letter in string.ascii_lowercase)
    free = (name for name in names if name not in taken)
    return [operand._replace(name=next(free)) for operand in operands]


CHUNK = 2**12
"""Rows times features evaluated together: below the size from which torch splits a sum among
threads, so that the bits do not depend on their number."""

Value = Tensor | float

_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "normal_cdf": lambda x: 0.5 * torch.erfc(x * -math.sqrt(0.5)),
    "sigmoid": torch.sigmoid,
    "reciprocal": torch.reciprocal,
    "sqrt": torch.sqrt,
    "rsqrt": lambda x: torch.where(x == 0, 0, x.rsqrt()),
    "shrunk_square": lambda x: (x * SHRINK).square(),
    "abs": torch.abs,
    "shrunk": lambda x: x * SHRINK,
    "twice_shrunk": lambda x: x * (2 * SHRINK**2),
    "sign": torch.sign,
}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which programs compute."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def lengths(program: Program, inputs: Sequence[Tensor]) -> dict[str, int]:
    """The length of each axis."""
    found: dict[str, int] = {}
    for operand, tensor in zip(program.inputs, inputs, strict=True):
        found.update(zip(operand.axes, tensor.shape[1:], strict=True))
    return found


def run(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs, contiguous, in the dtype of the inputs, to which they are rounded once."""
    dtype, size = inputs[0].dtype, lengths(program, inputs)
    wide = accumulator(dtype)
    rows, features = size["row"], size["feature"]
    at_once = max(1, CHUNK // max(features, 1))
    outputs = [
        inputs[0].new_zeros((o.operand.size, *(size[axis] for axis in o.operand.axes)), dtype=wide)
        for o in program.outputs
    ]
    named = list(zip(program.inputs, inputs, strict=True))
    for first in range(0, rows if features else 0, at_once):
        chunk = slice(first, min(first + at_once, rows))
        leaves = {
            operand.name: (t[:, chunk] if "row" in operand.axes else t[:, None]).to(wide)
            for operand, t in named
        }
        found = iter(evaluate(_roots(program), leaves, size))
        for output, result in zip(program.outputs, outputs, strict=True):
            by_row = "row" in output.operand.axes
            for component in range(output.operand.size):
                value = next(found)
                if by_row:
                    result[component, chunk] = value
                else:
                    result[component] += value[0] if isinstance(value, Tensor) else value
    return [result.to(dtype) for result in outputs]


@functools.lru_cache(maxsize=1024)
def _roots(program: Program) -> tuple[Expr, ...]:
    return program.roots()


def evaluate(
    outputs: Sequence[Expr], leaves: Mapping[str, Tensor], size: Mapping[str, int]
) -> list[Value]:
    """The values of expressions at all positions.

    Args:
        outputs: the expressions.
        leaves: the operands by name, (components, rows or 1, features).
        size: the length of each axis, for expressions that count.
    """
    steps = _steps(tuple(outputs))
    values: list[Any] = [None] * steps.size
    values[0] = next(iter(leaves.values()), None)
    for place, number in steps.numbers:
        values[place] = number
    for place, axis in steps.axes:
        values[place] = float(size[axis])
    for place, operand, components in steps.leaves:
        values[place] = leaves[operand][components]
    value_of = values.__getitem__
    for place, function, args, last_used in steps.calls:
        values[place] = function(*map(value_of, args))
        for arg in last_used:
            values[arg] = None
    return list(map(value_of, steps.outputs))


class _Steps(NamedTuple):
    """Expressions as calls on a list of values; the first value is any operand.

    Args:
        size: number of values.
        numbers: (place, value) of each constant.
        axes: (place, axis) of each expression that counts.
        leaves: (place, operand, component or slice of components).
        calls: (place, function, places of its arguments, places that no later call uses).
        outputs: places of the results.
    """

    size: int
    numbers: list[tuple[int, float]]
    axes: list[tuple[int, str]]
    leaves: list[tuple[int, str, int | slice]]
    calls: list[tuple[int, Callable[..., Value], tuple[int, ...], list[int]]]
    outputs: list[int]


@functools.lru_cache(maxsize=1024)
def _steps(outputs: tuple[Expr, ...]) -> _Steps:
    steps = _Steps(0, [], [], [], [], [])
    places: dict[Any, int] = {None: 0}
    for node in reachable(outputs):
        if node.kind == "const":
            steps.numbers.append((_place(node, steps, places), float(node.data)))
        elif node.kind == "count":
            steps.axes.append((_place(node, steps, places), node.data))
        elif node.kind == "form":
            form, slot, _ = node.data
            operands = zip(SLOTS, operands_of(node), strict=True)
            given = [o for name, o in operands if name != slot and o is not None]
            args = [_operand_place(components, steps, places) for components in given]
            _add_call(node, functools.partial(_contract, form, slot), args, steps, places)
        elif node.kind != "leaf":  # leaves are read where they are arguments
            args = [_place(arg, steps, places) for arg in node.args]
            _add_call(node, _function(node), args, steps, places)
    steps.outputs.extend(_place(e, steps, places) for e in outputs)
    used = set(steps.outputs)
    for _, _, places_of_args, last_used in reversed(steps.calls):
        last_used.extend(sorted(set(places_of_args) - used))
        used.update(places_of_args)
    return steps._replace(size=len(places))


def _place(node: Expr, steps: _Steps, places: dict[Any, int]) -> int:
    """The place of a node's value; a leaf is read at its first use."""
    if node not in places and node.kind == "leaf":
        steps.leaves.append((len(places), *node.data))
    return places.setdefault(node, len(places))


def _operand_place(components: tuple[Expr, ...], steps: _Steps, places: dict[Any, int]) -> int:
    """The place of (components, rows or 1, features or 1): a whole operand is not copied."""
    if components[0].kind == "leaf":
        name, count = components[0].data[0], len(components)
        if [e.data for e in components] == [(name, c) for c in range(count)]:
            if (name, count) not in places:
                steps.leaves.append((len(places), name, slice(count)))
            return places.setdefault((name, count), len(places))
    args = [0, *(_place(e, steps, places) for e in components)]
    return _add_call(object(), _stack, args, steps, places)


def _add_call(
    key: object,
    function: Callable[..., Value],
    args: Sequence[int],
    steps: _Steps,
    places: dict[Any, int],
) -> int:
    place = places.setdefault(key, len(places))
    steps.calls.append((place, function, tuple(args), []))
    return place


def _function(node: Expr) -> Callable[..., Value]:
    """The function that computes a node from its arguments."""
    if node.kind == "add":
        return operator.add if len(node.args) == 2 else _sum
    if node.kind == "mul":
        return operator.mul
    if node.kind == "total":
        dims = [{"row": 0, "feature": 1}[axis] for axis in sorted(node.data)]
        return operator.methodcaller("sum", dims, keepdim=True)
    if node.kind == "part":
        return operator.itemgetter(node.data)
    return functools.partial(_apply, node.kind)


def _sum(*terms: Value) -> Value:
    return functools.reduce(operator.add, terms)


def _apply(name: str, arg: Value) -> Value:
    return _TORCH[name](arg) if isinstance(arg, Tensor) else FUNCTIONS[name].value(arg)


def _stack(like: Tensor, *values: Value) -> Tensor:
    """(components, rows or 1, features or 1)."""
    tensors = [torch.as_tensor(v, dtype=like.dtype, device=like.device) for v in values]
    return torch.stack(torch.broadcast_tensors(*tensors))  # type: ignore[no-untyped-call]


class _Group(NamedTuple):
    """The terms with one component of the first factor, by target.

    Args:
        component: component of the first factor.
        coefficients: (terms, 1, 1).
        indices: the components of each term in the other factors.
        targets: the component to which each term is added.
        runs: (target, begin, end) of each target's terms.
    """

    component: int
    coefficients: Tensor
    indices: tuple[Tensor, ...]
    targets: Tensor
    runs: tuple[tuple[int, int, int], ...]


def _contract(form: Form, slot: str, *factors: Tensor) -> Tensor:
    """∂Q/∂slot, a component of the first factor at a time: few operations however many terms."""
    first, *others = factors
    shape = torch.broadcast_shapes(*(f.shape[1:] for f in factors))  # type: ignore[no-untyped-call]
    out = first.new_zeros(form.sizes[SLOTS.index(slot)], *shape)
    for group in _groups(form, slot, first.dtype, first.device):
        terms = group.coefficients
        selected = map(torch.index_select, others, itertools.repeat(0), group.indices)
        for factor in sorted(selected, key=Tensor.numel):
            terms = factor * terms
        own = first[group.component]
        if len(group.targets) == len(group.runs) == len(out):
            out.addcmul_(terms, own)
        elif len(group.targets) == len(group.runs):  # each target has one term: no order to choose
            out.index_add_(0, group.targets, (terms * own).expand(-1, *shape))
        else:
            terms = terms * own
            for target, begin, end in group.runs:
                out[target] += terms[begin:end].sum(0)
    return out


@functools.lru_cache(maxsize=256)
def _groups(form: Form, slot: str, dtype: torch.dtype, device: torch.device) -> list[_Group]:
    at = SLOTS.index(slot)
    first, *others = (i for i, name in enumerate(SLOTS) if name in form.slots and i != at)
    by_first: dict[int, list[tuple[float, ...]]] = {}
    for term in sorted(form.terms, key=lambda term: term[1 + at]):
        by_first.setdefault(int(term[1 + first]), []).append(term)
    groups = []
    for component, terms in by_first.items():
        coefficients, *columns = zip(*terms, strict=True)
        index = [torch.tensor(column, device=device) for column in columns]
        targets = columns[at]
        starts = {t: targets.index(t) for t in dict.fromkeys(targets)}
        runs = tuple((t, start, start + targets.count(t)) for t, start in starts.items())
        factors = torch.tensor(coefficients, dtype=dtype, device=device)[:, None, None]
        groups.append(_Group(component, factors, tuple(index[i] for i in others), index[at], runs))
    return groups
