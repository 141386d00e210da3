"""Forward calls with weights w = h A by generated Triton kernels: which, and their launches.

Columns of A are gathered beforehand, in the order in which programs read them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.explain import record_cost, recording
from weft.core.generated import load
from weft.core.launcher import (
    Call,
    Kernel,
    Tile,
    compile_together,
    current_device,
    processors,
)
from weft.o3.contraction import Call as Contraction
from weft.o3.graph import Tables
from weft.o3.radial_linear_generator import NAME, ROWS, Job, Tiling, columns, scale, source
from weft.o3.structure import Product, Structure
from weft.o3.wigner import entries_3j

__all__ = ["run", "serves"]

TILING = Tiling(16)
"""Of channels enough; a block of fewer channels is as wide as these.

Of some twenty shapes on an H200 this one was the fastest, or within a hundredth of it, for rows of
158 and of 6 edges and for both precisions, though 31 components then spill some registers.
"""

CARRIED = 128
"""Numbers that a thread sums over edges in registers."""

PROGRAMS = 16
"""Of each processor: enough to share the rows evenly, few enough to read A seldom."""

MOST_WORK = 2**12
"""Entries of 3j symbols that compilers bear."""


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
    return work <= MOST_WORK


def run(
    structure: Structure,
    tensors: Sequence[Tensor],
    tables: Tables,
    hidden: int,
    precision: str,
) -> list[Tensor]:
    """z (num_z, width) of x, y, h and A."""
    x, y, h, a = tensors
    indptr, src = tables.z_indptr, tables.src
    assert indptr is not None
    assert src is not None
    if tables.z_edges is not None:
        y, h, src = (t.index_select(0, tables.z_edges) for t in (y, h, src))
    src = src.to(torch.int32)
    shape = (tables.num_z, structure.width("z"))
    recipe = _recipe(structure, hidden, precision, indptr.dtype, x.device)
    z = (x.new_empty if recipe.covered and tables.num_edges else x.new_zeros)(shape)
    if not tables.num_edges:
        return [z]
    with current_device(x):
        calls = [
            Call(step.kernel, [x, y, h, step.prepared(a), z, indptr, src], step.numbers(shape[0]))
            for step in recipe.steps
        ]
        compile_together(calls)
        for step, (kernel, operands, (rows, lanes)) in zip(recipe.steps, calls, strict=True):
            kernel(lanes * step.job.channel_blocks, operands, (rows, lanes), step.workspace)
    if recording():
        flops = 2 * tables.num_edges * hidden * structure.width("w")
        record_cost(sum(t.nbytes for t in (x, y, h, a, z, indptr, src)), flops)
    return [z]


class _Step(NamedTuple):
    """A kernel, and what it reads of A."""

    job: Job
    kernel: Kernel
    columns: Tensor
    factors: Tensor

    def prepared(self, a: Tensor) -> Tensor:
        """Columns of A as rows, in the order in which programs read them."""
        rows = a.index_select(1, self.columns).mul_(self.factors).t()
        return torch.nn.functional.pad(rows, (0, self.job.depth - self.job.hidden)).contiguous()

    @property
    def workspace(self) -> int:
        """Bytes of the prepared rows."""
        return 4 * self.columns.numel() * self.job.depth

    def numbers(self, rows: int) -> tuple[int, int]:
        """Rows, and programs for each block of channels."""
        most = PROGRAMS * processors(self.columns.device) // self.job.channel_blocks
        return rows, max(1, min(-(-rows // ROWS), most))


class _Recipe(NamedTuple):
    """Kernels; whether they write all columns of z."""

    steps: tuple[_Step, ...]
    covered: bool


@functools.lru_cache(maxsize=1024)
def _recipe(
    structure: Structure, hidden: int, precision: str, index: torch.dtype, device: torch.device
) -> _Recipe:
    """With machine code for lists of a dtype."""
    widths = structure.width("x"), structure.width("y"), structure.width("z")
    steps = []
    covered = 0
    for product in structure.products:
        if not product.channels or not product.paths:
            continue
        tiling = _tiling(product)
        reached = {path.z for path in product.paths}
        covered += product.channels * sum(product.z[block].components for block in reached)
        for paths in groups(product, tiling):
            job = Job(product, paths, widths, hidden, precision == "tf32x3", tiling)
            steps.append(_step(job, device))
    return _Recipe(tuple(steps), covered == widths[2])


def _step(job: Job, device: torch.device) -> _Step:
    """Columns that are not there are any column times zero."""
    places, factors = [], []
    for column in columns(job):
        path = None if column is None else job.product.paths[column[0]]
        block = None if path is None else job.product.w[path.w]
        if path is None or block is None or column is None:
            places.append(0)
            factors.append(0.0)
        else:
            places.append(block.offset + column[1] * block.channel_step)
            factors.append(scale(job.product, path))
    tiling = job.tiling
    tile = Tile((tiling.block, tiling.stages), tiling.warps, 1)
    kernel = Kernel(load("o3_radial", source(job)).__dict__[NAME], (), (), tile)
    at = torch.tensor(places, dtype=torch.int64, device=device)
    return _Step(job, kernel, at, torch.tensor(factors, dtype=torch.float32, device=device))


def _tiling(product: Product) -> Tiling:
    least = 8 * TILING.warps // 4
    block = max(least, min(TILING.block, 1 << (product.channels - 1).bit_length()))
    return TILING._replace(block=block)


def groups(product: Product, tiling: Tiling) -> list[tuple[int, ...]]:
    """The paths of a product, by number, in groups: each is a kernel.

    They are cut between blocks of x where they can be, and never between paths into one block of z.
    """
    most = CARRIED * 4 * (tiling.warps // 4) // tiling.block
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
    """Bytes of shared memory that a program may take; none on AMD, whose cores lack TF32."""
    if interpreted():
        return 2**31
    if torch.version.hip is not None:
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
