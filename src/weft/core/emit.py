"""Expressions to source: the steps of a program in order, and their lines in a dialect.

    for step in schedule(program).steps: lines += step.lines(dialect)

A step assigns names: of a scalar expression, of all sums of one level (they can be reduced
together), or of every derivative of a form that is wanted at the same operands.  A kernel template
puts loads before them, stores behind, and says by its `Dialect` how things are spelled.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from weft.core.expr import (
    FUNCTIONS,
    SLOTS,
    Expr,
    Form,
    add,
    const,
    multiply,
    nonzero_terms,
    operands_of,
)
from weft.core.program import Program

__all__ = [
    "Assign",
    "Contract",
    "Dialect",
    "Result",
    "Schedule",
    "Sums",
    "indented",
    "most_live",
    "reads",
    "schedule",
    "writes",
]


class Dialect(NamedTuple):
    """How a language spells what steps are made of.

    Args:
        functions: a format of the arguments for each name in expr.FUNCTIONS that is used.
        sums: the lines that assign to names the sums, over the features, of other names.
        fetch: the lines that bring a feature operand's component to its name where it is used:
            registers are scarcer than cache hits.  Empty where it is there already.
    """

    functions: Mapping[str, str]
    sums: Callable[[Mapping[str, str]], list[str]]
    fetch: Callable[[str, int], list[str]]


class Assign(NamedTuple):
    """name = text; reads the components of feature operands listed in `fetched`."""

    name: str
    text: Callable[[Dialect], str]
    fetched: tuple[tuple[str, int], ...]

    def lines(self, dialect: Dialect) -> list[str]:
        """As source."""
        fetches = [line for leaf in self.fetched for line in dialect.fetch(*leaf)]
        return [*fetches, f"{self.name} = {self.text(dialect)}"]


class Sums(NamedTuple):
    """Each name is the sum of another over the features: all of one level."""

    of: dict[str, str]

    def lines(self, dialect: Dialect) -> list[str]:
        """As source."""
        return dialect.sums(self.of)


class Contract(NamedTuple):
    """Derivatives of a form at the same operands, path by path.

    u_i = Σ c out_j right_k is shared: w u_i is left's derivative, Σ left_i u_i the weight's.  So no
    left·right product is formed for a gradient, and few values live at a time.

    Args:
        form: the table.
        operands: the names of the components in each slot, None for zeros; None without weights.
        results: the names to assign, by wanted slot and component.
        fetched: feature operands, by the name of a component.
    """

    form: Form
    operands: tuple[tuple[str | None, ...] | None, ...]
    results: dict[str, dict[int, str]]
    fetched: dict[str, tuple[str, int]]

    def lines(self, dialect: Dialect) -> list[str]:
        """As source."""
        return list(_Printer(self, dialect).lines())


MOST_TERMS = 48
"""Terms of a printed sum."""

Step = Assign | Sums | Contract


class Result(NamedTuple):
    """The names of an output's components, None for zero; of their terms, if summed over rows."""

    operand: str
    names: tuple[str | None, ...]
    summed: bool


class Schedule(NamedTuple):
    """A program's steps in an order that respects what needs what, and its results."""

    steps: tuple[Step, ...]
    results: tuple[Result, ...]


def schedule(program: Program) -> Schedule:
    """The steps of a program: what is shared once, sums of one level together."""
    return _Scheduler(program).schedule()


class _Scheduler:
    def __init__(self, program: Program) -> None:
        self.program = program
        # an output summed over rows is accumulated by the template: here, its terms
        self.outputs = [
            (o.operand.name, [_unsummed(e) for e in o.components], "row" not in o.operand.axes)
            for o in program.outputs
        ]
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
            if root != const(0):
                self._visit(root)
        return Schedule(
            tuple(_early(self.steps)),
            tuple(
                Result(name, tuple(None if e == const(0) else self._name(e) for e in es), summed)
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
        """How many sums, one after the other, it waits for."""
        below = max((self._level_of(a) for a in self._needs(node)), default=0)
        return below + (node.kind == "total")

    def _needs(self, node: Expr) -> list[Expr]:
        """What is computed before it; forms of one group wait for each other's operands."""
        if node.kind != "form":
            return list(node.args)
        return list(dict.fromkeys(a for member in self.groups[_shared(node)] for a in member.args))

    def _visit(self, node: Expr) -> None:
        """Emit a node after all that it needs."""
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
            names.append(tuple(None if e == const(0) else self._named(e) for e in components))
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
        """Its name; an expression that was inlined, or a number, gets one now."""
        if node not in self.names and node.kind in ("const", "count", "add", "mul", *FUNCTIONS):
            self._assign(node)
        return self._name(node)

    def _inlined(self, node: Expr) -> bool:
        # a number gets no name: languages with typed names would round it
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
        """The text of a node, in which named nodes stand by their names."""

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
            return _signed_sum([_sign_of(arg, inner) for arg in node.args])
        if node.kind == "mul":
            return f"{inner(node.args[0], 'mul')} * {inner(node.args[1])}"
        if node.kind in FUNCTIONS:
            return dialect.functions[node.kind].format(*map(inner, node.args))
        return inner(node)


_BLANK = Dialect(
    {name: ", ".join(["{}"] * function.arity) for name, function in FUNCTIONS.items()},
    lambda of: [],
    lambda name, component: [],
)


def reads(step: Step) -> set[str]:
    """The names that a step reads; components of feature operands are not among them."""
    if isinstance(step, Assign):
        names = set(re.findall(r"[a-z]\w*", step.text(_BLANK)))
        return names - {f"{name}{component}" for name, component in step.fetched}
    if isinstance(step, Sums):
        return set(step.of.values())
    operands = {name for names in step.operands if names for name in names if name}
    return operands - step.fetched.keys()


def writes(step: Step) -> set[str]:
    """The names that a step assigns."""
    if isinstance(step, Assign):
        return {step.name}
    if isinstance(step, Sums):
        return set(step.of)
    return {name for names in step.results.values() for name in names.values()}


def most_live(plan: Schedule) -> int:
    """How many values are alive at once, at most: those that a step reads, assigns or passes by.

    Not counted are components of feature operands, and results that are summed over rows.
    """
    kept = {name for result in plan.results if not result.summed for name in result.names if name}
    summed = {name for result in plan.results if result.summed for name in result.names if name}
    live, most = kept, len(kept)
    for step in reversed(plan.steps):
        most = max(most, len((live | reads(step) | writes(step)) - summed))
        live = (live - writes(step)) | reads(step)
    return most


def _early(steps: list[Step]) -> list[Step]:
    """The steps, with each assignment moved before the forms that it does not need.

    What it reads then need not live through them: a form fills the registers.
    """
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


def _signed_sum(items: list[tuple[float, str]]) -> str:
    """+1 and −1 become signs, other coefficients factors; long sums are sums of shorter ones.

    Compilers walk a sum term by term, and give up on those of hundreds.
    """
    if len(items) > MOST_TERMS:
        parts = [items[i : i + MOST_TERMS] for i in range(0, len(items), MOST_TERMS)]
        items = [(1, f"({_signed_sum(part)})") for part in parts]
    text = ""
    for coefficient, item in items:
        factor = "" if abs(coefficient) == 1 else f"{abs(coefficient)!r} * "
        text += f" {'-' if coefficient < 0 else '+'} {factor}{item}"
    return text[3:] if text.startswith(" +") else "-" + text[3:]


def _unsummed(e: Expr) -> Expr:
    """The terms whose sum over the rows it is; itself if it is none.

    Sums are linear: Σa + Σb = Σ(a + b), and a factor that no row changes goes inside.
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
    """What the forms of one group have in common: the table and all operands."""
    form, slot, own = node.data
    return ("form", form, operands_of(node)) if own else ("form", form, slot, operands_of(node))


class _Printer:
    """The lines of one `Contract`."""

    def __init__(self, step: Contract, dialect: Dialect) -> None:
        self.step, self.dialect = step, dialect
        self.assigned: set[str] = set()

    def lines(self) -> Iterator[str]:
        weights = self.step.operands[SLOTS.index("weight")]
        wanted = self.step.results.keys()
        pivot, other = (
            ("right", "left") if "right" in wanted and "left" not in wanted else SLOTS[:2]
        )
        for path, terms in self._paths().items():
            weight = weights[path] if weights else None
            if weight in self.step.fetched:
                yield from self.dialect.fetch(*self.step.fetched[weight])
            if "out" in wanted:
                yield from self._slot(terms, "out", weight)
            if "weight" in wanted:
                yield from self._pivot(terms, pivot, weight, path)
            elif pivot in wanted:
                yield from self._slot(terms, pivot, weight)
            if other in wanted:
                yield from self._slot(terms, other, weight)

    def _paths(self) -> dict[int, list[tuple[float, tuple[int, ...]]]]:
        """The terms by path, paths by the first output they reach; one path without weights."""
        weighted = "weight" in self.step.form.slots
        paths: dict[int, list[tuple[float, tuple[int, ...]]]] = {}
        for coefficient, i, k, p, j in sorted(self.step.form.terms, key=lambda t: (t[4], t[3])):
            paths.setdefault(p if weighted else 0, []).append((coefficient, (i, k, p, j)))
        return paths

    def _sums(
        self, terms: list[tuple[float, tuple[int, ...]]], slot: str
    ) -> Iterator[tuple[int, str]]:
        """For each component of a slot, Σ c · (the two others of left, right and out)."""
        a, b = (SLOTS.index(s) for s in ("left", "right", "out") if s != slot)
        sums: dict[int, list[tuple[float, str]]] = {}
        firsts, seconds = (self.step.operands[s] or () for s in (a, b))
        for coefficient, components in terms:
            first, second = firsts[components[a]], seconds[components[b]]
            if first and second:
                target = components[SLOTS.index(slot)]
                sums.setdefault(target, []).append((coefficient, f"{first} * {second}"))
        for target, items in sorted(sums.items()):
            yield target, _signed_sum(items)

    def _slot(
        self, terms: list[tuple[float, tuple[int, ...]]], slot: str, weight: str | None
    ) -> Iterator[str]:
        for target, text in self._sums(terms, slot):
            name = self.step.results[slot].get(target)
            if name and (weight or "weight" not in self.step.form.slots):
                yield self._add(name, f"{weight} * ({text})" if weight else text)

    def _pivot(
        self,
        terms: list[tuple[float, tuple[int, ...]]],
        pivot: str,
        weight: str | None,
        path: int,
    ) -> Iterator[str]:
        own = self.step.operands[SLOTS.index(pivot)]
        value = self.step.results["weight"].get(path)
        results = self.step.results.get(pivot, {})
        for target, text in self._sums(terms, pivot):
            yield f"u = {text}"
            if value and own and own[target]:
                yield self._add(value, f"{own[target]} * u")
            if target in results and weight:
                yield self._add(results[target], f"{weight} * u")

    def _add(self, name: str, text: str) -> str:
        first = name not in self.assigned
        self.assigned.add(name)
        return f"{name} {'=' if first else '+='} {text}"


def indented(lines: Iterable[str], depth: int = 1) -> Iterator[str]:
    """Lines inside so many blocks."""
    return (" " * (4 * depth) + line for line in lines)
