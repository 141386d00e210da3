"""The tiles of generated kernels: what of a row a thread holds, and what waits in shared memory.

A thread holds every component of its features, so registers decide: of v features it needs about
28 + v · (values alive at once, sums over rows that stay in registers).  Compiled for sm_90, with 0
spills: the Cl(3,0) chain at v = 4 (130 registers), its gradient at v = 2 (255), Cl(2,0)'s at v = 4
(241), the Cl(1,3) chain at v = 2.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.clifford.generator import Tiling, parameters
from weft.core.emit import Sums, most_live, schedule
from weft.core.program import Operand, Program

__all__ = ["Machine", "choose"]


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
THREADS = 128
"""Of the smallest kernel program: short rows are taken several at a time."""


class _Tile(NamedTuple):
    block: int
    vector: int
    registers: int


def choose(
    program: Program, rows: int, features: int, itemsize: int, aligned: bool, machine: Machine
) -> tuple[Tiling, int]:
    """The tiling of a program, and how many kernel programs share its rows.

    Args:
        program: what is computed.
        rows: the length of that axis, not 0.
        features: the length of that axis, not 0.
        itemsize: bytes of an element.
        aligned: see Tiling.
        machine: where.
    """
    inputs, outputs = parameters(program)
    sums = [o for o in outputs if "row" not in o.axes]
    plan = schedule(program)
    reduces = any(isinstance(step, Sums) for step in plan.steps)
    size = 2 if itemsize == 8 else 1  # registers of a value
    live = most_live(plan) * size
    tile = _tile(live + sum(o.size for o in sums) * size, features)
    apart = machine.gluon and reduces and tile.block < features
    if apart:
        tile = _tile(live, features)
    short = tile.block < features
    if short and reduces:
        tile = _tile(live * 3 // 2, features)  # weights and sums pass through registers as well
    block, vector, registers = tile
    tile_rows = max(1, THREADS * vector // block)
    threads = tile_rows * block // vector
    tiling = Tiling(
        machine.gluon,
        tile_rows,
        block,
        vector,
        threads // 32,
        sweeps=short and reduces,
        tiles=short and not reduces,
        ragged=features % block != 0,
        aligned=aligned,
        itemsize=itemsize,
    )
    resident = max(1, REGISTERS // (registers * threads))
    if machine.gluon and not tiling.sweeps:
        tiling, resident = _in_shared(tiling, resident, features, inputs, sums * apart, machine)
    lanes = max(1, machine.processors * resident // (-(-features // block) if tiling.tiles else 1))
    return tiling, min(-(-rows // tile_rows), lanes)


def _tile(held: int, features: int) -> _Tile:
    """The longest tile of a row whose values fit the registers, several features a thread."""
    block = min(WIDEST, 1 << (features - 1).bit_length())
    while True:
        for vector in (v for v in (4, 2, 1) if v <= block):
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
    """What lies in shared memory: sums that registers do not hold, feature operands, rows ahead."""
    itemsize, tile = tiling.itemsize, tiling.rows * tiling.block
    row_inputs = [o for o in inputs if "row" in o.axes]
    wide = max(4, itemsize)
    kept = [(o.name, o.size * tile * wide) for o in sums]
    kept += [(o.name, o.size * tiling.block * wide) for o in inputs if "row" not in o.axes]
    # copies move 16 bytes, and tiles have powers of 2 as sizes
    can_stage = tiling.aligned and features % 16 == 0
    copies = [o for o in row_inputs if can_stage and o.size & (o.size - 1) == 0]
    copied = [(o.name, o.size * tile * itemsize) for o in copies]
    needed = sum(size for _, size in (*kept, *copied))
    while resident > 1 and needed > machine.shared // resident - _EXCHANGED:
        resident -= 1
    shared, room = _first_that_fit(kept, machine.shared // resident - _EXCHANGED)
    staged, _ = _first_that_fit(copied, room)
    return tiling._replace(shared=shared, staged=staged), resident


_EXCHANGED = 2048
"""Bytes of shared memory, at most, through which the warps of a kernel program add up."""


def _first_that_fit(pieces: list[tuple[str, int]], room: int) -> tuple[tuple[str, ...], int]:
    """Their names, and the bytes that are left."""
    found = []
    for name, size in pieces:
        if size <= room:
            found.append(name)
            room -= size
    return tuple(found), room
