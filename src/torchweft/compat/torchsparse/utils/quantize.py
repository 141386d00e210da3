"""Points to voxels on the host, as data pipelines do it."""

from __future__ import annotations

from typing import Any

import numpy as np

from torchweft.errors import ShapeError

__all__ = ["sparse_quantize"]


def sparse_quantize(
    coords: Any,
    voxel_size: float | tuple[float, ...] = 1,
    *,
    return_index: bool = False,
    return_inverse: bool = False,
) -> Any:
    """The distinct voxels ⌊point / size⌋, int32, ascending by (x, y, z).

    >>> sparse_quantize(np.array([[0.1, 0.0, 0.3], [0.4, 0.0, 0.0]]), 0.2).tolist()
    [[0, 0, 1], [2, 0, 0]]

    Args:
        coords: (N, 3) positions.
        voxel_size: edge of a voxel, one number or three.
        return_index: adds the first point of each voxel.
        return_inverse: adds the voxel of each point.

    Raises:
        ShapeError: positions or sizes that are not three a row.
    """
    points, size = np.asarray(coords), np.asarray(voxel_size)
    if points.ndim != 2 or points.shape[1] != 3 or size.size not in (1, 3):
        raise ShapeError(
            f"coords are {points.shape} and voxel_size is {voxel_size}: (N, 3) and one number or "
            "three are needed. Pass coords[:, :3]."
        )
    cells = np.floor(points / size).astype(np.int32)
    found, index, inverse = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    asked = [(return_index, index), (return_inverse, inverse.reshape(-1))]
    outputs = [found, *(values for wanted, values in asked if wanted)]
    return outputs if len(outputs) > 1 else found
