"""Who owns which row: cuts of all rows into parts, as one owner a row.

    by_position    recursive coordinate bisection: halves, quarters, ... across the longest side
    by_metis       few edges between the parts, by METIS
    round_robin    row n goes to part n mod P

Each is a pure function: every rank computes the same owners.  Any other (N,) table of ranks serves
as well.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.distributed.directory import row_numbers
from torchweft.errors import BackendError, IndexRangeError, ShapeError

__all__ = ["by_metis", "by_position", "round_robin"]

METIS_LEVELS = 16
"""Weight of a row by itself; a row with the mean number of edges weighs twice as much."""


def by_position(
    positions: Tensor, parts: int, cell: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Owners of rows by recursive coordinate bisection.

    A block of rows is cut across its longest side, and each piece again, until one block a part is
    left.  The parts' numbers of rows differ by one at most; with weights, each cut is where the
    larger excess, of rows or of weights, is least.  Rows at one coordinate go by their numbers.

    Args:
        positions: (N, D), in one unit.
        parts: P, may exceed N.
        cell: (D, D), its rows the vectors of a periodic cell, in the unit of positions: rows are
            then taken to their place in it and cut along its vectors.  None: not periodic.
        weights: (N,), 0 or more, of which each part should have the same; such as the number of
            edges that add to a row.

    Returns:
        (N,) int64, the part of each row, on the device of positions.

    Raises:
        ShapeError: arguments of other shapes, fewer parts than one, or a cell without volume.

    Cost: O(N log N log P).  Source: Berger and Bokhari, doi:10.1109/TC.1987.1676942.

    Example:
        >>> import torch
        >>> from torchweft.distributed import by_position
        >>> by_position(torch.tensor([[0.0], [3.0], [1.0], [2.0]]), 2)
        tensor([0, 1, 0, 1])
    """
    _check_parts(parts)
    if positions.dim() != 2:
        raise ShapeError(
            f"positions is {tuple(positions.shape)}: it must be (N, D), a position for each row. "
            "Pass such a tensor."
        )
    if weights is not None and weights.shape != positions.shape[:1]:
        raise ShapeError(
            f"weights is {tuple(weights.shape)} for {len(positions)} positions: it must be "
            f"({len(positions)},). Pass one weight a row."
        )
    x = positions.detach().double()
    x = x if cell is None else _in_cell(x, cell.detach().to(x))
    owner = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    blocks = [(torch.arange(len(x), device=x.device), 0, parts)]
    while blocks:
        rows, first, count = blocks.pop()
        if count == 1 or not len(rows):
            owner[rows] = first
            continue
        left = count // 2
        sides = (x[rows].amax(0) - x[rows].amin(0)).tolist()
        rows = rows[x[rows, sides.index(max(sides))].argsort(stable=True)]
        cut = _cut(None if weights is None else weights[rows], len(rows), left, count)
        blocks.append((rows[:cut].sort().values, first, left))
        blocks.append((rows[cut:].sort().values, first + left, count - left))
    return owner


def _in_cell(x: Tensor, cell: Tensor) -> Tensor:
    """Coordinates along the vectors of a cell, inside it, times the vectors' lengths."""
    size = x.shape[1]
    if cell.shape != (size, size) or not float(torch.linalg.det(cell)):
        raise ShapeError(
            f"cell is {cell.tolist()}: it must be {size} vectors that span a volume. Leave it out "
            "where rows are not periodic, or pass owners of your own."
        )
    along = x @ torch.linalg.inv(cell)
    inside: Tensor = (along - along.floor()) * torch.linalg.vector_norm(cell, dim=1)
    return inside


def _cut(weights: Tensor | None, rows: int, left: int, parts: int) -> int:
    """How many sorted rows go to the first `left` of `parts`."""
    even = left * (rows // parts) + min(left, rows % parts)
    if weights is None:
        return even
    before = torch.cat([weights.new_zeros(1), weights.cumsum(0)]).double()
    share = torch.arange(rows + 1, device=weights.device, dtype=torch.float64) / rows
    loads = [share, before / before[-1]] if before[-1] > 0 else [share]
    sides = [side for load in loads for side in (load / left, (1 - load) / (parts - left))]
    worst = torch.stack(sides).amax(0)
    best = (worst == worst.min()).nonzero()[:, 0]
    return int(best[(best - even).abs().argmin()])


def by_metis(src: Tensor, dst: Tensor, num_nodes: int, parts: int) -> Tensor:
    """Owners of a graph's rows by METIS: few edges between parts, and even parts.

    Parts are balanced in rows and in the edges that add to them, with equal weights.

    Args:
        src: (E,) the row that each edge reads.
        dst: (E,) the row that it adds to.
        num_nodes: N.
        parts: P, may exceed N.

    Returns:
        (N,) int64, the part of each row, on the device of src; the same at every call.

    Raises:
        BackendError: pymetis is not installed.
        ShapeError, DTypeError, IndexRangeError: the edges do not fit each other, or N.

    Source: Karypis and Kumar, doi:10.1137/S1064827595287997.

    Example:
        >>> import torch
        >>> from torchweft.distributed import by_metis
        >>> src, dst = torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 3, 0])  # a ring
        >>> by_metis(src, dst, num_nodes=4, parts=2)  # doctest: +SKIP
        tensor([0, 0, 1, 1])
    """
    pymetis = _pymetis()
    _check_parts(parts)
    src, dst = edges_of(src, dst, num_nodes)
    if parts >= num_nodes:
        return torch.arange(num_nodes, device=src.device)
    pairs = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
    a, b = torch.unique(pairs[:, pairs[0] != pairs[1]], dim=1)
    starts = torch.cat([a.new_zeros(1), torch.bincount(a, minlength=num_nodes).cumsum(0)])
    degree = torch.bincount(dst, minlength=num_nodes)
    heaviness = METIS_LEVELS * (1 + degree * (num_nodes / max(len(dst), 1)))
    adjacency = pymetis.CSRAdjacency(_numbers(starts), _numbers(b))
    options = pymetis.Options(seed=0)
    found = pymetis.part_graph(
        parts, adjacency, vweights=_numbers(heaviness.round()), options=options
    )
    return torch.tensor(found.vertex_part, dtype=torch.int64, device=src.device)


def _numbers(table: Tensor) -> Any:
    import pymetis

    return np.asarray(table.cpu().numpy(), pymetis.zero_copy_dtype())


def _pymetis() -> Any:
    if importlib.util.find_spec("pymetis") is None:
        raise BackendError(
            "pymetis is not installed: it cuts graphs by METIS. Run pip install pymetis, or pip "
            "install 'torchweft[distributed]'; or pass positions, or owners of your own."
        )
    import pymetis

    return pymetis


def round_robin(num_rows: int, parts: int) -> Tensor:
    """Owners of rows in turn: row n goes to part n mod P.

    Args:
        num_rows: N.
        parts: P.

    Returns:
        (N,) int64.

    Raises:
        ShapeError: fewer parts than one.

    Example:
        >>> from torchweft.distributed import round_robin
        >>> round_robin(5, 2)
        tensor([0, 1, 0, 1, 0])
    """
    _check_parts(parts)
    return torch.arange(num_rows) % parts


def edges_of(src: Tensor, dst: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """Edges as int64, checked against each other and against the number of rows."""
    src, dst = row_numbers("src", src), row_numbers("dst", dst)
    if src.shape != dst.shape:
        raise ShapeError(
            f"src has {len(src)} edges and dst has {len(dst)}: they must have the same number, one "
            "of each an edge. Pass the two rows of one edge_index."
        )
    for name, table in (("src", src), ("dst", dst)):
        if table.numel() and int(table.max()) >= num_nodes:
            raise IndexRangeError(
                f"{name} holds {int(table.max())} and num_nodes is {num_nodes}: every edge must "
                f"join rows below num_nodes. Correct {name}, or pass more rows."
            )
    return src, dst


def _check_parts(parts: int) -> None:
    if parts < 1:
        raise ShapeError(f"parts is {parts}: it must be 1 or more. Pass the number of ranks.")
