"""Forward calls with weights w = h A by generated Triton kernels: which, and their launches.

h and columns of A are taken apart beforehand, columns in the order in which programs read them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import interpreted
from torchweft.core.explain import record_cost, recording
from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Tile,
    current_device,
    processors,
)
from torchweft.core.printing.modules import printed
from torchweft.o3.channelwise.calls import Call as Contraction
from torchweft.o3.channelwise.structure import Product, Structure
from torchweft.o3.edges.graph import Tables
from torchweft.o3.irreps.wigner import entries_3j
from torchweft.o3.radial_linear.source import (
    NAME,
    ROWS,
    SHORT,
    WARPS,
    Job,
    Tiling,
    columns,
    scale,
    source,
)
from torchweft.o3.radial_linear.split_products import SplitLaunch, launch, of_columns, of_rows

__all__ = ["run", "serves"]

RADIAL_TILING = Tiling(16)
"""How products of many channels are cut; a block of fewer channels is as wide as these.

Of some twenty shapes on an H200 the fastest, for rows of 158 edges.  Narrow blocks and small groups
let more programs run at once, but repeat more than these hide: each group reads h, x and y again.
"""

SHARED_BYTES = 113 * 2**10
"""Bytes of shared memory with which two programs run on a processor."""

CARRIED_SUMS = 128
"""Sums over edges that a thread keeps in registers."""

PROGRAMS_PER_PROCESSOR = 16
"""Enough to share the rows evenly, few enough to read A seldom."""

MOST_ENTRIES_3J = 2**12
"""Entries of 3j symbols beyond which compilation takes too long."""


def serves(
    structure: Structure,
    call: Contraction,
    like: Tensor,
    tables: Tables,
    hidden: int,
    precision: str,
) -> bool:
    """Whether one kernel for each group of paths does the call: forward, channels sharing y alone.

    Rows that are cut, as those of thousands of edges are, go by blocks; so does what does not fit
    into the shared memory of the GPU.
    """
    result, *others = call.results
    if others or result.slot != "z" or len(result.terms) != 1 or like.dtype != torch.float32:
        return False
    if tables.z_slices is not None or tables.num_x >= 2**31 or not hidden:
        return False
    return _suits(structure) and _fits(structure, hidden, precision, like.device)


@functools.lru_cache(maxsize=1024)
def _fits(structure: Structure, hidden: int, precision: str, device: torch.device) -> bool:
    steps = _recipe(structure, hidden, precision, torch.int32, device).steps
    return all(step.job.shared <= _room(device) for step in steps)


@functools.lru_cache(maxsize=1024)
def _suits(structure: Structure) -> bool:
    work = 0
    for product in structure.products:
        for path in product.paths:
            work += len(entries_3j(*product.degrees(path)))
            x, y, z = product.x[path.x], product.y[path.y], product.z[path.z]
            if y.channel_step or not (x.channel_step and z.channel_step):
                return False
    return work <= MOST_ENTRIES_3J


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
    recipe = _recipe(structure, hidden, precision, indptr.dtype, x.device)
    z = (x.new_empty if recipe.covered and edges else x.new_zeros)(shape)
    if not edges or not recipe.steps:
        return [z]
    src = (src if order is None else src.index_select(0, order)).to(torch.int32)
    apart, (of_h, scaled) = of_rows(h, recipe.parts, y, order)
    beside, (of_a, powers) = of_columns(a, recipe.parts, recipe.columns, recipe.factors)
    launches = [apart, beside]
    for step in recipe.steps:
        own = of_a[step.begin :], powers[step.begin :]
        free = step.numbers(shape[0], x.device)
        call = Call(step.kernel, [x, scaled, of_h, *own, z, indptr, src], free)
        launches.append(SplitLaunch(call, free[1] * step.job.channel_blocks))
    with current_device(x):
        launch(launches, of_h.nbytes + of_a.nbytes + scaled.nbytes)
    if recording():
        flops = 2 * tables.num_edges * hidden * structure.width("w")
        record_cost(sum(t.nbytes for t in (x, y, h, a, z, indptr, src)), flops)
    return [z]


class _RadialStep(NamedTuple):
    """A kernel, and where its columns of A begin."""

    job: Job
    kernel: Kernel
    begin: int

    def numbers(self, rows: int, device: torch.device) -> tuple[int, int]:
        """Rows, and programs for each block of channels."""
        most = PROGRAMS_PER_PROCESSOR * processors(device) // self.job.channel_blocks
        return rows, max(1, min(-(-rows // ROWS), most))


class _RadialRecipe(NamedTuple):
    """Kernels; whether they write all columns of z; columns of A and factors, (beside, count)."""

    steps: tuple[_RadialStep, ...]
    covered: bool
    parts: int
    columns: Tensor
    factors: Tensor


@functools.lru_cache(maxsize=1024)
def _recipe(
    structure: Structure, hidden: int, precision: str, index: torch.dtype, device: torch.device
) -> _RadialRecipe:
    """The recipe, which keeps machine code for one dtype of index lists."""
    widths = structure.width("x"), structure.width("y"), structure.width("z")
    parts = 1 if precision == "tf32" else 2 if hidden >= SHORT else 3
    steps: list[_RadialStep] = []
    table: list[list[tuple[int, float]]] = []
    covered = 0
    for product in structure.products:
        if not product.channels or not product.paths:
            continue
        tiling = _tiling(product)
        reached = {path.z for path in product.paths}
        covered += product.channels * sum(product.z[block].components for block in reached)
        for paths in path_groups(product, tiling):
            job = _staged(Job(product, paths, widths, hidden, parts, tiling))
            tile = Tile((tiling.block, job.tiling.stages), WARPS, 1)
            kernel = Kernel(printed("o3_radial", source(job), NAME), (), (), tile)
            steps.append(_RadialStep(job, kernel, len(table)))
            table += [_beside(job, column) for column in columns(job)]
    beside = max(map(len, table), default=1)
    padded = [entries + [(0, 0.0)] * (beside - len(entries)) for entries in table]
    places, factors = ([[pair[i] for pair in entries] for entries in padded] for i in range(2))
    return _RadialRecipe(
        tuple(steps),
        covered == widths[2],
        parts,
        torch.tensor(places, dtype=torch.int32, device=device).view(-1, beside).t().contiguous(),
        torch.tensor(factors, dtype=torch.float32, device=device).view(-1, beside).t().contiguous(),
    )


def _beside(job: Job, column: tuple[int, int] | None) -> list[tuple[int, float]]:
    """(column of A, factor) of a prepared column, then those of paths into the same block of z.

    Columns that are not there are any column times zero.
    """
    if column is None:
        return [(0, 0.0)]
    first, channel = column
    paths, into = job.product.paths, job.product.paths[first].z
    found = []
    for number in (first, *(p for p in job.paths if p != first and paths[p].z == into)):
        block = job.product.w[paths[number].w]
        place = block.offset + channel * block.channel_step
        found.append((place, scale(job.product, paths[number])))
    return found


def _staged(job: Job) -> Job:
    """The job with one more stage, if two programs then still share a processor."""
    more = job._replace(tiling=job.tiling._replace(stages=job.tiling.stages + 1))
    return more if more.shared <= SHARED_BYTES else job


def _tiling(product: Product) -> Tiling:
    block = max(8, min(RADIAL_TILING.block, 1 << (product.channels - 1).bit_length()))
    return RADIAL_TILING._replace(block=block)


def path_groups(product: Product, tiling: Tiling) -> list[tuple[int, ...]]:
    """The paths of a product, by number, in groups: each is a kernel.

    They are cut between blocks of x where they can be, and never between paths into one block of z.
    """
    most = CARRIED_SUMS * 4 // tiling.block
    found: list[list[int]] = []
    carried = most + 1

    def size(paths: list[int]) -> int:
        reached = {product.paths[p].z for p in paths}
        return sum(product.z[block].components for block in reached)

    for parts in _by_block_of_x(product):
        whole = [p for part in parts for p in part]
        for part in [whole] if size(whole) <= most else parts:
            if carried + size(part) > most:
                found.append([])
                carried = 0
            found[-1] += part
            carried += size(part)
    return [tuple(group) for group in found]


def _by_block_of_x(product: Product) -> list[list[list[int]]]:
    """The paths into each block of z, by the block of x of the first."""
    into: dict[int, list[int]] = {}
    for n, path in sorted(enumerate(product.paths), key=lambda item: (item[1].x, item[1].z)):
        into.setdefault(path.z, []).append(n)
    found: dict[int, list[list[int]]] = {}
    for paths in into.values():
        found.setdefault(product.paths[paths[0]].x, []).append(paths)
    return list(found.values())


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; none on AMD: its threads hold other rows."""
    if interpreted():
        return 2**31
    if torch.version.hip is not None:
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
