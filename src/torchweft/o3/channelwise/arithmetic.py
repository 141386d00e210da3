"""The arithmetic of a call, path by path, with common subexpressions named once.

A path is c · C[a,b,m] x_a y_b w z_m.  A call's results are built from these sums over its entries:

    M[a,m] = Σ_b C y_b      the path's matrix of an edge: shared by all channels if y is
    T[a,b] = Σ_m C z_m      used by the gradients in x, y and w
    S[a]   = Σ_m M z_m, or Σ_b T y_b where T is needed anyway
    A[a]   = Σ_terms w x_a

    z_m = Σ_a M A    x_a = S Σ w    w = Σ_a S x_a    y_b = Σ_a T A

C is divided by the most frequent of its absolute values, so that most of its entries are ±1 and
need no multiplication; the weight is multiplied by the divisor.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from torchweft.o3.channelwise.calls import Call, Term
from torchweft.o3.channelwise.structure import SLOTS, Path, Product
from torchweft.o3.irreps.wigner import entries_3j

__all__ = ["Arithmetic", "Signed", "entries", "value_name"]

Entry = tuple[int, int, int, float]

UNIT_TOLERANCE = 1e-14
"""Distance from ±1 up to which a ratio of entries, computed in float64, is ±1."""


class Signed(NamedTuple):
    """A name with a sign."""

    sign: int
    name: str


Add = Callable[[int, int, int, str], None]
"""(result, block, component, terms that begin with + or −): adds to a component of a result."""


def value_name(slot: str, tensor: int, block: int, component: int) -> str:
    """The name of a component of a block of a tensor in kernels."""
    return f"{slot}{tensor}_{block}_{component}"


def entries(product: Product, path: Path) -> tuple[Sequence[Entry], float]:
    """The (a, b, m, C) of a path, and a factor to multiply them by."""
    blocks = product.x[path.x], product.y[path.y], product.z[path.z]
    degrees = blocks[0].degree, blocks[1].degree, blocks[2].degree
    if path.w < 0:
        return [(a, b, m, path.factor * c) for a, b, m, c in entries_3j(*degrees) if c], 1.0
    found, unit = _in_units(degrees)
    return found, _clean(path.factor * unit)


@functools.cache
def _in_units(degrees: tuple[int, int, int]) -> tuple[tuple[Entry, ...], float]:
    """The nonzero entries of a 3j symbol over the magnitude that most of them have."""
    found = [e for e in entries_3j(*degrees) if e[3]]
    sizes = collections.Counter(round(abs(c), 12) for *_, c in found)
    usual = sizes.most_common(1)[0][0]
    unit = next(abs(c) for *_, c in found if round(abs(c), 12) == usual)
    return tuple((a, b, m, _clean(c / unit)) for a, b, m, c in found), unit


class Arithmetic:
    """Lines that compute the terms of paths, which `add` adds to components of results.

    Args:
        product: the product of the paths.
        call: the results; where y is one of them, S is formed through T.
        add: receives the terms.
    """

    def __init__(self, product: Product, call: Call, add: Add) -> None:
        self.lines: list[str] = []
        self._product, self._call, self._add = product, call, add
        self._through_t = any(r.slot == "y" and r.terms for r in call.results)
        self._known: dict[str, str] = {}

    def path(self, path: Path) -> None:
        """Add the terms of one path."""
        self._path = path
        self._entries, self._scale = entries(self._product, path)
        for number, (slot, terms) in enumerate(self._call.results):
            named = [_by_slot(slot, term) for term in terms]
            {"x": self._x, "y": self._y, "z": self._z, "w": self._w}[slot](number, named)

    # results

    def _z(self, number: int, terms: list[Mapping[str, int]]) -> None:
        sums: dict[int, list[str]] = {}
        for y, pairs in _grouped(terms, "y").items():
            for (a, m), matrix in self._matrix(y[0]).items():
                sums.setdefault(m, []).append(_product_of(matrix, self._factor(pairs, a)))
        self._add_all(number, self._path.z, sums)

    def _x(self, number: int, terms: list[Mapping[str, int]]) -> None:
        sums: dict[int, list[str]] = {}
        for (y, z), rest in _grouped(terms, "y", "z").items():
            for a, s in self._vector(y, z).items():
                sums.setdefault(a, []).append(_product_of(s, *self._weights(rest)))
        self._add_all(number, self._path.x, sums)

    def _w(self, number: int, terms: list[Mapping[str, int]]) -> None:
        parts = []
        for (y, z), rest in _grouped(terms, "y", "z").items():
            for a, s in self._vector(y, z).items():
                x = self._linear("x", {self._value("x", t["x"], a): 1.0 for t in rest})
                parts.append(_product_of(s, x))
        if parts:
            total = self._named("h", _sum(parts))
            self._add(number, self._path.w, 0, _scaled(self._scale, total))

    def _y(self, number: int, terms: list[Mapping[str, int]]) -> None:
        sums: dict[int, list[str]] = {}
        for z, pairs in _grouped(terms, "z").items():
            for (a, b), t in self._slice(z[0]).items():
                sums.setdefault(b, []).append(_product_of(t, self._factor(pairs, a)))
        self._add_all(number, self._path.y, sums)

    def _add_all(self, number: int, block: int, sums: Mapping[int, list[str]]) -> None:
        for component, parts in sorted(sums.items()):
            self._add(number, block, component, " ".join(parts))

    # shared sums

    def _matrix(self, y: int) -> dict[tuple[int, int], Signed]:
        """M[a, m]."""
        return self._contracted("m", lambda a, b, m: ((a, m), self._value("y", y, b)))

    def _slice(self, z: int) -> dict[tuple[int, int], Signed]:
        """T[a, b]."""
        return self._contracted("t", lambda a, b, m: ((a, b), self._value("z", z, m)))

    def _contracted(
        self, prefix: str, split: Callable[[int, int, int], tuple[tuple[int, int], str]]
    ) -> dict[tuple[int, int], Signed]:
        sums: dict[tuple[int, int], dict[str, float]] = {}
        for a, b, m, c in self._entries:
            key, name = split(a, b, m)
            sums.setdefault(key, {})[name] = c
        return {key: self._linear(prefix, parts) for key, parts in sums.items()}

    def _vector(self, y: int, z: int) -> dict[int, Signed]:
        """S[a]."""
        sums: dict[int, list[str]] = {}
        if self._through_t:
            for (a, b), t in self._slice(z).items():
                sums.setdefault(a, []).append(_product_of(t, Signed(1, self._value("y", y, b))))
        else:
            for (a, m), matrix in self._matrix(y).items():
                other = Signed(1, self._value("z", z, m))
                sums.setdefault(a, []).append(_product_of(matrix, other))
        return {a: Signed(1, self._named("s", _sum(parts))) for a, parts in sums.items()}

    def _factor(self, terms: list[Mapping[str, int]], a: int) -> Signed:
        """A[a]."""
        if self._path.w < 0:
            return self._linear("a", {self._value("x", t["x"], a): 1.0 for t in terms})
        parts = (
            _product_of(*self._weights([t]), Signed(1, self._value("x", t["x"], a))) for t in terms
        )
        return Signed(1, self._named("a", _sum(parts)))

    def _weights(self, terms: list[Mapping[str, int]]) -> tuple[Signed, ...]:
        """Σ w times the divisor of the entries; empty without weights."""
        if self._path.w < 0:
            return ()
        parts = {self._value("w", t["w"], 0): self._scale for t in terms}
        return (self._linear("v", parts),)

    # names

    def _value(self, slot: str, tensor: int, component: int) -> str:
        return value_name(slot, tensor, getattr(self._path, slot), component)

    def _linear(self, prefix: str, parts: Mapping[str, float]) -> Signed:
        """Σ c · name; a single term ± name needs no new name."""
        (name, first), *others = parts.items()
        if not others and abs(first) == 1:
            return Signed(1 if first > 0 else -1, name)
        sign = 1 if first > 0 else -1
        text = _sum(_scaled(sign * c, name) for name, c in parts.items())
        return Signed(sign, self._named(prefix, text))

    def _named(self, prefix: str, text: str) -> str:
        if text not in self._known:
            self._known[text] = f"{prefix}{len(self._known)}"
            self.lines.append(f"{self._known[text]} = {text}")
        return self._known[text]


def _by_slot(slot: str, term: Term) -> Mapping[str, int]:
    """The tensor in each slot of a term."""
    return dict(zip((s for s in SLOTS if s != slot), term, strict=False))


def _grouped(
    terms: Iterable[Mapping[str, int]], *slots: str
) -> dict[tuple[int, ...], list[Mapping[str, int]]]:
    """The terms with the same tensors in these slots."""
    found: dict[tuple[int, ...], list[Mapping[str, int]]] = {}
    for term in terms:
        found.setdefault(tuple(term[s] for s in slots), []).append(term)
    return found


def _clean(ratio: float) -> float:
    return float(round(ratio)) if abs(abs(ratio) - 1) < UNIT_TOLERANCE else ratio


def _scaled(factor: float, name: str) -> str:
    """A term: its sign, the factor unless it is 1, a name."""
    size = "" if abs(factor) == 1 else f"{abs(factor)!r} * "
    return f"{'-' if factor < 0 else '+'} {size}{name}"


def _product_of(*factors: Signed) -> str:
    """A term: the product of names."""
    negative = sum(f.sign < 0 for f in factors) % 2
    return f"{'-' if negative else '+'} {' * '.join(f.name for f in factors)}"


def _sum(terms: Iterable[str]) -> str:
    """Terms without a leading plus."""
    return " ".join(terms).removeprefix("+ ")
