"""The table of primitive operations: one row holds all that the package knows of one.

To add a primitive, add a row: formula strings, `Genred`, the torch path, the printed loops of numba
and kernels of Triton, derivatives, simplification and texts all read this table.  A scalar function
that expressions do not have yet is also a row of `core.expressions.expr.FUNCTIONS`, of
`scalars.lines.FORMATS` and, for numba, of `cpu.source`; a method of `LazyTensor` stands in
`front.arithmetic`.

At the singular points 0 of sqrt and rsqrt the derivatives are 0, and rsqrt(0) = 0, so that the
gradients of norms and distances of coincident points are finite; those of atan2 at (0, 0) and of
powf in its exponent at 0 are 0 too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.expressions.expr import add, leaf
from torchweft.core.expressions.expr import const as number
from torchweft.errors import IndexRangeError, ShapeError
from torchweft.reductions.formula import lowering
from torchweft.reductions.formula.distances import sqdist
from torchweft.reductions.formula.node import (
    PRIMITIVES,
    Node,
    Primitive,
    const,
    expand,
    extract,
    node,
    place,
    power,
    product,
    total,
)

__all__ = ["PRIMITIVES"]

Contributions = tuple[Node | None, ...]


# Dimensions


def _dim_of_var(_: Sequence[int], data: Any) -> int:
    index, dim, cat = data
    if dim < 1 or cat not in (0, 1, 2) or index < 0:
        raise ShapeError(
            f"Var({index}, {dim}, {cat}) has index {index}, dimension {dim} and category {cat}: "
            "the index must be 0 or more, the dimension 1 or more, the category 0 (i), 1 (j) or "
            "2 (parameter). Use Vi, Vj or Pm."
        )
    return int(dim)


def _dim_of_expand(dims: Sequence[int], dim: Any) -> int:
    if dims[0] != 1 or dim < 1:
        raise ShapeError(
            f"expand to dimension {dim} is given a formula of dimension {dims[0]}: the formula "
            "must be of dimension 1, the result of 1 or more. Reduce it with sum or elem."
        )
    return int(dim)


def _dim_of_extract(dims: Sequence[int], data: Any) -> int:
    start, dim = data
    if start < 0 or dim < 1 or start + dim > dims[0]:
        raise IndexRangeError(
            f"components {start} to {start + dim} are taken of a formula of dimension {dims[0]}: "
            f"they must be one or more, within 0 to {dims[0]}. Change the first component or the "
            "count."
        )
    return int(dim)


def _dim_of_place(dims: Sequence[int], data: Any) -> int:
    start, dim = data
    if start < 0 or start + dims[0] > dim:
        raise IndexRangeError(
            f"a formula of dimension {dims[0]} is placed at component {start} of {dim}: it must "
            f"end at or before {dim}. Change the first component or the total dimension."
        )
    return int(dim)


def _dim_of_einsum(dims: Sequence[int], data: Any) -> int:
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


def _dim_of_sqdist(dims: Sequence[int], _: Any) -> int:
    if dims[0] != dims[1]:
        raise ShapeError(
            f"sqdist is given formulas of dimensions {dims[0]} and {dims[1]}: they must be equal. "
            "Take the components that match with extract."
        )
    return 1


def _dim_of_one_hot(dims: Sequence[int], dim: Any) -> int:
    if dims[0] != 1 or dim < 1:
        raise ShapeError(
            f"one_hot of {dim} is given a formula of dimension {dims[0]}: the formula must be of "
            "dimension 1 and its result of 1 or more. Take one component with elem."
        )
    return int(dim)


# Values


def _sinxdivx(x: Tensor) -> Tensor:
    at_zero = x == 0
    safe = x.masked_fill(at_zero, 1)
    return (safe.sin() / safe).masked_fill(at_zero, 1)


def _one_hot(x: Tensor, dim: int) -> Tensor:
    return ((x + 0.5).floor() == torch.arange(dim, device=x.device)).to(x.dtype)


def _concat(*args: Tensor) -> Tensor:
    leading = torch.broadcast_shapes(*(a.shape[:-1] for a in args))  # type: ignore[no-untyped-call]
    return torch.cat([a.expand(*leading, a.shape[-1]) for a in args], -1)


def _einsum(x: Tensor, y: Tensor, data: Any) -> Tensor:
    """Batched matrix products: an i-only and a j-only factor meet only in the result."""
    shape_a, labels_a, shape_b, labels_b, labels_out = data
    a, b = x.reshape(*x.shape[:-1], *shape_a), y.reshape(*y.shape[:-1], *shape_b)
    out = torch.einsum(f"...{labels_a},...{labels_b}->...{labels_out}", a, b)
    return out.flatten(-len(labels_out)) if labels_out else out[..., None]


def _pad(x: Tensor, data: Any) -> Tensor:
    start, dim = data
    return torch.nn.functional.pad(x, (start, dim - start - x.shape[-1]))


# Derivatives


def _zero(n: Node, g: Node) -> Contributions:
    return (None,) * len(n.args)


def _slope(
    function: Callable[[Node, Node], Node],
) -> Callable[[Node, Node], Contributions]:
    """The derivative of a pointwise function by its slope, of the argument and the value."""
    return lambda n, g: (g * function(n.args[0], n),)


def _div(n: Node, g: Node) -> Contributions:
    share = g / n.args[1]
    return share, -(share * n)


def _powf(n: Node, g: Node) -> Contributions:
    a, b = n.args
    log = node("log", a + node("equal", a, const(0)))  # log a, and 0 at 0
    return g * (b * node("powf", a, b - 1)), g * (log * n)


def _atan2(n: Node, g: Node) -> Contributions:
    a, b = n.args
    square = a * a + b * b
    share = g / (square + node("equal", square, const(0)))
    return share * b, -(share * a)


def _ifelse(n: Node, g: Node) -> Contributions:
    c = n.args[0]
    nothing = const(0)
    return None, node("ifelse", c, g, nothing), node("ifelse", c, nothing, g)


def _sinxdivx_slope(x: Node, value: Node) -> Node:
    """(cos x − sin x / x) / x, by its series Σ_k (−1)^k 2k x^(2k−1) / (2k+1)! where |x| ≤ 2."""
    small = const(2) - node("abs", x)
    safe = node("ifelse", small, const(2), x)
    square = x * x
    series = const(0)
    for k in range(14, 0, -1):
        series = series * square + const((-1) ** k * 2 * k / math.factorial(2 * k + 1))
    large = (node("cos", safe) - node("sinxdivx", safe)) / safe
    return node("ifelse", small, series * x, large)


def _concat_derivative(n: Node, g: Node) -> Contributions:
    starts = [0]
    for a in n.args:
        starts.append(starts[-1] + a.dim)
    return tuple(extract(g, start, a.dim) for start, a in zip(starts, n.args, strict=False))


def _einsum_derivative(n: Node, g: Node) -> Contributions:
    a, b = n.args
    shape_a, labels_a, shape_b, labels_b, labels_out = n.data
    sizes = dict(zip(labels_a + labels_b, shape_a + shape_b, strict=True))
    shape_out = tuple(sizes[label] for label in labels_out)
    return (
        product(g, b, shape_out, labels_out, shape_b, labels_b, labels_a),
        product(g, a, shape_out, labels_out, shape_a, labels_a, labels_b),
    )


def _sqdist_derivative(n: Node, g: Node) -> Contributions:
    a, b = n.args
    step = 2 * (g * (a - b))
    return step, -step


def _leaf(*_: Any) -> Any:
    raise NotImplementedError("a leaf has no arguments: evaluate and gradients stop there")


def _one(_: Sequence[int], __: Any) -> int:
    return 1


def _unary(
    doc: str,
    name: str,
    value: Callable[..., Tensor],
    derivative: Callable[[Node, Node], Contributions],
    op: str,
    *,
    into: Callable[..., Tensor] | None = None,
) -> Primitive:
    """A function of one number that core knows by the name `op`."""
    return Primitive(doc, 1, value, derivative, _function(op), name, into=into)


def _function(op: str) -> Callable[..., Any]:
    return functools.partial(lowering.function, op)


PRIMITIVES |= {
    "var": Primitive(
        "variable `index`: data (index, dimension, category)",
        0,
        _leaf,
        _leaf,
        lowering.variable,
        dimension=_dim_of_var,
    ),
    "const": Primitive(
        "a number: data", 0, _leaf, _leaf, lambda n: (number(n.data),), dimension=_one
    ),
    "inner": Primitive(
        "the sum of this number that a kernel loops for",
        0,
        _leaf,
        _leaf,
        lambda n: (leaf("s", n.data, {"i", "j"}),),
        dimension=_one,
    ),
    "add": Primitive(
        "a + b", 2, torch.add, lambda n, g: (g, g), add, into=torch.add, sign=("+", 1)
    ),
    "sub": Primitive(
        "a − b",
        2,
        torch.sub,
        lambda n, g: (g, -g),
        lambda a, b: a - b,
        into=torch.sub,
        sign=("-", 1),
    ),
    "mul": Primitive(
        "a b",
        2,
        torch.mul,
        lambda n, g: (g * n.args[1], g * n.args[0]),
        lowering.product,
        into=torch.mul,
        sign=("*", 2),
    ),
    "div": Primitive("a / b", 2, torch.div, _div, lowering.divided, into=torch.div, sign=("/", 2)),
    "neg": Primitive("−x", 1, torch.neg, lambda n, g: (-g,), lambda a: -a, into=torch.neg),
    "exp": Primitive(
        "e^x", 1, torch.exp, _slope(lambda x, e: e), lowering.exponential, "Exp", into=torch.exp
    ),
    "log": _unary("log x", "Log", torch.log, lambda n, g: (g / n.args[0],), "log", into=torch.log),
    "cos": _unary(
        "cos x", "Cos", torch.cos, _slope(lambda x, c: -node("sin", x)), "cos", into=torch.cos
    ),
    "sin": _unary(
        "sin x", "Sin", torch.sin, _slope(lambda x, s: node("cos", x)), "sin", into=torch.sin
    ),
    "asin": _unary(
        "arcsin x", "Asin", torch.asin, _slope(lambda x, a: node("rsqrt", 1 - x * x)), "asin"
    ),
    "acos": _unary(
        "arccos x", "Acos", torch.acos, _slope(lambda x, a: -node("rsqrt", 1 - x * x)), "acos"
    ),
    "atan": _unary(
        "arctan x", "Atan", torch.atan, lambda n, g: (g / (1 + n.args[0] * n.args[0]),), "atan"
    ),
    "sqrt": _unary(
        "√x",
        "Sqrt",
        torch.sqrt,
        _slope(lambda x, s: 0.5 * node("rsqrt", x)),
        "sqrt",
        into=torch.sqrt,
    ),
    "rsqrt": _unary(
        "1 / √x, 0 at 0",
        "Rsqrt",
        lambda x: x.rsqrt().masked_fill(x == 0, 0),
        _slope(lambda x, r: -0.5 * power(r, 3)),
        "rsqrt",
    ),
    "reciprocal": _unary(
        "1 / x",
        "Inv",
        torch.reciprocal,
        _slope(lambda x, r: -(r * r)),
        "reciprocal",
        into=torch.reciprocal,
    ),
    "abs": _unary("|x|", "Abs", torch.abs, _slope(lambda x, a: node("sign", x)), "abs"),
    "sign": _unary("−1, 0 or 1", "Sign", torch.sign, _zero, "sign"),
    "step": _unary("1 where x ≥ 0, else 0", "Step", lambda x: (x >= 0).to(x.dtype), _zero, "step"),
    "floor": _unary(
        "the largest integer that is not above x", "Floor", torch.floor, _zero, "floor"
    ),
    "round": Primitive(
        "x to some decimals (data), the even one of two equally near",
        1,
        lambda x, decimals: x.round(decimals=decimals),
        _zero,
        lowering.rounded,
    ),
    "xlogx": _unary(
        "x log x, 0 at 0",
        "XLogX",
        lambda x: x.xlogy(x),
        _slope(lambda x, v: node("log", x) + 1),
        "xlogx",
    ),
    "sinxdivx": _unary(
        "sin x / x, 1 at 0", "SinXDivX", _sinxdivx, _slope(_sinxdivx_slope), "sinxdivx"
    ),
    "pow": Primitive(
        "x^n of an integer n (data)",
        1,
        torch.pow,
        lambda n, g: (g * (n.data * power(n.args[0], n.data - 1)),),
        lowering.integer_power,
    ),
    "powf": Primitive("a^b of a > 0", 2, torch.pow, _powf, _function("power")),
    "atan2": Primitive(
        "the angle of the point (b, a)", 2, torch.atan2, _atan2, _function("atan2"), "Atan2"
    ),
    "equal": Primitive(
        "1 where a = b, else 0",
        2,
        lambda a, b: (a == b).to(a.dtype),
        _zero,
        _function("equal"),
        "Equal",
    ),
    "less": Primitive(
        "1 where a < b, else 0",
        2,
        lambda a, b: (a < b).to(a.dtype),
        _zero,
        _function("less"),
        "LessThan",
    ),
    "less_equal": Primitive(
        "1 where a ≤ b, else 0",
        2,
        lambda a, b: (a <= b).to(a.dtype),
        _zero,
        _function("less_equal"),
        "LessOrEqual",
    ),
    "ifelse": Primitive(
        "a where c ≥ 0, else b",
        3,
        lambda c, a, b: torch.where(c >= 0, a, b),
        _ifelse,
        lowering.selected,
        "IfElse",
    ),
    "sum": Primitive(
        "Σ_k x_k",
        1,
        lambda x: x.sum(-1, keepdim=True),
        lambda n, g: (expand(g, n.args[0].dim),),
        lambda n, a: (lowering.summed(a),),
        dimension=_one,
    ),
    "expand": Primitive(
        "x in each of so many components (data)",
        1,
        lambda x, dim: x.expand(*x.shape[:-1], dim),
        lambda n, g: (total(g),),
        lambda n, a: a * n.dim,
        dimension=_dim_of_expand,
        view=True,
    ),
    "extract": Primitive(
        "components of x: data (start, dimension)",
        1,
        lambda x, data: x.narrow(-1, *data),
        lambda n, g: (place(g, n.data[0], n.args[0].dim),),
        lambda n, a: a[n.data[0] : n.data[0] + n.data[1]],
        dimension=_dim_of_extract,
        view=True,
    ),
    "place": Primitive(
        "x among zeros: data (start, total dimension)",
        1,
        _pad,
        lambda n, g: (extract(g, n.data[0], n.args[0].dim),),
        lowering.placed,
        dimension=_dim_of_place,
    ),
    "concat": Primitive(
        "the components of all, one after the other",
        None,
        _concat,
        _concat_derivative,
        lambda n, *args: tuple(itertools.chain(*args)),
        dimension=lambda dims, data: sum(dims),
    ),
    "einsum": Primitive(
        "a product of tensors: data as `product` takes it behind the factors",
        2,
        _einsum,
        _einsum_derivative,
        lowering.einsum,
        dimension=_dim_of_einsum,
        view=True,
    ),
    "sqdist": Primitive(
        "Σ_k (a_k − b_k)²",
        2,
        sqdist,
        _sqdist_derivative,
        lowering.squared_distance,
        dimension=_dim_of_sqdist,
        fresh=True,
    ),
    "argmin": Primitive(
        "the position of the first of the smallest components",
        1,
        lambda x: x.argmin(-1, keepdim=True).to(x.dtype),
        _zero,
        lambda n, a: lowering.best(lambda value, x: value - x, a),
        "ArgMin",
        _one,
    ),
    "argmax": Primitive(
        "the position of the first of the largest components",
        1,
        lambda x: x.argmax(-1, keepdim=True).to(x.dtype),
        _zero,
        lambda n, a: lowering.best(lambda value, x: x - value, a),
        "ArgMax",
        _one,
    ),
    "one_hot": Primitive(
        "1 in component ⌊x + ½⌋ of so many (data), else 0",
        1,
        _one_hot,
        _zero,
        lowering.one_hot,
        dimension=_dim_of_one_hot,
    ),
}
