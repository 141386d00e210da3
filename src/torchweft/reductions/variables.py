"""Variables of lazy tensors and of `Genred`, and the formulas of them.

A variable is a tensor (..., M, D) of category 0, one row for each i, (..., N, D) of category 1, one
for each j, or (..., D) of category 2, a parameter; or a few numbers, which take the dtype of the
other variables; or symbolic: argument number `place` of a call.

Formulas are nodes in eager mode.  torch.compile cannot trace interned objects, but it traces
strings and evaluates functions of constants.  So while it traces, a formula is its canonical text,
and what functions return for it is a constant of the compiled program.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.core.operators.operands import not_strided
from torchweft.core.operators.operator import (
    compiling,
    constant_when_compiling,
    transformed,
    watched,
)
from torchweft.errors import DeviceError, DTypeError, ShapeError, WeftError
from torchweft.reductions.call import KEPT, kept
from torchweft.reductions.formula.named import operations
from torchweft.reductions.formula.node import (
    Node,
    const,
    node,
    read,
    substitute,
    swap,
    var,
    variables,
)
from torchweft.reductions.formula.parse import parse, parse_aliases

__all__ = [
    "DTYPE_NAMES",
    "NO_EXTENT",
    "Extent",
    "Formula",
    "Variable",
    "agree",
    "applied",
    "components",
    "dimension",
    "extent",
    "extent_of",
    "join",
    "leaf",
    "number",
    "parsed",
    "places",
    "renumbered",
    "require_count",
    "require_declared",
    "require_real",
    "require_strided",
    "require_tensors",
    "shown",
    "swapped",
    "symbol",
    "text",
    "used",
    "values",
    "variable_of",
    "with_witness",
]

DTYPE_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
"""Supported dtypes, with their names in pykeops."""


class Variable(NamedTuple):
    """One variable of a formula.

    Args:
        value: a tensor, or numbers that take the dtype of the others; None if symbolic.
        place: position among the arguments of a call, if symbolic.
        dim: number of components.
        cat: 0 (i), 1 (j) or 2 (parameter).
    """

    value: Tensor | tuple[float, ...] | None
    place: int | None
    dim: int
    cat: int

    def __str__(self) -> str:
        return f"{('Vi', 'Vj', 'Pm')[self.cat]}({self.place}, {self.dim})"


class Extent(NamedTuple):
    """Sizes, dtype and device that the tensors of a formula share; None while unknown.

    Args:
        batch: batch dimensions.
        rows: M, the number of i.
        columns: N, the number of j.
        dtype: dtype of the tensors.
        device: device of the tensors.
    """

    batch: tuple[int, ...] = ()
    rows: int | None = None
    columns: int | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None


NO_EXTENT = Extent()


def variable_of(x: Tensor, axis: int | None) -> Variable:
    """The variable of a tensor, whose category its shape or the axis gives.

    0-D and 1-D: a parameter.  2-D: needs axis 0 (i), 1 (j) or 2.  More: (..., M, 1, D) varies with
    i, (..., 1, N, D) with j, (..., 1, 1, D) is a parameter.
    """
    require_strided(x)
    if x.dim() < 2:
        if axis not in (None, 2):
            raise ShapeError(
                f"x is {tuple(x.shape)} with axis={axis}: a tensor of one dimension is a "
                "parameter. Leave out axis, or pass (M, D) with axis=0 or (N, D) with axis=1."
            )
        return _tensor_variable(x.reshape(1) if x.dim() == 0 else x, 2)
    if x.dim() == 2 or axis == 2:
        if axis is None:
            raise ShapeError(
                f"x is {tuple(x.shape)} without an axis: a tensor of two dimensions varies with i "
                "or with j. Pass axis=0 or axis=1 (Vi or Vj), or x[:, None, :] or x[None, :, :]."
            )
        return _tensor_variable(x, axis)
    if axis is not None:
        raise ShapeError(
            f"x is {tuple(x.shape)} with axis={axis}: three dimensions and more say what x varies "
            "with. Leave out axis, or use Vi or Vj for (..., M, D) with batch dimensions."
        )
    first, second, _ = x.shape[-3:]
    if first != 1 and second != 1:
        raise ShapeError(
            f"x is {tuple(x.shape)}: a tensor of three dimensions and more must be (..., M, 1, D), "
            "which varies with i, (..., 1, N, D), with j, or (..., 1, 1, D), a parameter. "
            "Use x[:, None, :] or x[None, :, :]."
        )
    if first != 1:
        return _tensor_variable(x.squeeze(-2), 0)
    x = x.squeeze(-3)
    return _tensor_variable(x.squeeze(-2), 2) if second == 1 else _tensor_variable(x, 1)


def _tensor_variable(x: Tensor, cat: int) -> Variable:
    return Variable(x, None, components(cat, x.shape, x.dtype), cat)


def components(cat: int, shape: Sequence[int], dtype: torch.dtype) -> int:
    """D of a tensor (..., M, D), (..., N, D) or (..., D) of the category."""
    if cat not in (0, 1, 2):
        raise ShapeError(
            f"axis is {cat}: it must be 0 (varies with i), 1 (with j) or 2 (a parameter). Pass one "
            "of them."
        )
    if dtype not in DTYPE_NAMES:
        raise DTypeError(
            f"x is {dtype}: formulas are computed of {', '.join(DTYPE_NAMES.values())}. "
            "Convert it with .to(torch.float32)."
        )
    if len(shape) < (1 if cat == 2 else 2):
        raise ShapeError(
            f"x is {tuple(shape)}: a variable of {'ij'[cat]} is (..., {'MN'[cat]}, D). "
            "Pass x[:, None] for one component."
        )
    return operator.index(shape[-1])


def extent(variable: Variable) -> Extent:
    """The extent of one variable."""
    x = variable.value
    return (
        extent_of(variable.cat, x.shape, x.dtype, x.device) if isinstance(x, Tensor) else NO_EXTENT
    )


@kept
def extent_of(cat: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Extent:
    """The extent of a tensor of the category."""
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


def require_tensors(given: Sequence[Any]) -> None:
    """Raise DTypeError if an argument is not a strided tensor."""
    for place, x in enumerate(given):
        if not isinstance(x, Tensor):
            raise DTypeError(
                f"argument {place} is a {type(x).__name__}: it must be a tensor. Convert it, "
                "numbers with torch.tensor([...]), arrays with torch.from_numpy, or take "
                "torchweft.reductions.numpy."
            )
        require_strided(x)


def require_count(name: str, given: int, places: int) -> None:
    """Raise ShapeError if a call has another number of arguments than symbolic variables."""
    if given != places:
        raise ShapeError(
            f"the {name} is called with {given} arguments: it has {places} symbolic variables. "
            "Pass one tensor for each, by its index."
        )


def require_strided(x: Tensor) -> None:
    """Raise DTypeError if a tensor is not strided."""
    if x.layout is not torch.strided or x.is_nested:
        raise not_strided("x", x.layout)


def require_real(name: str, operands: Iterable[Any]) -> None:
    """Raise DTypeError if an operand is complex: its formula has two components for a number."""
    if any(operand.is_complex for operand in operands):
        raise DTypeError(
            f"{name} is given a ComplexLazyTensor beside a real one: it needs real ones. Take "
            "real, imag, abs or angle first."
        )


def require_declared(
    name: str, dim: int, cat: int, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Raise unless a tensor of this shape and dtype fits the declared variable."""
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
    """The extent of both; raises where they differ, with a text that `who(*of)` begins."""
    if b is NO_EXTENT:
        return a
    found = _agreed(a, b)
    if isinstance(found, Extent):
        return found
    error, text = found
    raise error(who(*of) + text)


@kept
def _agreed(a: Extent, b: Extent) -> Extent | tuple[type[WeftError], str]:
    """The extent of both, or an error and the end of its text."""
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
        a.dtype or b.dtype,
        a.device or b.device,
    )


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """The broadcast batch dimensions, or None if they do not broadcast."""
    width = max(len(a), len(b))
    pairs = list(zip((1,) * (width - len(a)) + a, (1,) * (width - len(b)) + b, strict=True))
    if any(size not in (1, other) and other != 1 for size, other in pairs):
        return None
    return tuple(other if size == 1 else size for size, other in pairs)


def join(
    mine: tuple[Variable, ...], theirs: tuple[Variable, ...]
) -> tuple[tuple[Variable, ...], tuple[tuple[int, int, int, int], ...]]:
    """All variables without repetitions, and the renumbering of theirs for `renumbered`."""
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
    """The number of a variable among the joined ones, or the next number."""
    for m, known in enumerate(joined):
        if known.cat == variable.cat and known.dim == variable.dim and _same(known, variable):
            return m
        if known.place is not None and known.place == variable.place:
            raise ShapeError(
                f"argument {known.place} is {known} and {variable}: it must be "
                "one variable. Number the arguments from 0 on, each with one dimension."
            )
    return len(joined)


def _same(a: Variable, b: Variable) -> bool:
    if isinstance(a.value, Tensor) or isinstance(b.value, Tensor):
        return a.value is b.value
    return a.place == b.place and a.value == b.value


def places(variables: Sequence[Variable]) -> int:
    """The number of arguments of a call: one more than the largest place."""
    found = [0]  # Dynamo takes no max of nothing with a default
    found.extend(1 + v.place for v in variables if v.place is not None)
    return max(found)


def values(variables: Sequence[Variable], known: Extent, given: Sequence[Any] = ()) -> list[Any]:
    """The tensors of all variables; symbolic ones are arguments, or None without arguments."""
    found: list[Any] = []
    for v in variables:
        if v.place is not None:
            found.append(given[v.place] if given else None)
        else:
            found.append(numbers(v.value, known) if type(v.value) is tuple else v.value)
    return found


def numbers(given: tuple[float, ...], known: Extent) -> Tensor:
    """Numbers as a tensor of the extent's dtype and device.

    It is cached for each stream, except while a call is traced or captured.
    """
    device = known.device
    plain = not (compiling() or watched() or transformed() or torch.is_inference_mode_enabled())
    if device is None or not plain:
        return _tensor_of(given, known.dtype, device)
    if device.type != "cuda":
        stream = 0
    elif torch.cuda.is_current_stream_capturing():  # a graph needs memory of its own, and no copy
        return torch.cat([_tensor_of((value,), known.dtype, device) for value in given])
    else:
        stream = torch.cuda.current_stream(device).cuda_stream
    # the key holds their bits: 0.0 equals -0.0
    return _cached_numbers(struct.pack(f"{len(given)}d", *given), known.dtype, device, stream)


@functools.lru_cache(256)
def _cached_numbers(
    bits: bytes, dtype: torch.dtype | None, device: torch.device, stream: int
) -> Tensor:
    return _tensor_of(struct.unpack(f"{len(bits) // 8}d", bits), dtype, device)


def _tensor_of(
    given: tuple[float, ...], dtype: torch.dtype | None, device: torch.device | None
) -> Tensor:
    if len(given) == 1:  # fills memory on the device, without a copy
        return torch.full((1,), given[0], dtype=dtype, device=device)
    return torch.tensor(given, dtype=dtype, device=device)


# Formulas

Formula = Node | str

_STEPS: dict[str, Callable[..., Any]] = {}


def applied(
    name: str, formulas: tuple[Formula, ...], moves: tuple[Any, ...], data: tuple[Any, ...]
) -> Any:
    """The operation `name` of formulas, whose variables are first `renumbered` by `moves`."""
    if compiling():
        return _folded(name, tuple(map(text, map(renumbered, formulas, moves))), data)
    return _cached(name, formulas, data, moves)


@functools.lru_cache(KEPT)
def _cached(
    name: str, formulas: tuple[Formula, ...], data: tuple[Any, ...], moves: tuple[Any, ...] = ()
) -> Any:
    # text where tracing began the formula, and its graph broke
    nodes = [read(f) if isinstance(f, str) else f for f in formulas]
    moved = map(renumbered, nodes, moves) if moves else nodes
    return _function(name)(*moved, *data)


@constant_when_compiling
def _folded(name: str, texts: tuple[str, ...], data: tuple[Any, ...]) -> Any:
    result = _function(name)(*map(read, texts), *data)
    return str(result) if isinstance(result, Node) else result


def _function(name: str) -> Callable[..., Any]:
    return _STEPS[name] if name in _STEPS else operations()[name]


def _step(count: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn a function of `count` nodes, and of data, into one of formulas."""

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        _STEPS[name] = function

        @functools.wraps(function)
        def step(*given: Any) -> Any:
            formulas, data = given[:count], given[count:]
            if compiling():
                return _folded(name, tuple(map(text, formulas)), data)
            return _cached(name, formulas, data)

        return step

    return decorated


@_step(0)
def leaf(index: int, dim: int, cat: int) -> Node:
    """Variable number `index`."""
    return var(index, dim, cat)


@_step(0)
def number(value: int) -> Node:
    """A constant."""
    return const(value)


@_step(0)
def parsed(formula: str, aliases: tuple[str, ...]) -> Node:
    """The formula of a formula string."""
    return parse(formula, parse_aliases(aliases))


@_step(1)
def dimension(f: Node) -> int:
    """The number of components."""
    return f.dim


@_step(1)
def swapped(f: Node) -> Node:
    """The formula with i and j exchanged."""
    return swap(f)


@_step(1)
def with_witness(f: Node, index: int, cat: int) -> Node:
    """f + v, where v is a further variable that is 0 and gives the number of i or j."""
    return node("add", f, var(index, 1, cat))


@_step(1)
def _renumbered(f: Node, *renumbering: tuple[int, int, int, int]) -> Node:
    return substitute(f, {var(k, d, c): var(m, d, c) for k, m, d, c in renumbering})


def renumbered(f: Formula, renumbering: tuple[tuple[int, int, int, int], ...]) -> Any:
    """The formula with variable k, of dimension d and category c, as number m: for (k, m, d, c)."""
    return _renumbered(f, *renumbering) if renumbering else f


@_step(2)
def _used(*formulas: Node) -> tuple[tuple[int, int], ...]:
    found = {v for f in formulas for v in variables(f)}
    return tuple(sorted((v.data[0], v.data[2]) for v in found))


def used(f: Formula, weight: Formula | None) -> tuple[tuple[int, int], ...]:
    """(number, category) of the variables of both."""
    return tuple(_used(f) if weight is None else _used(f, weight))


def text(f: Formula) -> str:
    """The canonical text."""
    return f if isinstance(f, str) else _text(f)


@constant_when_compiling
def _text(f: Node) -> str:
    return _cached_text(f)


_cached_text = functools.lru_cache(KEPT)(str)


MOST_CHARACTERS = 300
"""Characters of a formula that `shown` prints; the rest is cut."""

_INFIX = {"add": ("+", 1), "sub": ("-", 1), "mul": ("*", 2), "div": ("/", 2)}
"""Signs, and how strongly they bind."""


def shown(f: Formula) -> str:
    """The formula in ordinary notation, cut after MOST_CHARACTERS."""
    text, _ = _shown(read(f) if isinstance(f, str) else f, {})
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _shown(f: Node, found: dict[Node, tuple[str, int]]) -> tuple[str, int]:
    """The text of f, and how strongly its operator binds."""
    if f not in found:
        text, strength = _written(f, [_shown(a, found) for a in f.args])
        # cut here too: the text of a shared argument could double with each operation
        found[f] = text[: MOST_CHARACTERS + 1], strength
    return found[f]


def _written(f: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
    if f.op == "var":
        index, _, cat = f.data
        return f"{'xyp'[cat]}{index}", 4
    if f.op == "const":
        return f"{f.data:g}" if isinstance(f.data, int | float) else str(f.data), 4
    if f.op in _INFIX:
        sign, strength = _INFIX[f.op]
        (a, weak), (b, other) = args
        left = f"({a})" if weak < strength else a
        right = f"({b})" if other <= strength else b
        return f"{left} {sign} {right}", strength
    if f.op == "neg":
        ((a, weak),) = args
        return f"-({a})" if weak < 2 else f"-{a}", 2
    data = [] if f.data is None else [str(f.data)]
    return f"{f.op}({', '.join([*(a for a, _ in args), *data])})", 4
