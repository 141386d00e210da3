"""Triton kernels of z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], h[e] A): no weight leaves the chip.

A program owns a block of channels, and keeps its columns of A in shared memory:

    for tiles of 32 rows of z:
        for the edges of these rows, two of each row at a time:    # 64 edges
            chunk after chunk of paths:
                w = h A                  (64, paths · channels), by tensor cores
                add the terms of both edges to the rows' sums
        store the sums

Two edges of a row stand 8 rows apart in the tile, because there the tensor cores leave them to one
thread.  A thread thus sums what it multiplied: nothing is exchanged between threads, and a row of
few edges wastes no more than half of its last pair.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

from weft.core.emit import indented
from weft.o3.contraction import Call, Result
from weft.o3.polynomial import Arithmetic, entries, value_name
from weft.o3.structure import Block, Path, Product
from weft.products.tiles import power_of_two

__all__ = ["NAME", "ROWS", "Job", "Tiling", "chunks", "columns", "scale", "source"]

NAME = "radial_linear"
"""Of the kernels, in profiles too."""

ROWS = 32
"""Of z, in a tile."""

EDGES = 2
"""Of a row, at a time."""


class Tiling(NamedTuple):
    """How a kernel lays its work out.

    Args:
        block: channels of a program, a power of 2.
        chunk: most paths whose weights are formed at once, a power of 2.
        warps: of a program, 4 or 8.
        stages: iterations of the loop over edges whose loads are under way.
    """

    block: int
    chunk: int = 8
    warps: int = 4
    stages: int = 2


class Job(NamedTuple):
    """What one kernel computes.  Its source depends on all of it.

    Args:
        product: blocks and paths; channels share y, and share nothing else.
        paths: those of the product that it computes, by number.
        widths: numbers in a row of x, y and z.
        hidden: numbers in a row of h.
        exact: whether numbers of 32 bits are multiplied in three parts of 19.
        tiling: how the work is laid out.
    """

    product: Product
    paths: tuple[int, ...]
    widths: tuple[int, int, int]
    hidden: int
    exact: bool
    tiling: Tiling

    @property
    def channel_blocks(self) -> int:
        """Programs that share rows."""
        return -(-self.product.channels // self.tiling.block)

    @property
    def shared(self) -> int:
        """Bytes of shared memory that its loads ahead and its columns of A take, at most."""
        tiling = self.tiling
        of_a = sum(map(_places, chunks(self))) * tiling.block * self.depth
        of_a *= 2 if self.exact else 1
        of_h = ROWS * EDGES * self.depth * (tiling.stages - self.exact)
        used = [self.product.paths[p] for p in self.paths]
        components = sum(self.product.x[b].components for b in {path.x for path in used})
        of_x = ROWS * EDGES * components * tiling.block * (tiling.stages - 1)
        of_y = ROWS * EDGES * power_of_two(self.widths[1]) * (tiling.stages - 1)
        return 4 * (of_a + of_h + of_x + of_y)

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

    Block of channels after block, chunk after chunk; warps side by side share the channels of a
    chunk, so these are cut before its paths are.
    """
    block, across = job.tiling.block, job.tiling.warps // 4
    found: list[tuple[int, int] | None] = []
    for b in range(job.channel_blocks):
        for chunk in chunks(job):
            for part in range(across):
                first = b * block + part * (block // across)
                for place in range(_places(chunk)):
                    for u in range(first, first + block // across):
                        there = place < len(chunk) and u < job.product.channels
                        found.append((chunk[place], u) if there else None)
    return found


def scale(product: Product, path: Path) -> float:
    """What A is multiplied by, so that most coefficients of the path are ±1."""
    return entries(product, path)[1]


def source(job: Job) -> str:
    """The module text of a job's kernel, `kernel`.

    Its pointers are x, y, h, the prepared A, z, indptr and src, int32; rows of y, h and src are
    edges, sorted by their row of z.  Then come the numbers `rows` and `lanes` (programs for each
    block of channels).
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

    def module(self) -> Iterator[str]:
        yield "import triton"
        yield "import triton.language as tl"
        yield ""
        yield ""
        yield from _ROUNDED
        yield from _NUMBER
        yield "@triton.jit(do_not_specialize=['rows', 'lanes'])"
        names = ["x", "y", "h", "a", "z", "indptr", "src"]
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
        for block in self.z_blocks:
            place = self.product.z[block]
            for c in range(place.components):
                mask = "live & inside" if self.ragged else "live"
                address = _address("z_row", place, c)
                yield f"tl.store({address}, {_sum_name(block, c)}, mask={mask})"

    def _matrices(self) -> Iterator[str]:
        """The program's columns of A, a chunk of paths each."""
        job, begin = self.job, 0
        widths = [_places(chunk) * job.tiling.block for chunk in chunks(job)]
        yield f"a_row = a_ptr + block * {sum(widths) * job.depth}"
        for n, width in enumerate(widths):
            yield f"n = {begin} + tl.arange(0, {width})[:, None]"
            yield f"A{n} = tl.load(a_row + n * {job.depth} + k)"
            if job.exact:
                yield f"A{n}_high = _rounded(A{n})"
                yield f"A{n}_low = A{n} - A{n}_high"
            else:  # tensor cores cut digits off: here, once, they are rounded
                yield f"A{n} = _rounded(A{n})"
            begin += width

    # two edges of each row

    def _pair(self) -> Iterator[str]:
        yield f"p = place_first + {EDGES} * pair"
        mask = "(p < place_last)[:, None]"
        if self.job.hidden < self.job.depth:
            mask += f" & (k < {self.job.hidden})"
        yield "p64 = tl.cast(p, tl.int64)"
        yield f"h = tl.load(h_ptr + p64[:, None] * {self.job.hidden} + k, mask={mask}, other=0.0)"
        if self.job.exact:
            yield "h_high = _rounded(h)"
            yield "h_low = h - h_high"
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
        if self.job.exact:
            yield f'w = tl.dot(h_low, A{n}_high.T, input_precision="tf32")'
            yield f'w = tl.dot(h_high, A{n}_low.T, w, input_precision="tf32")'
            yield f'w = tl.dot(h_high, A{n}_high.T, w, input_precision="tf32")'
        else:
            yield f'w = tl.dot(h, A{n}.T, input_precision="tf32")'
        paths, across = _places(chunk), self.job.tiling.warps // 4
        part = self.job.tiling.block // across
        yield f"w = tl.reshape(w, (4, 2, 8, {across}, {paths}, {part}))"
        yield "w0, w1 = tl.split(tl.permute(w, (0, 2, 3, 5, 4, 1)))"
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


_ROUNDED = (
    "@triton.jit",
    "def _rounded(v):",
    "    return ((v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)",
    "",
    "",
)
"""To the 11 bits that tensor cores read of a float32."""


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
