"""Functions of a row, each one kernel, and derivatives of every order.

    torchweft::o3_rows(Tensor[] tensors, str program) -> Tensor[]

A function is a program of `row_programs`, known by its key.

On a GPU a thread computes one channel of one row: result[row, component, c] is the component's
expression of inputs[row, :, c], for rows of (components, channels).  Where all operands have one
component it computes four of them, and a row may have any number.  Bound: memory, each number read
and written once.  On the CPU a loop serves many rows.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core import private
from torchweft.core.backend import choose, interpreted
from torchweft.core.explain import record_cost, recording
from torchweft.core.expressions.expr import WAVES
from torchweft.core.expressions.program import Operand, Program
from torchweft.core.gpu.launcher import Kernel, Tile, current_device
from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operator import compiling, unwatched
from torchweft.core.operators.tensor_list import (
    CachedCall,
    Call,
    ListOperator,
    ProgramRule,
    Rest,
    Results,
    Tensors,
    mapped_as_rows,
)
from torchweft.core.printing.dialect import Dialect
from torchweft.core.printing.kernel import Frame, load_before_use
from torchweft.core.printing.modules import printed
from torchweft.core.printing.schedule import schedule
from torchweft.o3.backends import chosen_backend, refuse_backend
from torchweft.o3.row_functions import functions_called
from torchweft.o3.row_programs import result_shapes, row_program, varying

__all__ = [
    "cached_rows",
    "first_rows",
    "prints_gluon",
    "row_kernel",
    "row_programs",
    "serves_rows",
]

ROW_WARPS = 4
"""Warps of a kernel program; a thread computes one channel of one row."""

SCALARS_PER_THREAD = 4
"""Numbers that a thread computes where operands have one component: more loads are under way."""

SMALLEST_NORMAL = {"tl.float32": 1.1754943508222875e-38, "tl.float64": sys.float_info.min}
"""The smallest normal numbers; the root of a smaller one is infinite."""

ROW_LOOP_DTYPES = (torch.float32, torch.float64)
ROW_DTYPES = (*ROW_LOOP_DTYPES, torch.bfloat16, torch.float16)

LOOP_FROM_NUMBERS = 2**10
"""Numbers of a result from which on a loop is worth the tenth of a second of its compilation."""

_INTERPRETED = interpreted()

# kernels


class PointwiseKernelSpec(NamedTuple):
    """All that the source of a kernel depends on.

    Args:
        program: what is computed.
        channels: channels of each component.
        frame: language, and dtype of the computation.
    """

    program: Program
    channels: int
    frame: Frame


def source(spec: PointwiseKernelSpec) -> str:
    """Module text; the kernel is its function `rows`."""
    frame, used = spec.frame, spec.program.used()
    pointers = [operand.name for operand in spec.program.inputs if operand.name in used]
    pointers += [output.operand.name for output in spec.program.outputs]
    body = list(_body(spec))
    called = [
        frame.function(name, ["x"], lines)
        for name, lines in functions_called(body, frame.wide).items()
    ]
    parameters = [*(f"{name}_ptr" for name in pointers), "rows"]
    kernel = frame.function("rows", parameters, body, free=["rows"])
    return frame.module(spec.program.key, *called, kernel)


def _body(spec: PointwiseKernelSpec) -> Iterator[str]:
    frame = spec.frame
    layout = f", tl.BlockedLayout([1], [32], [{ROW_WARPS}], [0])" if frame.gluon else ""
    numbers = _numbers(spec.program)
    program = frame.cast("tl.program_id(0)")
    yield f"place = {program} * {numbers} + tl.arange(0, {numbers}{layout})"
    yield f"row = place // {spec.channels}"
    yield f"c = place % {spec.channels}"
    yield "live = row < rows"
    used = spec.program.used()
    loads = {
        f"{operand.name}{n}": frame.load(at, "live")
        for operand in spec.program.inputs
        if operand.name in used
        for n, at in enumerate(_addresses(operand, spec.channels))
    }
    plan = schedule(varying(spec.program))
    yield from load_before_use(plan, _dialect(frame.number), loads)
    for result, output in zip(plan.results, spec.program.outputs, strict=True):
        places = _addresses(output.operand, spec.channels)
        for at, name, value in zip(places, result.names, output.components, strict=True):
            # a stored number needs a shape, and its own dtype: alone it would be a float32
            stored = name or f"live.to({frame.number}) * {value.data!r}"
            yield f"tl.store({at}, {stored}, mask=live)"


def _addresses(operand: Operand, channels: int) -> list[str]:
    row = f"{operand.name}_ptr + row * {operand.size * channels} + c"
    return [f"{row} + {n * channels}" for n in range(operand.size)]


def _dialect(dtype: str) -> Dialect:
    functions = {
        "sqrt": "tl.sqrt({0})",
        "rsqrt": f'tl.rsqrt(tl.where({{0}} < {SMALLEST_NORMAL[dtype]!r}, float("inf"), {{0}}))',
        "ramp": "tl.where({0} < 0, 0.0, {0})",
        "step": f"tl.where({{0}} < 0, 0.0, 1.0).to({dtype})",
        **{f"wave{n}": f"wave{n}({{0}})" for n in range(WAVES)},
        "sigmoid": "sigmoid({0})",
        "tanh": "tanh({0})",
        "sign": f"tl.where({{0}} > 0, 1.0, 0.0).to({dtype})",  # of what is not negative
    }
    return Dialect(functions, lambda of: [], lambda name, component: [])


@functools.lru_cache(maxsize=1024)
def row_kernel(
    program: Program, channels: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Kernel:
    """The kernel for tensors of some dtypes on a device; it computes in float64 if one of them is.

    It holds machine code, which depends on all arguments.
    """
    frame = Frame(prints_gluon(), torch.float64 in dtypes)
    text = source(PointwiseKernelSpec(program, channels, frame))
    return Kernel(printed("o3_rows", text, "rows"), (), (), Tile((), ROW_WARPS, 1))


def prints_gluon() -> bool:
    """Whether kernels are printed in Gluon; the interpreter and AMD's GPUs take Triton."""
    return not (interpreted() or torch.version.hip)


def row_programs(program: Program, numbers: int) -> int:
    """Number of kernel programs that run a program for a number of rows and channels."""
    return -(-numbers // _numbers(program))


@functools.lru_cache(maxsize=1024)
def _numbers(program: Program) -> int:
    """Rows and channels of one kernel program: a thread has four where it keeps few values."""
    sizes = {operand.size for operand in (*program.inputs, *[o for o, _ in program.outputs])}
    return 32 * ROW_WARPS * (SCALARS_PER_THREAD if sizes == {1} else 1)


@functools.lru_cache(maxsize=1024)
def _kernel_body(
    program: Program, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensors], Results]:
    """The body on a GPU, for any number of rows (rows, components)."""
    used = program.used()
    taken = [n for n, operand in enumerate(program.inputs) if operand.name in used]
    size = program.inputs[0].size
    kernel, index = row_kernel(program, 1, (dtype,), device), device.index

    def body(given: Tensors) -> Results:
        first, rows = given[0], given[0].numel() // size
        results = tuple([first.new_empty(shape) for shape in result_shapes(program, *first.shape)])
        tensors = (*[given[n].contiguous() for n in taken], *results)
        if index is None or index == private.get_device():
            kernel(row_programs(program, rows), tensors, (rows,))
        else:
            with current_device(first):
                kernel(row_programs(program, rows), tensors, (rows,))
        return results

    return body


# the operator


class _RowFunctionRule(ProgramRule):
    """Results of a program and its derivatives."""

    def body(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        results = _prepared(tensors, rest)(tensors)
        if recording():
            moved = sum(t.nbytes for t in (*tensors, *results))
            record_cost(moved, row_program(rest[0]).steps() * tensors[0].shape[0])
        return list(results)

    def fake(self, tensors: Tensors, *rest: Any) -> list[Tensor]:
        shapes = result_shapes(row_program(rest[0]), *tensors[0].shape)
        return [tensors[0].new_empty(shape) for shape in shapes]

    def batch(
        self, call: Call, size: int, dims: Sequence[int | None], tensors: Tensors, rest: Rest
    ) -> Results:
        return mapped_as_rows(call, size, dims, tensors, rest)


def _prepared(tensors: Tensors, rest: Rest) -> Callable[[Tensors], Results]:
    """The body for tensors like these, of any number of rows."""
    like, program = tensors[0], row_program(rest[0])
    if not _on_cpu(like):
        return _kernel_body(program, like.dtype, like.device)
    from torchweft.o3.row_loops import loop_body  # llvmlite need not be installed

    return loop_body(program, like.dtype)


_rows = ListOperator("o3_rows", "str program", _RowFunctionRule(row_program))

_row_calls: CallCache[CallCache[tuple[Rest, int]]] = CallCache()
"""Cached calls by function, then by the signature of x without its rows; least numbers of x."""


def serves_rows(x: Tensor, backend: str | None = None, size: int = 0) -> bool:
    """Whether kernels compute a function of the rows of x; torch's own operations otherwise.

    Args:
        x: (..., components).
        backend: the requested one.  None: kernels on a GPU, loops for many rows on the CPU, and
            torch where a dispatch mode watches its operations.
        size: numbers in a row of the result, if a loop may serve; else 0.

    Raises:
        BackendError: the requested backend cannot serve.
    """
    if backend is None:
        return _has_kernel(x) or (size > 0 and _has_loop(x, size))
    if backend == "torch":
        return False
    dtypes: tuple[torch.dtype, ...] = ROW_DTYPES
    if chosen_backend(backend, x.device.type) == "numba":
        dtypes = ROW_LOOP_DTYPES if size and not _INTERPRETED else ()
    if x.dtype not in dtypes:
        refuse_backend(backend, x.device.type, f"this function of rows, in {x.dtype}")
    return True


def _has_kernel(x: Tensor) -> bool:
    """Whether a kernel serves x where no backend is requested: on a GPU."""
    if not (x.is_cuda or _INTERPRETED) or not (compiling() or unwatched(x)):
        return False
    return x.dtype in ROW_DTYPES


def _has_loop(x: Tensor, size: int) -> bool:
    """Whether a loop serves x: of many rows, on the CPU, unless torch traces or is watched."""
    if compiling() or not _on_cpu(x) or not unwatched(x) or x.numel() < _fewest(x, size):
        return False
    return x.dtype in ROW_LOOP_DTYPES and choose(None, "cpu") == "numba"


def _on_cpu(x: Tensor) -> bool:
    return x.is_cpu and not _INTERPRETED


def _fewest(x: Tensor, size: int) -> int:
    """Numbers of x from which on a loop with `size` results a row serves; 0 for kernels."""
    return -(-LOOP_FROM_NUMBERS // size) * x.shape[-1] if _on_cpu(x) else 0


def cached_rows(called: Hashable, x: Tensor) -> Results | None:
    """The results of a cached call, which is one kernel; None if the call is not cached.

    Args:
        called: the function and its arguments except x.
        x: (..., components).
    """
    # calls that no kernel ever served need one look-up
    of_called = None if compiling() else _row_calls.get(called)
    known = None if of_called is None else signature((x,))
    if of_called is None or known is None:
        return None
    shape, *kind = known
    found = of_called.get((shape[-1:], *kind))
    if found is None or x.numel() < found[1]:
        return None
    return _by_kernel(x, found[0])


def first_rows(called: Hashable | None, key: str, x: Tensor, backend: str | None = None) -> Results:
    """The results of a checked call, which is then cached.

    Args:
        called: as in `cached_rows`; None: the call is not cached.
        key: key of the program.
        x: (..., components), which `serves_rows` accepts.
        backend: the requested one, part of `called`.
    """
    known, rest = signature((x,)), (key,)
    if known is not None:
        shape, *kind = known
        rest = CachedCall(rest, 1, _prepared)
        if called is not None:
            # few rows have torch's bits, also after a call with many
            fewest = 0 if backend else _fewest(x, row_program(key).outputs[0].operand.size)
            if (of_called := _row_calls.get(called)) is None:
                _row_calls.keep(called, of_called := CallCache())
            of_called.keep((shape[-1:], *kind), (rest, fewest))
    return _by_kernel(x, rest)


def _by_kernel(x: Tensor, rest: Rest) -> Results:
    if x.dim() == 2:
        return _rows((x,), rest)
    results = _rows((x.reshape(-1, x.shape[-1]),), rest)
    return tuple([y.view(*x.shape[:-1], y.shape[1]) for y in results])
