"""Block-sparse masks: which pairs (i, j) a reduction sees, as blocks of rows and of columns.

A mask is the 6-tuple of `reductions.cluster.from_matrix`: one half for reductions over j, one
for reductions over i.  `BlockSparsity` makes it from labels, radii or sizes; `checked_ranges`
validates one; `blocks_of` gives executors the half that they need.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.table_copies import constant, copies_of
from torchweft.core.tables import TensorCache, indptr_of
from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError
from torchweft.reductions.call import Blocks
from torchweft.reductions.cluster.points import Ranges, cluster_ranges, from_matrix

__all__ = ["BlockSparsity", "blocks_of", "checked_ranges", "pairs_of"]

NAMES = ("ranges_i", "slices_i", "redranges_j", "ranges_j", "slices_j", "redranges_i")
Half = tuple[Tensor, Tensor, Tensor]
"""Blocks of rows, the ends of their lists, and the lists of intervals of columns."""

CHUNK = 2**24  # pairs of clusters that are looked at together

_BLOCKS: TensorCache[Blocks] = TensorCache()
_CHECKED: TensorCache[None] = TensorCache()


@dataclass(frozen=True, eq=False, repr=False)
class BlockSparsity:
    """A mask of pairs (i, j) made of blocks; `ranges` is what reductions take.

    Points of one cluster must stand together: `sort_clusters` sees to it.

    Args:
        ranges: the 6-tuple of `from_matrix`, of any integer dtype; the mask holds copies.
        batch: None: one mask, which all entries of a batch share.  (B, M, N): a mask for each of B
            entries; b has the rows b·M ≤ i < (b + 1)·M and the columns b·N ≤ j < (b + 1)·N.

    Raises:
        ShapeError: not six arrays of the shapes that `from_matrix` gives.
        DTypeError: arrays that are not integers.

    Cost: a reduction with a mask computes the pairs of the mask alone.

    Example:
        >>> import torch
        >>> from torchweft.reductions import BlockSparsity, LazyTensor
        >>> x = torch.arange(4.0)[:, None]
        >>> K = LazyTensor(x[:, None]) * 0 + LazyTensor(x[None])
        >>> K.ranges = BlockSparsity.bands(4, 4, width=1)  # |i − j| ≤ 1
        >>> K.sum(1).flatten().tolist()
        [1.0, 3.0, 6.0, 5.0]
    """

    ranges: Ranges
    batch: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        _check_arrays(self.ranges)
        object.__setattr__(self, "ranges", _each(self.ranges, _own))

    def __repr__(self) -> str:
        rows, _, intervals, columns = self.ranges[:4]
        batch = f" of {self.batch[0]} entries" if self.batch else ""
        return (
            f"BlockSparsity({len(rows)} blocks of rows × {len(columns)} of columns{batch}, "
            f"{len(intervals)} intervals, {self.num_pairs():,} pairs)"
        )

    @classmethod
    def from_matrix(cls, ranges_i: Tensor, ranges_j: Tensor, keep: Tensor) -> BlockSparsity:
        """The blocks where `keep` is true.

        Args:
            ranges_i: (Ci, 2) integers, [start, end) of each block of rows.
            ranges_j: (Cj, 2) integers, of each block of columns.
            keep: (Ci, Cj) booleans.

        Returns:
            The mask.
        """
        return cls(from_matrix(ranges_i, ranges_j, keep))

    @classmethod
    def from_clusters(cls, labels_i: Tensor, labels_j: Tensor, keep: Tensor) -> BlockSparsity:
        """Pairs of points whose clusters meet: keep[labels_i[i], labels_j[j]].

        Args:
            labels_i: (M,) labels, ascending.
            labels_j: (N,) labels, ascending.
            keep: (Ci, Cj) booleans.

        Returns:
            The mask of M × N pairs.

        Raises:
            ShapeError: labels that are not ascending.
        """
        ranges_i = _ranges_of("labels_i", labels_i, keep.shape[0])
        ranges_j = _ranges_of("labels_j", labels_j, keep.shape[1])
        return cls.from_matrix(ranges_i, ranges_j, keep)

    @classmethod
    def from_radius(
        cls, x: Tensor, labels_x: Tensor, y: Tensor, labels_y: Tensor, radius: float
    ) -> BlockSparsity:
        """All pairs of clusters whose bounding boxes are within `radius`, so all pairs that are.

        No pair within the radius is lost; pairs beyond it stay where their clusters reach into it.

        Args:
            x: (M, D) points.
            labels_x: (M,) their clusters, ascending.
            y: (N, D) points.
            labels_y: (N,) their clusters, ascending.
            radius: largest distance that must be seen.

        Returns:
            The mask of M × N pairs.

        Raises:
            ShapeError: labels that are not ascending.
        """
        ranges_x, ranges_y = _ranges_of("labels_x", labels_x), _ranges_of("labels_y", labels_y)
        boxes_x, boxes_y = _boxes(x, ranges_x), _boxes(y, ranges_y)
        rows = max(1, CHUNK // max(1, len(ranges_y)))
        parts = [
            _gaps(boxes_x[:, k : k + rows], boxes_y) <= radius
            for k in range(0, len(ranges_x), rows)
        ]
        none = torch.zeros(0, len(ranges_y), dtype=torch.bool, device=x.device)
        return cls.from_matrix(ranges_x, ranges_y, torch.cat([none, *parts]))

    @classmethod
    def from_batch(cls, batch_x: Tensor, batch_y: Tensor) -> BlockSparsity:
        """Pairs of one sample: batch_x[i] = batch_y[j].

        Args:
            batch_x: (M,) integers, ascending: the sample of each row.
            batch_y: (N,) integers, ascending: the sample of each column.

        Returns:
            The mask of M × N pairs.

        Raises:
            ShapeError: integers that are not ascending.
        """
        count = max((int(b[-1]) + 1 for b in (batch_x, batch_y) if len(b)), default=0)
        rows = _ranges_of("batch_x", batch_x, count)
        columns = _ranges_of("batch_y", batch_y, count)
        return cls((*_one_each(rows, columns), *_one_each(columns, rows)))

    @classmethod
    def from_ptr(cls, ptr_x: Tensor, ptr_y: Tensor) -> BlockSparsity:
        """Pairs of one sample: sample b holds ptr[b] ≤ i < ptr[b + 1], of x and of y.

        Args:
            ptr_x: (B + 1,) integers, bounds of the samples among the rows.
            ptr_y: (B + 1,) integers, among the columns.

        Returns:
            The mask of ptr_x[B] × ptr_y[B] pairs.

        Raises:
            ShapeError: bounds of different lengths.
        """
        if ptr_x.shape != ptr_y.shape or ptr_x.ndim != 1:
            raise ShapeError(
                f"ptr_x is {tuple(ptr_x.shape)} but ptr_y is {tuple(ptr_y.shape)}: both hold the "
                "B + 1 bounds of the same B samples. Pass them with equal lengths."
            )
        rows, columns = (torch.stack([ptr[:-1], ptr[1:]], 1) for ptr in (ptr_x, ptr_y))
        return cls((*_one_each(rows, columns), *_one_each(columns, rows)))

    @classmethod
    def bands(
        cls, rows: int, columns: int, width: int, block: int = 1, device: torch.device | None = None
    ) -> BlockSparsity:
        """|i − j| ≤ width, in blocks of `block` rows and columns; exact where block is 1.

        Blocks are kept whole, so larger ones hold more than the band, never less.

        Args:
            rows: M, the number of rows.
            columns: N, the number of columns.
            width: largest |i − j|.
            block: rows and columns of a block.
            device: where the mask stands; None is the default device.

        Returns:
            The mask of M × N pairs.
        """

        def half(size: int, others: int) -> Half:
            starts, ends = _steps(size, block, device)
            low, high = (starts - width).clamp(min=0), ends + width
            return _one_each(*_whole(starts, ends, low, high, others, block))

        return cls((*half(rows, columns), *half(columns, rows)))

    @classmethod
    def causal(
        cls, rows: int, columns: int, block: int = 1, device: torch.device | None = None
    ) -> BlockSparsity:
        """j ≤ i, in blocks of `block` rows and columns; exact where block is 1.

        Larger blocks are kept whole: those on the diagonal hold pairs j > i, which the formula
        must leave out.

        Args:
            rows: M, the number of rows.
            columns: N, the number of columns.
            block: rows and columns of a block.
            device: where the mask stands; None is the default device.

        Returns:
            The mask of M × N pairs.
        """
        starts, ends = _steps(rows, block, device)
        past = _whole(starts, ends, torch.zeros_like(starts), ends, columns, block)
        starts, ends = _steps(columns, block, device)
        future = _whole(starts, ends, starts, torch.full_like(starts, rows), rows, block)
        return cls((*_one_each(*past), *_one_each(*future)))

    @classmethod
    def stack(cls, entries: Sequence[BlockSparsity], rows: int, columns: int) -> BlockSparsity:
        """A mask of its own for each entry of a batch.

        Args:
            entries: the masks.
            rows: M, the number of rows of each entry.
            columns: N, the number of columns of each entry.

        Returns:
            The mask of len(entries) × M × N pairs.

        Raises:
            IndexRangeError: bounds of a mask outside M and N.
        """
        for entry in entries:
            entry.check(rows, columns)
        first = _stacked([e.ranges[:3] for e in entries], rows, columns)
        second = _stacked([e.ranges[3:] for e in entries], columns, rows)
        return cls((*first, *second), (len(entries), rows, columns))

    def t(self) -> BlockSparsity:
        """The transposed mask: i and j change places."""
        batch = self.batch and (self.batch[0], self.batch[2], self.batch[1])
        return BlockSparsity((*self.ranges[3:], *self.ranges[:3]), batch)

    def to(self, device: torch.device | str) -> BlockSparsity:
        """The same mask on another device."""
        return BlockSparsity(_each(self.ranges, lambda t: t.to(device)), self.batch)

    def num_pairs(self) -> int:
        """The number of pairs (i, j) that a reduction computes; waits for a GPU."""
        return pairs_of(blocks_of(self, axis=1))

    def check(self, rows: int, columns: int) -> None:
        """Raise unless this is a mask of rows × columns pairs (of a batch: of each entry).

        Raises:
            IndexRangeError: bounds outside the data.
            ShapeError: blocks overlap, slices do not fit, or the halves differ.
        """
        _check_values(self.ranges, *_sizes(self, rows, columns))


torch.serialization.add_safe_globals([BlockSparsity])  # torch.load takes masks by default


def blocks_of(ranges: Ranges | BlockSparsity, axis: int) -> Blocks:
    """The half of a mask that a reduction over `axis` needs, its rows being rows of the result.

    Cached as long as the content of the ranges stays.

    Args:
        ranges: a 6-tuple of integers of any dtype, or a `BlockSparsity`.
        axis: 1 for reductions over j, 0 for reductions over i.
    """
    arrays = ranges.ranges if isinstance(ranges, BlockSparsity) else ranges
    half = copies_of(arrays[:3] if axis == 1 else arrays[3:])

    def build() -> Blocks:
        rows, slices, intervals = (t.to(torch.int64) for t in half if t is not None)
        return Blocks(
            rows[:, 0].contiguous(),
            rows[:, 1].contiguous(),
            torch.cat([slices.new_zeros(1), slices]),
            intervals[:, 0].contiguous(),
            intervals[:, 1].contiguous(),
        )

    return _BLOCKS.get(half, None, build)


def pairs_of(blocks: Blocks) -> int:
    """How many pairs (i, j) blocks hold."""
    starts, ends, indptr, j_starts, j_ends = blocks
    columns = pad((j_ends - j_starts).cumsum(0), (1, 0))
    return int(((ends - starts) * columns[indptr].diff()).sum())


def checked_ranges(
    ranges: Ranges | BlockSparsity, rows: int, columns: int
) -> Ranges | BlockSparsity:
    """The mask of rows × columns pairs (of a batch: of each entry), over private copies.

    Shapes and dtypes are looked at on every call, values once for the same content: on the CPU
    always, on a GPU under TORCHWEFT_CHECK=1, since that waits for it.  `BlockSparsity.check` looks
    at them always.

    Raises:
        ShapeError: not six arrays of the right shapes, blocks that overlap, slices that do not fit,
            or halves that are two masks, of which gradients would be wrong.
        DTypeError: no integers.
        DeviceError: on the device meta.
        IndexRangeError: bounds outside the data.
    """
    arrays = ranges.ranges if isinstance(ranges, BlockSparsity) else ranges
    _check_arrays(arrays)
    sizes = _sizes(ranges, rows, columns)
    copies = cast("Ranges", copies_of(arrays))
    if arrays[0].device.type == "cpu" or os.environ.get("TORCHWEFT_CHECK") == "1":
        _CHECKED.get(copies, sizes, lambda: _check_values(copies, *sizes))
    return ranges if isinstance(ranges, BlockSparsity) else copies


def _sizes(ranges: Ranges | BlockSparsity, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns that the ranges count, all entries of a batch together."""
    if not isinstance(ranges, BlockSparsity) or ranges.batch is None:
        return rows, columns
    count, *made_for = ranges.batch
    if made_for != [rows, columns]:
        raise ShapeError(
            f"the mask has {count} entries of {made_for[0]} × {made_for[1]} pairs but the data "
            f"{rows} × {columns}: the sizes must be equal. Stack masks made for this data."
        )
    return count * rows, count * columns


def _each(ranges: Ranges, function: Callable[[Tensor], Tensor]) -> Ranges:
    a, b, c, d, e, f = map(function, ranges)
    return a, b, c, d, e, f


def _own(table: Tensor) -> Tensor:
    return constant(table.to(torch.int64))


def _check_arrays(ranges: Ranges) -> None:
    """Six tensors of integers whose shapes fit each other."""
    if not isinstance(ranges, tuple | list) or len(ranges) != len(NAMES):
        given = f"{len(ranges)} arrays" if isinstance(ranges, tuple | list) else type(ranges)
        raise ShapeError(
            f"ranges is {given}: it must be six, ({', '.join(NAMES)}). Make it with from_matrix or "
            "BlockSparsity."
        )
    for name, array in zip(NAMES, ranges, strict=True):
        kind = str(array.dtype) if isinstance(array, Tensor) else type(array).__name__
        if "int" not in kind.removeprefix("torch."):
            raise DTypeError(
                f"{name} is {kind}: ranges are tensors of integers. Make them with from_matrix or "
                "BlockSparsity."
            )
        if array.device.type == "meta":
            raise DeviceError(
                f"{name} is on the device meta, without values: a mask is read. Make ranges on the "
                "CPU, or where the points are."
            )
        if "slices" not in name and (array.ndim != 2 or array.shape[1] != 2):
            raise ShapeError(
                f"{name} is {tuple(array.shape)}: it must be (number, 2), a start and an end in "
                "each row. Make it with from_matrix or BlockSparsity."
            )
    for half in (0, 3):
        blocks, slices = ranges[half : half + 2]
        if slices.shape != blocks.shape[:1]:
            raise ShapeError(
                f"{NAMES[half + 1]} is {tuple(slices.shape)} but {NAMES[half]} is "
                f"{tuple(blocks.shape)}: each block needs the end of its list of intervals, so "
                f"{NAMES[half + 1]} must be ({len(blocks)},). Make it with from_matrix."
            )


def _check_values(ranges: Ranges, rows: int, columns: int) -> None:
    sizes = {"ranges_i": rows, "redranges_i": rows, "ranges_j": columns, "redranges_j": columns}
    arrays = dict(zip(NAMES, (t.to(torch.int64) for t in ranges), strict=True))
    for name, size in sizes.items():
        _check_bounds(name, arrays[name], size)
    _check_slices("slices_i", arrays["slices_i"], "redranges_j", len(arrays["redranges_j"]))
    _check_slices("slices_j", arrays["slices_j"], "redranges_i", len(arrays["redranges_i"]))
    for name in ("ranges_i", "ranges_j"):
        _check_apart(name, arrays[name])
    if not _are_one_mask(ranges, rows, columns):
        _check_halves(ranges, columns)


def _check_bounds(name: str, intervals: Tensor, size: int) -> None:
    starts, ends = intervals.unbind(1)
    wrong = ((starts < 0) | (ends < starts) | (ends > size)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise IndexRangeError(
            f"{name}[{first}] is [{int(starts[first])}, {int(ends[first])}) but there are {size} "
            f"points: 0 ≤ start ≤ end ≤ {size} is needed. Make the ranges from labels of these "
            "points."
        )


def _check_slices(name: str, slices: Tensor, listed: str, count: int) -> None:
    lengths = slices.diff(prepend=slices.new_zeros(1))
    last = int(slices[-1]) if len(slices) else 0
    if bool((lengths < 0).any()) or last != count:
        raise ShapeError(
            f"{name} ends at {last} and falls {int((lengths < 0).sum())} times, but {listed} has "
            f"{count} rows: {name} must rise from 0 to {count}. Take the cumulative sum of the "
            "numbers of intervals."
        )


def _check_apart(name: str, blocks: Tensor) -> None:
    """No two blocks hold the same row, so that each row of a result has one writer."""
    filled = blocks[blocks[:, 1] > blocks[:, 0]]
    order = filled[:, 0].argsort(stable=True)
    starts, ends = filled[order].unbind(1)
    wrong = (starts[1:] < ends[:-1]).nonzero()
    if len(wrong):
        one, other = filled[order[wrong[0]]][0].tolist(), filled[order[wrong[0] + 1]][0].tolist()
        raise ShapeError(
            f"{name} holds the blocks [{one[0]}, {one[1]}) and [{other[0]}, {other[1]}), which "
            "overlap: each row belongs to one block at most. List the intervals of both under one "
            "block, or cut the blocks."
        )


def _are_one_mask(ranges: Ranges, rows: int, columns: int) -> bool:
    """Whether both halves have the same sum of a_i b_j over pairs, for random numbers modulo 2⁶⁴.

    Sums of different masks are equal with a chance below 2⁻⁵⁰; they are read off running sums of a
    and of b, which are as random, without a sort of all corners.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-(2**63), 2**63 - 1, (size + 1,), generator=generator)
        for size in (rows, columns)
    )
    first, second = ranges[:3], ranges[3:]
    return bool(_pair_sum(first, a, b) == _pair_sum(second, b, a))


def _pair_sum(half: Half, of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """Σ a_i b_j of half a mask, modulo 2⁶⁴, by running sums of a and of b."""
    device = half[0].device
    blocks, slices, intervals = (t.to(torch.int64) for t in half)
    heights = of_rows.to(device)[blocks].diff(dim=1)
    widths = of_columns.to(device)[intervals].diff(dim=1)
    lengths = slices.diff(prepend=slices.new_zeros(1))
    return (heights.repeat_interleave(lengths, 0) * widths).sum()


def _check_halves(ranges: Ranges, columns: int) -> None:
    """Both halves are one mask: the corners of their rectangles, with signs, are the same.

    A rectangle is the double running sum of +1, −1, −1, +1 at its corners, so masks are equal, with
    how often they hold each pair, if and only if these measures are.
    """
    i, j, sign = _corners(ranges[:3])
    other_j, other_i, other_sign = _corners(ranges[3:])
    place = torch.cat([i * (columns + 1) + j, other_i * (columns + 1) + other_j])
    where, inverse = torch.unique(place, return_inverse=True)
    total = torch.zeros_like(where).index_add_(0, inverse, torch.cat([sign, -other_sign]))
    wrong = total.nonzero()
    if len(wrong):
        row, column = divmod(int(where[wrong[0]]), columns + 1)
        raise ShapeError(
            "the halves of ranges are two different masks, first at "
            f"row {row}, column {column}: (ranges_j, slices_j, redranges_i) must list the pairs of "
            "(ranges_i, slices_i, redranges_j). Make both with from_matrix."
        )


def _corners(half: Half) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and signs of the corners of each block × interval."""
    blocks, slices, intervals = (t.to(torch.int64) for t in half)
    lengths = slices.diff(prepend=slices.new_zeros(1))
    rows = blocks.repeat_interleave(lengths, 0)
    corners = [(a, b, (-1) ** (a + b)) for a in (0, 1) for b in (0, 1)]
    return (
        torch.cat([rows[:, a] for a, _, _ in corners]),
        torch.cat([intervals[:, b] for _, b, _ in corners]),
        torch.cat([torch.full_like(rows[:, 0], sign) for _, _, sign in corners]),
    )


def _ranges_of(name: str, labels: Tensor, count: int = 0) -> Tensor:
    """(C, 2) ranges of ascending labels, at least `count` of them."""
    if bool((labels.diff() < 0).any()):
        raise ShapeError(
            f"{name} is not ascending: points of one cluster must stand together. Sort points and "
            "labels first, with sort_clusters."
        )
    cluster_ranges(labels)  # integers ≥ 0
    number = max(count, int(labels[-1]) + 1 if len(labels) else 0)
    indptr = indptr_of(labels.to(torch.int64), number)
    return torch.stack([indptr[:-1], indptr[1:]], 1)


def _one_each(blocks: Tensor, intervals: Tensor) -> Half:
    """Half a mask: block k meets interval k, where that is not empty."""
    filled = intervals[:, 1] > intervals[:, 0]
    return blocks, filled.cumsum(0), intervals[filled]


def _steps(size: int, block: int, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Starts and ends of blocks of `block` among `size`."""
    starts = torch.arange(0, size, block, device=device)
    return starts, (starts + block).clamp(max=size)


def _stacked(halves: Sequence[Half], size: int, others: int) -> Half:
    """Half masks one after the other, each `size` rows and `others` columns further on."""
    lists = [len(intervals) for _, _, intervals in halves]
    before = itertools.accumulate([0, *lists[:-1]])
    return (
        torch.cat([blocks + n * size for n, (blocks, _, _) in enumerate(halves)]),
        torch.cat([half[1] + n for n, half in zip(before, halves, strict=True)]),
        torch.cat([intervals + n * others for n, (_, _, intervals) in enumerate(halves)]),
    )


def _whole(
    starts: Tensor, ends: Tensor, low: Tensor, high: Tensor, size: int, block: int
) -> tuple[Tensor, Tensor]:
    """Blocks [starts, ends), and [low, high) rounded outwards to whole blocks of `size`."""
    low = torch.where(low < size, low // block * block, size)
    high = (-(-high // block) * block).clamp(max=size)
    return torch.stack([starts, ends], 1), torch.stack([low, high], 1)


def _boxes(points: Tensor, ranges: Tensor) -> Tensor:
    """(2, C, D) least and largest coordinates of each cluster, float64; of none: +∞ and −∞."""
    if not len(ranges):
        return points.new_zeros(2, 0, points.shape[1], dtype=torch.float64)
    lengths = ranges[:, 1] - ranges[:, 0]
    bounds = (("min", torch.inf), ("max", -torch.inf))
    return torch.stack(
        [
            torch.segment_reduce(points.detach().double(), kind, lengths=lengths, initial=none)
            for kind, none in bounds
        ]
    )


def _gaps(boxes: Tensor, others: Tensor) -> Tensor:
    """(C, C') distances between boxes, not rounded up."""
    squares = boxes.new_zeros(boxes.shape[1], others.shape[1])
    for (low, high), (other_low, other_high) in zip(boxes.unbind(2), others.unbind(2), strict=True):
        gap = torch.maximum(other_low - high.unsqueeze(1), low.unsqueeze(1) - other_high)
        squares += gap.clamp(min=0).square()
    slack = (boxes.shape[2] + 4) * torch.finfo(squares.dtype).eps
    return squares.sqrt() * (1 - slack)
