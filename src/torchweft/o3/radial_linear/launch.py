"""Launches for weights h A on a GPU: the fused forward kernel, and products of parts.

h and A are split into parts of 16 bits first, columns of A in the order in which programs read
them.  `run` is the fused forward call; `formed_weights` is h A of a block of edges, and
`summed_products` h^T g, the gradient of A.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core import recorded
from torchweft.core.backend import interpreted
from torchweft.core.explain import record_cost, recording
from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Tile,
    compile_together,
    current_device,
    processors,
)
from torchweft.core.printing.modules import printed, written
from torchweft.o3.channelwise.calls import Call as ContractionCall
from torchweft.o3.channelwise.structure import Product, Structure
from torchweft.o3.graph import Tables
from torchweft.o3.irreps.wigner import entries_3j
from torchweft.o3.radial_linear.source import (
    RADIAL_KERNEL,
    RADIAL_WARPS,
    ROWS_PER_TILE,
    TWO_PARTS_FROM,
    RadialKernelSpec,
    RadialTiling,
    columns,
    source,
)
from torchweft.products.tiles import power_of_two

__all__ = ["MOST_HIDDEN", "formed_weights", "run", "serves", "summed_products"]

RADIAL_TILING = RadialTiling(16)
"""Tiling of products of many channels; a block of fewer channels is as wide as these.

The fastest of some twenty on an H200, for rows of 158 edges.  Narrow blocks and small groups let
more programs run at once, but each group reads h, x and y again, which costs more.
"""

SHARED_BYTES = 113 * 2**10
"""Bytes of shared memory with which two programs run on a processor."""

CARRIED_SUMS = 128
"""Sums over edges that a thread keeps in registers."""

PROGRAMS_PER_PROCESSOR = 16
"""Enough to share the rows evenly, few enough to read A seldom."""

MOST_ENTRIES_3J = 2**12
"""Entries of 3j symbols beyond which compilation takes too long."""

MOST_HIDDEN = 128
"""Numbers in a row of h that `formed_weights` and `summed_products` take."""

FORMED_TILE = Tile((128, 128), 4, 1)
"""Rows and columns of weights."""

SUMMED_TILE = Tile((64, 2), 4, 1)
"""Rows that are summed at a time, and stages of their loads."""

SUMS_PER_PROGRAM = 2**13
"""Numbers of h times columns of g in a program."""

SUMMING_PROGRAMS = 2
"""Programs per processor that share a sum over rows: as many as run at once."""

NUMBERS_PER_PROGRAM = 2048
"""Numbers of a program that splits rows or columns."""

# the fused forward kernel


def serves(
    structure: Structure,
    call: ContractionCall,
    like: Tensor,
    tables: Tables,
    hidden: int,
    precision: str,
) -> bool:
    """Whether the fused kernel computes a call: forward in float32, channels share y alone.

    Rows that are cut, as those of thousands of edges are, go by blocks of edges; so does what does
    not fit into the shared memory of the GPU.
    """
    result, *others = call.results
    if others or result.slot != "z" or len(result.terms) != 1 or like.dtype != torch.float32:
        return False
    if tables.z_slices is not None or tables.num_x >= 2**31 or not hidden:
        return False
    return _fits(structure, hidden, precision, like.device)


@functools.lru_cache(maxsize=1024)
def _fits(structure: Structure, hidden: int, precision: str, device: torch.device) -> bool:
    """Whether channels share y alone, and kernels compile and fit into shared memory."""
    entries = 0
    for product in structure.products:
        for path in product.paths:
            entries += len(entries_3j(*product.degrees(path)))
            x, y, z = product.x[path.x], product.y[path.y], product.z[path.z]
            if y.channel_step or not (x.channel_step and z.channel_step):
                return False
    if entries > MOST_ENTRIES_3J:
        return False
    steps = _recipe(structure, hidden, precision, torch.int32, device).steps
    return all(spec.shared_bytes <= _room(device) for spec, *_ in steps)


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; 0 on AMD, whose threads hold other rows."""
    if interpreted():
        return 2**31
    if torch.version.hip is not None:
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def run(
    structure: Structure,
    tensors: Sequence[Tensor],
    tables: Tables,
    hidden: int,
    precision: str,
) -> list[Tensor]:
    """z (num_z, width) of x, y, h and A."""
    x, y, h, a = tensors
    indptr, src, order = tables.z_indptr, tables.src, tables.z_edges
    assert indptr is not None
    assert src is not None
    edges, shape = tables.num_edges, (tables.num_z, structure.width("z"))
    recipe = recorded.keep(_recipe(structure, hidden, precision, indptr.dtype, x.device))
    z = (x.new_empty if recipe.covered and edges else x.new_zeros)(shape)
    if not edges or not recipe.steps:
        return [z]
    src = src.to(torch.int32) if order is None else _in_order(src, order)
    h_launch, h_parts, scaled = _split_rows(h, recipe.parts, y, order)
    a_launch, a_parts, powers = _split_columns(a, recipe.parts, recipe.columns, recipe.factors)
    launches = [h_launch, a_launch]
    for spec, kernel, begin in recipe.steps:
        most = PROGRAMS_PER_PROCESSOR * processors(x.device) // spec.channel_blocks
        lanes = max(1, min(-(-shape[0] // ROWS_PER_TILE), most))
        read = [x, scaled, h_parts, a_parts[begin:], powers[begin:], z, indptr, src]
        call = Call(kernel, read, (shape[0], lanes))
        launches.append(_SplitLaunch(call, lanes * spec.channel_blocks))
    _launch(x, launches, h_parts.nbytes + a_parts.nbytes + scaled.nbytes)
    if recording():
        flops = 2 * tables.num_edges * hidden * structure.width("w")
        record_cost(sum(t.nbytes for t in (x, y, h, a, z, indptr, src)), flops)
    return [z]


def _in_order(src: Tensor, order: Tensor) -> Tensor:
    """Rows of x of edges in an order; layers of a run of `torchweft.capture` share them."""

    def gathered() -> Tensor:
        return src.index_select(0, order).to(torch.int32)

    now = recorded.Current.run
    return gathered() if now is None else now.value((src, order), "in order", gathered)


class _RadialRecipe(NamedTuple):
    """Kernels of a structure.

    Args:
        steps: kernels, and the first prepared column of A of each.
        covered: whether they write all columns of z.
        parts: parts of numbers of h and of A.
        columns: columns of A, (sharing, count): see `columns` in source.py.
        factors: their factors.
    """

    steps: tuple[tuple[RadialKernelSpec, Kernel, int], ...]
    covered: bool
    parts: int
    columns: Tensor
    factors: Tensor


@functools.lru_cache(maxsize=1024)
def _recipe(
    structure: Structure, hidden: int, precision: str, index: torch.dtype, device: torch.device
) -> _RadialRecipe:
    """The recipe for one dtype of index lists, with the machine code of its kernels."""
    widths = structure.width("x"), structure.width("y"), structure.width("z")
    parts = 1 if precision == "tf32" else 2 if hidden >= TWO_PARTS_FROM else 3
    steps: list[tuple[RadialKernelSpec, Kernel, int]] = []
    table: list[list[tuple[int, float]]] = []
    covered = 0
    for product in structure.products:
        if not product.channels or not product.paths:
            continue
        block = max(8, min(RADIAL_TILING.block, 1 << (product.channels - 1).bit_length()))
        tiling = RADIAL_TILING._replace(block=block)
        reached = {path.z for path in product.paths}
        covered += product.channels * sum(product.z[block].components for block in reached)
        for paths in _path_groups(product, block):
            spec = _staged(RadialKernelSpec(product, paths, widths, hidden, parts, tiling))
            tile = Tile((block, spec.tiling.stages), RADIAL_WARPS, 1)
            kernel = Kernel(printed("o3_radial", source(spec), RADIAL_KERNEL), (), (), tile)
            steps.append((spec, kernel, len(table)))
            table += columns(spec)
    sharing = max(map(len, table), default=1)
    padded = [entries + [(0, 0.0)] * (sharing - len(entries)) for entries in table]
    places, factors = (
        torch.tensor(
            [[pair[i] for pair in entries] for entries in padded], dtype=dtype, device="cpu"
        )
        .view(-1, sharing)
        .t()
        .contiguous()
        .to(device)
        for i, dtype in enumerate((torch.int32, torch.float32))
    )
    return _RadialRecipe(tuple(steps), covered == widths[2], parts, places, factors)


def _staged(spec: RadialKernelSpec) -> RadialKernelSpec:
    """The kernel with one more stage, if two programs then still share a processor."""
    more = spec._replace(tiling=spec.tiling._replace(stages=spec.tiling.stages + 1))
    return more if more.shared_bytes <= SHARED_BYTES else spec


def _path_groups(product: Product, block: int) -> list[tuple[int, ...]]:
    """The numbers of a product's paths in groups, each of which is a kernel.

    They are cut between blocks of x where they can be, and never between paths into one block of z.
    """
    paths = product.paths
    into: dict[int, list[int]] = {}
    for n in sorted(range(len(paths)), key=lambda n: (paths[n].x, paths[n].z)):
        into.setdefault(paths[n].z, []).append(n)

    def size(numbers: list[int]) -> int:
        return sum(product.z[z].components for z in {paths[n].z for n in numbers})

    most = CARRIED_SUMS * 4 // block
    found, carried = list[list[int]](), most + 1
    for _, same_x in itertools.groupby(into.values(), key=lambda numbers: paths[numbers[0]].x):
        parts = list(same_x)
        whole = [n for part in parts for n in part]
        for part in [whole] if size(whole) <= most else parts:
            if carried + size(part) > most:
                found.append([])
                carried = 0
            found[-1] += part
            carried += size(part)
    return [tuple(group) for group in found]


# parts of h and of A


class _SplitLaunch(NamedTuple):
    """A call of a kernel, and its number of programs."""

    call: Call
    programs: int


def _launch(like: Tensor, launches: Sequence[_SplitLaunch], workspace_bytes: int) -> None:
    """Launch in order; the kernels that take longest to compile are last."""
    with current_device(like):
        compile_together([each.call for each in reversed(launches)])
        for (kernel, tensors, free), programs in launches:
            kernel(programs, tensors, free, workspace_bytes)


@functools.lru_cache(maxsize=1024)
def split_kernel(name: str, constants: tuple[int, ...], tile: Tile, *variant: object) -> Kernel:
    """A kernel of kernels.py; `variant` is what else its machine code depends on."""
    return Kernel(written("torchweft.o3.radial_linear.kernels", name), (), constants, tile)


def split_tile(hidden: int) -> Tile:
    """Numbers of a part, and rows or columns that a program splits."""
    return Tile((_depth(hidden), max(1, NUMBERS_PER_PROGRAM // _depth(hidden))), 4, 1)


def _depth(hidden: int) -> int:
    """Numbers of a part: a power of 2 that tensor cores take."""
    return max(16, power_of_two(hidden))


def _split_rows(
    h: Tensor, parts: int, y: Tensor | None = None, order: Tensor | None = None
) -> tuple[_SplitLaunch, Tensor, Tensor]:
    """Parts of h (E, parts, depth), and their powers of two (E,), or rows of y times these."""
    (rows, hidden), width = h.shape, 0 if y is None else y.shape[1]
    made = h.new_empty((rows, parts, _depth(hidden)), dtype=torch.float16)
    powers = h.new_empty(rows) if y is None else torch.empty_like(y)
    constants, tile = (hidden, width, power_of_two(max(1, width)), parts), split_tile(hidden)
    index = None if order is None else order.dtype
    kernel = split_kernel("row_parts", constants, tile, index, h.device)
    results = (None, powers) if y is None else (powers, None)
    call = Call(kernel, [h, y, order, made, *results], (rows,))
    return _SplitLaunch(call, -(-rows // tile.blocks[1])), made, powers


def _split_columns(
    a: Tensor, parts: int, columns: Tensor | None = None, factors: Tensor | None = None
) -> tuple[_SplitLaunch, Tensor, Tensor]:
    """Parts of columns of A (count, parts, depth), all or gathered, and their powers of two."""
    hidden, width = a.shape
    sharing, count = (1, width) if columns is None else columns.shape
    made = a.new_empty((count, parts, _depth(hidden)), dtype=torch.float16)
    powers = a.new_empty(count)
    constants, tile = (hidden, width, sharing, parts), split_tile(hidden)
    kernel = split_kernel("column_parts", constants, tile, columns is None, a.device)
    call = Call(kernel, [a, columns, factors, made, powers], (count,))
    return _SplitLaunch(call, -(-count // tile.blocks[1])), made, powers


# products of parts


def formed_weights(h: Tensor, a: Tensor) -> Tensor:
    """h A (E, W), of contiguous float32; h has at most MOST_HIDDEN columns."""
    (rows, hidden), width = h.shape, a.shape[1]
    w = h.new_empty(rows, width)
    if not w.numel():
        return w
    h_launch, *h_parts = _split_rows(h, 2)
    a_launch, *a_parts = _split_columns(a, 2)
    tall, wide = FORMED_TILE.blocks
    kernel = split_kernel("formed_weights", (width, _depth(hidden)), FORMED_TILE, h.device)
    call = Call(kernel, [*h_parts, *a_parts, w], (rows,))
    product = _SplitLaunch(call, -(-rows // tall) * -(-width // wide))
    _launch(h, [h_launch, a_launch, product], h_parts[0].nbytes + a_parts[0].nbytes)
    if recording():
        record_cost(h.nbytes + a.nbytes + w.nbytes, 2 * rows * hidden * width)
    return w


def summed_products(h: Tensor, g: Tensor) -> Tensor:
    """h^T g (H, W), of contiguous float32; h has at most MOST_HIDDEN columns."""
    (rows, hidden), width = h.shape, g.shape[1]
    if not rows or not width:
        return h.new_zeros(hidden, width)
    constants = summed_constants(hidden, width)
    tall, across = SUMMED_TILE.blocks[0], -(-width // constants[-1])
    pieces = max(1, SUMMING_PROGRAMS * processors(h.device) // across)
    piece = -(-rows // (pieces * tall)) * tall
    pieces = -(-rows // piece)
    sums = h.new_empty(pieces, hidden, width)
    h_launch, *h_parts = _split_rows(h, 2)
    kernel = split_kernel("summed_products", constants, SUMMED_TILE, h.device)
    product = _SplitLaunch(Call(kernel, [*h_parts, g, sums], (rows, piece)), pieces * across)
    _launch(h, [h_launch, product], h_parts[0].nbytes + sums.nbytes)
    if recording():
        record_cost(h.nbytes + g.nbytes, 2 * rows * hidden * width)
    return sums.sum(0)


def summed_constants(hidden: int, width: int) -> tuple[int, ...]:
    """Constants of the kernel of `summed_products`; the last are columns of g of a program."""
    depth = _depth(hidden)
    return width, hidden, depth, SUMS_PER_PROGRAM // max(64, depth)
