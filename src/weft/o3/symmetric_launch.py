"""The GPU path of symmetric contractions: kernels, parts and grid of a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.core.backend import interpreted
from weft.core.generated import printed
from weft.core.launcher import Call, Kernel, Tile, compile_together, current_device, processors
from weft.o3 import symmetric_generator
from weft.o3.irreps import Irreps
from weft.o3.layout import steps
from weft.o3.mixing_kinds import Kinds
from weft.o3.symmetric_generator import LANES, Column, Job
from weft.o3.symmetric_kernels import fold_parts_kernel
from weft.o3.symmetric_program import parts, program, slots, used

__all__ = ["columns", "run", "shape"]


class Shape(NamedTuple):
    """Warps of a kernel program, and programs of a multiprocessor."""

    warps: int
    programs: int


ROWS = Shape(2, 32)
"""Where all results are of rows.  On an H200 4 warps took 9 % longer for the gradient of x."""

SUMS = Shape(4, 6)
"""Where sums are kept: fewer programs leave multiprocessors idle at the end, more make more parts
to add up."""

FOLD = Tile((8, 128), 4, 1)


class _Launch(NamedTuple):
    kernel: Kernel
    programs: int
    tensors: list[Tensor]
    free: tuple[int, ...]


def run(
    name: str, layout: str, tensors: Sequence[Tensor], element: Tensor, rows: Kinds
) -> list[Tensor]:
    """The results of a program.

    Args:
        name: its key.
        layout: of the rows of x and z.
        tensors: its inputs: (N, D) for x and z, (elements, products, C) for weights.
        element: (N,), of each row.
        rows: the rows by element.
    """
    x, w = tensors[:2]
    widths = {slot: len(of) * w.shape[2] for slot, of in columns(name, layout, w.shape[2])}
    shapes = [w.shape if slot == "w" else (len(x), widths[slot]) for slot in slots(name).outputs]
    if not len(x):
        return [x.new_zeros(shape) for shape in shapes]
    results = [x.new_empty(shape) for shape in shapes]
    with current_device(x):
        launches = [
            launch
            for part, numbers in parts(name)
            for launch in _part(part, [results[n] for n in numbers], layout, tensors, element, rows)
        ]
        if not all(launch.kernel.compiled for launch in launches):
            compile_together([Call(kernel, of, free) for kernel, _, of, free in launches])
        for kernel, programs, of, free in launches:
            kernel(programs, of, free)
    return results


def _part(
    name: str,
    results: Sequence[Tensor],
    layout: str,
    tensors: Sequence[Tensor],
    element: Tensor,
    rows: Kinds,
) -> Iterator[_Launch]:
    """A kernel, and those that add its sums over some rows up."""
    x, w = tensors[:2]
    channels, blocks = w.shape[2], -(-w.shape[2] // LANES)
    warps, programs = shape(name)
    span = max(warps, -(-len(x) * blocks // (programs * processors(x.device))))
    chunks = -(-len(x) // span)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    made = [
        x.new_empty(chunks + len(w) - 1, w[0].numel(), dtype=wide) if slot == "w" else result
        for result, slot in zip(results, slots(name).outputs, strict=True)
    ]
    read = list(itertools.compress(tensors, used(name)))
    kernel = _kernel(name, layout, channels, x.dtype, element.dtype, x.device)
    yield _Launch(kernel, chunks * blocks, [*read, *made, element, *rows], (len(x), span))
    for result, part in zip(results, made, strict=True):
        if part is not result:
            fold, each = _fold(w[0].numel(), x.dtype, x.device)
            yield _Launch(fold, len(w) * each, [part, result, rows.starts], (span,))


def shape(name: str) -> Shape:
    """How the rows of a program are shared among kernel programs."""
    return SUMS if "w" in slots(name).outputs else ROWS


@functools.lru_cache(maxsize=1024)
def columns(name: str, layout: str, channels: int) -> tuple[tuple[str, tuple[Column, ...]], ...]:
    """Where the components of x and z are, and how far a channel is from the next."""
    items, outs, *_ = name.split(" ")
    return ("x", _columns(items, layout, channels)), ("z", _columns(outs, layout, channels))


def _columns(items: str, layout: str, channels: int) -> tuple[Column, ...]:
    irreps = Irreps([(channels, ir) for _, ir in Irreps(items)])
    found = []
    for place, item in zip(irreps.slices(), irreps, strict=True):
        component, channel = steps(item, layout)
        found += [Column(place.start + m * component, channel) for m in range(item.ir.dim)]
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _kernel(
    name: str,
    layout: str,
    channels: int,
    dtype: torch.dtype,
    index: torch.dtype,
    device: torch.device,
) -> Kernel:
    """One for each combination that makes other machine code."""
    gluon = not (interpreted() or torch.version.hip)
    places = columns(name, layout, channels)
    warps, _ = shape(name)
    job = Job(program(name), places, channels, warps, dtype == torch.float64, gluon)
    function = symmetric_generator.name(job)
    kernel = printed("o3_symmetric", symmetric_generator.source(job), function)
    return Kernel(kernel, (), (), Tile((), warps, 1))


@functools.lru_cache(maxsize=1024)
def _fold(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Kernel, int]:
    """The kernel, and how many programs an element takes."""
    return Kernel(fold_parts_kernel, (width,), (), FOLD), -(-width // FOLD.blocks[1])
