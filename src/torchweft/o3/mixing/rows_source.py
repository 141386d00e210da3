"""Printed Triton kernels of products mixed by weights of each row's own; t is never stored.

    t[u, m] = Σ_i Σ_ab C[a, b, m] x_i[u, a] y_i[b]        i: some pairs of rows
    z[n, m] = Σ_u t[u, m] w[u, n]            w[u, n] = Σ_m t[u, m] z[n, m]
    x[u, a] = Σ_bm C y[b] Σ_n z w            y[b] = Σ_uam C x[u, a] Σ_n z w

A program takes a row and reads its weights, nearly all there is to read, once.  Programs of one or
two warps are fastest: they wait for nobody, and the rows under way keep memory busy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchweft.o3.channelwise.arithmetic import Entry, entries
from torchweft.o3.channelwise.structure import Block as Factor
from torchweft.o3.channelwise.structure import Path as Coupling
from torchweft.o3.channelwise.structure import Product, Structure
from torchweft.o3.mixing.blocks import CopyBlock, MatrixPath, Mixing, groups
from torchweft.o3.mixing.source import FRAME, ROW_ACCUMULATOR, alignment, number
from torchweft.products.tiles import power_of_two

__all__ = ["MIXED_PRODUCT", "coupled_paths", "operands", "reached", "row_weights", "source"]

MIXED_PRODUCT = "mixed_product"
"""Name of the kernels, in profiles too."""

LEAST_COPIES, MOST_COPIES = 16, 128
"""Copies n of a tile of weights."""

Place = tuple[int, ...]
"""Numbers of a row: where they begin, and of several the step between them and how many."""


class CoupledPath(NamedTuple):
    """A path of a mixing, and the coupling of x and y that it mixes."""

    path: MatrixPath
    product: Product
    coupling: Coupling

    @property
    def x(self) -> Factor:
        """Block of x."""
        return self.product.x[self.coupling.x]

    @property
    def y(self) -> Factor:
        """Block of y."""
        return self.product.y[self.coupling.y]

    @property
    def entries(self) -> Sequence[Entry]:
        """The (a, b, m, C)."""
        return entries(self.product, self.coupling)[0]

    def x_place(self, first: int, a: int, height: int) -> Place:
        """Component a of the copies of a tile of `height` copies, in x."""
        begin = self.x.offset + a * self.x.step + first * self.x.channel_step
        return begin, self.x.channel_step, min(height, self.product.channels - first)

    def places(self, height: int | None = None) -> Iterator[tuple[str, Place]]:
        """Numbers of x, by tiles of `height` copies (None: of all), and of y that it reads."""
        height = height or self.product.channels
        for a in range(self.x.components):
            for first in range(0, self.product.channels, height):
                yield "x", self.x_place(first, a, height)
        for b in range(self.y.components):
            yield "y", (self.y.offset + b * self.y.step,)


@functools.lru_cache(maxsize=1024)
def coupled_paths(
    structure: Structure, mixing: Mixing
) -> tuple[tuple[CopyBlock, tuple[CoupledPath, ...]], ...]:
    """The blocks of z, and the paths into each.

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
        if not group.paths:
            continue
        couplings = [(path, made.get(mixing.t[path.t], [])) for path, *_ in group.paths]
        if any(len(some) != 1 for _, some in couplings):
            return ()
        members = tuple(CoupledPath(path, *some[0]) for path, some in couplings)
        if any(member.y.channel_step or not member.x.channel_step for member in members):
            return ()
        found.append((group.block, members))
    places = _distinct(found, "x")
    numbers = [set(range(begin, begin + step * count, step)) for begin, step, count in places]
    alone = sum(map(len, numbers)) == len(set().union(*numbers))
    return tuple(found) if alone else ()


def _distinct(
    paths: Iterable[tuple[CopyBlock, Sequence[CoupledPath]]], slot: str, height: int | None = None
) -> list[Place]:
    """The places of a slot that paths read, in order."""
    every = (place for _, members in paths for member in members for place in member.places(height))
    return sorted({place for kind, place in every if kind == slot})


def reached(structure: Structure, mixing: Mixing, slot: str) -> int:
    """Count of numbers of a row of x or y that belong to paths."""
    places = _distinct(coupled_paths(structure, mixing), slot)
    return sum(place[2] if slot == "x" else 1 for place in places)


def row_weights(structure: Structure, mixing: Mixing) -> int:
    """Count of a row's weights, with the padding of tiles."""
    return sum(
        member.product.channels * size
        for block, members in coupled_paths(structure, mixing)
        for member in members
        for _, size in _tiles(block.copies)
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
    """Module text of a kernel whose pointers are those of `operands`; a program takes a row.

    Args:
        structure: product of x and y.
        mixing: of the product, by w.
        result: z or w of some pairs (x, y), or x, y or both of one.
        pairs: number of pairs.
        height: copies u of a tile of weights.
    """
    printer = _MixedProductPrinter(structure, mixing, result, pairs, height)
    parameters = [*(f"{name}_ptr" for name in printer.names), "WARPS: tl.constexpr"]
    return FRAME.module(MIXED_PRODUCT, FRAME.function(MIXED_PRODUCT, parameters, printer.lines()))


def _tiles(copies: int) -> Iterator[tuple[int, int]]:
    """(first, size) of tiles of copies n: powers of 2 with little padding."""
    first = 0
    while first < copies:
        size = min(MOST_COPIES, max(LEAST_COPIES, power_of_two(copies - first)))
        if size - (copies - first) >= LEAST_COPIES:
            size //= 2
        yield first, size
        first += size


class _MixedProductPrinter:
    """Lines for one row."""

    def __init__(
        self, structure: Structure, mixing: Mixing, result: str, pairs: int, height: int
    ) -> None:
        self.result, self.pairs, self.height = result, pairs, height
        self.names = operands(result, pairs)
        self.paths = coupled_paths(structure, mixing)
        self.widths = {s: structure.width(s) for s in "xy"} | {s: mixing.width(s) for s in "zw"}
        self.begun = set[str]()

    def lines(self) -> Iterator[str]:
        yield ROW_ACCUMULATOR
        yield "row = tl.program_id(0).to(tl.int64)"
        for name in self.names:
            yield f"{name}_row = {name}_ptr + row * {self.widths[name.removeprefix('g')[0]]}"
        yield f"u = tl.arange(0, {self.height})"
        for name in self.names:
            if name[0] in "xy":
                for at in _distinct(self.paths, name[0], self.height):
                    mask = self._mask(at, ", other=0.0")
                    yield f"{name}_{_name(at)} = tl.load({name}_row + {_offset(at)}{mask}).to(ACC)"
        for block, members in self.paths:
            for member in members:
                for first in range(0, member.product.channels, self.height):
                    yield from self._weights(block, member, first)
            if self.result == "z":
                yield from self._stored_z(block)
        yield from self._stored_gradients()

    def _mask(self, at: Place, other: str = "") -> str:
        """Mask of numbers of x, where a tile has more."""
        return "" if len(at) == 1 or at[2] == self.height else f", mask=u < {at[2]}{other}"

    def _weights(self, block: CopyBlock, member: CoupledPath, first: int) -> Iterator[str]:
        """The tiles of weights of some copies u, and the terms that they take part in."""
        components, begin = range(block.components), first * block.copies
        if self.result in ("z", "w"):
            for m in components:
                yield f"t_{m} = {self._coupled(member, first, m)}"
        aligned = alignment(member.path.weight, begin, block.copies)
        left = member.product.channels - first
        for n_first, size in _tiles(block.copies):
            live = [f"(u < {left})[:, None]"] if left < self.height else []
            live += [f"(n < {block.copies})[None, :]"] if n_first + size > block.copies else []
            mask = f", mask={' & '.join(live)}" if live else ""
            rows = f"{member.path.weight + begin} + u * {block.copies}"
            yield f"n = {n_first} + tl.arange(0, {size})"
            yield f"at = w_row + tl.multiple_of({rows}, {aligned})[:, None] + n[None, :]"
            yield from self._terms(block, member, (n_first, size), mask)
        if self.result not in ("z", "w"):
            yield from self._gradients(member, first)

    def _terms(
        self, block: CopyBlock, member: CoupledPath, tile: tuple[int, int], mask: str
    ) -> Iterator[str]:
        """Terms of one tile of weights (u, n)."""
        factor = "" if member.path.factor == 1.0 else f" * {number(member.path.factor)}"
        if self.result == "w":
            for m in range(block.components):
                value = f"t_{m}[:, None] * {self._z(block, tile, m)}"
                yield _add("tile", m == 0, value)
            value = f"(tile{factor}).to(w_ptr.dtype.element_ty)"
            yield f'tl.store(at, {value}{mask}, eviction_policy="evict_first")'
            return
        other = ", other=0.0" if mask else ""
        load = f'tl.load(at{mask}{other}, eviction_policy="evict_first").to(ACC)'
        yield f"w = {load}{factor}"
        for m in range(block.components):
            if self.result == "z":
                yield self._sum(f"z_{tile[0]}_{block.offset}_{m}", f"t_{m}[:, None] * w")
            else:
                value = f"tl.sum({self._z(block, tile, m)} * w, 1)"
                yield _add(f"t_{m}", tile[0] == 0, value)

    def _coupled(self, member: CoupledPath, first: int, m: int) -> str:
        """Σ_i Σ_a (Σ_b C y_b) x_a of component m."""
        return " + ".join(
            f"({factor}) * x{i}_{_name(member.x_place(first, a, self.height))}"
            for i in range(self.pairs)
            for a, factor in self._matrix(member, m, f"y{i}").items()
        )

    def _matrix(self, member: CoupledPath, m: int, name: str) -> dict[int, str]:
        """For each a the sum Σ_b C y_b."""
        found: dict[int, list[str]] = {}
        for a, b, component, value in member.entries:
            if component == m:
                term = f"{number(value)} * {name}_{member.y.offset + b * member.y.step}"
                found.setdefault(a, []).append(term)
        return {a: " + ".join(terms) for a, terms in found.items()}

    def _gradients(self, member: CoupledPath, first: int) -> Iterator[str]:
        """What a tile of Σ_n z w adds to x and y."""
        if "x" in self.result:
            for m in range(2 * member.product.z[member.coupling.z].degree + 1):
                for a, factor in self._matrix(member, m, "y0").items():
                    name = f"gx_{_name(member.x_place(first, a, self.height))}"
                    yield self._sum(name, f"({factor}) * t_{m}")
        if "y" in self.result:
            for a, b, m, value in member.entries:
                x = f"x0_{_name(member.x_place(first, a, self.height))}"
                name = f"gy_{member.y.offset + b * member.y.step}"
                yield self._sum(name, f"{number(value)} * {x} * t_{m}")

    @staticmethod
    def _z(block: CopyBlock, tile: tuple[int, int], m: int) -> str:
        """Load a component of the copies n of z, for a tile."""
        mask = f", mask=n < {block.copies}, other=0.0" if sum(tile) > block.copies else ""
        return f"tl.load({_z_address(block, m)}{mask}).to(ACC)[None, :]"

    def _sum(self, name: str, value: str) -> str:
        first = name not in self.begun
        self.begun.add(name)
        return _add(name, first, value)

    def _stored_z(self, block: CopyBlock) -> Iterator[str]:
        for first, size in _tiles(block.copies):
            yield f"n = {first} + tl.arange(0, {size})"
            mask = f", mask=n < {block.copies}" if first + size > block.copies else ""
            for m in range(block.components):
                value = f"tl.sum(z_{first}_{block.offset}_{m}, 0)"
                stored = f"{value}.to(z_ptr.dtype.element_ty){mask}"
                yield f"tl.store({_z_address(block, m)}, {stored})"

    def _stored_gradients(self) -> Iterator[str]:
        """Store the gradients of x and y."""
        for slot in "xy":
            for at in _distinct(self.paths, slot, self.height):
                name = f"g{slot}_{_name(at)}"
                if name in self.begun:
                    value = name if slot == "x" else f"tl.sum({name})"
                    value = f"{value}.to(g{slot}_ptr.dtype.element_ty)"
                    yield f"tl.store(g{slot}_row + {_offset(at)}, {value}{self._mask(at)})"


def _add(name: str, first: bool, value: str) -> str:
    return f"{name} {'=' if first else '+='} {value}"


def _z_address(block: CopyBlock, m: int) -> str:
    return f"z_row + {block.offset + m * block.step} + n * {block.copy_step}"


def _name(at: Place) -> str:
    return "_".join(map(str, at))


def _offset(at: Place) -> str:
    return f"{at[0]}" if len(at) == 1 else f"{at[0]} + u * {at[1]}"
