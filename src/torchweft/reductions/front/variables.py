"""The variables of a lazy tensor: what each holds, what it varies with, and how they are joined.

A variable is a tensor (..., M, D) of category 0, one row for each i, (..., N, D) of category 1, one
for each j, or (..., D) of category 2, a parameter; or a few numbers, which wait for the dtype of
the others; or nothing yet: symbolic, argument number `place` of a call.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, transformed, watched
from torchweft.errors import DeviceError, DTypeError, ShapeError, WeftError
from torchweft.reductions.call.layout import kept

__all__ = [
    "NOTHING",
    "REAL",
    "Extent",
    "Variable",
    "agree",
    "argument",
    "components",
    "extent",
    "extent_of",
    "join",
    "numbers",
    "places",
    "read",
    "require_declared",
    "require_strided",
    "require_tensors",
    "symbol",
    "tensor_variable",
    "values",
]

REAL = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""What formulas are computed of, with the names that pykeops gives them."""

LETTERS = ("i", "j")


class Variable(NamedTuple):
    """One variable of a formula.

    Args:
        value: a tensor, or numbers that take the dtype of the others, or None: symbolic.
        place: position among the arguments of a call, if symbolic.
        dim: components.
        cat: 0 (i), 1 (j) or 2 (parameter).
    """

    value: Tensor | tuple[float, ...] | None
    place: int | None
    dim: int
    cat: int


class Extent(NamedTuple):
    """What the tensors of a formula agree on; None where there is none that tells.

    Args:
        batch: batch dimensions.
        rows: M, how many i.
        columns: N, how many j.
        dtype: of the tensors.
        device: of the tensors.
    """

    batch: tuple[int, ...] = ()
    rows: int | None = None
    columns: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None


NOTHING = Extent()


def read(x: Tensor, axis: int | None) -> Variable:
    """The variable that a tensor stands for, from its shape or from the axis.

    0-D and 1-D: a parameter.  2-D: needs axis 0 (i), 1 (j) or 2.  More: (..., M, 1, D) varies with
    i, (..., 1, N, D) with j, (..., 1, 1, D) is a parameter.
    """
    if x.dim() < 2:
        if axis not in (None, 2):
            raise ShapeError(
                f"x is {tuple(x.shape)} with axis={axis}: a tensor of one dimension is a "
                "parameter. Leave out axis, or pass (M, D) with axis=0 or (N, D) with axis=1."
            )
        return tensor_variable(x.reshape(1) if x.dim() == 0 else x, 2)
    if x.dim() == 2 or axis == 2:
        if axis is None:
            raise ShapeError(
                f"x is {tuple(x.shape)} without an axis: a tensor of two dimensions varies with i "
                "or with j. Pass axis=0 or axis=1 (Vi or Vj), or x[:, None, :] or x[None, :, :]."
            )
        return tensor_variable(x, axis)
    if axis is not None:
        raise ShapeError(
            f"x is {tuple(x.shape)} with axis={axis}: three dimensions and more say what x varies "
            "with. Leave out axis, or use Vi or Vj for (..., M, D) with batch dimensions."
        )
    first, second = x.shape[-3], x.shape[-2]
    if first == 1:
        return (
            tensor_variable(x.squeeze(-3).squeeze(-2), 2)
            if second == 1
            else tensor_variable(x.squeeze(-3), 1)
        )
    if second == 1:
        return tensor_variable(x.squeeze(-2), 0)
    raise ShapeError(
        f"x is {tuple(x.shape)}: a tensor of three dimensions and more must be (..., M, 1, D), "
        "which varies with i, (..., 1, N, D), with j, or (..., 1, 1, D), a parameter. "
        "Use x[:, None, :] or x[None, :, :]."
    )


def tensor_variable(x: Tensor, cat: int) -> Variable:
    """A tensor (..., M, D), (..., N, D) or (..., D) of the category."""
    require_strided(x)
    return Variable(x, None, components(cat, x.shape, x.dtype), cat)


def components(cat: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """D of a tensor (..., M, D), (..., N, D) or (..., D) of the category."""
    if cat not in (0, 1, 2):
        raise ShapeError(
            f"axis is {cat}: it must be 0 (varies with i), 1 (with j) or 2 (a parameter). Pass one "
            "of them."
        )
    if dtype not in REAL:
        raise DTypeError(
            f"x is {dtype}: formulas are computed of {', '.join(REAL.values())}. "
            "Convert it with .to(torch.float32)."
        )
    if len(shape) < (1 if cat == 2 else 2):
        raise ShapeError(
            f"x is {tuple(shape)}: a variable of {LETTERS[cat]} is (..., {'MN'[cat]}, D). "
            "Pass x[:, None] for one component."
        )
    return operator.index(shape[-1])


def extent(variable: Variable) -> Extent:
    """What one variable says of the extent."""
    x = variable.value
    return extent_of(variable.cat, x.shape, x.dtype, x.device) if isinstance(x, Tensor) else NOTHING


@kept
def extent_of(cat: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Extent:
    """What a tensor of the category says of the extent."""
    if cat == 2:
        return Extent(tuple(shape[:-1]), None, None, dtype, device)
    rows, columns = (shape[-2], None) if cat == 0 else (None, shape[-2])
    return Extent(tuple(shape[:-2]), rows, columns, dtype, device)


def symbol(given: tuple[Any, ...], axis: int | None) -> Variable:
    """The symbolic variable (index, dim, category)."""
    integers = all(isinstance(n, int) and n >= 0 for n in given)
    if len(given) != 3 or not integers or given[1] < 1 or given[2] > 2 or axis is not None:
        raise ShapeError(
            f"x is {given!r} with axis={axis}: a symbolic variable is (index, dim, category), "
            "of integers, with category 0 (i), 1 (j) or 2 (parameter), and no axis. "
            "Use Vi(index, dim), Vj(index, dim) or Pm(index, dim)."
        )
    return Variable(None, given[0], given[1], given[2])


def argument(v: Variable, x: Any, name: str) -> Variable:
    """The variable v with the tensor that is given for it."""
    require_declared(name, v.dim, v.cat, x.shape, x.dtype)
    return Variable(x, None, v.dim, v.cat)


def require_tensors(given: Sequence[Any]) -> None:
    """Raise if an argument is something else, or no strided tensor."""
    for place, x in enumerate(given):
        if not isinstance(x, Tensor):
            raise DTypeError(
                f"argument {place} is a {type(x).__name__}: it must be a tensor. Convert it, "
                "numbers with torch.tensor([...]), arrays with torch.from_numpy, or take "
                "torchweft.reductions.numpy."
            )
        require_strided(x)


def require_strided(x: Tensor) -> None:
    """Raise if a tensor has no strides: formulas read each of its numbers."""
    if x.layout != torch.strided:
        raise DTypeError(
            f"x is {tuple(x.shape)} of layout {x.layout}: formulas read strided tensors. Convert "
            "it with .to_dense()."
        )


def require_declared(
    name: str, dim: int, cat: int, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Raise unless a tensor of this shape and dtype can be the variable."""
    least = 1 if cat == 2 else 2
    if len(shape) < least or shape[-1] != dim:
        rows = ("M, ", "N, ", "")[cat]
        kind = ("Vi", "Vj", "Pm")[cat]
        raise ShapeError(
            f"{name} is {tuple(shape)} but declared {kind}({dim}): it must be (..., {rows}{dim}). "
            "Reshape it, x[:, None] for one component, or change the declaration."
        )
    components(cat, shape, dtype)


def agree(a: Extent, b: Extent, who: Callable[..., str], *of: Any) -> Extent:
    """The extent of both; raises where they do not agree, with what `who(*of)` says of them."""
    if b is NOTHING:
        return a
    found = _agreed(a, b)
    if isinstance(found, Extent):
        return found
    error, text = found
    raise error(who(*of) + text)


@kept
def _agreed(a: Extent, b: Extent) -> Extent | tuple[type[WeftError], str]:
    """The extent of both, or the error and what it says of them."""
    for letter, size, other in (("i", a.rows, b.rows), ("j", a.columns, b.columns)):
        if size is not None and other is not None and size != other:
            here, there = ("[:, None, :]", "[None, :, :]")[:: 1 if letter == "i" else -1]
            return ShapeError, (
                f", which have {size} and {other} rows of {letter}: they must have as many. "
                f"If one varies with {'ji'[letter == 'j']} instead, make it of x{there}, not of "
                f"x{here}."
            )
    if a.dtype is not None and b.dtype is not None and a.dtype != b.dtype:
        return DTypeError, (
            f", of {a.dtype} and {b.dtype}: a formula has one dtype. Convert one with "
            f".to({a.dtype})."
        )
    if a.device is not None and b.device is not None and a.device != b.device:
        return DeviceError, (
            f", on {a.device} and {b.device}: a formula has one device. Move one with "
            f".to({str(a.device)!r})."
        )
    batch = a.batch if a.batch == b.batch else _broadcast(a.batch, b.batch)
    if batch is None:
        return ShapeError, (
            f", whose batch dimensions are {a.batch} and {b.batch}: each pair must be equal, or "
            "one of them 1. Unsqueeze the one that is to be broadcast."
        )
    return Extent(
        batch,
        b.rows if a.rows is None else a.rows,
        b.columns if a.columns is None else a.columns,
        b.dtype if a.dtype is None else a.dtype,
        b.device if a.device is None else a.device,
    )


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Both broadcast, or None if they do not."""
    width = max(len(a), len(b))
    wide_a, wide_b = (1,) * (width - len(a)) + a, (1,) * (width - len(b)) + b
    for size, other in zip(wide_a, wide_b, strict=True):
        if size not in (1, other) and other != 1:
            return None
    return tuple(other if size == 1 else size for size, other in zip(wide_a, wide_b, strict=True))


def join(
    mine: tuple[Variable, ...], theirs: tuple[Variable, ...]
) -> tuple[tuple[Variable, ...], tuple[tuple[int, int, int, int], ...]]:
    """Both variables without repetitions, and the renumbering of theirs for `traced.renumbered`."""
    joined = list(mine)
    renumbering = []
    for k, variable in enumerate(theirs):
        m = _position(joined, variable)
        if m == len(joined):
            joined.append(variable)
        if m != k:
            renumbering.append((k, m, variable.dim, variable.cat))
    return tuple(joined), tuple(renumbering)


def _position(joined: list[Variable], variable: Variable) -> int:
    """Its number among the joined ones, or the next."""
    for m, known in enumerate(joined):
        if known.cat == variable.cat and known.dim == variable.dim and _same(known, variable):
            return m
        if known.place is not None and known.place == variable.place:
            raise ShapeError(
                f"argument {known.place} is {_symbol(known)} and {_symbol(variable)}: it must be "
                "one variable. Number the arguments from 0 on, each with one dimension."
            )
    return len(joined)


def _same(a: Variable, b: Variable) -> bool:
    if isinstance(a.value, Tensor) or isinstance(b.value, Tensor):
        return a.value is b.value
    return a.place == b.place and a.value == b.value


def _symbol(v: Variable) -> str:
    return f"{('Vi', 'Vj', 'Pm')[v.cat]}({v.place}, {v.dim})"


def places(variables: Sequence[Variable]) -> int:
    """How many arguments a call has: one more than the largest index."""
    found = [0]  # Dynamo takes no max of nothing with a default
    found.extend(1 + v.place for v in variables if v.place is not None)
    return max(found)


def values(variables: Sequence[Variable], known: Extent, given: Sequence[Any]) -> list[Any]:
    """The tensors of all variables: symbolic ones from the arguments, numbers in the dtype."""
    found = []
    for v in variables:
        if v.place is not None:
            found.append(given[v.place])
        elif isinstance(v.value, tuple):
            found.append(numbers(v.value, known))
        else:
            found.append(v.value)
    return found


def numbers(given: tuple[float, ...], known: Extent) -> Tensor:
    """Numbers as a tensor beside the others.

    It is kept for a stream that writes it once, where nobody traces or captures what is written.
    """
    device = known.device
    plain = not (compiling() or watched() or transformed() or torch.is_inference_mode_enabled())
    if device is None or not plain:
        return _written(given, known.dtype, device)
    if device.type != "cuda":
        stream = 0
    elif torch.cuda.is_current_stream_capturing():  # a graph reads its own memory
        return _written(given, known.dtype, device)
    else:
        stream = torch.cuda.current_stream(device).cuda_stream
    # by their bits: 0.0 equals -0.0
    return _kept_numbers(struct.pack(f"{len(given)}d", *given), known.dtype, device, stream)


@functools.lru_cache(256)
def _kept_numbers(
    bits: bytes, dtype: torch.dtype | None, device: torch.device, stream: int
) -> Tensor:
    return _written(struct.unpack(f"{len(bits) // 8}d", bits), dtype, device)


def _written(
    given: tuple[float, ...], dtype: torch.dtype | None, device: torch.device | None
) -> Tensor:
    if len(given) == 1:  # written on the device, nothing is copied to it
        return torch.full((1,), given[0], dtype=dtype, device=device)
    return torch.tensor(given, dtype=dtype, device=device)
