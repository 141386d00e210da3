"""The operator of symmetric contractions in one kernel: gradients of any order are programs again.

    torchweft::o3_symmetric(Tensor[] tensors, str program, str layout, str mixed) -> Tensor[]

Tensors are those of the program, (N, D) for x and z, and in place of weights the parameters that
make them, (elements, couplings, C) each; then each row's element and the rows by element.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.explain import record_cost, recording
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
from torchweft.core.operators.operator import compiling
from torchweft.core.operators.tensor_list import (
    CachedCall,
    ListOperator,
    ProgramRule,
    Rest,
    Results,
    Tensors,
)
from torchweft.core.operators.tensor_list import Call as Door
from torchweft.core.printing.kernel import Frame
from torchweft.core.printing.modules import printed, written
from torchweft.errors import ShapeError
from torchweft.o3.channelwise.operator import one_by_one
from torchweft.o3.irreps.irreps import Irreps, steps
from torchweft.o3.pointwise import prints_gluon, row_kernel, row_programs
from torchweft.o3.symmetric import source
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

__all__ = ["cached_symmetric_call", "contract_symmetric"]


def cached_symmetric_call(name: str, layout: str, mixed: str) -> Rest:
    """Non-tensor arguments of `contract_symmetric`, cached for one signature of its tensors.

    They are strings while torch.compile traces.

    Args:
        name: key of a program.
        layout: of the rows of x and z.
        mixed: text of T, which makes weights of parameters.
    """
    rest = (name, layout, mixed)
    return rest if compiling() else CachedCall(rest, 1 + len(weight_counts(mixed)), prepared)


class _SymmetricRule(ProgramRule):
    """Results of a program and its derivatives; weights stand for all parameters."""

    def inputs(self, rest: Rest) -> Sequence[int]:
        return self._sizes(slots(rest[0]).inputs, rest)

    def outputs(self, rest: Rest, count: int) -> Sequence[int]:
        return self._sizes(slots(rest[0]).outputs, rest)

    def _sizes(self, letters: str, rest: Rest) -> Sequence[int]:
        many = len(weight_counts(rest[2]))
        return [many if slot == "w" else 1 for slot in letters]

    def body(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        results = prepared(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            work = len(tensors[-ELEMENT_TABLES]) * tensors[1].shape[2]
            record_cost(moved, symmetric_program(rest[0]).steps() * work)
        return list(results)

    def fake(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        x, parameters = tensors[0], tensors[1 : 1 + len(weight_counts(rest[2]))]
        outs = sum(ir.dim for _, ir in Irreps(rest[0].split(" ")[1]))
        rows = {
            "x": [x],
            "w": parameters,
            "z": [x.new_empty(x.shape[0], outs * parameters[0].shape[2])],
        }
        likes = [like for slot in slots(rest[0]).outputs for like in rows[slot]]
        return [like.new_empty(like.shape) for like in likes]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        if any(dim is not None for dim in dims[-ELEMENT_TABLES:]):
            raise ShapeError(
                "the elements of rows were given to torch.vmap as a mapped argument: they must be "
                "the same for the whole map. Map x and weights only, or call once for each."
            )
        return one_by_one(call, size, dims, tensors, rest)


contract_symmetric = ListOperator(
    "o3_symmetric",
    "str program, str layout, str mixed",
    _SymmetricRule(symmetric_program, ELEMENT_TABLES),
)

# launches


class ProgramShape(NamedTuple):
    """Warps per kernel program, and programs per processor."""

    warps: int
    programs: int


ROWS_SHAPE = ProgramShape(2, 32)
"""Shape where all results are rows.  On an H200 4 warps took 9 % longer for the gradient of x."""

SUMS_SHAPE = ProgramShape(4, 6)
"""Shape where results are sums over rows: fewer programs leave processors idle at the end, more
make more partial sums."""

FOLD_PARTS_TILE = Tile((8, 128), 4, 1)


def prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body of a call for one signature of its tensors."""
    name, layout, mixed = rest
    plan, floats = _SymmetricPlan(name, layout, mixed, tensors), len(tensors) - ELEMENT_TABLES
    steps, results, shapes = plan.steps, plan.results, plan.scratch  # the plan holds tensors
    launches, wide = Launches(steps), _wide(tensors[0].dtype)
    with current_device(tensors[0]):
        scratch = [tensors[0].new_empty(1, dtype=wide)] * len(shapes)
        every = [*tensors, *(tensors[like] for like, _ in results), *scratch]
        compile_together([Call(s.kernel, [every[n] for n in s.taken], s.free) for s in steps])

    def body(given: Tensors) -> Results:
        values = [t.contiguous() for t in given[:floats]]
        if not steps:
            return tuple([values[like].new_zeros(shape) for like, shape in results])
        found = tuple([values[like].new_empty(shape) for like, shape in results])
        scratch = [values[0].new_empty(shape, dtype=wide) for shape in shapes]
        with current_device(values[0]):
            launches((*values, *given[floats:], *found, *scratch))
        return found

    return body


class _SymmetricPlan:
    """Kernels of a program, on the tensors of a call, its results, then scratch memory.

    Attributes:
        steps: the kernels; none where there are no rows.
        results: for each result a tensor of the call with its dtype, and its shape.
        scratch: shapes of scratch memory, in the dtype of sums.
    """

    def __init__(self, name: str, layout: str, mixed: str, tensors: Tensors) -> None:
        self._layout, self._tensors, self._many = layout, tensors, len(weight_counts(mixed))
        self._elements, _, self._channels = tensors[1].shape
        made = weight_program(mixed).outputs[0].operand
        self._weights = (self._elements, made.size * self._channels)
        self.steps, self.scratch = list[Step](), list[tuple[int, int]]()
        letters, widths = slots(name), dict(columns(name, layout, self._channels))
        self.results = list[tuple[int, Sequence[int]]]()
        for slot in letters.outputs:
            if slot == "w":
                self.results += [(n, tensors[n].shape) for n in range(1, 1 + self._many)]
            else:
                self.results.append((0, (len(tensors[0]), len(widths[slot]) * self._channels)))
        if len(tensors[0]):
            self._add(name, mixed, letters.inputs, letters.outputs)

    def _add(self, name: str, mixed: str, inputs: str, outputs: str) -> None:
        """Weights of parameters, the parts of the program, gradients of parameters."""
        read = []
        for slot, places, used in zip(
            inputs, self._placed(inputs, 0), program_reads(name), strict=True
        ):
            place = places[0] if used else -1
            if used and slot == "w":
                place = self._new(self._weights)
                self._mix(mixed, places, [place])
            read.append(place)
        results = list(self._placed(outputs, len(self._tensors)))
        written = [
            self._new(self._weights) if slot == "w" else places[0]
            for places, slot in zip(results, outputs, strict=True)
        ]
        for part, numbers in program_parts(name):
            self._part(part, read, [written[n] for n in numbers])
        for places, slot, made in zip(results, outputs, written, strict=True):
            if slot == "w":
                self._mix(weight_gradients(mixed), [made], places)

    def _placed(self, letters: str, first: int) -> Iterator[Sequence[int]]:
        """Places of the tensors of operands."""
        for slot in letters:
            count = self._many if slot == "w" else 1
            yield range(first, first + count)
            first += count

    def _new(self, shape: tuple[int, int]) -> int:
        """The place of more scratch memory."""
        self.scratch.append(shape)
        return len(self._tensors) + len(self.results) + len(self.scratch) - 1

    def _mix(self, name: str, read: Sequence[int], written: Sequence[int]) -> None:
        """A program on parameters."""
        x, parameter = self._tensors[:2]
        dtypes = parameter.dtype, _wide(x.dtype)
        program = weight_program(name)
        kernel = row_kernel(program, self._channels, dtypes, x.device)
        programs = row_programs(program, self._elements * self._channels)
        self.steps.append(Step(kernel, programs, (*read, *written), (self._elements,)))

    def _part(self, name: str, read: Sequence[int], written: Sequence[int]) -> None:
        """A kernel, and those that add up its partial sums."""
        x, count = self._tensors[0], len(self._tensors)
        element, order, starts = range(count - ELEMENT_TABLES, count)
        blocks, (warps, programs) = -(-self._channels // source.CHANNEL_LANES), shape(name)
        span = max(warps, -(-len(x) * blocks // (programs * processors(x.device))))
        chunks, width = -(-len(x) // span), self._weights[1]
        made = [
            self._new((chunks + self._elements - 1, width)) if slot == "w" else place
            for place, slot in zip(written, slots(name).outputs, strict=True)
        ]
        index = self._tensors[element].dtype
        kernel = _kernel(name, self._layout, self._channels, x.dtype, index, x.device)
        taken = (*itertools.compress(read, program_reads(name)), *made, element, order, starts)
        self.steps.append(Step(kernel, chunks * blocks, taken, (len(x), span)))
        for place, part in zip(written, made, strict=True):
            if part != place:
                programs = self._elements * -(-width // FOLD_PARTS_TILE.blocks[1])
                fold = _fold(width, x.dtype, x.device)
                self.steps.append(Step(fold, programs, (part, place, starts), (span,)))


def shape(name: str) -> ProgramShape:
    """How rows are shared among the kernel programs of a program."""
    return SUMS_SHAPE if "w" in slots(name).outputs else ROWS_SHAPE


@functools.lru_cache(maxsize=1024)
def columns(name: str, layout: str, channels: int) -> source.Columns:
    """Where the components of x and z are, and how far a channel is from the next."""
    found = []
    for text in name.split(" ")[:2]:
        irreps = Irreps([(channels, ir) for _, ir in Irreps(text)])
        places = []
        for place, item in zip(irreps.slices(), irreps, strict=True):
            component, channel = steps(item, layout)
            places += [
                source.Column(place.start + m * component, channel) for m in range(item.ir.dim)
            ]
        found.append(tuple(places))
    return tuple(zip("xz", found, strict=True))


@functools.lru_cache(maxsize=1024)
def _kernel(name: str, layout: str, channels: int, dtype: torch.dtype, *variant: object) -> Kernel:
    """The kernel; `variant` is what else its machine code depends on."""
    places, (warps, _) = columns(name, layout, channels), shape(name)
    frame = Frame(prints_gluon(), dtype == torch.float64)
    spec = source.SymmetricKernelSpec(symmetric_program(name), places, channels, warps, frame)
    kernel = printed("o3_symmetric", source.source(spec), source.name(spec))
    return Kernel(kernel, (), (), Tile((), warps, 1))


@functools.lru_cache(maxsize=1024)
def _fold(width: int, *variant: object) -> Kernel:
    """The kernel that adds up partial sums; `variant` is what else its machine code depends on."""
    kernel = written("torchweft.o3.symmetric.kernels", "fold_parts_kernel")
    return Kernel(kernel, (width,), (), FOLD_PARTS_TILE)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32
