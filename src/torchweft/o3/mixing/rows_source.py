"""Kernels of products whose copies are mixed by weights of each row's own; t is never stored.

    t[u, m] = Σ_i Σ_ab C[a, b, m] x_i[u, a] y_i[b]        i: some pairs of rows
    z[n, m] = Σ_u t[u, m] w[u, n]            w[u, n] = Σ_m t[u, m] z[n, m]
    x[u, a] = Σ_bm C y[b] Σ_n z w            y[b] = Σ_uam C x[u, a] Σ_n z w

A program takes a row, and reads its weights, nearly all there is to read, once.  Programs of one
or two warps are fastest: they wait for nobody, and so many rows are under way that memory is busy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchweft.o3.channelwise.arithmetic import Entry, entries
from torchweft.o3.channelwise.structure import Block as Factor
from torchweft.o3.channelwise.structure import Path as Coupling
from torchweft.o3.channelwise.structure import Product, Structure
from torchweft.o3.mixing.blocks import Block, Mixing, Path, groups
from torchweft.products.tiles import power_of_two

__all__ = ["NAME", "Form", "forms", "numbers", "operands", "reached", "source"]

NAME = "mixed_product"
"""Of the kernels, in profiles too."""

LEAST, MOST = 16, 128
"""Copies n of a tile."""

HEAD = """import triton
import triton.language as tl


@triton.jit
def {name}({pointers}, WARPS: tl.constexpr):
    ACC: tl.constexpr = tl.float64 if w_ptr.dtype.element_ty == tl.float64 else tl.float32
    row = tl.program_id(0).to(tl.int64)
"""


Place = tuple[int, int, int]
"""Numbers of a row side by side: where they begin, the step between them, how many."""


class Form(NamedTuple):
    """What is mixed by a path: x and y of a coupling."""

    path: Path
    product: Product
    coupling: Coupling

    @property
    def x(self) -> Factor:
        """Its block of x."""
        return self.product.x[self.coupling.x]

    @property
    def y(self) -> Factor:
        """Its block of y."""
        return self.product.y[self.coupling.y]

    @property
    def entries(self) -> list[Entry]:
        """The (a, b, m, C)."""
        return entries(self.product, self.coupling)[0]

    def place(self, first: int, a: int, height: int) -> Place:
        """Component a of the copies of a tile, in x."""
        begin = self.x.offset + a * self.x.step + first * self.x.channel_step
        return begin, self.x.channel_step, min(height, self.product.channels - first)

    def places(self, height: int | None = None) -> Iterator[Place]:
        """All it reads of x, by tiles of some height; None: of all copies."""
        height = height or self.product.channels
        for a in range(self.x.components):
            for first in range(0, self.product.channels, height):
                yield self.place(first, a, height)


@functools.lru_cache(maxsize=1024)
def forms(structure: Structure, mixing: Mixing) -> tuple[tuple[Block, tuple[Form, ...]], ...]:
    """The blocks of z and what is mixed into each.

    Nothing, unless each block of t is of one coupling, whose channels share y alone.
    """
    made: dict[tuple[int, ...], list[tuple[Product, Coupling]]] = {}
    for product in structure.products:
        for path in product.paths:
            z = product.z[path.z]
            key = (z.offset, z.components, z.step, z.channel_step, product.channels)
            made.setdefault(key, []).append((product, path))
    found = []
    for group in groups(mixing, "z"):
        couplings = [(path, made.get(mixing.t[path.t], [])) for path, *_ in group.paths]
        if any(len(some) != 1 for _, some in couplings):
            return ()
        found.append((group.block, tuple(Form(path, *some[0]) for path, some in couplings)))
    every = [form for _, members in found for form in members]
    if any(form.y.channel_step or not form.x.channel_step for form in every):
        return ()
    places = {place for form in every for place in form.places()}
    numbers_of = [set(range(begin, begin + step * count, step)) for begin, step, count in places]
    alone = sum(map(len, numbers_of)) == len(set().union(*numbers_of))
    return tuple(found) if alone else ()


def reached(structure: Structure, mixing: Mixing, slot: str) -> int:
    """How many numbers of a row of x or y there are in paths."""
    every = [form for _, members in forms(structure, mixing) for form in members]
    if slot == "x":
        return sum(count for _, _, count in {place for form in every for place in form.places()})
    return len(
        {form.y.offset + b * form.y.step for form in every for b in range(form.y.components)}
    )


def numbers(structure: Structure, mixing: Mixing) -> int:
    """Of a row's weights, with those that tiles have beside them."""
    return sum(
        form.product.channels * size
        for block, members in forms(structure, mixing)
        for form in members
        for _, size in _sides(block.copies)
    )


def operands(result: str, pairs: int) -> list[str]:
    """The tensors of a kernel, in order; results come last."""
    rows = [f"{slot}{i}" for i in range(pairs) for slot in "xy"]
    if result in ("z", "w"):
        return [*rows, "w" if result == "z" else "z", result]
    read = [slot for slot in ("x0", "y0") if {"x0": "y", "y0": "x"}[slot] in result]
    return [*read, "z", "w", *(f"g{slot}" for slot in result)]


def source(
    structure: Structure, mixing: Mixing, result: str, pairs: int = 1, height: int = 16
) -> str:
    """The module text of a kernel; the result is z or w of some pairs, or x, y or both of one.

    A tile of weights has those of `height` copies u.

    Its pointers are those of `operands`; each row is a program's.
    """
    writer = _Writer(structure, mixing, result, pairs, height)
    pointers = ", ".join(f"{name}_ptr" for name in writer.names)
    text = HEAD.format(name=NAME, pointers=pointers)
    return text + "".join(f"    {line}\n" for line in writer.lines())


def _sides(copies: int) -> Iterator[tuple[int, int]]:
    """(first, size) of tiles of copies n: powers of 2 of which few are empty."""
    first = 0
    while first < copies:
        size = min(MOST, max(LEAST, power_of_two(copies - first)))
        if size - (copies - first) >= LEAST:
            size //= 2
        yield first, size
        first += size


class _Writer:
    """The lines for one row."""

    def __init__(
        self, structure: Structure, mixing: Mixing, result: str, pairs: int, height: int
    ) -> None:
        self.result, self.pairs, self.height = result, pairs, height
        self.names = operands(result, pairs)
        self.forms = forms(structure, mixing)
        self.widths = {s: structure.width(s) for s in "xy"} | {s: mixing.width(s) for s in "zw"}
        self.begun = set[str]()

    def lines(self) -> Iterator[str]:
        for name in self.names:
            slot = name.removeprefix("g")[0]
            yield f"{name}_row = {name}_ptr + row * {self.widths[slot]}"
        yield f"u = tl.arange(0, {self.height})"
        yield from self._factors()
        for block, members in self.forms:
            for form in members:
                for first in range(0, form.product.channels, self.height):
                    yield from self._tile(block, form, first)
            if self.result == "z":
                yield from self._stored_z(block)
        yield from self._stored_rows()

    # x and y of the row

    def _factors(self) -> Iterator[str]:
        """What is read of x and y, once."""
        rows = [name for name in self.names if name[0] in "xy"]
        for name in rows:
            for kind, at in sorted({(k, n) for k, n in self._places() if k == name[0]}):
                mask = self._mask(at) if kind == "x" else ""
                yield f"{name}_{_name(at)} = tl.load({name}_row + {_offset(at)}{mask}).to(ACC)"

    def _places(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Of x the places of tiles, of y the offsets, that paths read."""
        for _, members in self.forms:
            for form in members:
                yield from (("x", place) for place in form.places(self.height))
                yield from (
                    ("y", (form.y.offset + b * form.y.step,)) for b in range(form.y.components)
                )

    def _mask(self, at: tuple[int, ...], other: str = ", other=0.0") -> str:
        return "" if at[2] == self.height else f", mask=u < {at[2]}{other}"

    # tiles of weights

    def _tile(self, block: Block, form: Form, first: int) -> Iterator[str]:
        components = range(block.components)
        if self.result in ("z", "w"):
            for m in components:
                yield f"t_{m} = {self._coupled(form, first, m)}"
        begin = form.path.weight + first * block.copies
        aligned = _alignment(form.path.weight, first * block.copies, block.copies)
        left = form.product.channels - first
        for n_first, size in _sides(block.copies):
            live = [f"(u < {left})[:, None]"] if left < self.height else []
            live += [f"(n < {block.copies})[None, :]"] if n_first + size > block.copies else []
            mask = f", mask={' & '.join(live)}" if live else ""
            yield f"n = {n_first} + tl.arange(0, {size})"
            yield (
                f"at = w_row + tl.multiple_of({begin} + u * {block.copies}, {aligned})[:, None]"
                " + n[None, :]"
            )
            if self.result == "w":
                for m in components:
                    yield self._add(
                        "tile", m == 0, f"t_{m}[:, None] * {self._z(block, n_first, size, m)}"
                    )
                factor = _times(form.path.factor)
                value = f"(tile{factor}).to(w_ptr.dtype.element_ty)"
                yield f'tl.store(at, {value}{mask}, eviction_policy="evict_first")'
                continue
            other = ", other=0.0" if mask else ""
            load = f'tl.load(at{mask}{other}, eviction_policy="evict_first").to(ACC)'
            yield f"w = {load}{_times(form.path.factor)}"
            for m in components:
                if self.result == "z":
                    yield self._sum(f"z_{n_first}_{block.offset}_{m}", f"t_{m}[:, None] * w")
                else:
                    value = f"tl.sum({self._z(block, n_first, size, m)} * w, 1)"
                    yield self._add(f"t_{m}", n_first == 0, value)
        if self.result not in ("z", "w"):
            yield from self._gradients(form, first)

    def _coupled(self, form: Form, first: int, m: int) -> str:
        """Σ_i Σ_a (Σ_b C y_b) x_a of component m."""
        terms = []
        for i in range(self.pairs):
            for a, factor in self._matrix(form, m, f"y{i}").items():
                terms.append(f"({factor}) * x{i}_{_name(form.place(first, a, self.height))}")
        return " + ".join(terms)

    def _matrix(self, form: Form, m: int, name: str) -> dict[int, str]:
        """For each a the sum Σ_b C y_b."""
        found: dict[int, list[str]] = {}
        for a, b, component, value in form.entries:
            if component == m:
                term = f"{_number(value)} * {name}_{form.y.offset + b * form.y.step}"
                found.setdefault(a, []).append(term)
        return {a: " + ".join(terms) for a, terms in found.items()}

    def _gradients(self, form: Form, first: int) -> Iterator[str]:
        """What a tile of Σ_n z w adds to x and y."""
        components = range(2 * form.product.z[form.coupling.z].degree + 1)
        if "x" in self.result:
            for m in components:
                for a, factor in self._matrix(form, m, "y0").items():
                    name = f"gx_{_name(form.place(first, a, self.height))}"
                    yield self._sum(name, f"({factor}) * t_{m}")
        if "y" in self.result:
            for a, b, m, value in form.entries:
                x = f"x0_{_name(form.place(first, a, self.height))}"
                name = f"gy_{form.y.offset + b * form.y.step}"
                yield self._sum(name, f"{_number(value)} * {x} * t_{m}")

    @staticmethod
    def _z(block: Block, first: int, size: int, m: int) -> str:
        """A component of copies n of z, beside a tile."""
        mask = f", mask=n < {block.copies}, other=0.0" if first + size > block.copies else ""
        place = f"z_row + {block.offset + m * block.step} + n * {block.copy_step}"
        return f"tl.load({place}{mask}).to(ACC)[None, :]"

    # results

    def _sum(self, name: str, value: str) -> str:
        first = name not in self.begun
        self.begun.add(name)
        return self._add(name, first, value)

    @staticmethod
    def _add(name: str, first: bool, value: str) -> str:
        return f"{name} {'=' if first else '+='} {value}"

    def _stored_z(self, block: Block) -> Iterator[str]:
        for first, size in _sides(block.copies):
            yield f"n = {first} + tl.arange(0, {size})"
            mask = f", mask=n < {block.copies}" if first + size > block.copies else ""
            for m in range(block.components):
                place = f"z_row + {block.offset + m * block.step} + n * {block.copy_step}"
                value = f"tl.sum(z_{first}_{block.offset}_{m}, 0)"
                yield f"tl.store({place}, {value}.to(z_ptr.dtype.element_ty){mask})"

    def _stored_rows(self) -> Iterator[str]:
        """The gradients of x and y that the row has."""
        for kind, at in sorted(set(self._places())):
            name = f"g{kind}_{_name(at)}"
            if name in self.begun:
                value, mask = (name, self._mask(at, "")) if kind == "x" else (f"tl.sum({name})", "")
                value = f"{value}.to(g{kind}_ptr.dtype.element_ty)"
                yield f"tl.store(g{kind}_row + {_offset(at)}, {value}{mask})"


def _name(at: Iterable[int]) -> str:
    return "_".join(map(str, at))


def _offset(at: tuple[int, ...]) -> str:
    return f"{at[0]}" if len(at) == 1 else f"{at[0]} + u * {at[1]}"


def _alignment(*places: int) -> int:
    """A power of two that divides all."""
    return min([16, *(place & -place for place in places if place)])


def _times(factor: float) -> str:
    return "" if factor == 1.0 else f" * {_number(factor)}"


def _number(value: float) -> str:
    """A constant in the dtype of sums: Triton's literals are float32."""
    return f"tl.full((), {value!r}, ACC)"
