"""Checks of coordinates, and the errors that they raise."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from torchweft.errors import DeviceError, DTypeError, IndexRangeError, ShapeError

__all__ = [
    "MOST_DIMENSIONS",
    "check_rows",
    "check_same_device",
    "checked_batch_size",
    "repeated_voxel",
    "written_since",
]

MOST_DIMENSIONS = 4


def repeated_voxel(rows: Tensor, keys: Tensor) -> ShapeError:
    """The error of a voxel that occurs twice."""
    keys, order = torch.sort(keys, stable=True)
    twice = keys[1:] == keys[:-1]
    at = int(twice.nonzero()[0, 0])
    first, second = order[at : at + 2].tolist()
    return ShapeError(
        f"voxel {tuple(rows[first].tolist())} stands in rows {first} and {second} of coords "
        f"({int(twice.sum())} rows repeat another): voxels must be distinct. Merge them: "
        'voxelize(points, size, reduce="mean"), or drop repeats.'
    )


def written_since(shape: tuple[int, ...] | None, batch_size: int) -> IndexRangeError:
    """The error of rows outside of their box that were written to before it was noticed."""
    return IndexRangeError(
        f"coords had a voxel outside of spatial_shape {shape} and batch_size "
        f"{batch_size}, and were written to since: values must be in range when a "
        "SparseTensor is built. Correct coords before."
    )


def checked_batch_size(batch_size: int) -> int:
    """A number of samples as Python's integer.

    Raises:
        DTypeError, ShapeError: it is none.
    """
    try:
        found = operator.index(batch_size)
    except TypeError:
        raise DTypeError(
            f"batch_size is {batch_size}: it must be an integer. Pass batch_size=1, for example."
        ) from None
    if found < 0:
        raise ShapeError(
            f"batch_size is {found}: it must be at least 0. Pass the number of samples, empty ones "
            "too, or None."
        )
    return found


def check_rows(rows: Tensor, name: str = "coords", dim: int | None = None) -> None:
    """Raise unless a tensor holds rows (batch, s0, s1, …), of `dim` axes if given.

    Raises:
        DTypeError, ShapeError: not integers, other columns.
    """
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise DTypeError(
            f"{name} are {rows.dtype}: they must be integers. Use voxelize(points, size) for "
            f"points, or {name}.int()."
        )
    dims = range(1, MOST_DIMENSIONS + 1) if dim is None else [dim]
    if rows.dim() != 2 or rows.shape[1] - 1 not in dims:
        axes = f"1 to {MOST_DIMENSIONS}" if dim is None else str(dim)
        raise ShapeError(
            f"{name} are {tuple(rows.shape)}: they must be (N, 1 + d), batch number first, then "
            f"d = {axes} axes. Add the batch column, or use sparse_collate."
        )


def check_same_device(voxels: torch.device, name: str, device: torch.device) -> None:
    """Raise unless a device is that of the voxels.

    Raises:
        DeviceError: it is another one.
    """
    if device != voxels:
        raise DeviceError(
            f"the device of {name} is {device}, that of the voxels {voxels}: they must "
            f"be the same. Move {name} with .to({str(voxels)!r})."
        )
