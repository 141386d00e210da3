"""Kernels of weights that mix copies, printed for one mixing.

shared weights   programs take tiles of matrix products, block of the result after block
own weights      a program takes a row and reads its weights once, 16 bytes at a time; bound: memory
"""

from __future__ import annotations

from torchweft.core.printing.dialect import indented
from torchweft.o3.mixing.blocks import Block, Group, Mixing, groups, merged, prepared, weights
from torchweft.products.tiles import power_of_two

__all__ = ["fold_source", "outer_source", "own_source", "prepare_source", "product_source"]

IMPORTS = """import triton
import triton.language as tl

"""

SHARED = """from torchweft.o3.mixing.kernels import {names}


@triton.jit(do_not_specialize={numbers})
def mixing_{kind}({arguments}):
    tile = tl.program_id(0)
"""


def product_source(mixing: Mixing, result: str, parts: int, kinds: int | None = None) -> str:
    """z = a @ prepared weights, for every block of the result; a tile's rows are of one kind."""
    lines, begin = list[str](), 0
    numbers = prepared(mixing, result)
    a, z = mixing.width("z" if result == "t" else "t"), mixing.width(result)
    for group in merged(mixing, result):
        block = group.block
        c, n = block.components, block.copies
        rows = f"{'None' if kinds is None else 'order_ptr'}, first_r, last_r"
        code = ["acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)"]
        for run in group.runs:
            source = run.block
            code.append(
                f"acc = accumulate(acc, a_ptr + {source.offset}, own_w_ptr + {begin + run.first}, "
                f"{rows}, tile, {c}, {a}, {source.step}, {source.copy_step}, {source.copies}, {n}, "
                f"{group.length}, {numbers}, {parts}, BLOCK_M, BLOCK_N, BLOCK_K)"
            )
        code.append(
            f"store(acc, z_ptr + {block.offset}, {rows}, tile, {c}, {z}, {block.step}, "
            f"{block.copy_step}, {n}, BLOCK_M, BLOCK_N)"
        )
        across = f"tl.cdiv({n}, BLOCK_N)"
        stride = numbers * max(1, parts)
        size, head = _tile_of_rows(kinds, c, across, stride)
        lines += _tiled(f"{size} * {across}", [*head, *code])
        begin += n * group.length
    arguments = "a_ptr, w_ptr, z_ptr, R, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, "
    names = "accumulate, store"
    if kinds is not None:
        arguments, names = "order_ptr, starts_ptr, " + arguments, "accumulate, piece, store"
    return _shared("product", names, ["R"], arguments + "BLOCK_K: tl.constexpr", lines)


def _tile_of_rows(kinds: int | None, c: int, across: str, stride: int) -> tuple[str, list[str]]:
    """How many tiles of rows of components there are, and how a program finds its own."""
    size, tile = f"tl.cdiv(R * {c}, BLOCK_M)", f"tile // {across}"
    if kinds is None:
        return size, [f"first_r, last_r = {tile} * BLOCK_M, R * {c}", "own_w_ptr = w_ptr"]
    return f"({size} + {kinds})", [
        f"kind, first_r, last_r = piece({tile}, starts_ptr, BLOCK_M, {c}, {_sides(kinds)})",
        f"own_w_ptr = w_ptr + {_behind(stride)}",
    ]


def prepare_source(mixing: Mixing, result: str, parts: int, kinds: int | None = None) -> str:
    """The weights of every block, as the product reads them."""
    lines, begin = list[str](), 0
    numbers = prepared(mixing, result)
    for group in merged(mixing, result):
        for path, column, row in group.paths:
            u, n = mixing.t[path.t].copies, mixing.z[path.z].copies
            steps = (1, group.length) if result == "z" else (group.length, 1)
            at = begin + row * group.length + column
            tiles = f"tl.cdiv({u}, BLOCK) * tl.cdiv({n}, BLOCK)"
            stride = numbers * max(1, parts)
            code = [
                *_of_kind(kinds, tiles, {"w_ptr": mixing.width("w"), "p_ptr": stride}),
                f"prepare(own_w_ptr + {path.weight}, own_p_ptr + {at}, own, {u}, {n}, "
                f"{steps[0]}, {steps[1]}, {path.factor!r}, {numbers}, {parts}, BLOCK)",
            ]
            lines += _tiled(tiles, code, kinds)
        begin += group.block.copies * group.length
    return _shared("prepare", "prepare", [], "w_ptr, p_ptr, BLOCK: tl.constexpr", lines)


def outer_source(mixing: Mixing, parts: int, kinds: int | None = None) -> str:
    """Parts of the weights' gradient: t times z, over some rows each; block of z after block.

    A part has CHUNK components.  Every kind may end in a part that is not full.
    """
    lines, begin = list[str](), 0
    numbers = weights(mixing)
    for group in merged(mixing, "z"):
        z, c = group.block, group.block.components
        for run in group.runs:
            t = run.block
            tiles = f"tl.cdiv({t.copies}, BLOCK_M) * tl.cdiv({z.copies}, BLOCK_N)"
            code = [f"part, chunk = tile // ({tiles}), CHUNK // {c}"]
            if kinds is None:
                rows = "None, part * chunk, tl.minimum(part * chunk + chunk, R)"
                size = f"tl.cdiv(R, CHUNK // {c}) * {tiles}"
            else:
                rows = "order_ptr, first_row, last_row"
                size = f"(tl.cdiv(R, CHUNK // {c}) + {kinds}) * {tiles}"
                code.append(
                    f"_, first_row, last_row = piece(part, starts_ptr, chunk, 1, {_sides(kinds)})"
                )
            code.append(
                f"outer(t_ptr + {t.offset}, z_ptr + {z.offset}, "
                f"part_ptr + {begin + run.first * z.copies}, {rows}, part, tile, {numbers}, {c}, "
                f"{mixing.width('t')}, {t.step}, {t.copy_step}, {t.copies}, "
                f"{mixing.width('z')}, {z.step}, {z.copy_step}, {z.copies}, {parts}, "
                "BLOCK_M, BLOCK_N, BLOCK_K)"
            )
            lines += _tiled(size, code)
        begin += group.columns * z.copies
    arguments = "t_ptr, z_ptr, part_ptr, R, CHUNK, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, "
    names = "outer"
    if kinds is not None:
        arguments, names = "order_ptr, starts_ptr, " + arguments, "outer, piece"
    return _shared("outer", names, ["R", "CHUNK"], arguments + "BLOCK_K: tl.constexpr", lines)


def fold_source(mixing: Mixing, kinds: int | None = None) -> str:
    """The weights' gradient, from its parts."""
    lines, begin = list[str](), 0
    numbers = weights(mixing)
    for group in merged(mixing, "z"):
        z = group.block
        for path, column, row in group.paths:
            n = mixing.z[path.z].copies
            count = mixing.t[path.t].copies * n
            tiles = f"tl.cdiv({count}, BLOCK)"
            code = _of_kind(kinds, tiles, {"w_ptr": mixing.width("w")})
            chunk = f"CHUNK // {z.components}"
            some = f"0, tl.cdiv(R, {chunk})"
            if kinds is not None:
                some = "first, last"
                code.append(f"first, last = pieces(kind, starts_ptr, {chunk}, 1, {_sides(kinds)})")
            code.append(
                f"fold(part_ptr + {begin + column * z.copies + row}, own_w_ptr + {path.weight}, "
                f"{some}, own, {numbers}, {count}, {n}, {z.copies}, {path.factor!r}, "
                "BLOCK_P, BLOCK)"
            )
            lines += _tiled(tiles, code, kinds)
        begin += group.columns * z.copies
    arguments = "part_ptr, w_ptr, R, CHUNK, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr"
    names = "fold"
    if kinds is not None:
        arguments, names = "starts_ptr, " + arguments, "fold, pieces"
    return _shared("fold", names, ["R", "CHUNK"], arguments, lines)


def _of_kind(kinds: int | None, tiles: str, strides: dict[str, int]) -> list[str]:
    """Of a program's kind the tile, and where its numbers begin: so many for each kind."""
    if kinds is None:
        return ["own = tile", *(f"own_{name} = {name}" for name in strides)]
    own = [f"own_{name} = {name} + {_behind(stride)}" for name, stride in strides.items()]
    return [f"kind, own = tile // ({tiles}), tile % ({tiles})", *own]


def _behind(stride: int) -> str:
    """Where the numbers of a kind begin, in 64 bits."""
    return f"kind * tl.full((), {stride}, tl.int64)"


def _sides(kinds: int) -> str:
    """How many kinds, and a power of two that holds them."""
    return f"{kinds}, {power_of_two(kinds)}"


def _tiled(size: str, code: list[str], times: int | None = None) -> list[str]:
    """Code for the next so many programs, for each kind."""
    head = [
        f"size = {size}" + (f" * {times}" if times else ""),
        "if (tile >= 0) & (tile < size):",
    ]
    return [*head, *indented(code, 1), "tile -= size"]


def _shared(kind: str, names: str, numbers: list[str], arguments: str, lines: list[str]) -> str:
    head = SHARED.format(kind=kind, names=names, numbers=numbers, arguments=arguments)
    return IMPORTS + head + _body(lines)


PART = """@triton.jit
def part_{number}(t_ptr, z_ptr, w_ptr, ACC: tl.constexpr):
"""

OWN = """@triton.jit
def mixing_own(t_ptr, z_ptr, w_ptr, WARPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    t_ptr += row * {t}
    z_ptr += row * {z}
    w_ptr += row * {w}
    ACC: tl.constexpr = tl.float64 if w_ptr.dtype.element_ty == tl.float64 else tl.float32
"""

SUMS = 48
"""Numbers that a thread keeps of a tile of weights and of the sums over it: with 96, or with all
weights read before the first sum, fewer programs run together and take a quarter longer (H200)."""


def own_source(mixing: Mixing, result: str, warps: int) -> str:
    """Each row by the weights of its own; the result is t, z or w, the others are read."""
    text, calls = IMPORTS, list[str]()
    for number, group in enumerate(groups(mixing, "z")):
        part = _Own(group, 32 * warps)
        calls.append(f"part_{number}(t_ptr, z_ptr, w_ptr, ACC)")
        lines = {"t": part.turned, "z": part.product, "w": part.outer}[result]()
        text += "\n" + PART.format(number=number) + _body(lines) + "\n"
    head = OWN.format(t=mixing.width("t"), z=mixing.width("z"), w=mixing.width("w"))
    return text + "\n" + head + _body(calls)


def _body(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)


class _Own:
    """The code of one block of z: u are the copies of t into it, n its own."""

    def __init__(self, group: Group, threads: int) -> None:
        self.group = group
        self.c, self.n, self.u = group.block.components, group.block.copies, group.columns
        self.block_n = min(128, power_of_two(self.n))
        most = 1 << (max(1, SUMS * threads // (1 + self.c) // self.block_n).bit_length() - 1)
        self.block_u = min(power_of_two(self.u), max(1, most))

    def indices(self, u: str, n: str) -> list[str]:
        """U, n, and where the weights of u begin: paths follow each other, weights need not."""
        at, before = f"u * {self.n}", 0
        for path, first, _ in self.group.paths:
            jump = path.weight - first * self.n - before
            if jump:
                at += f" + (u >= {first}) * {jump}" if first else f" + {jump}"
            before += jump
        return [
            f"u = {u} + tl.arange(0, {self.block_u})",
            f"n = {n} + tl.arange(0, {self.block_n})",
            f"at = tl.multiple_of({at}, {self._alignment()})[:, None] + n[None, :]",
            f"live = (u < {self.u})[:, None] & (n < {self.n})[None, :]",
        ]

    def load(self) -> str:
        """A tile of weights."""
        return (
            'tl.load(w_ptr + at, mask=live, other=0.0, eviction_policy="evict_first").to(ACC)'
            f"{self._factor()}"
        )

    def product(self) -> list[str]:
        """z[m, n] = Σ_u t[m, u] w[u, n]."""
        sums = [f"    s_{m} = {self._zeros()}" for m in range(self.c)]
        steps = [
            line
            for m in range(self.c)
            for line in (*self._value("t", m), f"s_{m} += value[:, None] * w")
        ]
        ends = [self._store("z", m, f"tl.sum(s_{m}, 0)") for m in range(self.c)]
        return [
            f"for n_first in range(0, {self.n}, {self.block_n}):",
            *sums,
            f"    for u_first in range(0, {self.u}, {self.block_u}):",
            *indented(self.indices("u_first", "n_first"), 2),
            f"        w = {self.load()}",
            *indented(steps, 2),
            *indented(self.indices("0", "n_first")[1:2], 1),
            *indented(ends, 1),
        ]

    def turned(self) -> list[str]:
        """t[m, u] = Σ_n z[m, n] w[u, n]."""
        sums = [f"    s_{m} = {self._zeros()}" for m in range(self.c)]
        steps = [
            line
            for m in range(self.c)
            for line in (*self._value("z", m), f"s_{m} += value[None, :] * w")
        ]
        ends = [line for m in range(self.c) for line in self._stores("t", m, f"tl.sum(s_{m}, 1)")]
        return [
            f"for u_first in range(0, {self.u}, {self.block_u}):",
            *sums,
            f"    for n_first in range(0, {self.n}, {self.block_n}):",
            *indented(self.indices("u_first", "n_first"), 2),
            f"        w = {self.load()}",
            *indented(steps, 2),
            *indented(self.indices("u_first", "0")[:1], 1),
            *indented(ends, 1),
        ]

    def outer(self) -> list[str]:
        """w[u, n] = Σ_m t[m, u] z[m, n]."""
        steps = [f"w = {self._zeros()}"]
        for m in range(self.c):
            steps += [*self._value("t", m), "left = value", *self._value("z", m)]
            steps.append("w += left[:, None] * value[None, :]")
        stored = f"(w{self._factor()}).to(w_ptr.dtype.element_ty)"
        steps.append(f'tl.store(w_ptr + at, {stored}, mask=live, eviction_policy="evict_first")')
        return [
            f"for u_first in range(0, {self.u}, {self.block_u}):",
            f"    for n_first in range(0, {self.n}, {self.block_n}):",
            *indented(self.indices("u_first", "n_first"), 2),
            *indented(steps, 2),
        ]

    def _alignment(self) -> int:
        """A power of two that divides where the weights of every u begin."""
        numbers = [self.n, *(path.weight for path, *_ in self.group.paths), 16]
        return min(number & -number for number in numbers if number)

    def _factor(self) -> str:
        """Behind a tile of weights: what scales its rows."""
        factors = [(path.factor, first) for path, first, _ in self.group.paths]
        if all(factor == factors[0][0] for factor, _ in factors):
            return "" if factors[0][0] == 1.0 else f" * {self._number(factors[0][0])}"
        text = self._number(factors[0][0])
        for factor, first in factors[1:]:
            text = f"tl.where(u >= {first}, {self._number(factor)}, {text})"
        return f" * ({text})[:, None]"

    def _number(self, value: float) -> str:
        """A constant in the dtype of sums: Triton's literals are float32."""
        return f"tl.full((), {value!r}, ACC)"

    def _zeros(self) -> str:
        return f"tl.zeros(({self.block_u}, {self.block_n}), ACC)"

    def _value(self, slot: str, m: int) -> list[str]:
        """Component m of the copies u of t, or n of z."""
        if slot == "z":
            block = self.group.block
            return [f"value = {_load('z', block, 'n', m, f'n < {self.n}')}"]
        found = []
        for run in self.group.runs:
            block, first = run.block, run.first
            index, mask = ("u", f"u < {first + block.copies}")
            if first:
                index, mask = f"(u - {first})", f"(u >= {first}) & ({mask})"
            found.append(_load("t", block, index, m, mask))
        return ["value = " + " + ".join(found)]

    def _store(self, slot: str, m: int, value: str) -> str:
        block = self.group.block
        at = f"{slot}_ptr + {block.offset + m * block.step} + n * {block.copy_step}"
        return f"tl.store({at}, ({value}).to({slot}_ptr.dtype.element_ty), mask=n < {self.n})"

    def _stores(self, slot: str, m: int, value: str) -> list[str]:
        """As many as there are runs."""
        lines = [f"value = ({value}).to({slot}_ptr.dtype.element_ty)"]
        for run in self.group.runs:
            block, first = run.block, run.first
            at = f"{slot}_ptr + {block.offset + m * block.step} + (u - {first}) * {block.copy_step}"
            mask = f"(u >= {first}) & (u < {first + block.copies})"
            lines.append(f"tl.store({at}, value, mask={mask})")
        return lines


def _load(slot: str, block: Block, index: str, m: int, mask: str) -> str:
    at = f"{slot}_ptr + {block.offset + m * block.step} + {index} * {block.copy_step}"
    return f"tl.load({at}, mask={mask}, other=0.0).to(ACC)"
