"""Sums over the rows of each segment, and back: the two directions of one linear map.

    together   y[m] = Σ_(r: owner[r] = m) x[r]        apart   y[r] = x[owner[r]]

Each is the other's gradient, so gradients of any order exist.  Rows are summed in a given order,
in pieces of at most PIECE, then pieces of pieces: no atomics, and no program walks a long segment.
All sizes follow from the numbers of rows and segments, so nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operator import LIBRARY, Call, Operator
from torchweft.core.tables.segments import indptr_of
from torchweft.voxels.maps.tensor import SparseTensor

__all__ = [
    "PIECE",
    "apart",
    "first_largest",
    "fold_channels",
    "lengths",
    "register_selection",
    "samples_of",
    "together",
    "unfold_channels",
    "walks_rows",
]

PIECE = 64
"""Rows that one program adds in a row."""


def together(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    """y[m] = Σ_(r: owner[r] = m) x[r], (count, C) in x's dtype, summed in float32 or wider.

    Args:
        x: (R, C).
        owner: (R,) integers below count, the segment of each row.
        order: (R,) the rows sorted by owner, which is the order of the sums; None: as they stand.
        count: M, the number of segments; one without rows is 0.
    """
    return _segment_op(x, owner, order, count, True)


def apart(x: Tensor, owner: Tensor, order: Tensor | None) -> Tensor:
    """y[r] = x[owner[r]]; order is that of the gradient's sums, see `together`."""
    return _segment_op(x, owner, order, x.shape[0], False)


def first_largest(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    """(R, C) bool: in each segment and channel, the first row in order that is largest.

    NaN is larger than every number.
    """
    found: Tensor = torch.ops.torchweft.voxels_first_largest(x.detach(), owner, order, count)
    return found


def lengths(owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    """(M,) how many rows each segment has."""
    owner = owner if order is None else owner.index_select(0, order)
    return indptr_of(owner.contiguous(), count).diff()


def samples_of(tensor: SparseTensor) -> tuple[Tensor, Tensor | None, int]:
    """(owner, order, count): the samples of a batch as segments, voxels ascending in each."""
    coordinates = tensor.coordinates
    return coordinates.rows[:, 0], coordinates.order, coordinates.batch_size


def fold_channels(x: Tensor, in_dim: int | None, size: int) -> Tensor:
    """A mapped (…, R, C) as (R, size · C), for operations that treat all channels alike."""
    if in_dim is None:
        return x.repeat(1, size)
    return x.movedim(in_dim, 1).flatten(1)


def unfold_channels(x: Tensor, size: int) -> Tensor:
    """(R, size · C) as (size, R, C)."""
    return x.view(x.shape[0], size, x.shape[1] // size).movedim(1, 0)


def _sort(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The rows by segment, and where each segment begins."""
    if order is not None:
        x, owner = x.index_select(0, order), owner.index_select(0, order)
    return x.contiguous(), indptr_of(owner.contiguous(), count)


def _reduce(x: Tensor, bounds: Tensor, reduce: str) -> Tensor:
    """Sums or maxima of the rows between bounds, long segments in pieces of pieces."""
    count = bounds.numel() - 1
    while -(-x.shape[0] // PIECE) + count < x.shape[0] // 2:
        edges, bounds = _pieces(bounds, x.shape[0])
        x = _segment_reduce(x, edges, reduce)
    return _segment_reduce(x, bounds, reduce)


def _pieces(bounds: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Where pieces of at most PIECE rows begin, and the pieces that each segment begins with.

    A segment is cut counting from its own first row, so that its sum does not depend on where it
    stands.  There are as many pieces as any lengths may need; those past the last are empty.
    """
    needed = (bounds.diff() + PIECE - 1) // PIECE
    first = torch.nn.functional.pad(needed.cumsum(0), (1, 0))
    most = -(-rows // PIECE) + needed.numel()
    piece = torch.arange(most + 1, device=bounds.device)
    segment = torch.searchsorted(first, piece, right=True) - 1
    begin = bounds.index_select(0, segment) + (piece - first.index_select(0, segment)) * PIECE
    return begin.clamp(max=rows), first


def _segment_reduce(x: Tensor, bounds: Tensor, reduce: str) -> Tensor:
    count = bounds.numel() - 1
    initial = 0 if reduce == "sum" else -torch.inf
    if not x.numel():
        return x.new_full((count, x.shape[1]), initial)
    if not walks_rows(x.device.type):
        return torch.segment_reduce(x, reduce, offsets=bounds, axis=0, unsafe=True, initial=initial)
    owner = torch.repeat_interleave(bounds.diff())
    x = x[: len(owner)]  # pieces past the last are no segment's
    result = x.new_full((count, x.shape[1]), initial)
    if reduce == "sum":
        return result.index_add_(0, owner, x)
    return result.scatter_reduce_(0, owner.unsqueeze(1).expand_as(x), x, "amax")


def walks_rows(device: str) -> bool:
    """Whether a device adds rows one after the other: then index_add_ is in order, and faster."""
    return device == "cpu"


def _body(x: Tensor, owner: Tensor, order: Tensor | None, count: int, summed: bool) -> Tensor:
    if not summed:
        return x.index_select(0, owner)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return _reduce(*_sort(wide, owner, order, count), "sum").to(x.dtype)


def _fake(x: Tensor, owner: Tensor, order: Tensor | None, count: int, summed: bool) -> Tensor:
    return x.new_empty(count if summed else owner.shape[0], x.shape[1])


def _gradients(
    call: Call, args: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    _, owner, order, count, summed = args
    return (call(grad, owner, order, count, not summed),)


def _batch(call: Call, size: int, in_dims: Sequence[int | None], args: Sequence[Any]) -> Tensor:
    x, *rest = args
    return unfold_channels(call(fold_channels(x, in_dims[0], size), *rest), size)


_segment_op = Operator(
    "voxels_segment_sum",
    "Tensor x, Tensor owner, Tensor? order, SymInt count, bool summed",
    1,
    2,
    _body,
    _fake,
    _gradients,
    _batch,
)


def register_selection(
    schema: str,
    body: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    batch: Callable[..., Any],
) -> None:
    """Register an operation that says which entries are taken: it has no gradient.

    Args:
        schema: in torch's notation, with the operation's name.
        body: computes it on every device.
        fake: an empty result.
        batch: torch's rule of vmap.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, body, device)
    torch.library.register_fake(f"torchweft::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"torchweft::{name}", batch, lib=LIBRARY)


def _first_largest(x: Tensor, owner: Tensor, order: Tensor | None, count: int) -> Tensor:
    rows, bounds = _sort(x, owner, order, count)
    segment = owner if order is None else owner.index_select(0, order)
    largest = _reduce(rows, bounds, "max").index_select(0, segment)
    equal = (rows == largest) | (rows.isnan() & largest.isnan())
    place = torch.arange(len(rows), dtype=torch.float64, device=x.device).unsqueeze(1)
    nearest = _reduce(torch.where(equal, -place, -torch.inf), bounds, "max")
    first = nearest.index_select(0, segment) == -place
    return first if order is None else torch.empty_like(first).index_copy_(0, order.long(), first)


def _first_largest_batch(
    info: Any, in_dims: Sequence[int | None], x: Tensor, *segments: Any
) -> tuple[Tensor, int]:
    folded = _first_largest(fold_channels(x, in_dims[0], info.batch_size), *segments)
    return unfold_channels(folded, info.batch_size), 0


register_selection(
    "voxels_first_largest(Tensor x, Tensor owner, Tensor? order, SymInt count) -> Tensor",
    _first_largest,
    lambda x, owner, order, count: torch.empty_like(x, dtype=torch.bool),
    _first_largest_batch,
)
