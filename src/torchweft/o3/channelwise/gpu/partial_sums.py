"""Results that kernels store in parts: how these are added up, in a fixed order.

parts of edges, pieces of rows, runs or programs -> rows of a result
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.core.gpu.launcher import Kernel, Tile
from torchweft.core.printing.modules import written
from torchweft.o3.channelwise.gpu.kernel_split import Loan, Output
from torchweft.o3.edges.graph import FLAT, Tables

__all__ = ["COLUMNS", "LOAN", "ROUND", "Fold", "Made", "loan_fold", "made_of", "round_fold"]

KERNELS = "torchweft.o3.channelwise.gpu.kernels"

ROUND = Tile((8, 256, 128), 4, 1)
"""Of the kernel that adds the parts of a round up: edges, columns, entries looked through."""

LOAN = Tile((4, 256), 2, 1)
"""Of the kernel that adds the parts of a loan up: edges, columns."""

COLUMNS = 256
"""Numbers of a program that adds parts side by side up: many small ones, of a warp each."""

VECTOR = 4
"""Numbers that a thread reads at once."""


class Fold(NamedTuple):
    """One kernel that adds parts up: the lists it walks, and the shape of what it makes."""

    kernel: Kernel
    programs: int
    lists: tuple[int | None, ...]
    shape: tuple[int, int]
    places: Tensor | None


class Made(NamedTuple):
    """A result: what kernels write, and what adds it up."""

    shape: tuple[int, int]
    parts: tuple[int, int] | None
    folds: tuple[Fold, ...]
    zero: bool


def made_of(
    output: Output | None,
    slot: str,
    shape: tuple[int, int],
    tables: Tables,
    lanes: int,
    device: torch.device,
) -> Made:
    """How a result is made."""
    if output is None:
        return Made(shape, None, (), True)
    if output.direct or output.rows == "lent":
        return Made(shape, None, (), not output.covered)
    slices = tables.z_slices if slot == "z" else tables.x_slices
    places = None if output.places is None else torch.tensor(output.places, dtype=torch.int32)
    walks = [(f"{slot} columns", shape[0])]
    count = shape[0]
    if output.rows == "lanes":
        walks, count = [(f"{slot} all", shape[0])], lanes
    elif output.rows == "runs" and tables.runs is not None:
        walks, count = [(f"{slot} runs", shape[0])], tables.runs.owner.shape[0]
    elif output.rows == "pieces" and slices is not None:
        walks, count = [(f"{slot} owners", shape[0])], slices.num_pieces
    elif output.rows == "edges":
        walks, count = [(f"{slot} rows", shape[0])], tables.num_edges
        if slices is not None:
            walks = [(f"{slot} pieces", slices.num_pieces), (f"{slot} owners", shape[0])]
    folds: list[Fold] = []
    width = output.width
    for walk, made_rows in walks:
        here = None if folds or places is None else places.to(device)
        folds.append(_fold(walk, (made_rows, shape[1]), width, here, count))
        width = shape[1]
    return Made(shape, (count, output.width), tuple(folds), False)


def _fold(
    walk: str, shape: tuple[int, int], partial_width: int, places: Tensor | None, length: int
) -> Fold:
    count = 1 if places is None else places.shape[0]
    rows, width = shape
    if walk.endswith("columns"):
        columns = min(128, 1 << max(width - 1, 0).bit_length())
        tile = Tile((COLUMNS // columns, columns), 1, 1)
        programs = -(-rows // tile.blocks[0]) * -(-width // columns)
        numbers: tuple[int, ...] = (rows, width, partial_width)
        kernel = written(KERNELS, "fold_columns_kernel")
    else:
        tall, columns = (64, 32) if rows == 1 else (16, 128) if length > 8 * rows else (4, 256)
        tile = Tile((tall, columns), max(2, min(4, tall // 4)), 1)
        programs = rows * -(-width // tile.blocks[1])
        numbers = (length, width, partial_width)
        kernel = written(KERNELS, "fold_rows_kernel")
    fold = Kernel(kernel, numbers, (count,), tile)
    return Fold(fold, programs, _walked(*walk.split()), shape, places)


def _walked(slot: str, what: str) -> tuple[int | None, ...]:
    """The indptr and the entries of a fold, by their places in FLAT."""
    names = {
        "columns": (),
        "all": (None, None),
        "runs": ("runs_bounds", "runs_order"),
        "owners": (f"{slot}_owners", None),
        "pieces": (f"{slot}_pieces", f"{slot}_edges"),
        "rows": (f"{slot}_indptr", f"{slot}_edges"),
    }
    return tuple(None if name is None else FLAT.index(name) for name in names[what])


def round_fold(shape: tuple[int, int]) -> tuple[Kernel, int]:
    """The kernel that adds the parts of a round up, and its programs."""
    rows, width = shape
    kernel = Kernel(written(KERNELS, "fold_round_kernel"), (width,), (), ROUND)
    return kernel, rows * -(-width // ROUND.blocks[1])


def loan_fold(loan: Loan, shape: tuple[int, int]) -> tuple[Kernel, int]:
    """The kernel that adds the parts of a loan up, and its programs."""
    rows, width = shape
    count = len(loan.columns)
    vector = VECTOR if _beside(loan.columns) and _beside(loan.places) else 1
    numbers = (count, width, loan.width)
    kernel = Kernel(written(KERNELS, "fold_lent_kernel"), numbers, (vector,), LOAN)
    return kernel, rows * -(-count // LOAN.blocks[1])


def _beside(columns: Sequence[int]) -> bool:
    """Whether columns come VECTOR side by side, from a multiple of it on."""
    groups = [columns[n : n + VECTOR] for n in range(0, len(columns), VECTOR)]
    return all(
        first % VECTOR == 0 and rest == list(range(first + 1, first + VECTOR))
        for first, *rest in groups
    )
