"""Symmetric contractions by two operators, whose gradients of any order are programs again.

    torchweft::o3_symmetric_weights(Tensor[] tensors, str program) -> Tensor[]
    torchweft::o3_symmetric(Tensor[] tensors, str program, str layout) -> Tensor[]

The first makes the weights of elements of the parameters, all (elements, numbers, C): once for the
contraction and its gradients.  Tensors of the second are those of the program, (N, D) for x and z,
then each row's element and the rows by element.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
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
    weight_program,
)

__all__ = ["SymmetricCall", "cached_symmetric_call", "contracted"]


class SymmetricCall(NamedTuple):
    """Non-tensor arguments of both operators."""

    weights: Rest
    contraction: Rest


def cached_symmetric_call(name: str, layout: str, mixed: str, parameters: int) -> SymmetricCall:
    """Arguments of `contracted`, cached for one signature of its tensors.

    They are strings while torch.compile traces.

    Args:
        name: key of a program.
        layout: of the rows of x and z.
        mixed: text of T, which makes weights of parameters.
        parameters: their number.
    """
    call = SymmetricCall((mixed,), (name, layout))
    if compiling():
        return call
    return SymmetricCall(
        CachedCall(call.weights, parameters, prepared_weights),
        CachedCall(call.contraction, 2, prepared),
    )


def contracted(
    x: Tensor, parameters: Sequence[Tensor], elements: Tensors, call: SymmetricCall
) -> Tensor:
    """z (N, D_out) of x (N, D), with weights of the parameters (elements, couplings, C).

    Args:
        x: rows.
        parameters: as many as T has.
        elements: each row's element, and rows by element.
        call: see `cached_symmetric_call`.
    """
    wide = _wide(x.dtype)
    given = [p if p.dtype == wide else p.to(wide) for p in parameters]
    (weights,) = _make_weights(given, call.weights)
    return _contract((x, weights, *elements), call.contraction)[0]


class _WeightRule(ProgramRule):
    """Results of a program of parameters, and its derivatives."""

    def body(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        results = prepared_weights(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            elements, _, channels = tensors[0].shape
            record_cost(moved, weight_program(rest[0]).steps() * elements * channels)
        return list(results)

    def fake(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        elements, _, channels = tensors[0].shape
        outputs = weight_program(rest[0]).outputs
        return [tensors[0].new_empty(elements, of.operand.size, channels) for of in outputs]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        return one_by_one(call, size, dims, tensors, rest)


_make_weights = ListOperator("o3_symmetric_weights", "str program", _WeightRule(weight_program))


class _SymmetricRule(ProgramRule):
    """Results of a program and its derivatives."""

    def body(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        results = prepared(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            work = len(tensors[0]) * tensors[1].shape[2]
            record_cost(moved, symmetric_program(rest[0]).steps() * work)
        return list(results)

    def fake(self, tensors: Tensors, *rest: str) -> list[Tensor]:
        shapes = result_shapes(tensors, rest[0])
        return [tensors[like].new_empty(shape) for like, shape in shapes]

    def batch(
        self, call: Door, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        if any(dim is not None for dim in dims[-ELEMENT_TABLES:]):
            raise ShapeError(
                "the elements of rows were given to torch.vmap as a mapped argument: they must be "
                "the same for the whole map. Map x and weights only, or call once for each."
            )
        return one_by_one(call, size, dims, tensors, rest)


_contract = ListOperator(
    "o3_symmetric",
    "str program, str layout",
    _SymmetricRule(symmetric_program, ELEMENT_TABLES),
)


def result_shapes(tensors: Tensors, name: str) -> list[tuple[int, Sequence[int]]]:
    """For each result of a program a tensor of the call with its dtype, and its shape."""
    x, weights = tensors[:2]
    outs = sum(ir.dim for _, ir in Irreps(name.split(" ")[1]))
    z = x.shape[0], outs * weights.shape[2]
    found = {"x": (0, x.shape), "w": (1, weights.shape), "z": (0, z)}
    return [found[slot] for slot in slots(name).outputs]


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


def prepared_weights(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body of a call on parameters for one signature of its tensors."""
    program, like = weight_program(rest[0]), tensors[0]
    elements, _, channels = like.shape
    kernel = row_kernel(program, channels, (like.dtype,), like.device)
    programs, used = row_programs(program, elements * channels), program.reads()
    sizes = [output.operand.size for output in program.outputs]
    with current_device(like):
        every = [*itertools.compress(tensors, used), *[like] * len(sizes)]
        compile_together([Call(kernel, every, (elements,))])

    def body(given: Tensors) -> Results:
        read = [t.contiguous() for t in itertools.compress(given, used)]
        results = [given[0].new_empty(elements, size, channels) for size in sizes]
        with current_device(given[0]):
            kernel(programs, (*read, *results), (elements,))
        return tuple(results)

    return body


def prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body of a call for one signature of its tensors."""
    floats = len(tensors) - ELEMENT_TABLES
    plan, results = _SymmetricPlan(rest, tensors), result_shapes(tensors, rest[0])
    steps, shapes = plan.steps, plan.scratch  # the plan holds tensors
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
        scratch: shapes of scratch memory, in the dtype of sums.
    """

    def __init__(self, rest: Rest, tensors: Tensors) -> None:
        name, self._layout = rest
        self._tensors = tensors
        self._elements, size, self._channels = tensors[1].shape
        self._width = size * self._channels
        self._results = len(slots(name).outputs)
        self.steps, self.scratch = list[Step](), list[tuple[int, int]]()
        if len(tensors[0]):
            for part, numbers in program_parts(name):
                self._part(part, [len(tensors) + n for n in numbers])

    def _new(self, shape: tuple[int, int]) -> int:
        """The place of more scratch memory."""
        self.scratch.append(shape)
        return len(self._tensors) + self._results + len(self.scratch) - 1

    def _part(self, name: str, written: Sequence[int]) -> None:
        """A kernel, and those that add up its partial sums."""
        x, count = self._tensors[0], len(self._tensors)
        read, tables = range(count - ELEMENT_TABLES), range(count - ELEMENT_TABLES, count)
        blocks, (warps, programs) = -(-self._channels // source.CHANNEL_LANES), shape(name)
        span = max(warps, -(-len(x) * blocks // (programs * processors(x.device))))
        chunks, width = -(-len(x) // span), self._width
        made = [
            self._new((chunks + self._elements - 1, width)) if slot == "w" else place
            for place, slot in zip(written, slots(name).outputs, strict=True)
        ]
        index = self._tensors[tables[0]].dtype
        kernel = _kernel(name, self._layout, self._channels, x.dtype, index, x.device)
        taken = (*itertools.compress(read, program_reads(name)), *made, *tables)
        self.steps.append(Step(kernel, chunks * blocks, taken, (len(x), span)))
        for place, part in zip(written, made, strict=True):
            if part != place:
                programs = self._elements * -(-width // FOLD_PARTS_TILE.blocks[1])
                fold = _fold(width, x.dtype, x.device)
                self.steps.append(Step(fold, programs, (part, place, tables[2]), (span,)))


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
