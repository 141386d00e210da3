"""Functions of rows on the CPU: one loop each, as machine code.

    for each tile:  components of its rows side by side · the program · rows of the results

The program is computed in float64, in vector lanes; in float32 the powers of 1/|x| in derivatives
would overflow for x shorter than 1e-13.  A tile is a task of its own, so that results are the same
on any number of threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from torchweft.core.cpu.loops import share, terms
from torchweft.core.cpu.machine_code import machine_code
from torchweft.core.explain import Launch, record, recording
from torchweft.core.expressions.expr import WAVES
from torchweft.core.expressions.program import Operand, Program
from torchweft.core.operators.tensor_list import Results, Tensors
from torchweft.core.printing.dialect import Dialect, indented
from torchweft.core.printing.schedule import schedule
from torchweft.o3.row_functions import functions_called
from torchweft.o3.row_programs import result_shapes, varying

__all__ = ["loop_body"]

TILE = 64
"""Rows whose components lie side by side: long enough for vector lanes."""

SERIAL_WORK = 2**20
"""Multiplications below which one thread is faster."""

FLAGS = ("contract", "nsz")
"""Products stay in the order in which a program multiplies, so that none leaves the range."""

_DIALECT = Dialect(
    {
        "sqrt": "sqrt({0})",
        "rsqrt": "where({0} == 0.0, 0.0, 1.0 / sqrt({0}))",
        "ramp": "where({0} < 0.0, 0.0, {0})",
        "step": "where({0} < 0.0, 0.0, 1.0)",
        "sign": "where({0} > 0.0, 1.0, 0.0)",  # of what is not negative
        **{name: f"{name}({{0}})" for name in ("sigmoid", "tanh")},
        **{f"wave{n}": f"wave{n}({{0}})" for n in range(WAVES)},
    },
    lambda of: [],
    lambda name, component: [],
)


@functools.lru_cache(maxsize=1024)
def loop_body(program: Program, dtype: torch.dtype) -> Callable[[Tensors], Results]:
    """The body of a program on the CPU, for any number of rows (rows, components)."""
    size, work = program.inputs[0].size, max(terms(program), 1)
    used = [n for n, operand in enumerate(program.inputs) if operand.name in program.used()]
    text, sizes = _text(program, str(dtype).removeprefix("torch."))
    code = machine_code(text, FLAGS, wide=True)

    def body(given: Tensors) -> Results:
        first = given[0]
        results = tuple([first.new_empty(of) for of in result_shapes(program, *first.shape)])
        arrays = [given[n].detach().resolve_neg().contiguous().view(-1) for n in used]
        arrays += [result.view(-1) for result in results]

        def run(first: int, end: int, begin: int = 0, count: int = TILE) -> None:
            scratch = [
                torch.empty(components * TILE, dtype=torch.float64, device="cpu")
                for components in sizes
            ]
            code(first, end, begin, count, *scratch, *arrays)

        rows = first.numel() // size
        tiles, rest = divmod(rows, TILE)
        if tiles:
            share(run, tiles, rows * work, SERIAL_WORK)
        if rest:
            run(0, 1, tiles * TILE, rest)
        if recording():
            record(Launch("numba", program.key, {"tile": TILE}, -(-rows // TILE), 0))
        return results

    return body


def _text(program: Program, dtype: str) -> tuple[str, tuple[int, int]]:
    """The loop, and how many components of operands and of results it keeps of a row."""
    steps, results = schedule(varying(program))
    leaves = [(o.name, c, o.size) for o in _read(program) for c in range(o.size)]
    kept = [name for result in results for name in result.names if name]
    row = f"n = begin + tile * {TILE} + q"
    load, compute, store = [row], [], [row]
    for at, (name, c, size) in enumerate(leaves):
        load.append(f"given[{at} * {TILE} + q] = in_{name}[n * {size} + {c}]")
        compute.append(f"{name}{c} = given[{at} * {TILE} + q]")
    compute += [line for step in steps for line in step.lines(_DIALECT)]
    compute += [f"found[{at} * {TILE} + q] = {name}" for at, name in enumerate(kept)]
    places = iter(range(len(kept)))
    for result, output in zip(results, program.outputs, strict=True):
        for c, (computed, value) in enumerate(zip(result.names, output.components, strict=True)):
            number = f"found[{next(places)} * {TILE} + q]" if computed else repr(value.data)
            store.append(f"out_{result.operand}[n * {len(result.names)} + {c}] = {number}")
    lines = [*_functions(compute), _head(program, dtype), *_loops(load, compute, store)]
    return "\n".join(lines) + "\n", (len(leaves) or 1, len(kept) or 1)


def _read(program: Program) -> list[Operand]:
    return [operand for operand in program.inputs if operand.name in program.used()]


def _head(program: Program, dtype: str) -> str:
    """The name and the arguments of the loop."""
    arrays = [f"in_{operand.name}" for operand in _read(program)]
    arrays += [f"out_{output.operand.name}" for output in program.outputs]
    kinds = [f"{name}: int64" for name in ("first", "end", "begin", "count")]
    kinds += ["given: float64[:]", "found: float64[:]", *(f"{name}: {dtype}[:]" for name in arrays)]
    return f"def rows({', '.join(kinds)}):"


def _functions(lines: list[str]) -> Iterator[str]:
    """The functions that lines of the program call."""
    for name, body in functions_called(lines, wide=True).items():
        yield f"def {name}(x):"
        yield from indented(line.replace("tl.", "") for line in body)


def _loops(*bodies: list[str]) -> Iterator[str]:
    """Loops over the rows of a tile, one after the other, for each tile."""
    yield "    for tile in range(first, end):"
    for body in bodies:
        yield "        for q in range(0, count):"
        yield from indented(body, 3)
