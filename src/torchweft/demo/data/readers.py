"""Point clouds from files, as (N, 3) float64 tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from torchweft.demo.data import SUFFIXES
from torchweft.demo.data.formats import NAMED, READERS
from torchweft.errors import DTypeError, ShapeError, WeftError
from torchweft.progress import say, step

__all__ = ["read_points"]

Array = np.ndarray[Any, Any]


def read_points(path: Path, key: str | None = None) -> Tensor:
    """The points of a file: its columns x, y and z, or else its first three columns.

    Standard error says which columns are left out, and how many points, since they are not finite
    in float32.

    Args:
        path: the file, with one of SUFFIXES.
        key: name of the array in an .npz or .pt; None is its only array, or the one with a usual
            name, such as points or xyz.

    Returns:
        (N, 3) float64, N ≥ 1.

    Raises:
        DTypeError: another suffix, a file that cannot be read, numbers that are no coordinates.
        ShapeError: an array that is not (N, ≥ 3), or no finite points.
        BackendError: the package that reads this format is not installed.
        FileNotFoundError: no such file.
    """
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise DTypeError(
            f"{path} ends in {suffix!r}: torchweft reads {SUFFIXES}. "
            "Save the points in one of these, e.g. with numpy.save."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file: a readable file of points is needed. Check its path."
        )
    if key is not None and suffix not in NAMED:
        raise ShapeError(
            f"{path} was given with the key {key!r}: only {' and '.join(NAMED)} have arrays with "
            "names. Leave --key out."
        )
    with step(f"reading {path}"):
        points = _contents(path, suffix, key)
        _check(path, points)
    if points.shape[1] > 3:
        say(f"{path}: x, y, z are the first 3 of {points.shape[1]} columns, the others are unused")
    return torch.from_numpy(_finite(path, points[:, :3].astype(np.float64)))


def _contents(path: Path, suffix: str, key: str | None) -> Array:
    """What the reader of a suffix finds; libraries have many errors for a file that is cut off."""
    unreadable = (ValueError, TypeError, LookupError, StopIteration, EOFError, RuntimeError)
    try:
        found = READERS[suffix](path, key) if suffix in NAMED else READERS[suffix](path)
        return np.asarray(found)
    except WeftError:
        raise
    except (*unreadable, BadZipFile) as error:
        reason = str(error).split(". ")[0].rstrip(".")
        raise DTypeError(
            f"{path} cannot be read as {suffix} ({reason}): a whole file of this format is needed. "
            "Save the points as .npy, an array of shape (N, 3)."
        ) from error


def _check(path: Path, points: Array) -> None:
    """Raise unless these are rows of at least three real numbers."""
    given = f"{path} holds an array of shape {points.shape}"
    if points.dtype.kind not in "iuf":
        raise DTypeError(
            f"{path} holds {points.dtype}: coordinates are real numbers. Save an array of float32."
        )
    if points.dtype == np.uint8:
        raise DTypeError(
            f"{given} of uint8, the type of colours: coordinates are needed. Save the positions; "
            "or, if these are positions, save points.astype('int32')."
        )
    if points.ndim == 2 and points.shape[1] > max(len(points), 3):
        raise ShapeError(
            f"{given}, {len(points)} rows of {points.shape[1]} numbers: points are rows of "
            "x, y, z, and these look like columns. Save the transposed array, points.T; or, if "
            "they are rows, save points[:, :3]."
        )
    if points.ndim != 2 or points.shape[1] < 3:
        raise ShapeError(
            f"{given}: points are rows of x, y, z. Save an array of shape (N, 3), "
            "e.g. points.reshape(-1, 3)."
        )
    if not len(points):
        raise ShapeError(f"{given}, no points: at least one is needed. Pass another file.")


def _finite(path: Path, points: Array) -> Array:
    """The points without those that are not finite in float32."""
    finite = (np.abs(points) <= np.finfo(np.float32).max).all(1)
    if not finite.any():
        raise ShapeError(
            f"{path} holds {len(points):,} points, all with NaN or infinite coordinates: finite "
            "ones are needed. Save the points before what made them NaN."
        )
    if not finite.all():
        say(f"{path}: {(~finite).sum():,} of {len(points):,} points are not finite: left out")
    return points[finite]
