"""From points to voxels: the rows to keep, and the voxel of each row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.compat.MinkowskiEngine.coordinate_maps import distinct
from torchweft.errors import ShapeError

__all__ = ["sparse_quantize", "unique_coordinate_map"]


def sparse_quantize(
    coordinates: Any,
    features: Any = None,
    labels: Any = None,
    ignore_label: int = -100,
    return_index: bool = False,
    return_inverse: bool = False,
    return_maps_only: bool = False,
    quantization_size: Any = None,
    device: torch.device | str = "cpu",
) -> Any:
    """⌊coordinates / size⌋, each voxel once with what belongs to its first row.

    >>> points = torch.tensor([[0.1, 0.2], [3.7, 0.5], [0.3, 0.4]])
    >>> voxels, rows = sparse_quantize(points, return_index=True)
    >>> voxels.tolist(), rows.tolist()
    ([[0, 0], [3, 0]], [0, 1])

    Args:
        coordinates: (N, D) of NumPy or torch, without a batch number.
        features: (N, C), likewise.
        labels: (N,) integers, likewise; a voxel whose rows disagree gets ignore_label.
        ignore_label: see labels.
        return_index: whether the first rows are returned.
        return_inverse: whether the voxel of each row is returned; needs return_index.
        return_maps_only: whether these alone are returned, without labels.
        quantization_size: edge of a voxel, one number or D; None is 1.
        device: of the voxels, without labels.

    Returns:
        The voxels (M, D) int32, then features, labels, rows and inverse, as far as given or asked
        for; one alone is no tuple.
    """
    if return_inverse and not return_index:
        raise ShapeError(
            "return_inverse was given without return_index: both are needed, as in the original. "
            "Pass return_index=True."
        )
    _check_rows(coordinates, features, labels)
    arrays = isinstance(coordinates, np.ndarray)
    cells = (
        coordinates
        if quantization_size is None
        else coordinates / _edges(coordinates, quantization_size)
    )
    cells = np.floor(cells).astype(np.int32) if arrays else torch.floor(cells).int()
    rows = torch.as_tensor(cells)
    if labels is None:
        rows = rows.to(device)
    unique, voxel = distinct(rows)
    maps: list[Any] = [unique, *([voxel] if return_inverse else [])]
    if return_maps_only and labels is None:
        return maps[0] if len(maps) == 1 else tuple(maps)
    if labels is not None and arrays:  # the original gives arrays then, and tensors else
        maps = [m.numpy() for m in maps]
        found = [cells[maps[0]]]
    else:
        found = [rows[unique]]
    if features is not None:
        found.append(features[_like(features, unique)])
    if labels is not None:
        found.append(_agreed(labels, unique, voxel, ignore_label))
    found += maps if return_index else []
    return found[0] if len(found) == 1 else tuple(found)


def unique_coordinate_map(coordinates: Tensor, tensor_stride: Any = 1) -> tuple[Tensor, Tensor]:
    """The first row of each voxel, and the voxel of each row; the stride has no effect."""
    return distinct(coordinates)


def _like(values: Any, rows: Tensor) -> Any:
    """Rows that index an array or a tensor."""
    return rows.to(values.device) if isinstance(values, Tensor) else rows.cpu().numpy()


def _agreed(labels: Any, unique: Tensor, voxel: Tensor, ignore_label: int) -> Any:
    """The label of each voxel's rows; ignore_label where they disagree."""
    given = torch.as_tensor(labels)
    first = given[unique]
    differs = torch.zeros(len(unique), dtype=torch.bool)
    differs[voxel[given != first[voxel]]] = True
    found = first.masked_fill(differs, ignore_label)
    return found.numpy() if isinstance(labels, np.ndarray) else found


def _edges(coordinates: Any, size: Any) -> Any:
    if np.ndim(size) == 0:
        return size
    if len(size) != coordinates.shape[1]:
        raise ShapeError(
            f"quantization_size has {len(size)} numbers but coordinates {coordinates.shape[1]} "
            "axes: one number or as many are needed. Correct it."
        )
    edges = [float(n) for n in size]
    return np.array(edges) if isinstance(coordinates, np.ndarray) else torch.tensor(edges)


def _check_rows(coordinates: Any, features: Any, labels: Any) -> None:
    counts = [len(given) for given in (coordinates, features, labels) if given is not None]
    if coordinates.ndim != 2 or len(set(counts)) != 1:
        raise ShapeError(
            f"coordinates are {tuple(coordinates.shape)}, and the rows of coordinates, features "
            f"and labels {counts}: (N, D) and as many of each are needed. Leave the batch number "
            "out."
        )
