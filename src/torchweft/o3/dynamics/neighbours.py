"""Neighbour lists: the pairs of atoms that are closer than a cutoff, periodic images included.

    edge e:  |positions[dst[e]] - positions[src[e]] + shift[e] @ cell| < cutoff

Candidates come from vesin's cell list, for a cutoff that is larger by a skin.  They stay complete
as long as no atom has moved by more than half the skin, and are sorted once.  Each call keeps those
whose length, in float64, is below the cutoff: so a list with a skin has exactly the edges of a list
that is built anew, in the same order.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.core.table_copies import mark_constant
from torchweft.errors import (
    BackendError,
    DeviceError,
    DTypeError,
    IndexRangeError,
    ShapeError,
)

__all__ = [
    "ROUNDING",
    "NeighbourList",
    "System",
    "check_values",
    "frame_of",
    "lengths2",
    "neighbour_list",
    "system_of",
]

Edges = tuple[Tensor, Tensor, Tensor]
"""src (E,), dst (E,), shift (E, 3)."""

ROUNDING = 2.0**-16
"""Part of the cutoff by which candidates exceed it, so that none is lost to vesin's rounding."""


FLATTEST = 1e-6
"""Volume of a cell over the product of its vectors' lengths, below which it has none."""


MOST_CELLS = 1e5
"""Cells of vesin's grid above which it makes a coarser one, which flat shapes may not have."""

FARTHEST = 2.0**20
"""Cutoffs from the origin up to which vesin's 32-bit numbers of cells do not overflow."""


def neighbour_list(
    positions: Tensor,
    cutoff: float,
    cell: Tensor | None = None,
    pbc: Any = False,
    batch: Tensor | None = None,
) -> Edges:
    """All pairs of atoms with |positions[dst] - positions[src] + shift @ cell| < cutoff.

    Both directions of every pair, periodic images included: a cell may be smaller than the cutoff,
    and an atom is then a neighbour of its own images.  An atom is no neighbour of itself.

    Args:
        positions: (N, 3), float64 or float32, in the unit of the cutoff; they may lie outside the
            cell.
        cutoff: edges are shorter than this length, positive.
        cell: (3, 3), three lattice vectors as rows, or (B, 3, 3), in the positions' dtype.  Rows
            that are not periodic may be zero.
        pbc: whether images repeat along each lattice vector: a bool, (3,) or (B, 3).
        batch: (N,) sorted integers, the structure of each atom, 0 to B - 1; atoms of two structures
            are no neighbours.

    Returns:
        src (E,) and dst (E,) int64, and shift (E, 3), whole numbers in the positions' dtype, how
        many lattice vectors the image of dst is away.  Sorted by dst, then by src, then by shift.
        The vector of an edge of structure b is positions[dst] - positions[src] + shift @ cell[b].
        The tables are `torchweft.constant`: layers do not compare them with their cached plans.

    Raises:
        ShapeError: other shapes, a cutoff that is not positive, positions or cells that are NaN or
            infinite, periodic lattice vectors without a volume, a batch that is not sorted, atoms
            millions of cutoffs apart.
        DTypeError: positions of another dtype, a cell of another dtype than the positions.
        IndexRangeError: a batch with more structures than cells.
        DeviceError: tensors on different devices.
        BackendError: vesin is not installed.

    Cost: vesin's cell list, O(N + E), on the positions' device, and four sorts of the edges; on a
    GPU the host waits for it.  For steps of molecular dynamics use `NeighbourList`.

    Source: the convention is ASE's `neighbor_list("ijS")`; the library is vesin,
    https://github.com/Luthaf/vesin.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> copper = torch.tensor([[0.0, 1.8, 1.8], [1.8, 0.0, 1.8], [1.8, 1.8, 0.0]])
        >>> src, dst, shift = o3.neighbour_list(torch.zeros(1, 3), 3.0, copper, pbc=True)
        >>> len(src)  # twelve images of the one atom
        12
        >>> (shift @ copper).norm(dim=1).max()
        tensor(2.5456)
    """
    return NeighbourList(cutoff, skin=0.0)(positions, cell, pbc, batch)


class NeighbourList:
    """Neighbour lists of moving atoms: `neighbour_list`, without a search at every call.

    Called with positions, cell, pbc and batch it returns what `neighbour_list` returns for them,
    bit for bit.  Candidates are searched again when an atom has moved by more than skin / 2, and
    when the cell, pbc, batch, dtype, device or number of atoms has changed.

    Args:
        cutoff: edges are shorter than this length, positive, in the unit of the positions.
        skin: by how much candidates exceed the cutoff, 0 or more.  With a larger skin, searches are
            rarer, and each call filters more candidates.

    Attributes:
        builds: number of searches so far.

    Raises:
        ShapeError: a cutoff that is not positive, a negative skin.
        DTypeError: one of them is no number.

    Cost of a call that keeps its candidates: about fifteen operations on them; on a GPU the host
    reads one number, whether an atom has moved too far, and waits for the number of edges.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> near = o3.NeighbourList(2.5, skin=0.5)
        >>> line = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
        >>> for step in range(10):
        ...     src, dst, shift = near(line + 0.01 * step)
        >>> len(src), near.builds
        (10, 1)
    """

    def __init__(self, cutoff: float, skin: float = 0.5) -> None:
        for name, value in (("cutoff", cutoff), ("skin", skin)):
            if not hasattr(value, "__float__"):
                raise DTypeError(
                    f"{name} is {value!r}: it must be a number. Pass {name}=5.0, for example."
                )
        if not 0 < cutoff < float("inf"):
            raise ShapeError(
                f"cutoff is {cutoff}: it must be a positive length. Pass cutoff=5.0, for example."
            )
        if not 0 <= skin < float("inf"):
            raise ShapeError(f"skin is {skin}: it must be 0 or more. Pass skin=0.5, for example.")
        self.cutoff, self.skin = float(cutoff), float(skin)
        self.builds = 0
        self._of: System | None = None
        self._candidates: Edges | None = None

    def __repr__(self) -> str:
        return f"NeighbourList(cutoff={self.cutoff}, skin={self.skin}, builds={self.builds})"

    def __call__(
        self,
        positions: Tensor,
        cell: Tensor | None = None,
        pbc: Any = False,
        batch: Tensor | None = None,
    ) -> Edges:
        """src (E,), dst (E,) and shift (E, 3) of positions (N, 3), as `neighbour_list`'s."""
        system = system_of(positions, cell, pbc, batch)
        if self._candidates is None or not self._serves(system):
            check_values(system)
            reach = self.cutoff * (1 + ROUNDING) + self.skin
            self._candidates, self._of = _candidates(system, reach), system
            self.builds += 1
        src, dst, shift = self._candidates
        kept = (lengths2(system, src, dst, shift) < self.cutoff**2).nonzero().flatten()
        src, dst = src[kept], dst[kept]
        mark_constant(src, dst)
        return src, dst, shift[kept].to(positions.dtype)

    def _serves(self, system: System) -> bool:
        """Whether the candidates are complete for a system; NaN positions have none."""
        old = self._of
        assert old is not None
        if old.signature != system.signature:
            return False
        moved = (system.positions - old.positions).square().sum(1)
        same = (moved <= (self.skin / 2) ** 2).all()
        same &= (system.cells == old.cells).all() & (system.batch == old.batch).all()
        return bool(same)


class System(NamedTuple):
    """Atoms of one or more structures, as they are searched."""

    positions: Tensor  # (N, 3) float64
    cells: Tensor  # (B, 3, 3) float64
    pbc: Tensor  # (B, 3) bool, on the CPU
    batch: Tensor  # (N,) int64

    @property
    def signature(self) -> Any:
        """What candidates are searched anew for, besides values on the device."""
        return self.positions.shape, self.positions.device, self.pbc.tolist()


@torch.no_grad()
def system_of(positions: Tensor, cell: Tensor | None, pbc: Any, batch: Tensor | None) -> System:
    """What was given, in float64 and of full shapes."""
    _check_positions(positions)
    repeats = torch.as_tensor(pbc, device="cpu")
    _check_cell(cell, repeats, positions)
    if cell is None:
        cell = positions.new_zeros(3, 3)
    counts = {len(t) for t, dim in ((cell, 3), (repeats, 2)) if t.dim() == dim}
    if batch is None:
        counts.add(1)
        batch = torch.zeros(len(positions), dtype=torch.int64, device=positions.device)
    else:
        _check_batch(batch, positions)
        counts = counts or {int(batch.max().clamp(min=0)) + 1 if len(batch) else 1}
    if len(counts) > 1:
        raise ShapeError(
            f"cell is {tuple(cell.shape)} and pbc is {tuple(repeats.shape)}, of {sorted(counts)} "
            "structures: there must be one number of structures. Pass (B, 3, 3) and (B, 3) with a "
            "batch, or (3, 3) and (3,)."
        )
    (count,) = counts
    return System(
        positions.detach().double().clone(),
        cell.detach().double().expand(count, 3, 3).clone(),
        repeats.expand(count, 3),
        batch.long(),
    )


@torch.no_grad()
def _candidates(system: System, reach: float) -> Edges:
    """The pairs closer than `reach`, sorted by dst, then src, then shift."""
    search = _vesin().NeighborList(cutoff=reach, full_list=True, n_threads=torch.get_num_threads())
    sizes = system.batch.bincount(minlength=len(system.cells)).tolist()
    tables, start = [system.batch.new_zeros(0, 5)], 0
    for index, points in enumerate(torch.split(system.positions, sizes)):
        box = _box(system, index, points, reach).to(points.device)
        if len(points):
            pairs, shift = search.compute(points, box, True, "PS")
            tables.append(torch.cat([pairs.view(torch.int64).flip(1) + start, shift], 1))
        start += len(points)
    dst, src, *shift = torch.cat(tables).unbind(1)
    order = torch.arange(len(src), device=src.device)
    for column in (*reversed(shift), dst * len(system.positions) + src):
        order = order[column[order].argsort(stable=True)]
    return src[order], dst[order], torch.stack(shift, 1)[order].double()


def _box(system: System, index: int, points: Tensor, reach: float) -> Tensor:
    """(3, 3), on the CPU: the cell, repeating in all directions, with new vectors where it did not.

    These are orthogonal to the others, and so long that images along them are out of reach.
    """
    cell, repeats, points = frame_of(system, index), system.pbc[index], points.cpu()
    places = points @ cell[~repeats].T
    extent = places.amax(0) - places.amin(0) if len(points) else places.new_zeros(places.shape[1])
    cell[~repeats] *= extent[:, None] + 1.5 * reach
    heights = 1 / cell.inverse().norm(dim=0)  # between opposite faces
    grid = (heights / reach).floor().clamp(min=1)
    scale = (MOST_CELLS / grid.prod()).clamp(max=1) ** (1 / 3)
    farthest = float(points.abs().max()) if len(points) else 0.0
    if (scale < 1 and scale * grid.min() < 2) or farthest > FARTHEST * reach:
        raise ShapeError(
            f"structure {index} extends over {heights.tolist()} and lies to {farthest} from the "
            f"origin: too far for a search within {reach}. Look for atoms that have left the "
            "others, or pass a larger skin to NeighbourList."
        )
    return cell


def frame_of(system: System, index: int = 0) -> Tensor:
    """(3, 3), on the CPU: the cell, with unit vectors where it does not repeat.

    These are orthogonal to each other and to the vectors that repeat.
    """
    cell, repeats = system.cells[index].cpu().clone(), system.pbc[index]
    cell[~repeats] = torch.linalg.svd(cell[repeats])[2][int(repeats.sum()) :]
    if not cell.det().abs() > FLATTEST * cell.norm(dim=1).prod():
        raise ShapeError(
            f"the cell {system.cells[index].tolist()} of structure {index} has no volume along its "
            f"periodic vectors, pbc={repeats.tolist()}: these must be independent. Correct the "
            "cell, or pass pbc=False where images do not repeat."
        )
    return cell


def lengths2(system: System, src: Tensor, dst: Tensor, shift: Tensor) -> Tensor:
    """|edge|², by operations of elements: those of an edge and its reverse are the same bits."""
    cell = system.cells[0] if len(system.cells) == 1 else system.cells[system.batch[dst]]
    across = system.positions[dst] - system.positions[src]
    for axis in range(3):
        across = across + shift[:, axis, None] * cell[..., axis, :]
    x, y, z = across.square().unbind(1)
    return x + y + z


def _vesin() -> Any:
    if importlib.util.find_spec("vesin") is None:
        raise BackendError(
            "vesin is not installed: it searches neighbours. Run pip install vesin, or pip install "
            "'torchweft[md]' for all that molecular dynamics needs."
        )
    import vesin

    return vesin


def _check_positions(positions: Tensor) -> None:
    check_tensors(positions=positions)
    if positions.dtype not in (torch.float64, torch.float32):
        raise DTypeError(
            f"positions is {positions.dtype}: it must be float64 or float32. Pass "
            "positions.double()."
        )
    if positions.dim() != 2 or positions.shape[1] != 3:
        raise ShapeError(
            f"positions is {tuple(positions.shape)}: it must be (N, 3), a row an atom. Pass "
            "positions.reshape(-1, 3)."
        )


def _check_cell(cell: Tensor | None, repeats: Tensor, positions: Tensor) -> None:
    if repeats.dtype != torch.bool or not (repeats.shape in ((), (3,)) or _is_rows(repeats, 2)):
        raise ShapeError(
            f"pbc is {repeats.tolist()}: it must be a bool, three bools or (B, 3), whether images "
            "repeat along each lattice vector. Pass pbc=True, for example."
        )
    if cell is None:
        if repeats.any():
            raise ShapeError(
                f"pbc is {repeats.tolist()} and there is no cell: images repeat along lattice "
                "vectors. Pass cell=, three of them as rows, or pbc=False."
            )
        return
    check_tensors(cell=cell)
    if not (cell.shape == (3, 3) or (_is_rows(cell, 3) and cell.shape[1] == 3)):
        raise ShapeError(
            f"cell is {tuple(cell.shape)}: it must be (3, 3), three lattice vectors as rows, or "
            "(B, 3, 3). Pass torch.diag(lengths) for three lengths."
        )
    if cell.dtype != positions.dtype:
        raise DTypeError(
            f"cell is {cell.dtype} and positions are {positions.dtype}: they must be of one dtype. "
            "Pass cell.to(positions.dtype)."
        )
    _check_device("cell", cell, positions)


def _is_rows(table: Tensor, dim: int) -> bool:
    return table.dim() == dim and table.shape[-1] == 3


def _check_batch(batch: Tensor, positions: Tensor) -> None:
    check_tensors(batch=batch)
    if batch.dtype not in (torch.int64, torch.int32):
        raise DTypeError(
            f"batch is {batch.dtype}: it has the number of each atom's structure, int64 or int32. "
            "Pass batch.long()."
        )
    if batch.shape != positions.shape[:1]:
        raise ShapeError(
            f"batch is {tuple(batch.shape)} and there are {len(positions)} positions: it must have "
            f"the structure of each, ({len(positions)},). Pass zeros for one structure, or None."
        )
    _check_device("batch", batch, positions)


def _check_device(name: str, table: Tensor, positions: Tensor) -> None:
    if table.device != positions.device:
        raise DeviceError(
            f"{name} is on {table.device} and positions are on {positions.device}: they must be "
            f"on one device. Pass {name}.to({str(positions.device)!r})."
        )


def check_values(system: System) -> None:
    """Raise where positions or cells are not finite, or the batch is not sorted or too large."""
    positions, batch, count = system.positions, system.batch, len(system.cells)
    if not positions.isfinite().all():
        atom = int((~positions.isfinite()).any(1).nonzero()[0, 0])
        raise ShapeError(
            f"positions[{atom}] is {positions[atom].tolist()}: positions must be finite. Look for "
            "atoms that are too close, or a time step that is too long."
        )
    if not system.cells.isfinite().all():
        raise ShapeError(
            f"cell is {system.cells.tolist()}: lattice vectors must be finite. Pass zeros for "
            "those that do not repeat."
        )
    if (batch.diff() < 0).any():
        raise ShapeError(
            "batch is not sorted: the atoms of a structure must be adjacent. Sort the atoms by it, "
            "e.g. by batch.argsort(stable=True)."
        )
    if len(batch) and not 0 <= int(batch[0]) <= int(batch[-1]) < count:
        raise IndexRangeError(
            f"batch has structures {int(batch[0])} to {int(batch[-1])} and there are {count} cells "
            f"or rows of pbc: every value must lie in 0..{count - 1}. Pass a cell a structure."
        )
