"""Readers of points, one function for each format of files."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import numpy as np
import torch

from torchweft.errors import BackendError, DTypeError, ShapeError
from torchweft.progress import say

__all__ = ["NAMED", "READERS"]

Array = np.ndarray[Any, Any]

POINT_NAMES = ("points", "point", "pc", "xyz", "pos", "positions", "position", "coords")
"""Names of the points among several arrays, where one of them alone is there."""


def _npy(path: Path) -> Array:
    return np.asarray(np.load(path))


def _npz(path: Path, key: str | None) -> Array:
    with np.load(path) as arrays:
        return _named(path, arrays, key)


def _pt(path: Path, key: str | None) -> Array:
    """A tensor that torch.save wrote, or a dictionary with tensors."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError:
        found = None
    if isinstance(found, torch.Tensor):
        found = {"the tensor": found}
    if not isinstance(found, dict):
        raise DTypeError(
            f"{path} holds other objects than tensors: a tensor or a dictionary of tensors is "
            "needed. Save the points alone, torch.save(points, path)."
        )
    tensors = {name: t.detach() for name, t in found.items() if isinstance(t, torch.Tensor)}
    # numpy has no bfloat16
    arrays = {n: (t.double() if t.is_floating_point() else t).numpy() for n, t in tensors.items()}
    return _named(path, arrays, key)


def _named(path: Path, arrays: Mapping[str, Array], key: str | None) -> Array:
    """The array of a name; without a name the only array, or the only one with a usual name."""
    if key is None:
        usual = [name for name in arrays if name in POINT_NAMES or len(arrays) == 1]
        key = usual[0] if len(usual) == 1 else None
    if key is not None and key in arrays:
        return arrays[key]
    shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    given = "several arrays" if key is None else f"no array {key!r}"
    raise ShapeError(
        f"{path} holds {given}: {shapes or 'nothing'}. The name of the array with the points is "
        "needed. Pass --key with its name."
    )


def _text(path: Path) -> Array:
    """Rows of numbers, divided by blanks, commas or semicolons, below any header.

    A header that names as many columns as there are says which are x, y and z.
    """
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    rows = (n for n, line in enumerate(lines) if sum(map(_is_number, _words(line))) >= 3)
    first = next(rows, None)
    if first is None:
        raise ShapeError(
            f"{path} has no line with three numbers: a line is a point, x y z. "
            "Write one point a line, or save the points as .npy, an array of shape (N, 3)."
        )
    return np.loadtxt(
        lines[first:],
        delimiter=_separator(lines[first]),
        usecols=_named_columns(path, lines[:first], len(_words(lines[first]))),
        ndmin=2,
        quotechar='"',
    )


def _separator(line: str) -> str | None:
    return next((mark for mark in ";," if mark in line), None)


def _words(line: str) -> list[str]:
    """The fields of a line of text, without quotes and the mark of a comment."""
    fields = line.strip().lstrip("#/").split(_separator(line))
    return [field.strip(' \t"') for field in fields]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _named_columns(path: Path, header: Sequence[str], width: int) -> list[int] | None:
    """The columns x, y and z by the header's names; None where it names none.

    A comment is taken for names only if these three are among them.
    """
    for line in reversed(header):
        names = [word.lower() for word in _words(line)]
        named = {"x", "y", "z"} <= set(names) or not line.lstrip().startswith(("#", "/"))
        if len(names) == width and named:
            return _axes(path, names)
    return None


def _axes(path: Path, names: Sequence[str]) -> list[int]:
    """The places of x, y and z among names of columns."""
    if not {"x", "y", "z"} <= set(names):
        raise ShapeError(
            f"{path} has points of {' '.join(names)}: x, y and z are needed. Name these columns "
            "x, y and z, or save the points as .npy, an array of shape (N, 3)."
        )
    return [names.index(axis) for axis in "xyz"]


def _xyz(path: Path) -> Array:
    """Atoms, if the file begins with their number and its third line with an element; or text."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        begin = [file.readline().strip() for _ in range(3)]
    return _atoms(path) if begin[0].isdecimal() and begin[2][:1].isalpha() else _text(path)


def _atoms(path: Path) -> Array:
    """The positions of the last structure in a file of atoms, as ASE reads it."""
    _require("ase", path)
    from ase.io import read
    from ase.io.extxyz import XYZError

    try:
        structures: Any = read(path, index=":", format="extxyz")
    except XYZError as error:
        raise ValueError(str(error)) from error
    if len(structures) > 1:
        say(f"{path}: the last of {len(structures)} structures is taken")
    return np.asarray(structures[-1].positions)


def _las(path: Path) -> Array:
    """The scaled coordinates of a LAS file (ASPRS), or of its compressed form."""
    _require("laspy", path)
    if path.suffix.lower() == ".laz":
        _require("lazrs", path)
    import laspy

    try:
        return np.asarray(laspy.read(path).xyz)
    except laspy.errors.LaspyException as error:
        raise ValueError(str(error)) from error


def _require(package: str, path: Path) -> None:
    """Raise unless the package that reads a file is installed."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"{path} was given, and {package} is not installed: it reads {path.suffix}. "
            f"Run pip install {package}, or pip install 'torchweft[demo]' for all formats."
        ) from error


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
    return numbers.reshape(-1, 4)[:, :3]


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
    columns = _axes(path, [name for name, _ in fields])
    if ascii:
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


NAMED = {".npz": _npz, ".pt": _pt}
"""Readers of files that hold arrays with names: they take the name of one, or None."""

READERS: dict[str, Callable[..., Array]] = {
    **NAMED,
    ".npy": _npy,
    ".csv": _text,
    ".txt": _text,
    ".xyz": _xyz,
    ".extxyz": _atoms,
    ".las": _las,
    ".laz": _las,
    ".bin": _bin,
    ".ply": _ply,
    ".pcd": _pcd,
}
