"""The dimensions of a function's arguments that vary, and what fills their padding.

A size is named by a tensor argument whose first dimension it is; every dimension of the examples
that has the same length is the same size.  Padding rows repeat the first rows, so that they hold
what the function can compute with.  Tables of row numbers name padding rows of another size: entry
j of table k names row n + (j + k) mod p, of n rows and p padding rows.  So padded edges join padded
atoms, no two ends are one atom, and all padded atoms have about as many edges.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core import private
from torchweft.errors import DTypeError, ShapeError

__all__ = ["Layout", "Rows", "Sizes", "named_in", "named_leaves"]

Fill = str | float
"""The size whose padding rows a table names, or a number."""

Key = str | tuple[str, int]
"""A leaf, or a dimension of it."""

Sizes = Mapping[Key, float | tuple[float, Mapping[Key, Fill]]]

SPARE = 2
"""Padding rows that each size has at least: the two ends of an edge."""


class _Size(NamedTuple):
    """A dimension that varies."""

    name: str
    factor: float
    leaf: int
    dim: int


class Rows(NamedTuple):
    """Filled with numbers of padding rows of a size."""

    size: int
    table: int  # the number of this table among those of the size


class Layout:
    """What varies in the leaves of the arguments.

    Args:
        names: of the leaves.
        examples: the leaves.
        sizes: see `torchweft.capture`.

    Raises:
        ShapeError, DTypeError: sizes that do not fit the examples.
    """

    def __init__(self, names: Sequence[str], examples: Sequence[Any], sizes: Sizes | None) -> None:
        self.names = tuple(names)
        given = dict(sizes or {})
        self.sizes = tuple(self._size(key, value, examples) for key, value in given.items())
        fills = [_fills_of(value) for value in given.values()]
        self.dims = self._dims(self._exact(fills, examples), examples)
        self.fills: dict[int, Rows | float] = {}
        self._tables = [0] * len(self.sizes)
        for i, named in enumerate(fills):
            for key, fill in named.items():
                self._add_fill(i, _name(key), fill, examples)

    def _exact(
        self, fills: Sequence[Mapping[Key, Fill]], examples: Sequence[Any]
    ) -> dict[int, dict[int, int]]:
        """The size of each dimension that fills name, by leaf."""
        exact: dict[int, dict[int, int]] = {}
        for i, named in enumerate(fills):
            for name, dim in (key for key in named if isinstance(key, tuple)):
                exact.setdefault(self._leaf(name, examples), {})[dim] = i
        return exact

    def _dims(
        self, exact: Mapping[int, Mapping[int, int]], examples: Sequence[Any]
    ) -> tuple[tuple[int | None, ...], ...]:
        """The size of each dimension of each leaf: as it is named, else by length."""
        lengths = [examples[size.leaf].shape[size.dim] for size in self.sizes]
        for i, size in enumerate(self.sizes):
            if lengths[i] in lengths[:i] and size.leaf not in exact:
                other = self.sizes[lengths.index(lengths[i])].name
                raise ShapeError(
                    f"{other} and {size.name} both have {lengths[i]} rows in the examples: sizes "
                    "are told apart by their lengths. Pass examples in which these differ."
                )
        found = [_varying(leaf, lengths) for leaf in examples]
        for leaf, dims in exact.items():
            found[leaf] = tuple(dims.get(dim) for dim in range(examples[leaf].dim()))
        return tuple(found)

    def _leaf(self, name: str, examples: Sequence[Any]) -> int:
        found = [i for i, known in enumerate(self.names) if known == name]
        if len(found) != 1 or not isinstance(examples[found[0]], Tensor):
            given = {0: "which no argument is called", 1: "which is no tensor"}
            called = given.get(len(found), f"which {len(found)} arguments are called")
            raise ShapeError(
                f"sizes names {name!r}, {called}: it must be one tensor among "
                f"{', '.join(map(repr, self.names))}. Pass one of these names: those of "
                "parameters, and keys of dicts among the arguments."
            )
        return found[0]

    def _size(self, key: Any, value: Any, examples: Sequence[Any]) -> _Size:
        name, dim = key if isinstance(key, tuple) else (key, 0)
        leaf = self._leaf(name, examples)
        factor = value[0] if isinstance(value, tuple) else value
        if dim >= examples[leaf].dim():
            raise ShapeError(
                f"sizes names dimension {dim} of {name}, which is {tuple(examples[leaf].shape)}: "
                "it must be a dimension. Pass a tensor that has rows."
            )
        if not isinstance(factor, int | float) or not 1 <= factor < math.inf:
            raise ShapeError(
                f"the room of {name} is {factor!r}: it must be a factor, 1 or more. Pass 1.1 for "
                "ten in a hundred more rows."
            )
        return _Size(name, factor, leaf, dim)

    def _add_fill(self, size: int, name: str, fill: Any, examples: Sequence[Any]) -> None:
        leaf = self._leaf(name, examples)
        if size not in self.dims[leaf]:
            raise ShapeError(
                f"{name} is {tuple(examples[leaf].shape)}, without a dimension of the "
                f"{self.sizes[size].name} in whose pair it is filled: its fill must be in the pair "
                "of a size that it has. Move it there."
            )
        if not isinstance(fill, str):
            self.fills[leaf] = fill
            return
        names = [s.name for s in self.sizes]
        if fill not in names:
            raise ShapeError(
                f"{name} is filled with rows of {fill!r}, but the sizes are {', '.join(names)}: "
                f"its numbers must be rows of one of these. Add {fill!r} to sizes."
            )
        if examples[leaf].is_floating_point() or examples[leaf].dtype == torch.bool:
            raise DTypeError(
                f"{name} is {examples[leaf].dtype} and filled with rows of {fill}: numbers of rows "
                "are integers. Pass a number instead, or name a table of integers."
            )
        target = names.index(fill)
        self.fills[leaf] = Rows(target, self._tables[target])
        self._tables[target] += 1

    def check_dim(self, leaf: int, tensor: Tensor) -> None:
        """Raise ShapeError unless a tensor has as many dimensions as its example."""
        if self.sizes and tensor.dim() != len(self.dims[leaf]):
            raise ShapeError(
                f"{self.names[leaf]} is {tuple(tensor.shape)} but had {len(self.dims[leaf])} "
                "dimensions in the examples: with sizes it must have as many. Capture the function "
                "again for other arguments."
            )

    def lengths(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The length of each size in the leaves of a call.

        Raises:
            ShapeError: dimensions of one size have different lengths.
        """
        found = tuple(leaves[size.leaf].shape[size.dim] for size in self.sizes)
        for i, dims in enumerate(self.dims):
            for dim, size in enumerate(dims):
                if size is not None and leaves[i].shape[dim] != found[size]:
                    raise ShapeError(
                        f"{self.names[i]} is {tuple(leaves[i].shape)} but {self.sizes[size].name} "
                        f"has {found[size]} rows: dimension {dim} must have as many, as in the "
                        "examples. Pass such tensors, or examples in which it differs by chance "
                        "from no other length."
                    )
        return found

    def rooms(self, lengths: Sequence[int], least: Sequence[int]) -> tuple[int, ...]:
        """Room for these lengths, no less than before; no two sizes have the same."""
        found: list[int] = []
        for size, length, before in zip(self.sizes, lengths, least, strict=True):
            room = before
            if length + SPARE > before:
                room = math.ceil(length * size.factor) + SPARE
            while room in found:
                room += 1
            found.append(room)
        return tuple(found)

    def fits(self, lengths: Sequence[int], rooms: Sequence[int]) -> bool:
        """Whether there is room for these lengths."""
        return all(n + SPARE <= room for n, room in zip(lengths, rooms, strict=True))

    def shown(self, lengths: Sequence[int]) -> str:
        """Lengths with the names of their sizes."""
        names = (size.name for size in self.sizes)
        return ", ".join(f"{n} rows of {name}" for n, name in zip(lengths, names, strict=True))

    def shape(self, leaf: int, shape: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """The shape of a leaf where sizes have other lengths."""
        dims = self.dims[leaf] if self.sizes else (None,) * len(shape)
        return [n if s is None else lengths[s] for n, s in zip(shape, dims, strict=True)]

    def fill(self, leaf: int, buffer: Tensor, lengths: Sequence[int], rooms: Sequence[int]) -> None:
        """Fill what is behind the rows of a call in a buffer, one dimension after the other."""
        for dim, size in enumerate(self.dims[leaf]):
            if size is None:
                continue
            known = buffer
            for later in range(dim + 1, buffer.dim()):
                other = self.dims[leaf][later]
                known = known if other is None else known.narrow(later, 0, lengths[other])
            begin, count = lengths[size], rooms[size] - lengths[size]
            padding, fill = known.narrow(dim, begin, count), self.fills.get(leaf)
            if isinstance(fill, Rows):
                padding.copy_(_row_numbers(fill, padding, dim, lengths, rooms))
            elif fill is not None:
                padding.fill_(fill)
            else:
                _repeat(known, padding, dim, begin)


def _varying(leaf: Any, lengths: Sequence[int]) -> tuple[int | None, ...]:
    """The size of each dimension of a leaf."""
    if not isinstance(leaf, Tensor):
        return ()
    return tuple(lengths.index(n) if n in lengths else None for n in leaf.shape)


def _row_numbers(
    fill: Rows, padding: Tensor, dim: int, lengths: Sequence[int], rooms: Sequence[int]
) -> Tensor:
    """Numbers of padding rows: entry j of table k, and of its line r, names row j + k + r."""
    first, count = lengths[fill.size], rooms[fill.size] - lengths[fill.size]
    moved = padding.movedim(dim, -1)
    lines = torch.arange(math.prod(moved.shape[:-1]), device=padding.device)[:, None]
    entries = torch.arange(moved.shape[-1], device=padding.device)
    numbers = first + (entries + lines + fill.table) % count
    return numbers.view(moved.shape).movedim(-1, dim)


def _repeat(known: Tensor, padding: Tensor, dim: int, rows: int) -> None:
    """Repeat the first rows; without any, what was there stays."""
    count = padding.shape[dim]
    for begin in range(0, count, rows) if rows else ():
        taken = min(rows, count - begin)
        padding.narrow(dim, begin, taken).copy_(known.narrow(dim, 0, taken))


def named_leaves(function: Callable[..., Any], arguments: Sequence[Any]) -> list[str]:
    """The name of each leaf: a parameter, or the last key of dicts, with the numbers of items."""
    names, parameters = [], _parameters(function)
    for path, _ in private.flatten_with_path(tuple(arguments))[0]:
        place, *keys = (_item(key) for key in path)
        name = parameters[place] if place < len(parameters) else f"argument {place}"
        for key in keys:
            name = f"{name}[{key}]" if isinstance(key, int) else str(key)
        names.append(name)
    return names


def _item(key: Any) -> Any:
    """The number of an item, the key of a dict, or the name of a field."""
    return next(getattr(key, kind) for kind in ("idx", "key", "name") if hasattr(key, kind))


def named_in(sizes: Sizes | None) -> set[str]:
    """The arguments that sizes name."""
    found = set[str]()
    for key, value in (sizes or {}).items():
        found.update(map(_name, (key, *_fills_of(value))))
    return found


def _fills_of(value: float | tuple[float, Mapping[Key, Fill]]) -> Mapping[Key, Fill]:
    return value[1] if isinstance(value, tuple) else {}


def _name(key: Key) -> str:
    return key[0] if isinstance(key, tuple) else key


def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters by position."""
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        every = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # of a function written in C
        return []
    return [p.name for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
