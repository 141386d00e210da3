"""The tiles of generated kernels: what of a row a thread holds, and what waits in shared memory.

A thread holds every component of its features, so registers decide: of v features it needs about
28 + v · (values alive at once, sums over rows that stay in registers).  Compiled for sm_90, with 0
spills: the Cl(3,0) chain at v = 4 (130 registers), its gradient at v = 2 (255), Cl(2,0)'s at v = 4
(241), the Cl(1,3) chain at v = 4 (255), its gradient at v = 2 (254).

A program that sums over a row that no tile holds is split at its sums.  Measured on an H200, 4096
rows, fp32, against one kernel that read each row again for its sums and added the weight's gradient
up in memory: the gradient of the Cl(5,0) chain, F = 512, 889 µs for 2760; of Cl(1,3), F = 1024, 654
for 1313; of Cl(3,0), F = 2048, 574 for 942.  The chain itself: Cl(3,0), F = 4096, 645 for 734; with
F = 2048, where the second reading came from the L2 cache, 347 for 298.
"""

from __future__ import annotations

from typing import NamedTuple

from torchweft.clifford.programs.source import Tiling, copied_at_once, parameters
from torchweft.core.expressions.program import Operand, Program
from torchweft.core.expressions.rewrite import split
from torchweft.core.printing.dialect import Contract, most_live
from torchweft.core.printing.schedule import schedule

__all__ = ["Kernel", "Machine", "choose"]


class Machine(NamedTuple):
    """What a kernel may use.

    Args:
        gluon: whether Gluon serves it (NVIDIA); else Triton.
        processors: multiprocessors.
        shared: bytes of shared memory in each.
    """

    gluon: bool
    processors: int
    shared: int


REGISTERS = 65536
"""Of a multiprocessor; a thread has up to 255."""
WIDEST = 1024
"""Features of a tile."""
MOST_TERMS = 512
"""Of a form, up to which a thread takes several features.

With more the compiler moves so much ahead that registers spill: the Cl(5,0) chain at 4096 × 512
takes 354 µs at v = 2 (162 spills) and 251 at v = 1 (4 spills, H200).
"""
THREADS = 128
"""Of the smallest kernel program: short rows are taken several at a time."""


class Kernel(NamedTuple):
    """A program, or a part of one, and how it is computed.

    Args:
        program: what.
        tiling: in which tiles.
        tiles: of a row.
        lanes: how many kernel programs share the rows, for each tile.
    """

    program: Program
    tiling: Tiling
    tiles: int
    lanes: int


class _Tile(NamedTuple):
    block: int
    vector: int
    registers: int


def choose(
    program: Program, rows: int, features: int, itemsize: int, aligned: bool, machine: Machine
) -> tuple[Kernel, ...]:
    """The kernels of a program, in order: each may read the results of those before it.

    Args:
        program: what is computed.
        rows: the length of that axis, not 0.
        features: the length of that axis, not 0.
        itemsize: bytes of an element.
        aligned: see Tiling.
        machine: where.
    """
    kernel = _kernel(program, rows, features, itemsize, aligned, machine)
    parts = split(program)
    if kernel.tiles == 1 or len(parts) == 1:
        return (kernel,)
    return tuple(_kernel(part, rows, features, itemsize, aligned, machine) for part in parts)


def _kernel(
    program: Program, rows: int, features: int, itemsize: int, aligned: bool, machine: Machine
) -> Kernel:
    inputs, outputs = parameters(program)
    sums = [o for o in outputs if "row" not in o.axes]
    size = 2 if itemsize == 8 else 1  # registers of a value
    plan = schedule(program)
    live = most_live(plan) * size
    terms = max((len(s.form.terms) for s in plan.steps if isinstance(s, Contract)), default=0)
    vectors = (4, 2, 1) if terms <= MOST_TERMS else (1,)
    tile = _tile(live + sum(o.size for o in sums) * size, features, vectors)
    apart = machine.gluon and tile.block < features
    if apart:
        tile = _tile(live, features, vectors)
    block, vector, registers = tile
    count = -(-features // block)
    tile_rows = max(1, THREADS * vector // block)
    threads = tile_rows * block // vector
    tiling = Tiling(
        machine.gluon,
        tile_rows,
        block,
        vector,
        threads // 32,
        tiles=count > 1,
        ragged=features % block != 0,
        aligned=aligned,
        itemsize=itemsize,
    )
    resident = max(1, REGISTERS // (registers * threads))
    if machine.gluon:
        tiling, resident = _in_shared(tiling, resident, features, inputs, sums * apart, machine)
    lanes = max(1, machine.processors * resident // count)
    return Kernel(program, tiling, count, min(-(-rows // tile_rows), lanes))


def _tile(held: int, features: int, vectors: tuple[int, ...]) -> _Tile:
    """The longest tile of a row whose values fit the registers, several features a thread."""
    block = min(WIDEST, 1 << (features - 1).bit_length())
    while True:
        for vector in (v for v in vectors if v <= block):
            registers = 28 + vector * held
            fits = registers <= 255 and registers * max(THREADS, block // vector) <= REGISTERS
            if fits or (vector == 1 and block <= 256):
                return _Tile(block, vector, min(255, registers))
        block //= 2


def _in_shared(
    tiling: Tiling,
    resident: int,
    features: int,
    inputs: list[Operand],
    sums: list[Operand],
    machine: Machine,
) -> tuple[Tiling, int]:
    """What lies in shared memory, as far as there is room.

    Sums that registers do not hold, then feature operands, then the rows ahead.
    """
    tile, wide = tiling.rows * tiling.block, max(4, tiling.itemsize)
    can_stage = tiling.aligned and features % 16 == 0  # copies move 16 bytes
    rows = [o for o in inputs if can_stage and o.axes == ("row", "feature")]
    copied = [_Piece(o, tile * tiling.itemsize, copied_at_once(o, tiling)) for o in rows]
    summed = [_Piece(o, tile * wide, 1) for o in sums]
    kept = [_Piece(o, tiling.block * wide, 1) for o in inputs if o.axes == ("feature",)]
    needed = sum(piece.operand.size * piece.bytes for piece in (*summed, *copied, *kept))
    while resident > 1 and needed > machine.shared // resident - _EXCHANGED:
        resident -= 1
    room = machine.shared // resident - _EXCHANGED
    summed_there, room = _that_fit(summed, room)
    kept_there, room = _that_fit(kept, room)
    staged, _ = _that_fit(copied, room)
    return tiling._replace(shared=summed_there + kept_there, staged=staged), resident


_EXCHANGED = 2048
"""Bytes of shared memory, at most, through which the warps of a kernel program add up."""


class _Piece(NamedTuple):
    """An operand, the bytes of a component in shared memory, and how many come at once."""

    operand: Operand
    bytes: int
    at_once: int


def _that_fit(pieces: list[_Piece], room: int) -> tuple[tuple[tuple[str, int], ...], int]:
    """How many components of each, and the bytes that are left."""
    found = []
    for operand, size, at_once in pieces:
        count = min(operand.size, room // size // at_once * at_once)
        if count:
            found.append((operand.name, count))
        room -= count * size
    return tuple(found), room
