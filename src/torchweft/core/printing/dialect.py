"""Steps of a program, their lines in a dialect, and the names that they read and assign."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torchweft.core.expressions.expr import FUNCTIONS, SLOTS, Form

__all__ = [
    "Assign",
    "Contract",
    "Dialect",
    "Result",
    "Schedule",
    "Step",
    "Sums",
    "indented",
    "most_live",
    "reads",
    "signed_sum",
    "writes",
]


class Dialect(NamedTuple):
    """How the steps of a program are written in a language.

    Args:
        functions: a format string of the arguments for each name in expr.FUNCTIONS that is used.
        sums: the lines that assign to names the sums, over the features, of other names.
        fetch: the lines that load a component of a feature operand right before it is used, since
            registers are scarcer than cache hits.  Empty if the component is loaded already.
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
    """Each name is the sum of another name over the features: all sums of one level."""

    of: dict[str, str]

    def lines(self, dialect: Dialect) -> list[str]:
        """As source."""
        return dialect.sums(self.of)


class Contract(NamedTuple):
    """Derivatives of a form at the same operands, path by path.

    u_i = Σ c out_j right_k is shared: w u_i is the derivative by left, Σ left_i u_i that by the
    weight.  So no left·right product is formed for a gradient, and few values live at a time.

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
        return list(_ContractLines(self, dialect).lines())


Step = Assign | Sums | Contract


class Result(NamedTuple):
    """The names of an output's components, or of their terms if summed over rows; None for zero."""

    operand: str
    names: tuple[str | None, ...]
    summed: bool


class Schedule(NamedTuple):
    """A program's steps in an order that respects their dependencies, and its results."""

    steps: tuple[Step, ...]
    results: tuple[Result, ...]


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
    """The largest number of values alive at a step: those that it reads or assigns, and others.

    Components of feature operands, and results that are summed over rows, are not counted.
    """
    kept = {name for result in plan.results if not result.summed for name in result.names if name}
    summed = {name for result in plan.results if result.summed for name in result.names if name}
    live, most = kept, len(kept)
    for step in reversed(plan.steps):
        read, written = reads(step), writes(step)
        most = max(most, len((live | read | written) - summed))
        live = (live - written) | read
    return most


MOST_TERMS = 48
"""Most terms of a printed sum."""


def signed_sum(items: list[tuple[float, str]]) -> str:
    """The text of Σ coefficient · item; ±1 become signs, and long sums are sums of shorter ones.

    Compilers recurse into a sum term by term, and fail on hundreds of terms.
    """
    if len(items) > MOST_TERMS:
        parts = [items[i : i + MOST_TERMS] for i in range(0, len(items), MOST_TERMS)]
        items = [(1, f"({signed_sum(part)})") for part in parts]
    text = ""
    for coefficient, item in items:
        factor = "" if abs(coefficient) == 1 else f"{abs(coefficient)!r} * "
        text += f" {'-' if coefficient < 0 else '+'} {factor}{item}"
    return text[3:] if text.startswith(" +") else "-" + text[3:]


Term = tuple[float, tuple[int, ...]]
"""A coefficient, and the component in each of SLOTS."""


class _ContractLines:
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

    def _paths(self) -> dict[int, list[Term]]:
        """The terms by path, paths by the first output they reach; one path without weights."""
        weighted = "weight" in self.step.form.slots
        paths: dict[int, list[Term]] = {}
        for coefficient, i, k, p, j in sorted(self.step.form.terms, key=lambda t: (t[4], t[3])):
            paths.setdefault(p if weighted else 0, []).append((coefficient, (i, k, p, j)))
        return paths

    def _sums(self, terms: list[Term], slot: str) -> Iterator[tuple[int, str]]:
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
            yield target, signed_sum(items)

    def _slot(self, terms: list[Term], slot: str, weight: str | None) -> Iterator[str]:
        for target, text in self._sums(terms, slot):
            name = self.step.results[slot].get(target)
            if name and (weight or "weight" not in self.step.form.slots):
                yield self._add(name, f"{weight} * ({text})" if weight else text)

    def _pivot(
        self,
        terms: list[Term],
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
    """Lines indented by `depth` levels."""
    return (" " * (4 * depth) + line for line in lines)
