"""The table of primitive operations.

A row holds everything that the package knows of an operation: formula strings, `Genred`, the torch
path, the numba loops and Triton kernels that are printed, derivatives, simplification and texts
read this table.  A scalar function that expressions do not have yet also needs a row of
`core.expressions.expr.FUNCTIONS`, of `lowering.FORMATS` and, for numba, of `engine.numba_path`; a
method of `LazyTensor` is written in `lazy.operations`.

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
from torchweft.reductions.formula.evaluate import sqdist
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


def _dim_of_number(name: str, dims: Sequence[int], dim: Any) -> int:
    """The dimension `dim` of an operation on a formula of dimension 1."""
    if dims[0] != 1 or dim < 1:
        raise ShapeError(
            f"{name} to dimension {dim} is given a formula of dimension {dims[0]}: the formula "
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


def _sinxdivx_slope(x: Node) -> Node:
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


# Rows


def _stop(*_: Any) -> Any:
    raise NotImplementedError("a leaf has no arguments: evaluation and gradients stop there")


def _one(*_: Any) -> int:
    return 1


def _function(op: str) -> Callable[..., Any]:
    return functools.partial(lowering.function, op)


def _unary(
    op: str,
    name: str,
    doc: str,
    value: Callable[[Tensor], Tensor],
    derivative: Callable[[Node, Node, Node], Node | None] = lambda g, x, value: None,
) -> Primitive:
    """Core's function `op` of a number; the derivative takes the cotangent, x and the value."""
    return Primitive(doc, value, lambda n, g: (derivative(g, n.args[0], n),), _function(op), name)


def _comparison(op: str, name: str, sign: str, compare: Callable[..., Tensor]) -> Primitive:
    """Core's function `op` of two numbers, 0 or 1."""
    return Primitive(
        f"1 where a {sign} b, else 0",
        lambda a, b: compare(a, b).to(a.dtype),
        _zero,
        _function(op),
        name,
        arity=2,
    )


def _position(
    name: str, doc: str, best: Callable[..., Tensor], better: Callable[[Any, Any], Any]
) -> Primitive:
    """The position of the first of the best components, as `lowering.best` compares them."""
    return Primitive(
        doc,
        lambda x: best(x, -1, keepdim=True).to(x.dtype),
        _zero,
        lambda n, a: lowering.best(better, a),
        name,
        dimension=_one,
    )


PRIMITIVES |= {
    # leaves
    "var": Primitive(
        "variable `index`: data (index, dimension, category)",
        _stop,
        _stop,
        lowering.variable,
        dimension=_dim_of_var,
    ),
    "const": Primitive("a number: data", _stop, _stop, lambda n: (number(n.data),), dimension=_one),
    "inner": Primitive(
        "an inner sum that a kernel computes first: data, its number",
        _stop,
        _stop,
        lambda n: (leaf("s", n.data, {"i", "j"}),),
        dimension=_one,
    ),
    # arithmetic
    "add": Primitive("a + b", torch.add, lambda n, g: (g, g), add),
    "sub": Primitive("a − b", torch.sub, lambda n, g: (g, -g), lambda a, b: a - b),
    "mul": Primitive(
        "a b", torch.mul, lambda n, g: (g * n.args[1], g * n.args[0]), lowering.product
    ),
    "div": Primitive("a / b", torch.div, _div, lowering.divided),
    "neg": Primitive("−x", torch.neg, lambda n, g: (-g,), lambda a: -a),
    "pow": Primitive(
        "x^n of an integer n (data)",
        torch.pow,
        lambda n, g: (g * (n.data * power(n.args[0], n.data - 1)),),
        lowering.integer_power,
    ),
    "powf": Primitive("a^b of a > 0", torch.pow, _powf, _function("power")),
    # functions of one number
    "exp": Primitive("e^x", torch.exp, lambda n, g: (g * n,), lowering.exponential, "Exp"),
    "log": _unary("log", "Log", "log x", torch.log, lambda g, x, f: g / x),
    "cos": _unary("cos", "Cos", "cos x", torch.cos, lambda g, x, f: g * -node("sin", x)),
    "sin": _unary("sin", "Sin", "sin x", torch.sin, lambda g, x, f: g * node("cos", x)),
    "asin": _unary(
        "asin", "Asin", "arcsin x", torch.asin, lambda g, x, f: g * node("rsqrt", 1 - x * x)
    ),
    "acos": _unary(
        "acos", "Acos", "arccos x", torch.acos, lambda g, x, f: g * -node("rsqrt", 1 - x * x)
    ),
    "atan": _unary("atan", "Atan", "arctan x", torch.atan, lambda g, x, f: g / (1 + x * x)),
    "sqrt": _unary("sqrt", "Sqrt", "√x", torch.sqrt, lambda g, x, f: g * (0.5 * node("rsqrt", x))),
    "rsqrt": _unary(
        "rsqrt",
        "Rsqrt",
        "1 / √x, 0 at 0",
        lambda x: x.rsqrt().masked_fill(x == 0, 0),
        lambda g, x, f: g * (-0.5 * power(f, 3)),
    ),
    "reciprocal": _unary(
        "reciprocal", "Inv", "1 / x", torch.reciprocal, lambda g, x, f: g * -(f * f)
    ),
    "abs": _unary("abs", "Abs", "|x|", torch.abs, lambda g, x, f: g * node("sign", x)),
    "sign": _unary("sign", "Sign", "−1, 0 or 1", torch.sign),
    "step": _unary("step", "Step", "1 where x ≥ 0, else 0", lambda x: (x >= 0).to(x.dtype)),
    "floor": _unary("floor", "Floor", "the largest integer that is not above x", torch.floor),
    "round": Primitive(
        "x rounded to a number of decimals (data), halves to even",
        lambda x, decimals: x.round(decimals=decimals),
        _zero,
        lowering.rounded,
    ),
    "xlogx": _unary(
        "xlogx",
        "XLogX",
        "x log x, 0 at 0",
        lambda x: x.xlogy(x),
        lambda g, x, f: g * (node("log", x) + 1),
    ),
    "sinxdivx": _unary(
        "sinxdivx",
        "SinXDivX",
        "sin x / x, 1 at 0",
        _sinxdivx,
        lambda g, x, f: g * _sinxdivx_slope(x),
    ),
    # functions of several numbers
    "atan2": Primitive(
        "the angle of the point (b, a)", torch.atan2, _atan2, _function("atan2"), "Atan2", arity=2
    ),
    "equal": _comparison("equal", "Equal", "=", torch.eq),
    "less": _comparison("less", "LessThan", "<", torch.lt),
    "less_equal": _comparison("less_equal", "LessOrEqual", "≤", torch.le),
    "ifelse": Primitive(
        "a where c ≥ 0, else b",
        lambda c, a, b: torch.where(c >= 0, a, b),
        _ifelse,
        lowering.selected,
        "IfElse",
        arity=3,
    ),
    # vectors
    "sum": Primitive(
        "Σ_k x_k",
        lambda x: x.sum(-1, keepdim=True),
        lambda n, g: (expand(g, n.args[0].dim),),
        lambda n, a: (lowering.summed(a),),
        dimension=_one,
    ),
    "expand": Primitive(
        "x in each of several components: data, their number",
        lambda x, dim: x.expand(*x.shape[:-1], dim),
        lambda n, g: (total(g),),
        lambda n, a: a * n.dim,
        dimension=functools.partial(_dim_of_number, "expand"),
        view=True,
    ),
    "extract": Primitive(
        "components of x: data (start, dimension)",
        lambda x, data: x.narrow(-1, *data),
        lambda n, g: (place(g, n.data[0], n.args[0].dim),),
        lambda n, a: a[n.data[0] : n.data[0] + n.data[1]],
        dimension=_dim_of_extract,
        view=True,
    ),
    "place": Primitive(
        "x between zeros: data (start, total dimension)",
        _pad,
        lambda n, g: (extract(g, n.data[0], n.args[0].dim),),
        lowering.placed,
        dimension=_dim_of_place,
    ),
    "concat": Primitive(
        "the components of all arguments, one argument after the other",
        _concat,
        _concat_derivative,
        lambda n, *args: tuple(itertools.chain(*args)),
        dimension=lambda dims, data: sum(dims),
    ),
    "einsum": Primitive(
        "a product of tensors: data as `product` takes it after the factors",
        _einsum,
        _einsum_derivative,
        lowering.einsum,
        dimension=_dim_of_einsum,
        view=True,
    ),
    "sqdist": Primitive(
        "Σ_k (a_k − b_k)²",
        sqdist,
        _sqdist_derivative,
        lowering.squared_distance,
        dimension=_dim_of_sqdist,
    ),
    "argmin": _position(
        "ArgMin",
        "the position of the first of the smallest components",
        torch.argmin,
        lambda value, x: value - x,
    ),
    "argmax": _position(
        "ArgMax",
        "the position of the first of the largest components",
        torch.argmax,
        lambda value, x: x - value,
    ),
    "one_hot": Primitive(
        "1 in component ⌊x + ½⌋ of several, else 0: data, their number",
        _one_hot,
        _zero,
        lowering.one_hot,
        dimension=functools.partial(_dim_of_number, "one_hot"),
    ),
}
