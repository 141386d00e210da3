"""Point clouds from files: .npy .npz .xyz .bin (KITTI) .ply .pcd, as (N, 3) float64 tensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError, WeftError
from torchweft.progress import say

__all__ = ["read_points"]

Array = np.ndarray[Any, Any]


POINT_NAMES = ("points", "point", "pc", "xyz", "pos", "positions", "position", "coords")
"""Names of the points in an .npz of several arrays, where one of them alone is there."""


def read_points(path: Path, array: str | None = None) -> Tensor:
    """The first three columns of the points in a file.

    Points that are not finite in float32 are left out, and standard error hears how many.

    Args:
        path: the file.
        array: name of the array in an .npz; None is its only array, or the one with a name of
            POINT_NAMES.
    """
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DTypeError(
            f"{path} ends in {suffix!r}: torchweft reads {' '.join(_READERS)}. "
            "Save the points in one of these, e.g. with numpy.save."
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not a file: a readable file of points is needed. Give its path; "
            "`torchweft demo` without --points takes matplotlib's elevation model."
        )
    if array is not None and suffix != ".npz":
        raise ShapeError(
            f"{path} was given with the array {array!r}: only an .npz has arrays with names. "
            "Leave --array out."
        )
    points = _contents(path, suffix, array)
    if points.dtype.kind not in "iuf":
        raise DTypeError(
            f"{path} holds {points.dtype}: coordinates are real numbers. Save an array of float32."
        )
    if points.ndim != 2 or points.shape[1] < 3:
        raise ShapeError(
            f"{path} holds an array of shape {points.shape}: points are rows of x, y, z. "
            "Save an array of shape (N, 3)."
        )
    points = points[:, :3].astype(np.float64)
    finite = (np.abs(points) <= np.finfo(np.float32).max).all(1)
    if not finite.all():
        say(f"{path}: {(~finite).sum():,} of {len(points):,} points are not finite: left out")
    return torch.from_numpy(points[finite])


def _contents(path: Path, suffix: str, array: str | None) -> Array:
    """What the reader of a suffix finds; libraries have many words for a file that is cut off."""
    try:
        found = _npz(path, array) if suffix == ".npz" else _READERS[suffix](path)
        return np.asarray(found)
    except WeftError:
        raise
    except (ValueError, LookupError, StopIteration, EOFError, BadZipFile) as error:
        reason = str(error).split(". ")[0]
        raise DTypeError(
            f"{path} cannot be read as {suffix} ({reason}): a whole file of this format is needed. "
            "Save the points as .npy, an array of shape (N, 3)."
        ) from error


def _npy(path: Path) -> Array:
    return _in_rows(path, np.load(path))


def _in_rows(path: Path, points: Array) -> Array:
    """The array, unless its points are columns."""
    if points.ndim == 2 and len(points) in (3, 4) and points.shape[1] > len(points):
        raise ShapeError(
            f"{path} holds an array of shape {points.shape}, {len(points)} rows of "
            f"{points.shape[1]} numbers: points are rows of x, y, z, and these look like columns. "
            "Save the transposed array, points.T; or, if they are rows, save points[:, :3]."
        )
    return points


def _npz(path: Path, name: str | None) -> Array:
    with np.load(path) as arrays:
        if name is None:
            usual = [one for one in arrays if one in POINT_NAMES or len(arrays) == 1]
            name = usual[0] if len(usual) == 1 else None
        if name in arrays:
            return _in_rows(path, arrays[name])
        shapes = ", ".join(f"{one} {array.shape}" for one, array in arrays.items())
    given = "several arrays" if name is None else f"no array {name!r}"
    raise ShapeError(
        f"{path} holds {given}: {shapes or 'nothing'}. Which of them are the points must be known. "
        "Pass --array with its name."
    )


def _xyz(path: Path) -> Array:
    """Columns of text, split by blanks or commas; lines that begin with a letter are left out."""
    number = re.compile(r"\s*[-+.\d]")
    lines = (line.replace(",", " ") for line in path.read_text().splitlines() if number.match(line))
    rows = [row for row in (line.split()[:3] for line in lines) if len(row) == 3]
    if not rows:
        raise ShapeError(
            f"{path} has no line that begins with three numbers: a line of .xyz is a point, x y z. "
            "Write one a line, or save the points as .npy, an array of shape (N, 3)."
        )
    return np.array(rows, dtype=np.float64)


def _bin(path: Path) -> Array:
    """KITTI: float32 x, y, z, reflectance in [0, 1], without a header."""
    numbers = np.fromfile(path, dtype="<f4")
    reflectance = numbers[3::4]
    # nobody measures lengths of 1e-30: bits that are no floats have any exponent
    measured = (numbers == 0) | ~((np.abs(numbers) < 1e-30) | (np.abs(numbers) > 1e30))
    within = (reflectance >= 0) & (reflectance <= 1)
    if path.stat().st_size % 16 or not (measured.all() and within.all()):
        # rows of another length would be read as a cloud all the same, of points that nobody saw
        raise DTypeError(
            f"{path} has {path.stat().st_size:,} bytes that are no rows of x, y, z, reflectance: "
            "torchweft reads .bin as KITTI's, four float32 a point, the last in [0, 1]. "
            "Save the points as .npy, an array of shape (N, 3)."
        )
    return numbers.reshape(-1, 4)


_PLY_TYPES = {
    "char": "i1", "int8": "i1", "uchar": "u1", "uint8": "u1", "short": "i2", "int16": "i2",
    "ushort": "u2", "uint16": "u2", "int": "i4", "int32": "i4", "uint": "u4", "uint32": "u4",
    "float": "f4", "float32": "f4", "double": "f8", "float64": "f8",
}  # fmt: skip


def _ply(path: Path) -> Array:
    """The vertices of a PLY file, which must be its first element."""
    with path.open("rb") as file:
        header = _header(file, path, b"end_header")
        style = next(words[1] for words in header if words[0] == "format")
        elements = [n for n, words in enumerate(header) if words[0] == "element"]
        first = header[elements[0]]
        own = header[elements[0] + 1 : (elements[1:] or [len(header)])[0]]
        properties = [words for words in own if words[0] == "property"]
        if first[1] != "vertex" or any(words[1] == "list" for words in properties):
            raise DTypeError(
                f"{path} begins with {' '.join(first)} or has lists in its vertices: torchweft "
                "reads vertices of plain numbers. Save the points as .npy."
            )
        order = ">" if style == "binary_big_endian" else "<"
        fields = [(w[2], order + _PLY_TYPES[w[1]]) for w in properties]
        return _table(file, path, fields, int(first[2]), ascii=style == "ascii")


def _pcd(path: Path) -> Array:
    """The points of a PCD file (Point Cloud Library), ascii or binary."""
    with path.open("rb") as file:
        lines = _header(file, path, b"DATA")
        header = {words[0]: words[1:] for words in lines}
        style = header["DATA"][0]
        if style not in ("ascii", "binary"):
            raise DTypeError(
                f"{path} has DATA {style}: torchweft reads ascii and binary. Convert it with "
                f"pcl_convert_pcd_ascii_binary, or save the points as .npy."
            )
        counts = header.get("COUNT", ["1"] * len(header["FIELDS"]))
        fields = []
        for number, (name, kind, size, count) in enumerate(
            zip(header["FIELDS"], header["TYPE"], header["SIZE"], counts, strict=True)
        ):
            # a name may occur twice ("_" is padding); a field may hold several numbers
            base = name if name in "xyz" else f"{number}"
            names = [base] if count == "1" else [f"{base}.{i}" for i in range(int(count))]
            fields += [(n, f"<{kind.lower()}{size}") for n in names]
        return _table(file, path, fields, int(header["POINTS"][0]), ascii=style == "ascii")


def _header(file: BinaryIO, path: Path, last: bytes) -> list[list[str]]:
    """The words of the lines up to the one that begins with `last`."""
    lines = []
    for line in file:
        if line.strip() and not line.startswith(b"#"):
            lines.append(line.decode("ascii", "replace").split())
        if line.startswith(last):
            return lines
    raise DTypeError(
        f"{path} has no line {last.decode()}: it is no {path.suffix} file, or cut off. "
        "Save the points as .npy."
    )


def _table(
    file: BinaryIO, path: Path, fields: list[tuple[str, str]], count: int, *, ascii: bool
) -> Array:
    """Columns x, y, z of `count` rows of named fields."""
    names = [name for name, _ in fields]
    if not {"x", "y", "z"} <= set(names):
        raise ShapeError(
            f"{path} has points of {' '.join(names)}: x, y and z are needed. "
            "Save the points as .npy, an array of shape (N, 3)."
        )
    if ascii:
        columns = [names.index(axis) for axis in "xyz"]
        rows = np.loadtxt(file, usecols=columns, max_rows=count, ndmin=2)
    else:
        kind = np.dtype(fields)
        table = np.frombuffer(file.read(count * kind.itemsize), dtype=kind)
        rows = np.stack([table[axis] for axis in "xyz"], axis=1)
    if len(rows) < count:
        raise ShapeError(
            f"{path} ends after {len(rows):,} points of {count:,}: it is cut off. "
            "Copy it again, or save the points as .npy."
        )
    return rows


_READERS: dict[str, Callable[..., Array]] = {
    ".npy": _npy,
    ".npz": _npz,
    ".xyz": _xyz,
    ".bin": _bin,
    ".ply": _ply,
    ".pcd": _pcd,
}
