"""Expressions to source: the steps of a program in order, and their lines in a dialect.

    for step in schedule(program).steps: lines += step.lines(dialect)

A step assigns names: of a scalar expression, of all sums of one level (which are reduced together),
or of all derivatives of a form that are wanted at the same operands.  A kernel adds loads before
the steps and stores after them; its `Dialect` defines the language.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

from torchweft.core.expressions.expr import (
    FUNCTIONS,
    SLOTS,
    Expr,
    add,
    is_zero,
    multiply,
    nonzero_terms,
    operands_of,
)
from torchweft.core.expressions.program import Output, Program
from torchweft.core.printing.dialect import (
    Assign,
    Contract,
    Dialect,
    Result,
    Schedule,
    Step,
    Sums,
    reads,
    signed_sum,
    writes,
)

__all__ = ["schedule"]


@functools.lru_cache(maxsize=64)
def schedule(program: Program) -> Schedule:
    """The steps of a program: shared values once, sums of one level together."""
    return _Scheduler(program).schedule()


class _Scheduler:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.outputs = [_terms(output) for output in program.outputs]
        self.groups: dict[object, list[Expr]] = {}
        self.uses: dict[Expr, int] = {}
        self.levels: dict[int, list[Expr]] = {}
        self.names: dict[Expr, str] = {}
        self.parts: dict[tuple[Expr, int], str] = {}
        self.steps: list[Step] = []
        self.done: set[object] = set()

    def schedule(self) -> Schedule:
        roots = [e for _, components, _ in self.outputs for e in components]
        self._survey(roots)
        for root in roots:
            if not is_zero(root):
                self._visit(root)
        return Schedule(
            tuple(_early(self.steps)),
            tuple(
                Result(name, tuple(None if is_zero(e) else self._name(e) for e in es), summed)
                for name, es, summed in self.outputs
            ),
        )

    def _survey(self, roots: list[Expr]) -> None:
        """Group forms, count uses, sort sums by level."""
        seen = dict.fromkeys(roots)
        for node in (queue := list(seen)):
            for arg in node.args:
                self.uses[arg] = self.uses.get(arg, 0) + 1
                if arg not in seen:
                    seen[arg] = None
                    queue.append(arg)
            if node.kind == "form":
                self.groups.setdefault(_shared(node), []).append(node)
        for root in roots:
            self.uses[root] = self.uses.get(root, 0) + 2  # results have names
        level = functools.cache(self._level)
        self._level_of = level
        for node in seen:
            if node.kind == "total":
                self.levels.setdefault(level(node), []).append(node)

    def _level(self, node: Expr) -> int:
        """The length of the longest chain of sums on which a node depends."""
        below = max((self._level_of(a) for a in self._needs(node)), default=0)
        return below + (node.kind == "total")

    def _needs(self, node: Expr) -> list[Expr]:
        """The nodes that come before it; a form needs all operands of its group."""
        if node.kind != "form":
            return list(node.args)
        return list(dict.fromkeys(a for member in self.groups[_shared(node)] for a in member.args))

    def _visit(self, node: Expr) -> None:
        """Emit a node after the nodes that it needs."""
        if node.kind == "total":
            self._once(("level", self._level_of(node)), self._emit_sums, node)
        elif node.kind == "form":
            self._once(_shared(node), self._emit_form, node)
        elif node not in self.done:
            self.done.add(node)
            for arg in node.args:
                self._visit(arg)
            if node.kind in ("add", "mul", *FUNCTIONS) and not self._inlined(node):
                self._assign(node)

    def _once(self, key: object, emit: Callable[[Expr], None], node: Expr) -> None:
        if key not in self.done:
            self.done.add(key)
            emit(node)

    def _emit_sums(self, node: Expr) -> None:
        members = self.levels[self._level_of(node)]
        for member in members:
            self._visit(member.args[0])
        for member in members:
            if member.axes & {"feature"} or "row" not in member.axes:
                raise ValueError(f"inside a program only rows are summed over features: {member}")
        of = {self._fresh(member, "sum"): self._named(member.args[0]) for member in members}
        self.steps.append(Sums(of))

    def _emit_form(self, node: Expr) -> None:
        members = self.groups[_shared(node)]
        for arg in self._needs(node):
            self._visit(arg)
        operands = operands_of(node)
        wanted = {member.data.slot for member in members}
        fetched: dict[str, tuple[str, int]] = {}
        names: list[tuple[str | None, ...] | None] = []
        for slot, components in zip(SLOTS, operands, strict=True):
            if components is None or wanted == {slot}:  # its own operand is not read
                names.append(None)
                continue
            names.append(tuple(None if is_zero(e) else self._named(e) for e in components))
            for e in components:
                if _is_feature(e):
                    fetched[self._name(e)] = e.data
        number = sum(isinstance(step, Contract) for step in self.steps)
        results: dict[str, dict[int, str]] = {}
        for member in members:
            form, slot, _ = member.data
            terms = nonzero_terms(form, slot, operands_of(member))
            reached = sorted({components[SLOTS.index(slot)] for _, components in terms})
            results[slot] = {c: f"{slot}{number}_{c}" for c in reached}
            self.parts.update({(member, c): n for c, n in results[slot].items()})
        self.steps.append(Contract(node.data.form, tuple(names), results, fetched))

    def _assign(self, node: Expr) -> None:
        text = functools.partial(self._spell, node)
        fetched = tuple(
            dict.fromkeys(leaf.data for leaf in self._leaves(node) if _is_feature(leaf))
        )
        self.steps.append(Assign(self._fresh(node, "t"), text, fetched))

    def _named(self, node: Expr) -> str:
        """The name of a node; an inlined expression or a number is assigned a name now."""
        if node not in self.names and node.kind in ("const", "count", "add", "mul", *FUNCTIONS):
            self._assign(node)
        return self._name(node)

    def _inlined(self, node: Expr) -> bool:
        # a number gets no name: a language with typed names would round it
        return not node.axes or self.uses[node] < 2

    def _leaves(self, node: Expr) -> Iterator[Expr]:
        """The leaves in the text of a node."""
        for arg in node.args:
            if arg.kind == "leaf":
                yield arg
            elif arg not in self.names and arg.kind not in ("part", "total"):
                yield from self._leaves(arg)

    def _fresh(self, node: Expr, prefix: str) -> str:
        self.names[node] = f"{prefix}{len(self.names)}"
        return self.names[node]

    def _name(self, node: Expr) -> str:
        if node.kind == "leaf":
            return "{}{}".format(*node.data)
        if node.kind == "part":
            return self.parts[node.args[0], node.data]
        return self.names[node]

    def _spell(self, node: Expr, dialect: Dialect) -> str:
        """The text of a node; nodes with names appear as their names."""

        def inner(e: Expr, *open_kinds: str) -> str:
            if e.kind == "const":
                return _number(e.data)
            if e.kind == "count":
                return f"num_{e.data}"
            if e.kind in ("leaf", "part") or e in self.names:
                return self._name(e)
            text = self._spell(e, dialect)
            return text if e.kind in (*open_kinds, *FUNCTIONS) else f"({text})"

        if node.kind == "add":
            return signed_sum([_sign_of(arg, inner) for arg in node.args])
        if node.kind == "mul":
            return f"{inner(node.args[0], 'mul')} * {inner(node.args[1])}"
        if node.kind in FUNCTIONS:
            return dialect.functions[node.kind].format(*map(inner, node.args))
        return inner(node)


def _early(steps: list[Step]) -> list[Step]:
    """The steps, with each assignment moved before the forms that it does not depend on.

    A form fills the registers, and the values that the assignment reads need not live through it.
    """
    if not any(isinstance(step, Contract) for step in steps):
        return steps
    found: list[Step] = []
    for step in steps:
        place = len(found)
        if isinstance(step, Assign):
            needed = reads(step)
            for at in range(len(found) - 1, -1, -1):
                if needed & writes(found[at]):
                    break
                if isinstance(found[at], Contract):
                    place = at
        found.insert(place, step)
    return found


def _number(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'float("{value}")'


def _sign_of(arg: Expr, inner: Callable[..., str]) -> tuple[float, str]:
    if arg.kind == "mul" and arg.args[0].kind == "const":
        return arg.args[0].data, inner(arg.args[1], "mul")
    return 1, inner(arg, "mul")


def _terms(output: Output) -> tuple[str, Sequence[Expr], bool]:
    """Name of an output, the expressions that steps compute, whether kernels sum them over rows."""
    name, _, axes = output.operand
    if "row" in axes:
        return name, output.components, False
    return name, [_unsummed(e) for e in output.components], True


def _unsummed(e: Expr) -> Expr:
    """The expression whose sum over the rows is `e`; `e` itself if it is no such sum.

    Sums are linear: Σa + Σb = Σ(a + b), and a factor that is constant over rows moves inside.
    """
    if e.kind == "total" and "row" in e.data:
        return e.args[0]
    if e.kind == "add":
        return add(*map(_unsummed, e.args))
    if e.kind == "mul":
        return multiply(*map(_unsummed, e.args))
    return e


def _is_feature(e: Expr) -> bool:
    return e.kind == "leaf" and e.axes == {"feature"}


def _shared(node: Expr) -> tuple[object, ...]:
    """The key of a group of forms: the table and all operands."""
    form, slot, own = node.data
    return ("form", form, operands_of(node)) if own else ("form", form, slot, operands_of(node))
