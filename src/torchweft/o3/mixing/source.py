"""Printed Triton kernels of one mixing.

shared weights   programs take tiles of matrix products, block of the result after block
own weights      a program takes a row and reads its weights once, 16 bytes at a time; bound: memory

Shared weights may be those of an element: tiles then take rows of one element, by the order and
starts of rows sorted by it.  Elements have rows of weights each, or are `inside` each matrix,
(copies of t, elements, copies of z).

A product of shared weights reads them as they are, or prepared: scaled, cut in parts, side by side
in the order of the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torchweft.core.printing.dialect import indented
from torchweft.core.printing.kernel import Frame
from torchweft.o3.mixing.blocks import (
    CopyBlock,
    CopySum,
    MatrixPath,
    Mixing,
    groups,
    merged,
    prepared,
)
from torchweft.products.tiles import power_of_two

__all__ = [
    "alignment",
    "direct_source",
    "fold_source",
    "number",
    "outer_source",
    "own_source",
    "prepare_source",
    "product_source",
    "whole_outer_source",
]

FRAME = Frame(gluon=False)

CARRIED_NUMBERS = 48
"""Numbers that a thread keeps of a tile of weights and of the sums over it: with 96, or with all
weights read before the first sum, fewer programs run together and take a quarter longer (H200)."""


class _Factor(NamedTuple):
    """A matrix w[k, n] of a product, `first` behind a place, and the copies k that it takes."""

    block: CopyBlock
    place: str
    first: int
    step_k: int
    step_n: int
    factor: float
    low: int


def product_source(mixing: Mixing, result: str, parts: int, elements: int | None = None) -> str:
    """z = a @ prepared weights, for every block of the result."""
    numbers, begin, found = prepared(mixing, result), 0, list[tuple[CopyBlock, list[_Factor]]]()
    own = "w_ptr" if elements is None else f"w_ptr + {_behind(numbers * max(1, parts))}"
    for group in merged(mixing, result):
        factors = [
            _Factor(block, own, begin + first, 1, group.length, 1.0, numbers)
            for block, first in group.runs
        ]
        found.append((group.block, factors))
        begin += group.block.copies * group.length
    return _product("product", mixing, result, parts, elements, [[one] for one in found])


def direct_source(
    mixing: Mixing, result: str, parts: int, elements: int | None = None, inside: bool = False
) -> str:
    """z = a @ weights as they are, for every block of the result."""
    found = []
    for group in sorted(groups(mixing, result), key=lambda group: -group.columns):
        factors = []
        for path, *_ in group.paths:
            place, first, row = _matrix(mixing, path, elements, inside)
            block = mixing.t[path.t] if result == "z" else mixing.z[path.z]
            steps = (row, 1) if result == "z" else (1, row)
            factors.append(_Factor(block, place, first, *steps, path.factor, 0))
        found.append((group.block, factors))
    return _product("direct", mixing, result, parts, elements, _alike(found))


_Summed = tuple[CopyBlock, list[_Factor]]
"""A block of the result, and the products that are summed in it."""


def _numbers(block: CopyBlock, factors: list[_Factor]) -> list[int | float]:
    """The numbers of a block that code can take as variables."""
    found: list[int | float] = [block.components, block.offset, block.step]
    for of, _, first, *_, factor, _ in factors:
        found += [of.offset, of.step, first, factor]
    return found


def _alike(found: list[_Summed]) -> list[list[_Summed]]:
    """Blocks that differ in these numbers alone, together: one code serves them.

    The blocks of a model's linear map are often ten of a kind, and the compiler takes as long for
    each; a program looks its numbers up once.
    """
    by_form: dict[object, list[_Summed]] = {}
    for block, factors in found:
        same = block._replace(offset=0, components=0, step=0)
        form = [
            (f._replace(block=f.block._replace(offset=0, components=0, step=0), first=0, factor=0))
            for f in factors
        ]
        by_form.setdefault((same, *form), []).append((block, factors))
    return list(by_form.values())


def _product(
    name: str,
    mixing: Mixing,
    result: str,
    parts: int,
    elements: int | None,
    found: list[list[_Summed]],
) -> str:
    """Tiles of the blocks of the result, each a sum of products."""
    widths, lines = (mixing.width("z" if result == "t" else "t"), mixing.width(result)), list[str]()
    for alike in found:
        sizes = [_size(block, elements) for block, _ in alike]
        every = [_numbers(*one) for one in alike]
        if len(alike) == 1:
            code = _sum_of_products(alike[0], every[0], "tile", widths, parts, elements)
            lines += _next_tiles(sizes[0], code)
            continue
        names = [
            f"v{n}" if len(set(values)) > 1 else repr(values[0])
            for n, values in enumerate(zip(*every, strict=True))
        ]
        lines += _looked_up(names, every, sizes)
        code = _sum_of_products(alike[0], names, "own", widths, parts, elements)
        lines += ["if (tile >= 0) & (tile < size):", *indented(code), "tile -= size"]
    return _module(name, "a_ptr w_ptr z_ptr", ["R"], " ".join(_BLOCKS), lines)


def _size(block: CopyBlock, elements: int | None) -> str:
    """Number of tiles of a block."""
    size = f"tl.cdiv(R * {block.components}, BLOCK_M)"
    size = size if elements is None else f"({size} + {elements})"
    return f"{size} * tl.cdiv({block.copies}, BLOCK_N)"


def _looked_up(names: list[str], every: list[list[int | float]], sizes: list[str]) -> Iterator[str]:
    """The numbers of the block of a tile, its number there as `own`, and all their tiles."""
    varying = [n for n, name in enumerate(names) if name == f"v{n}"]
    yield f"own, size = tile, {sizes[0]}"
    yield from (f"v{n} = {every[0][n]!r}" for n in varying)
    for numbers, size in zip(every[1:], sizes[1:], strict=True):
        yield "later = tile >= size"
        yield "own = tl.where(later, tile - size, own)"
        yield from (f"v{n} = tl.where(later, {numbers[n]!r}, v{n})" for n in varying)
        yield f"size += {size}"


def _sum_of_products(
    of: _Summed,
    numbers: Sequence[object],
    tile: str,
    widths: tuple[int, int],
    parts: int,
    elements: int | None,
) -> list[str]:
    """A tile of a block.

    Args:
        of: the block and its products, or one of those that are alike.
        numbers: in place of theirs, as text or values.
        tile: name of the tile's number.
        widths: of rows of a and of the result.
        parts: of each number, see `kernels.py`.
        elements: number of them; None: all rows have the same weights.
    """
    (block, factors), (c, offset, step, *others) = of, numbers
    across = f"tl.cdiv({block.copies}, BLOCK_N)"
    rows = (None if elements is None else "order_ptr", "first_r", "last_r", tile)
    if elements is None:
        code = [f"first_r, last_r = {tile} // {across} * BLOCK_M, R * {c}"]
    else:
        piece = f"{tile} // {across}, starts_ptr, BLOCK_M, {c}, {_sides(elements)}"
        code = [f"kind, first_r, last_r = piece({piece})"]
    code.append("acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)")
    for n, (of_a, place, _, step_k, step_n, _, low) in enumerate(factors):
        at, step_a, first, factor = others[4 * n : 4 * n + 4]
        read = f"a_ptr + {at}", f"{place} + {first}"
        how = c, widths[0], step_a, of_a.copy_step, of_a.copies, block.copies, step_k, step_n
        call = _call("accumulate", "acc", *read, *rows, *how, factor, low, parts, *_BLOCKS)
        code.append(f"acc = {call}")
    to = f"z_ptr + {offset}", *rows, c, widths[1], step, block.copy_step, block.copies
    code.append(_call("store", "acc", *to, *_BLOCKS[:2]))
    return code


_BLOCKS = "BLOCK_M", "BLOCK_N", "BLOCK_K"


def prepare_source(
    mixing: Mixing, result: str, parts: int, elements: int | None = None, inside: bool = False
) -> str:
    """The weights of every block, in the order in which the product reads them."""
    numbers, begin, lines = prepared(mixing, result), 0, list[str]()
    own = "p_ptr" if elements is None else f"p_ptr + {_behind(numbers * max(1, parts))}"
    for group in merged(mixing, result):
        for path, column, n_first in group.paths:
            u, n = mixing.t[path.t].copies, mixing.z[path.z].copies
            steps = (1, group.length) if result == "z" else (group.length, 1)
            to = f"{own} + {begin + n_first * group.length + column}"
            tiles = f"tl.cdiv({u}, BLOCK) * tl.cdiv({n}, BLOCK)"
            place, first, row = _matrix(mixing, path, elements, inside)
            of = u, n, row, *steps, repr(path.factor), numbers, parts, "BLOCK"
            code = [
                _own_tile(elements, tiles),
                _call("prepare", f"{place} + {first}", to, "own", *of),
            ]
            lines += _next_tiles(tiles, code, elements)
        begin += group.block.copies * group.length
    return _module("prepare", "w_ptr p_ptr", [], "BLOCK", lines)


def outer_source(mixing: Mixing, parts: int, elements: int | None = None) -> str:
    """Partial sums of the weights' gradient, t times z over CHUNK components of rows each.

    The last part of an element may not be full.
    """
    begin, lines = 0, list[str]()
    for group in merged(mixing, "z"):
        z, c = group.block, group.block.components
        for t, first in group.runs:
            tiles = f"tl.cdiv({t.copies}, BLOCK_M) * tl.cdiv({z.copies}, BLOCK_N)"
            code = [f"part, chunk = tile // ({tiles}), CHUNK // {c}"]
            size = f"tl.cdiv(R, CHUNK // {c})"
            if elements is None:
                rows = "None, part * chunk, tl.minimum(part * chunk + chunk, R)"
            else:
                size = f"({size} + {elements})"
                rows = "order_ptr, first_row, last_row"
                piece = f"part, starts_ptr, chunk, 1, {_sides(elements)}"
                code.append(f"_, first_row, last_row = piece({piece})")
            behind = _behind(mixing.num_weights, "part")
            to = f"part_ptr + {begin + first * z.copies} + {behind}", rows, "tile"
            code.append(_outer(mixing, t, z, to, z.copies, 1.0, parts))
            lines += _next_tiles(f"{size} * {tiles}", code)
        begin += group.columns * z.copies
    free = ["R", "CHUNK"]
    return _module("outer", "t_ptr z_ptr part_ptr", free, "BLOCK_M BLOCK_N BLOCK_K", lines)


def whole_outer_source(
    mixing: Mixing, parts: int, elements: int | None = None, inside: bool = False
) -> str:
    """The weights' gradient of few rows, which one program sums."""
    lines = list[str]()
    for path in mixing.paths:
        t, z = mixing.t[path.t], mixing.z[path.z]
        tiles = f"tl.cdiv({t.copies}, BLOCK_M) * tl.cdiv({z.copies}, BLOCK_N)"
        code, rows = [_own_tile(elements, tiles)], "None, 0, R"
        if elements is not None:
            rows = "order_ptr, tl.load(starts_ptr + kind), tl.load(starts_ptr + kind + 1)"
        place, first, row = _matrix(mixing, path, elements, inside)
        code.append(
            _outer(mixing, t, z, (f"{place} + {first}", rows, "own"), row, path.factor, parts)
        )
        lines += _next_tiles(tiles, code, elements)
    return _module("whole_outer", "t_ptr z_ptr w_ptr", ["R"], " ".join(_BLOCKS), lines)


def _outer(
    mixing: Mixing,
    t: CopyBlock,
    z: CopyBlock,
    to: tuple[str, str, str],
    row: int,
    factor: float,
    parts: int,
) -> str:
    """The sum over rows of two blocks' products; `to` has its place, the rows and the tile."""
    of_t = mixing.width("t"), t.step, t.copy_step, t.copies
    of_z = mixing.width("z"), z.step, z.copy_step, z.copies
    read = f"t_ptr + {t.offset}", f"z_ptr + {z.offset}", *to, z.components
    return _call("outer", *read, *of_t, *of_z, row, repr(factor), parts, *_BLOCKS)


def fold_source(mixing: Mixing, elements: int | None = None, inside: bool = False) -> str:
    """The weights' gradient, added up from its partial sums."""
    begin, lines = 0, list[str]()
    for group in merged(mixing, "z"):
        z = group.block
        for path, column, n_first in group.paths:
            n = mixing.z[path.z].copies
            count = mixing.t[path.t].copies * n
            tiles, chunk = f"tl.cdiv({count}, BLOCK)", f"CHUNK // {z.components}"
            code = [_own_tile(elements, tiles)]
            some = f"0, tl.cdiv(R, {chunk})"
            if elements is not None:
                some = "first, last"
                pieces = f"kind, starts_ptr, {chunk}, 1, {_sides(elements)}"
                code.append(f"first, last = pieces({pieces})")
            place, first, row = _matrix(mixing, path, elements, inside)
            read = f"part_ptr + {begin + column * z.copies + n_first}", f"{place} + {first}"
            of = mixing.num_weights, count, n, z.copies, row, repr(path.factor), "BLOCK_P", "BLOCK"
            code.append(_call("fold", *read, some, "own", *of))
            lines += _next_tiles(tiles, code, elements)
        begin += group.columns * z.copies
    return _module("fold", "part_ptr w_ptr", ["R", "CHUNK"], "BLOCK_P BLOCK", lines)


def _call(function: str, *arguments: object) -> str:
    return f"{function}({', '.join(map(str, arguments))})"


def _own_tile(elements: int | None, tiles: str) -> str:
    """Find the tile of a program's element."""
    if elements is None:
        return "own = tile"
    return f"kind, own = tile // ({tiles}), tile % ({tiles})"


def _matrix(
    mixing: Mixing, path: MatrixPath, elements: int | None, inside: bool
) -> tuple[str, int, int]:
    """The place of a path's matrix, of the element `kind`; its first number and its step there."""
    n = mixing.z[path.z].copies
    if elements is None:
        return "w_ptr", path.weight, n
    if inside:
        return f"w_ptr + {_behind(n)}", path.weight * elements, n * elements
    return f"w_ptr + {_behind(mixing.width('w'))}", path.weight, n


def _behind(stride: int, name: str = "kind") -> str:
    """Offset of the weights of an element or a part, in 64 bits."""
    return f"{name} * tl.full((), {stride}, tl.int64)"


def _sides(elements: int) -> str:
    """Number of elements, and a power of two that holds them."""
    return f"{elements}, {power_of_two(elements)}"


def _next_tiles(size: str, code: list[str], times: int | None = None) -> list[str]:
    """Code for the next programs, `times` as many where it is given."""
    size = f"size = {size}" + (f" * {times}" if times else "")
    return [size, "if (tile >= 0) & (tile < size):", *indented(code), "tile -= size"]


HELPERS = ("accumulate", "fold", "outer", "piece", "pieces", "prepare", "store")
"""Functions of kernels.py that the lines call."""


def _module(name: str, pointers: str, free: list[str], blocks: str, lines: list[str]) -> str:
    """Module text of a kernel for shared weights; helpers and tables follow from its lines."""
    text = "\n".join(lines)
    parameters = [name for name in ("order_ptr", "starts_ptr") if name in text]
    parameters += [*pointers.split(), *free]
    parameters += [f"{block}: tl.constexpr" for block in blocks.split()]
    body = ["tile = tl.program_id(0)", *lines]
    kernel = FRAME.function(f"mixing_{name}", parameters, body, free)
    used = [helper for helper in HELPERS if f"{helper}(" in text]
    imports = [f"from torchweft.o3.mixing.kernels import {', '.join(used)}"]
    return FRAME.module(f"mixing_{name}", kernel, imports=imports)


def own_source(mixing: Mixing, result: str, warps: int) -> str:
    """Each row by weights of its own; the result is t, z or w, the others are read."""
    pointers, parts = ["t_ptr", "z_ptr", "w_ptr"], list[Iterator[str]]()
    body = ["row = tl.program_id(0).to(tl.int64)"]
    body += [f"{slot}_ptr += row * {mixing.width(slot)}" for slot in "tzw"]
    body.append(ROW_ACCUMULATOR)
    for n, group in enumerate(g for g in groups(mixing, "z") if g.paths):
        lines = _OwnPrinter(group, 32 * warps).lines(result)
        parts.append(FRAME.function(f"part_{n}", [*pointers, "ACC: tl.constexpr"], lines))
        body.append(f"part_{n}(t_ptr, z_ptr, w_ptr, ACC)")
    kernel = FRAME.function("mixing_own", [*pointers, "WARPS: tl.constexpr"], body)
    return FRAME.module("mixing_own", *parts, kernel)


ROW_ACCUMULATOR = (
    "ACC: tl.constexpr = tl.float64 if w_ptr.dtype.element_ty == tl.float64 else tl.float32"
)
"""The dtype of sums, in kernels of rows with own weights."""


def number(value: float) -> str:
    """A constant in the dtype of sums: Triton's literals are float32."""
    return f"tl.full((), {value!r}, ACC)"


def alignment(*places: int) -> int:
    """A power of two that divides all, at most 16."""
    return min([16, *(place & -place for place in places if place)])


class _OwnPrinter:
    """Lines of one block of z: u are the copies of t into it, n its own."""

    def __init__(self, group: CopySum, threads: int) -> None:
        self.group = group
        self.c, self.n, self.u = group.block.components, group.block.copies, group.columns
        self.block_n = min(128, power_of_two(self.n))
        most = max(1, CARRIED_NUMBERS * threads // (1 + self.c) // self.block_n)
        self.block_u = min(power_of_two(self.u), 1 << (most.bit_length() - 1))

    def lines(self, result: str) -> list[str]:
        """z[m, n] = Σ_u t[m, u] w[u, n], t[m, u] = Σ_n z[m, n] w[u, n] or w[u, n] = Σ_m t z."""
        ranges = {"u": (self.u, self.block_u), "n": (self.n, self.block_n)}
        loops = [f"for {i}_first in range(0, {n}, {by}):" for i, (n, by) in ranges.items()]
        tile = [*(self._index(i, f"{i}_first") for i in "un"), *self._place()]
        zeros = f"tl.zeros(({self.block_u}, {self.block_n}), ACC)"
        if result == "w":
            inner = [*tile, f"w = {zeros}", *self._outer()]
            return [loops[0], *indented([loops[1], *indented(inner)])]
        read, lanes, axis, index = (
            ("t", ":, None", 0, "n") if result == "z" else ("z", "None, :", 1, "u")
        )
        first, second = reversed(loops) if result == "z" else loops
        load = 'tl.load(w_ptr + at, mask=live, other=0.0, eviction_policy="evict_first").to(ACC)'
        steps = [*tile, f"w = {load}{self._factor()}"]
        for m in range(self.c):
            steps += [self._value(read, m), f"s_{m} += value[{lanes}] * w"]
        ends = [self._index(index, f"{index}_first")]
        for m in range(self.c):
            ends += self._stores(result, m, f"tl.sum(s_{m}, {axis})")
        sums = [f"s_{m} = {zeros}" for m in range(self.c)]
        return [first, *indented([*sums, second, *indented(steps), *ends])]

    def _outer(self) -> Iterator[str]:
        for m in range(self.c):
            yield from (self._value("t", m), "left = value", self._value("z", m))
            yield "w += left[:, None] * value[None, :]"
        stored = f"(w{self._factor()}).to(w_ptr.dtype.element_ty)"
        yield f'tl.store(w_ptr + at, {stored}, mask=live, eviction_policy="evict_first")'

    def _index(self, name: str, first: str) -> str:
        return f"{name} = {first} + tl.arange(0, {self.block_u if name == 'u' else self.block_n})"

    def _place(self) -> Iterator[str]:
        """Where the weights of u begin: paths follow each other, weights need not."""
        at, before = f"u * {self.n}", 0
        for path, first, _ in self.group.paths:
            jump = path.weight - first * self.n - before
            if jump:
                at += f" + (u >= {first}) * {jump}" if first else f" + {jump}"
            before += jump
        aligned = alignment(self.n, *(path.weight for path, *_ in self.group.paths))
        yield f"at = tl.multiple_of({at}, {aligned})[:, None] + n[None, :]"
        yield f"live = (u < {self.u})[:, None] & (n < {self.n})[None, :]"

    def _factor(self) -> str:
        """What scales the rows of a tile of weights."""
        (text, _), *others = factors = [
            (number(path.factor), first) for path, first, _ in self.group.paths
        ]
        if len({factor for factor, _ in factors}) == 1:
            return "" if text == number(1.0) else f" * {text}"
        for factor, first in others:
            text = f"tl.where(u >= {first}, {factor}, {text})"
        return f" * ({text})[:, None]"

    def _value(self, slot: str, m: int) -> str:
        """Load component m of the copies u of t, or n of z."""
        if slot == "z":
            return f"value = {_load('z', self.group.block, 'n', m, f'n < {self.n}')}"
        found = []
        for block, first in self.group.runs:
            index, mask = "u", f"u < {first + block.copies}"
            if first:
                index, mask = f"(u - {first})", f"(u >= {first}) & ({mask})"
            found.append(_load("t", block, index, m, mask))
        return "value = " + " + ".join(found)

    def _stores(self, slot: str, m: int, value: str) -> Iterator[str]:
        value = f"({value}).to({slot}_ptr.dtype.element_ty)"
        if slot == "z":
            at = _address("z", self.group.block, "n", m)
            yield f"tl.store({at}, {value}, mask=n < {self.n})"
            return
        yield f"value = {value}"
        for block, first in self.group.runs:
            mask = f"(u >= {first}) & (u < {first + block.copies})"
            yield f"tl.store({_address('t', block, f'(u - {first})', m)}, value, mask={mask})"


def _address(slot: str, block: CopyBlock, index: str, m: int) -> str:
    return f"{slot}_ptr + {block.offset + m * block.step} + {index} * {block.copy_step}"


def _load(slot: str, block: CopyBlock, index: str, m: int, mask: str) -> str:
    return f"tl.load({_address(slot, block, index, m)}, mask={mask}, other=0.0).to(ACC)"
