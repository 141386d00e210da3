"""Printed Triton kernels of z[d] = Σ_{e: dst[e] = d} Q(x[src[e]], y[e], h[e] A), no weights stored.

h and A come in parts of 16 bits (see kernels.py): rows of y carry the powers of two of rows of h,
and the sums are multiplied by those of columns of A.  A program owns a block of channels and keeps
its columns of A in shared memory:

    for tiles of 32 rows of z:
        for the edges of these rows, two of each row at a time:    # 64 edges
            chunk after chunk of paths:
                w = h A                  (64, paths · channels), by tensor cores, part by part
                add the terms of both edges to the rows' sums
        store the sums

The two edges of a row are 8 rows apart in the tile: there tensor cores leave both products to one
thread, so that threads exchange nothing.  A row wastes at most half of its last pair.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from torchweft.core.printing.dialect import indented
from torchweft.o3.channelwise.arithmetic import Arithmetic, entries, value_name
from torchweft.o3.channelwise.calls import Call, Result
from torchweft.o3.channelwise.structure import Block, Path, Product
from torchweft.products.tiles import power_of_two

__all__ = ["NAME", "RadialKernelSpec", "RadialTiling", "columns", "source"]

NAME = "radial_linear"
"""Name of the kernels, in profiles too."""

ROWS_PER_TILE = 32
"""Rows of z in a tile."""

EDGES_PER_ROW = 2
"""Edges of a row that one iteration takes."""

RADIAL_WARPS = 4
"""Warps of a program: those that share a product on tensor cores."""

TWO_PARTS_FROM = 32
"""Terms of a sum from which on two parts err no more than float32, which rounds each term once
where they leave out up to eight roundings.  Three parts leave out none."""


class RadialTiling(NamedTuple):
    """Work of one program.

    Args:
        block: channels of a program, a power of 2.
        chunk: most paths whose weights are formed at once, a power of 2.
        stages: iterations of the loop over edges whose loads are under way.
    """

    block: int
    chunk: int = 8
    stages: int = 2


class RadialKernelSpec(NamedTuple):
    """All that the source of one kernel depends on.

    Args:
        product: blocks and paths; channels share y and nothing else.
        paths: numbers of the product's paths that the kernel computes.
        widths: numbers in a row of x, y and z.
        hidden: numbers in a row of h.
        parts: parts P of numbers of h and of A; parts i and j with i + j < P are multiplied.
        tiling: work of one program.
    """

    product: Product
    paths: tuple[int, ...]
    widths: tuple[int, int, int]
    hidden: int
    parts: int
    tiling: RadialTiling

    @property
    def channel_blocks(self) -> int:
        """Number of programs that share rows."""
        return -(-self.product.channels // self.tiling.block)

    @property
    def chunks(self) -> list[tuple[int, ...]]:
        """Paths whose weights are formed together."""
        step = self.tiling.chunk
        return [self.paths[n : n + step] for n in range(0, len(self.paths), step)]

    @property
    def length(self) -> int:
        """Columns of A of a block of channels."""
        return sum(power_of_two(len(chunk)) for chunk in self.chunks) * self.tiling.block

    @property
    def depth(self) -> int:
        """Numbers of a row of h with its padding, a power of 2."""
        return max(16, power_of_two(self.hidden))

    @property
    def shared_bytes(self) -> int:
        """Upper bound of the shared memory for prefetched loads and columns of A."""
        stages, tall = self.tiling.stages, ROWS_PER_TILE * EDGES_PER_ROW
        blocks = {self.product.paths[p].x for p in self.paths}
        components = sum(self.product.x[b].components for b in blocks)
        numbers = components * self.tiling.block + power_of_two(self.widths[1])
        halves = self.parts * self.depth * (self.length + tall * stages)
        return 2 * halves + 4 * tall * (stages - 1) * numbers


def columns(spec: RadialKernelSpec) -> list[list[tuple[int, float]]]:
    """Each prepared column of A, as (column, factor) of all columns with its power of two.

    The first is the prepared one, the others belong to paths into the same block of z.  Prepared
    columns follow each other by block of channels, chunk and path; padding has the factor 0.  The
    factors make most coefficients of a path ±1.
    """
    product, block = spec.product, spec.tiling.block
    found = []
    for first in range(0, spec.channel_blocks * block, block):
        for chunk in spec.chunks:
            for place in range(power_of_two(len(chunk))):
                for u in range(first, first + block):
                    there = place < len(chunk) and u < product.channels
                    found.append(_sharing(spec, chunk[place], u) if there else [(0, 0.0)])
    return found


def _sharing(spec: RadialKernelSpec, path: int, channel: int) -> list[tuple[int, float]]:
    product, into = spec.product, spec.product.paths[path].z
    others = [p for p in spec.paths if p != path and product.paths[p].z == into]
    found = []
    for number in (path, *others):
        block = product.w[product.paths[number].w]
        scale = entries(product, product.paths[number])[1]
        found.append((block.offset + channel * block.channel_step, scale))
    return found


def source(spec: RadialKernelSpec) -> str:
    """Module text of a kernel.

    Its pointers are x, y, parts of h, those of A and their powers of two, z, indptr and src, int32;
    rows of y, h and src are edges, sorted by their row of z.  Then come the numbers `rows` and
    `lanes` (programs for each block of channels).
    """
    return "\n".join(_RadialPrinter(spec).module()) + "\n"


class _EdgeSums(Arithmetic):
    """Terms of one edge of each row; A is scaled already."""

    def __init__(self, product: Product, edge: int) -> None:
        self._term = dict(zip("xyw", range(3 * edge, 3 * edge + 3), strict=True))
        term = tuple(self._term.values())
        call = Call("xyw" * EDGES_PER_ROW, (Result("z", (term,)),))
        super().__init__(product, call, self._sum)
        self._edge = edge

    def path(self, path: Path) -> None:
        self._path, self._scale = path, 1.0
        self._entries = entries(self._product, path)[0]
        self._z(0, [self._term])

    def _sum(self, result: int, block: int, component: int, terms: str) -> None:
        name = _sum_name(block, component)
        self.lines.append(f"{name} = {name} {terms}")

    def _named(self, prefix: str, text: str) -> str:
        return super()._named(f"{'ab'[self._edge]}_{prefix}", text)


def _sum_name(block: int, component: int) -> str:
    return f"z_{block}_{component}"


class _RadialPrinter:
    """Lines of one kernel."""

    def __init__(self, spec: RadialKernelSpec) -> None:
        self.spec, self.product = spec, spec.product
        self.sums = [_EdgeSums(spec.product, edge) for edge in range(EDGES_PER_ROW)]
        used = [spec.product.paths[p] for p in spec.paths]
        self.z_blocks = sorted({path.z for path in used})
        self.y_blocks = [(b, spec.product.y[b]) for b in sorted({path.y for path in used})]
        self.ragged = spec.product.channels % spec.tiling.block != 0
        self.loaded: set[tuple[int, int]] = set()
        self.part_step = spec.parts * spec.depth

    def module(self) -> Iterator[str]:
        yield _HEAD
        names = ["x", "y", "h", "a", "powers", "z", "indptr", "src"]
        constants = "BLOCK: tl.constexpr, STAGES: tl.constexpr"
        yield f"def {NAME}({', '.join(f'{n}_ptr' for n in names)}, rows, lanes, {constants}):"
        yield from indented(self._body())

    def _body(self) -> Iterator[str]:
        blocks = self.spec.channel_blocks
        yield "pid = tl.program_id(0)"
        yield f"lane, block = pid // {blocks}, pid % {blocks}"
        yield "u = block * BLOCK + tl.arange(0, BLOCK)[None, :]"
        if self.ragged:
            yield f"inside = u < {self.product.channels}"
        yield f"k = tl.arange(0, {self.spec.depth})[None, :]"
        yield f"place = tl.arange(0, {ROWS_PER_TILE * EDGES_PER_ROW})"
        yield from self._matrices()
        yield f"for tile in range(lane, tl.cdiv(rows, {ROWS_PER_TILE}), lanes):"
        yield from indented(self._tile())

    def _matrices(self) -> Iterator[str]:
        """Load the program's columns of A, chunk by chunk; `into` finds the powers of a block."""
        spec, begin = self.spec, 0
        self.into: dict[int, int] = {}
        yield f"a_row = a_ptr + block * {spec.length * self.part_step}"
        yield f"power_ptr = powers_ptr + block * {spec.length} + tl.arange(0, BLOCK)[None, :]"
        for n, chunk in enumerate(spec.chunks):
            for place, path in enumerate(chunk):
                self.into.setdefault(self.product.paths[path].z, begin + place * spec.tiling.block)
            width = power_of_two(len(chunk)) * spec.tiling.block
            yield f"n = {begin} + tl.arange(0, {width})[:, None]"
            for part in range(spec.parts):
                at = f"a_row + n * {self.part_step} + {part * spec.depth} + k"
                yield f"A{n}_{part} = tl.load({at})"
            begin += width

    def _tile(self) -> Iterator[str]:
        """Sums of a tile of rows."""
        yield f"row = tile * {ROWS_PER_TILE} + tl.arange(0, {ROWS_PER_TILE})"
        yield from _bounds("row", "first", "last")
        yield f"count = (tl.max(last - first) + {EDGES_PER_ROW - 1}) // {EDGES_PER_ROW}"
        yield f"place_row = tile * {ROWS_PER_TILE} + place // 16 * 8 + place % 8"
        yield from _bounds("place_row", "place_first", "place_last")
        yield "place_first += place // 8 % 2"
        for block in self.z_blocks:
            for c in range(self.product.z[block].components):
                yield f"{_sum_name(block, c)} = tl.zeros(({ROWS_PER_TILE}, BLOCK), tl.float32)"
        yield from _sources(str)
        yield "for pair in tl.range(0, count, num_stages=STAGES):"
        yield from indented(self._pair())
        yield "live = (row < rows)[:, None]"
        yield f"z_row = z_ptr + tl.cast(row, tl.int64)[:, None] * {self.spec.widths[2]}"
        mask = "live & inside" if self.ragged else "live"
        for block in self.z_blocks:
            place = self.product.z[block]
            yield f"power = tl.load(power_ptr + {self.into[block]})"
            for c in range(place.components):
                value = f"{_sum_name(block, c)} * power"
                yield f"tl.store({_address('z_row', place, c)}, {value}, mask={mask})"

    def _pair(self) -> Iterator[str]:
        """Terms of two edges of each row."""
        spec = self.spec
        yield f"p = place_first + {EDGES_PER_ROW} * pair"
        yield f"h_row = h_ptr + tl.cast(p, tl.int64)[:, None] * {self.part_step} + k"
        for part in range(spec.parts):
            at = f"h_row + {part * spec.depth}"
            yield f"h_{part} = tl.load({at}, mask=(p < place_last)[:, None], other=0.0)"
        for edge in range(EDGES_PER_ROW):
            yield f"p{edge} = first + ({EDGES_PER_ROW} * pair + {edge})"
            yield f"live{edge} = p{edge} < last"
            yield f"e{edge} = tl.cast(p{edge}, tl.int64)"
            row = f"tl.cast(source{edge}, tl.int64)[:, None]"
            yield f"x{edge}_row = x_ptr + {row} * {spec.widths[0]}"
        for n, chunk in enumerate(spec.chunks):
            yield from self._weights(n, chunk)
            for edge in range(EDGES_PER_ROW):
                if not n:
                    yield from self._harmonics(edge)
                for number in chunk:
                    yield from self._path(edge, self.product.paths[number])
        # rows of x are known one iteration before their features are loaded
        yield from _sources(lambda edge: f"({EDGES_PER_ROW} * pair + {EDGES_PER_ROW + edge})")

    def _harmonics(self, edge: int) -> Iterator[str]:
        """Load the row of y as one tile and split it into its components."""
        begin = min(b.offset for _, b in self.y_blocks)
        end = max(b.offset + (b.components - 1) * b.step + 1 for _, b in self.y_blocks)
        width = power_of_two(end - begin)
        yield f"c = tl.arange(0, {width})[None, :]"
        mask = f"live{edge}[:, None]"
        mask += "" if width == end - begin else f" & (c < {end - begin})"
        row = f"y_ptr + e{edge}[:, None] * {self.spec.widths[1]} + {begin}"
        yield f"y{edge} = tl.load({row} + c, mask={mask}, other=0.0)"
        names = yield from _split(f"y{edge}", [str(ROWS_PER_TILE)], width)
        for number, block in self.y_blocks:
            for c in range(block.components):
                at = names[block.offset + c * block.step - begin]
                name = value_name("y", 3 * edge + 1, number, c)
                yield f"{name} = tl.reshape({at}, ({ROWS_PER_TILE}, 1))"

    def _weights(self, n: int, chunk: tuple[int, ...]) -> Iterator[str]:
        """Weights of a chunk of paths and both edges, in the threads that use them."""
        parts = range(self.spec.parts)
        pairs = [(i, j) for i in parts for j in parts if i + j < len(parts)]
        for step, (i, j) in enumerate(sorted(pairs, key=sum, reverse=True)):  # small ones first
            into = ", w" if step else ""
            yield f"w = tl.dot(h_{i}, A{n}_{j}.T{into})"
        paths = power_of_two(len(chunk))
        yield f"w = tl.reshape(w, (4, 2, 8, {paths}, BLOCK))"
        yield "w0, w1 = tl.split(tl.permute(w, (0, 2, 4, 3, 1)))"
        for edge in range(EDGES_PER_ROW):
            names = yield from _split(f"w{edge}", [str(ROWS_PER_TILE), "BLOCK"], paths)
            for at, number in enumerate(chunk):
                name = value_name("w", 3 * edge + 2, self.product.paths[number].w, 0)
                yield f"{name} = tl.reshape({names[at]}, ({ROWS_PER_TILE}, BLOCK))"

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


_HEAD = """\
import triton
import triton.language as tl


@triton.jit
def _number(list_ptr, at, end):
    half_ptr = list_ptr.to(tl.pointer_type(tl.int16)) + 2 * tl.cast(at, tl.int64)
    low = tl.load(half_ptr, mask=at < end, other=0).to(tl.int32) & 0xFFFF
    high = tl.load(half_ptr + 1, mask=at < end, other=0).to(tl.int32)
    return (high << 16) | low


@triton.jit(do_not_specialize=['rows', 'lanes'])"""
"""`_number` loads an int32 of a list in two halves: the compiler keeps these in registers, while it
would copy whole ones to shared memory, where other copies must wait for them.
"""


def _sources(place: Callable[[int], str]) -> Iterator[str]:
    """Load the row of x of each edge."""
    for edge in range(EDGES_PER_ROW):
        yield f"source{edge} = _number(src_ptr, first + {place(edge)}, last)"


def _bounds(row: str, first: str, last: str) -> Iterator[str]:
    """Load where the edges of rows begin and end; rows behind the last one have none."""
    for name, shift in ((first, ""), (last, " + 1")):
        yield f"{name} = tl.load(indptr_ptr + {row}{shift}, mask={row} < rows, other=0)"


def _split(name: str, shape: list[str], count: int) -> Generator[str, None, list[str]]:
    """Halve a tile (…, count) until each name is one of `count`; returns the names in order."""
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
