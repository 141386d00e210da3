"""How many components an operation has, and the errors of arguments that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torchweft.errors import IndexRangeError, ShapeError

__all__ = ["POINTWISE", "broadcast", "dimension"]

POINTWISE = (
    frozenset(("add", "sub", "mul", "div", "neg", "reciprocal", "pow", "powf", "sqrt", "rsqrt"))
    | {"exp", "log", "xlogx", "cos", "sin", "sinxdivx", "asin", "acos", "atan", "atan2"}
    | {"abs", "sign", "step", "floor", "round", "equal", "less", "less_equal", "ifelse"}
)
"""Operations on each component; dimensions 1 and D broadcast."""


def dimension(op: str, dims: Sequence[int], data: Any) -> int:
    """The dimension of `op` with `data` on arguments of dimensions `dims`."""
    return broadcast(op, dims) if op in POINTWISE else _RULES[op](dims, data)


def broadcast(op: str, dims: Sequence[int]) -> int:
    """D of arguments of dimensions 1 and D."""
    dim = max(dims)
    if any(d not in (1, dim) for d in dims):
        raise ShapeError(
            f"{op} is given formulas of dimensions {_listed(dims)}: they must be equal, or 1. "
            "Reduce one with sum or elem, or take the components that match with extract."
        )
    return dim


def _listed(dims: Sequence[int]) -> str:
    return ", ".join(map(str, dims[:-1])) + f" and {dims[-1]}"


def _var_dim(_: Sequence[int], data: Any) -> int:
    index, dim, cat = data
    if dim < 1 or cat not in (0, 1, 2) or index < 0:
        raise ShapeError(
            f"Var({index}, {dim}, {cat}) has index {index}, dimension {dim} and category {cat}: "
            "the index must be 0 or more, the dimension 1 or more, the category 0 (i), 1 (j) or "
            "2 (parameter). Use Vi, Vj or Pm."
        )
    return int(dim)


def _expand_dim(dims: Sequence[int], dim: Any) -> int:
    if dims[0] != 1 or dim < 1:
        raise ShapeError(
            f"expand to dimension {dim} is given a formula of dimension {dims[0]}: the formula "
            "must be of dimension 1, the result of 1 or more. Reduce it with sum or elem."
        )
    return int(dim)


def _extract_dim(dims: Sequence[int], data: Any) -> int:
    start, dim = data
    if start < 0 or dim < 1 or start + dim > dims[0]:
        raise IndexRangeError(
            f"components {start} to {start + dim} are taken of a formula of dimension {dims[0]}: "
            f"they must be one or more, within 0 to {dims[0]}. Change the first component or the "
            "count."
        )
    return int(dim)


def _place_dim(dims: Sequence[int], data: Any) -> int:
    start, dim = data
    if start < 0 or start + dims[0] > dim:
        raise IndexRangeError(
            f"a formula of dimension {dims[0]} is placed at component {start} of {dim}: it must "
            f"end at or before {dim}. Change the first component or the total dimension."
        )
    return int(dim)


def _einsum_dim(dims: Sequence[int], data: Any) -> int:
    shape_a, labels_a, shape_b, labels_b, labels_out = data
    sizes: dict[str, int] = {}
    for given, shape, labels in ((dims[0], shape_a, labels_a), (dims[1], shape_b, labels_b)):
        if given != math.prod(shape):
            raise ShapeError(
                f"a product of tensors is given a formula of dimension {given} for a tensor of "
                f"shape {tuple(shape)}: the dimension must be {math.prod(shape)}. Change the shape "
                "or extract that many components."
            )
        for label, size in zip(labels, shape, strict=True):
            if sizes.setdefault(label, size) != size:
                raise ShapeError(
                    f"a product of tensors of shapes {tuple(shape_a)} and {tuple(shape_b)}, "
                    f"{labels_a!r} and {labels_b!r}, pairs axes of {sizes[label]} and {size}: they "
                    "must be equal. Change the shapes or the axes that are paired."
                )
    return math.prod([sizes[label] for label in labels_out])


def _sqdist_dim(dims: Sequence[int], _: Any) -> int:
    if dims[0] != dims[1]:
        raise ShapeError(
            f"sqdist is given formulas of dimensions {dims[0]} and {dims[1]}: they must be equal. "
            "Take the components that match with extract."
        )
    return 1


def _one_hot_dim(dims: Sequence[int], dim: Any) -> int:
    if dims[0] != 1 or dim < 1:
        raise ShapeError(
            f"one_hot of {dim} is given a formula of dimension {dims[0]}: the formula must be of "
            "dimension 1 and its result of 1 or more. Take one component with elem."
        )
    return int(dim)


_RULES: dict[str, Callable[[Sequence[int], Any], int]] = {
    "var": _var_dim,
    "const": lambda dims, data: 1,
    "inner": lambda dims, data: 1,
    "sum": lambda dims, data: 1,
    "expand": _expand_dim,
    "extract": _extract_dim,
    "place": _place_dim,
    "concat": lambda dims, data: sum(dims),
    "einsum": _einsum_dim,
    "sqdist": _sqdist_dim,
    "argmin": lambda dims, data: 1,
    "argmax": lambda dims, data: 1,
    "one_hot": _one_hot_dim,
}
