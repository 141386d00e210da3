"""The GPU path of symmetric contractions: kernels, parts and grid of a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.backend import interpreted
from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Launches,
    Step,
    Tile,
    compile_together,
    current_device,
    processors,
)
from torchweft.core.printing.modules import printed
from torchweft.o3.irreps.irreps import Irreps, steps
from torchweft.o3.pointwise import launch as row_launch
from torchweft.o3.symmetric import source as symmetric_generator
from torchweft.o3.symmetric.kernels import fold_parts_kernel
from torchweft.o3.symmetric.program import (
    ELEMENT_TABLES,
    program_parts,
    program_reads,
    slots,
    symmetric_program,
    weight_counts,
    weight_gradients,
    weight_program,
)
from torchweft.o3.symmetric.source import LANES, Column, Job

__all__ = ["columns", "prepared", "shape"]


class ProgramShape(NamedTuple):
    """Warps of a kernel program, and programs of a multiprocessor."""

    warps: int
    programs: int


ROWS_SHAPE = ProgramShape(2, 32)
"""Where all results are of rows.  On an H200 4 warps took 9 % longer for the gradient of x."""

SUMS_SHAPE = ProgramShape(4, 6)
"""Where sums are kept: fewer programs leave multiprocessors idle at the end, more make more parts
to add up."""

FOLD_PARTS_TILE = Tile((8, 128), 4, 1)


def prepared(
    name: str, layout: str, mixed: str, tensors: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], tuple[Tensor, ...]]:
    """The results of a program, for tensors like these.

    Args:
        name: its key.
        layout: of the rows of x and z.
        mixed: how weights are made of parameters, see torchweft.o3.symmetric.program.
        tensors: its inputs, (N, D) for x and z, and in place of weights the parameters (elements,
            couplings, C); then the element of each row (N,), and order and starts of rows by it.
    """
    plan, floats = _SymmetricPlan(name, layout, mixed, tensors), len(tensors) - ELEMENT_TABLES
    launches, results, wide = Launches(plan.steps), plan.results, _wide(tensors[0].dtype)
    with current_device(tensors[0]):
        between = [tensors[0].new_empty(1, dtype=wide)] * len(plan.scratch)
        every = [*tensors, *(tensors[like] for like, _ in results), *between]
        compile_together([Call(s.kernel, [every[n] for n in s.taken], s.free) for s in plan.steps])

    def again(given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = [t.contiguous() for t in given[:floats]]
        if not plan.steps:
            return tuple([values[like].new_zeros(shape) for like, shape in results])
        found = tuple([values[like].new_empty(shape) for like, shape in results])
        between = [values[0].new_empty(shape, dtype=wide) for shape in plan.scratch]
        with current_device(values[0]):
            launches((*values, *given[floats:], *found, *between))
        return found

    return again


class _SymmetricPlan:
    """Kernels, and where their tensors stand: those of a call, results, memory between kernels.

    Attributes:
        steps: the kernels; none where there are no rows.
        results: the place of a tensor of the same kind, and the shape, of each.
        scratch: shapes of the memory, of the dtype of sums.
    """

    def __init__(self, name: str, layout: str, mixed: str, tensors: Sequence[Tensor]) -> None:
        self._layout, self._mixed, self._tensors = layout, mixed, tensors
        self._many = len(weight_counts(mixed))
        self._elements, _, self._channels = tensors[1].shape
        made = weight_program(mixed).outputs[0].operand
        self._weights = (self._elements, made.size * self._channels)
        self.steps, self.scratch = list[Step](), list[tuple[int, int]]()
        letters = slots(name)
        self.results = [shape for slot in letters.outputs for shape in self._shapes(name, slot)]
        if len(tensors[0]):
            self._add(name, letters.inputs, letters.outputs)

    def _shapes(self, name: str, slot: str) -> list[tuple[int, Sequence[int]]]:
        if slot == "w":
            return [(n, self._tensors[n].shape) for n in range(1, 1 + self._many)]
        width = len(dict(columns(name, self._layout, self._channels))[slot]) * self._channels
        return [(0, (len(self._tensors[0]), width))]

    def _add(self, name: str, inputs: str, outputs: str) -> None:
        """Weights of parameters, the parts of the program, gradients of parameters."""
        read = [
            self._read(places, slot) if flag else -1
            for places, slot, flag in zip(
                self._placed(inputs, 0), inputs, program_reads(name), strict=True
            )
        ]
        results = list(self._placed(outputs, len(self._tensors)))
        written = [
            self._new(self._weights) if slot == "w" else places[0]
            for places, slot in zip(results, outputs, strict=True)
        ]
        for part, numbers in program_parts(name):
            self._part(part, read, [written[n] for n in numbers])
        for places, slot, made in zip(results, outputs, written, strict=True):
            if slot == "w":
                self._mix(weight_gradients(self._mixed), [made], places)

    def _placed(self, letters: str, first: int) -> Iterator[Sequence[int]]:
        """Where the tensors of operands are."""
        for slot in letters:
            count = self._many if slot == "w" else 1
            yield range(first, first + count)
            first += count

    def _new(self, shape: tuple[int, int]) -> int:
        """The place of more memory."""
        self.scratch.append(shape)
        return len(self._tensors) + len(self.results) + len(self.scratch) - 1

    def _read(self, places: Sequence[int], slot: str) -> int:
        """Where an operand is; weights are made."""
        if slot != "w":
            return places[0]
        made = self._new(self._weights)
        self._mix(self._mixed, places, [made])
        return made

    def _mix(self, name: str, read: Sequence[int], written: Sequence[int]) -> None:
        """A program on parameters."""
        x, parameter = self._tensors[:2]
        found = weight_program(name)
        dtypes = parameter.dtype, _wide(x.dtype)
        kernel = row_launch.kernel(found, self._channels, dtypes, x.device)
        programs = row_launch.programs(self._elements * self._channels)
        self.steps.append(Step(kernel, programs, (*read, *written), (self._elements,)))

    def _part(self, name: str, read: Sequence[int], written: Sequence[int]) -> None:
        """A kernel, and those that add its sums over some rows up."""
        x, (element, order, starts) = (
            self._tensors[0],
            range(len(self._tensors) - ELEMENT_TABLES, len(self._tensors)),
        )
        blocks, (warps, programs) = -(-self._channels // LANES), shape(name)
        span = max(warps, -(-len(x) * blocks // (programs * processors(x.device))))
        chunks = -(-len(x) // span)
        width = self._weights[1]
        outputs = slots(name).outputs
        made = [
            self._new((chunks + self._elements - 1, width)) if slot == "w" else place
            for place, slot in zip(written, outputs, strict=True)
        ]
        index = self._tensors[element].dtype
        kernel = _kernel(name, self._layout, self._channels, x.dtype, index, x.device)
        taken = (*itertools.compress(read, program_reads(name)), *made, element, order, starts)
        self.steps.append(Step(kernel, chunks * blocks, taken, (len(x), span)))
        for place, part in zip(written, made, strict=True):
            if part != place:
                fold, each = _fold(width, x.dtype, x.device)
                taken = (part, place, starts)
                self.steps.append(Step(fold, self._elements * each, taken, (span,)))


def shape(name: str) -> ProgramShape:
    """How the rows of a program are shared among kernel programs."""
    return SUMS_SHAPE if "w" in slots(name).outputs else ROWS_SHAPE


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
    job = Job(symmetric_program(name), places, channels, warps, dtype == torch.float64, gluon)
    function = symmetric_generator.name(job)
    kernel = printed("o3_symmetric", symmetric_generator.source(job), function)
    return Kernel(kernel, (), (), Tile((), warps, 1))


@functools.lru_cache(maxsize=1024)
def _fold(width: int, dtype: torch.dtype, device: torch.device) -> tuple[Kernel, int]:
    """The kernel, and how many programs an element takes."""
    tile = FOLD_PARTS_TILE
    return Kernel(fold_parts_kernel, (width,), (), tile), -(-width // tile.blocks[1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
