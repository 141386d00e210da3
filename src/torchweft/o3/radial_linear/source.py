"""Triton kernels of z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], h[e] A): no weight leaves the chip.

h and A come in parts of 16 bits (radial_linear_kernels), so that rows of y hold the powers of two
of rows of h, and sums are multiplied by those of columns of A.  A program owns a block of channels,
and keeps its columns of A in shared memory:

    for tiles of 32 rows of z:
        for the edges of these rows, two of each row at a time:    # 64 edges
            chunk after chunk of paths:
                w = h A                  (64, paths · channels), by tensor cores, part by part
                add the terms of both edges to the rows' sums
        store the sums

Two edges of a row stand 8 rows apart in the tile, because there the tensor cores leave them to one
thread.  A thread thus sums what it multiplied: nothing is exchanged between threads, and a row of
few edges wastes no more than half of its last pair.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from torchweft.core.printing.dialect import indented
from torchweft.o3.channelwise.arithmetic import Arithmetic, entries, value_name
from torchweft.o3.channelwise.calls import Call, Result
from torchweft.o3.channelwise.structure import Block, Path, Product
from torchweft.products.tiles import power_of_two

__all__ = [
    "NAME",
    "ROWS",
    "SHORT",
    "WARPS",
    "Job",
    "Tiling",
    "chunks",
    "columns",
    "scale",
    "source",
]

NAME = "radial_linear"
"""Of the kernels, in profiles too."""

ROWS = 32
"""Of z, in a tile."""

EDGES = 2
"""Of a row, at a time."""

WARPS = 4
"""Of a program: those that share a product on tensor cores."""

SHORT = 32
"""Terms of a sum from which on two parts err no more than float32, which rounds each term once
where they leave out up to eight roundings.  Three parts leave out none."""


class Tiling(NamedTuple):
    """How a kernel lays its work out.

    Args:
        block: channels of a program, a power of 2.
        chunk: most paths whose weights are formed at once, a power of 2.
        stages: iterations of the loop over edges whose loads are under way.
    """

    block: int
    chunk: int = 8
    stages: int = 2


class Job(NamedTuple):
    """What one kernel computes.  Its source depends on all of it.

    Args:
        product: blocks and paths; channels share y, and share nothing else.
        paths: those of the product that it computes, by number.
        widths: numbers in a row of x, y and z.
        hidden: numbers in a row of h.
        parts: of numbers of h and of A; of P parts those i and j with i + j < P are multiplied.
        tiling: how the work is laid out.
    """

    product: Product
    paths: tuple[int, ...]
    widths: tuple[int, int, int]
    hidden: int
    parts: int
    tiling: Tiling

    @property
    def channel_blocks(self) -> int:
        """Programs that share rows."""
        return -(-self.product.channels // self.tiling.block)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that its loads ahead and its columns of A take, at most."""
        tiling, tall = self.tiling, ROWS * EDGES
        halves = sum(map(_places, chunks(self))) * tiling.block + tall * tiling.stages
        used = [self.product.paths[p] for p in self.paths]
        components = sum(self.product.x[b].components for b in {path.x for path in used})
        numbers = components * tiling.block + power_of_two(self.widths[1])
        return 2 * self.parts * self.depth * halves + 4 * tall * (tiling.stages - 1) * numbers

    @property
    def depth(self) -> int:
        """Numbers of h that are summed: a power of 2."""
        return max(16, power_of_two(self.hidden))


def chunks(job: Job) -> list[tuple[int, ...]]:
    """The paths whose weights are formed together."""
    step = job.tiling.chunk
    return [job.paths[n : n + step] for n in range(0, len(job.paths), step)]


def _places(chunk: tuple[int, ...]) -> int:
    """Of a chunk: a power of 2."""
    return power_of_two(len(chunk))


def columns(job: Job) -> list[tuple[int, int] | None]:
    """(path, channel) of each prepared column of A; None: zero.

    Block of channels after block, chunk after chunk.
    """
    block = job.tiling.block
    found: list[tuple[int, int] | None] = []
    for first in range(0, job.channel_blocks * block, block):
        for chunk in chunks(job):
            for place in range(_places(chunk)):
                for u in range(first, first + block):
                    there = place < len(chunk) and u < job.product.channels
                    found.append((chunk[place], u) if there else None)
    return found


def scale(product: Product, path: Path) -> float:
    """What A is multiplied by, so that most coefficients of the path are ±1."""
    return entries(product, path)[1]


def source(job: Job) -> str:
    """The module text of a job's kernel, `kernel`.

    Its pointers are x, y, parts of h, those of A and their powers of two, z, indptr and src, int32;
    rows of y, h and src are edges, sorted by their row of z.  Then come the numbers `rows` and
    `lanes` (programs for each block of channels).
    """
    return "\n".join(_Writer(job).module()) + "\n"


class _Sums(Arithmetic):
    """The terms of one edge of each row; A has been scaled."""

    def __init__(self, product: Product, edge: int) -> None:
        x, y, w = range(3 * edge, 3 * edge + 3)
        super().__init__(product, Call("xyw" * EDGES, (Result("z", ((x, y, w),)),)), self._sum)
        self._edge = edge

    def path(self, path: Path) -> None:
        """Its terms, with coefficients that have been divided."""
        self._path, self._scale = path, 1.0
        self._entries = entries(self._product, path)[0]
        self._z(0, [dict(zip("xyw", range(3 * self._edge, 3 * self._edge + 3), strict=True))])

    def _sum(self, result: int, block: int, component: int, terms: str) -> None:
        name = _sum_name(block, component)
        self.lines.append(f"{name} = {name} {terms}")

    def _named(self, prefix: str, text: str) -> str:
        return super()._named(f"{'ab'[self._edge]}_{prefix}", text)


def _sum_name(block: int, component: int) -> str:
    return f"z_{block}_{component}"


class _Writer:
    """The lines of one kernel."""

    def __init__(self, job: Job) -> None:
        self.job, self.product = job, job.product
        self.sums = [_Sums(job.product, edge) for edge in range(EDGES)]
        used = [job.product.paths[p] for p in job.paths]
        self.z_blocks = sorted({path.z for path in used})
        self.y_blocks = sorted({path.y for path in used})
        self.ragged = job.product.channels % job.tiling.block != 0
        self.loaded: set[tuple[int, int]] = set()
        self.length = sum(map(_places, chunks(job))) * job.tiling.block

    def module(self) -> Iterator[str]:
        yield "import triton"
        yield "import triton.language as tl"
        yield ""
        yield ""
        yield from _NUMBER
        yield "@triton.jit(do_not_specialize=['rows', 'lanes'])"
        names = ["x", "y", "h", "a", "powers", "z", "indptr", "src"]
        constants = "BLOCK: tl.constexpr, STAGES: tl.constexpr"
        yield f"def {NAME}({', '.join(f'{n}_ptr' for n in names)}, rows, lanes, {constants}):"
        yield from indented(self._body())

    def _body(self) -> Iterator[str]:
        blocks = self.job.channel_blocks
        yield "pid = tl.program_id(0)"
        yield f"lane, block = pid // {blocks}, pid % {blocks}"
        yield "u = block * BLOCK + tl.arange(0, BLOCK)[None, :]"
        if self.ragged:
            yield f"inside = u < {self.product.channels}"
        yield f"k = tl.arange(0, {self.job.depth})[None, :]"
        yield f"place = tl.arange(0, {ROWS * EDGES})"
        yield from self._matrices()
        yield f"for tile in range(lane, tl.cdiv(rows, {ROWS}), lanes):"
        yield from indented(self._tile())

    def _tile(self) -> Iterator[str]:
        """The sums of 32 rows."""
        yield f"row = tile * {ROWS} + tl.arange(0, {ROWS})"
        yield from _bounds("row", "first", "last")
        yield f"count = (tl.max(last - first) + {EDGES - 1}) // {EDGES}"
        yield f"place_row = tile * {ROWS} + place // 16 * 8 + place % 8"
        yield from _bounds("place_row", "place_first", "place_last")
        yield "place_first += place // 8 % 2"
        for block in self.z_blocks:
            for c in range(self.product.z[block].components):
                yield f"{_sum_name(block, c)} = tl.zeros(({ROWS}, BLOCK), tl.float32)"
        for edge in range(EDGES):
            yield f"source{edge} = {self._source(edge, str(edge))}"
        yield "for pair in tl.range(0, count, num_stages=STAGES):"
        yield from indented(self._pair())
        yield "live = (row < rows)[:, None]"
        yield f"z_row = z_ptr + tl.cast(row, tl.int64)[:, None] * {self.job.widths[2]}"
        mask = "live & inside" if self.ragged else "live"
        for block in self.z_blocks:
            place = self.product.z[block]
            yield f"power = tl.load(power_ptr + {self._column_into(block)})"
            for c in range(place.components):
                value = f"{_sum_name(block, c)} * power"
                yield f"tl.store({_address('z_row', place, c)}, {value}, mask={mask})"

    def _column_into(self, block: int) -> int:
        """The first of a program's columns of A whose path leads into a block of z."""
        begin = 0
        for chunk in chunks(self.job):
            for place, path in enumerate(chunk):
                if self.product.paths[path].z == block:
                    return begin + place * self.job.tiling.block
            begin += _places(chunk) * self.job.tiling.block
        raise AssertionError(block)

    def _matrices(self) -> Iterator[str]:
        """The program's columns of A, a chunk of paths each."""
        job, begin = self.job, 0
        step = job.parts * job.depth
        yield f"a_row = a_ptr + block * {self.length * step}"
        yield f"power_ptr = powers_ptr + block * {self.length} + tl.arange(0, BLOCK)[None, :]"
        for n, chunk in enumerate(chunks(job)):
            width = _places(chunk) * job.tiling.block
            yield f"n = {begin} + tl.arange(0, {width})[:, None]"
            for part in range(job.parts):
                yield f"A{n}_{part} = tl.load(a_row + n * {step} + {part * job.depth} + k)"
            begin += width

    # two edges of each row

    def _pair(self) -> Iterator[str]:
        yield f"p = place_first + {EDGES} * pair"
        step = self.job.parts * self.job.depth
        yield f"h_row = h_ptr + tl.cast(p, tl.int64)[:, None] * {step} + k"
        for part in range(self.job.parts):
            at = f"h_row + {part * self.job.depth}"
            yield f"h_{part} = tl.load({at}, mask=(p < place_last)[:, None], other=0.0)"
        for edge in range(EDGES):
            yield f"p{edge} = first + ({EDGES} * pair + {edge})"
            yield f"live{edge} = p{edge} < last"
            yield f"e{edge} = tl.cast(p{edge}, tl.int64)"
            source = f"tl.cast(source{edge}, tl.int64)[:, None]"
            yield f"x{edge}_row = x_ptr + {source} * {self.job.widths[0]}"
        for n, chunk in enumerate(chunks(self.job)):
            yield from self._weights(n, chunk)
            for edge in range(EDGES):
                if not n:
                    yield from self._harmonics(edge)
                for number in chunk:
                    yield from self._path(edge, self.product.paths[number])
        for edge in range(EDGES):
            yield f"source{edge} = {self._source(edge, f'({EDGES} * pair + {EDGES + edge})')}"

    def _source(self, edge: int, place: str) -> str:
        """Row of x of an edge of the list: known a step before its features are asked for."""
        return f"_number(src_ptr, first + {place}, last)"

    def _harmonics(self, edge: int) -> Iterator[str]:
        """The row of y as one tile, taken apart into its components."""
        ends = [self._span(self.product.y[b]) for b in self.y_blocks]
        begin, end = min(b for b, _ in ends), max(e for _, e in ends)
        width = power_of_two(end - begin)
        yield f"c = tl.arange(0, {width})[None, :]"
        mask = f"live{edge}[:, None]"
        mask += "" if width == end - begin else f" & (c < {end - begin})"
        row = f"y_ptr + e{edge}[:, None] * {self.job.widths[1]} + {begin}"
        tile = f"y{edge}"
        yield f"{tile} = tl.load({row} + c, mask={mask}, other=0.0)"
        names = yield from _apart(tile, [str(ROWS)], width)
        for b in self.y_blocks:
            block = self.product.y[b]
            for c in range(block.components):
                at = names[block.offset + c * block.step - begin]
                name = value_name("y", 3 * edge + 1, b, c)
                yield f"{name} = tl.reshape({at}, ({ROWS}, 1))"

    @staticmethod
    def _span(block: Block) -> tuple[int, int]:
        return block.offset, block.offset + (block.components - 1) * block.step + 1

    def _weights(self, n: int, chunk: tuple[int, ...]) -> Iterator[str]:
        """The weights of a chunk of paths, each of both edges, where its thread has them."""
        parts = range(self.job.parts)
        pairs = [(i, j) for i in parts for j in parts if i + j < len(parts)]
        for step, (i, j) in enumerate(sorted(pairs, key=sum, reverse=True)):  # small ones first
            into = ", w" if step else ""
            yield f"w = tl.dot(h_{i}, A{n}_{j}.T{into})"
        paths = _places(chunk)
        yield f"w = tl.reshape(w, (4, 2, 8, {paths}, BLOCK))"
        yield "w0, w1 = tl.split(tl.permute(w, (0, 2, 4, 3, 1)))"
        for edge in range(EDGES):
            names = yield from _apart(f"w{edge}", [str(ROWS), "BLOCK"], paths)
            for at, number in enumerate(chunk):
                name = value_name("w", 3 * edge + 2, self.product.paths[number].w, 0)
                yield f"{name} = tl.reshape({names[at]}, ({ROWS}, BLOCK))"

    def _path(self, edge: int, path: Path) -> Iterator[str]:
        if (edge, path.x) not in self.loaded:
            self.loaded.add((edge, path.x))
            block = self.product.x[path.x]
            mask = f"live{edge}[:, None]{' & inside' if self.ragged else ''}"
            for c in range(block.components):
                address = _address(f"x{edge}_row", block, c)
                name = value_name("x", 3 * edge, path.x, c)
                yield f"{name} = tl.load({address}, mask={mask}, other=0.0)"
        sums = self.sums[edge]
        begin = len(sums.lines)
        sums.path(path)
        yield from sums.lines[begin:]


_NUMBER = (
    "@triton.jit",
    "def _number(list_ptr, at, end):",
    "    half_ptr = list_ptr.to(tl.pointer_type(tl.int16)) + 2 * tl.cast(at, tl.int64)",
    "    low = tl.load(half_ptr, mask=at < end, other=0).to(tl.int32) & 0xFFFF",
    "    high = tl.load(half_ptr + 1, mask=at < end, other=0).to(tl.int32)",
    "    return (high << 16) | low",
    "",
    "",
)
"""An int32 of a list, in two halves: the compiler keeps in registers what is loaded so, and copies
to shared memory nothing that other copies must wait for.
"""


def _bounds(row: str, first: str, last: str) -> Iterator[str]:
    """Where the lists of rows begin and end; rows that are not there are empty."""
    for name, shift in ((first, ""), (last, " + 1")):
        yield f"{name} = tl.load(indptr_ptr + {row}{shift}, mask={row} < rows, other=0)"


def _apart(name: str, shape: list[str], count: int) -> Generator[str, None, list[str]]:
    """Halves a tile (…, count) until each name is one of `count`; returns the names in order."""
    names = [name]
    while count > 1:
        count //= 2
        dims = ", ".join([*shape, str(count), "2"])
        for each in names:
            yield f"{each}e, {each}o = tl.split(tl.reshape({each}, ({dims})))"
        names = [f"{each}{half}" for half in "eo" for each in names]
    return names


def _address(pointer: str, place: Block, component: int) -> str:
    offset = place.offset + component * place.step
    lanes = f" + u * {place.channel_step}" if place.channel_step > 1 else " + u"
    return f"{pointer}{f' + {offset}' if offset else ''}{lanes}"
