"""`torchweft inspect`: what the layers of a network cost on a point cloud, as a page."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from torchweft.demo.data.readers import read_points
from torchweft.demo.folders import make_folder, require_matplotlib
from torchweft.demo.inspection.layer import layer_of, spacing_of
from torchweft.errors import DTypeError, ShapeError
from torchweft.progress import track
from torchweft.voxels import SparseTensor, voxelize

__all__ = ["inspect"]

FACTORS = (0.5, 1.0, 2.0, 4.0)  # of the voxel size


def inspect(file: Path, size: float | None, kernel: int, channels: int, out: Path) -> Path:
    """Voxelize a cloud at a few sizes, write `out/index.html`, and return its path.

    Args:
        file: of points, in a format of `read_points`.
        size: edge of a voxel; None is twice the median distance of a point to its nearest.
        kernel: of every axis; 3 and 5 are shown beside it.
        channels: C, in and out.
        out: folder of the page.

    Raises:
        ShapeError, DTypeError, FileNotFoundError: what cannot be inspected.
        NotADirectoryError: `out` cannot be made or written.
    """
    require_matplotlib()
    _check(size, kernel, channels)
    make_folder(out)
    points = read_points(file)
    if len(points) < 2:
        raise ShapeError(
            f"{file} holds {len(points)} finite points: at least 2 are needed. "
            "Pass a file with more points."
        )
    from torchweft.demo.inspection.page import page_of  # needs matplotlib

    chosen = float(f"{2 * spacing_of(points):.2g}") if size is None else size
    kernels = sorted({3, 5, kernel})
    clouds = {factor * chosen: _voxels(points, factor * chosen) for factor in FACTORS}
    cases = [(edge, k) for edge in clouds for k in kernels]
    layers = [layer_of(clouds[edge], edge, k) for edge, k in track(cases, "layers")]
    text = page_of(file.name, len(points), clouds, layers, chosen, kernel, channels)
    path = out / "index.html"
    path.write_text(text, encoding="utf-8")
    return path


def _voxels(points: Tensor, size: float) -> SparseTensor:
    return voxelize(points, size, points[:, :1], origin=points.amin(0))[0]


def _check(size: float | None, kernel: int, channels: int) -> None:
    if size is not None and not 0 < size < float("inf"):
        raise DTypeError(
            f"--size is {size}: the edge of a voxel must be positive and finite. Pass --size 0.1, "
            "or leave it out: it then follows from the cloud."
        )
    for name, value in (("--kernel", kernel), ("--channels", channels)):
        if value < 1:
            raise ShapeError(f"{name} is {value}: it must be at least 1. Pass {name} 3, say.")
