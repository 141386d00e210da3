"""The primitive operations: how torch computes each, and its derivative as a formula.

A derivative takes the operation's node n and the cotangent g, of n's dimension, to a contribution
Σ_k g_k ∂n_k/∂a for each argument a: None where it is zero, of n's dimension where the argument was
broadcast (its sum is then meant).

At the singular points 0 of sqrt and rsqrt the derivatives are 0, and rsqrt(0) = 0, so that the
gradients of norms and distances of coincident points are finite; those of atan2 at (0, 0) and of
powf in its exponent at 0 are 0 too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.reductions.formula.node import Node, const, expand, is_zero, node, total, zeros

__all__ = ["OPERATIONS", "Operation", "apply", "concat", "extract", "place", "power", "product"]

Contributions = tuple[Node | None, ...]


class Operation(NamedTuple):
    """A primitive operation.

    Args:
        value: of the values of the arguments, components last, and of the data.
        derivative: of the node and the cotangent, see the module.
    """

    value: Callable[[Sequence[Tensor], Any], Tensor]
    derivative: Callable[[Node, Node], Contributions]


# Constructors that leave out what does nothing


def apply(op: str, *args: Node) -> Node:
    """The node `op` without data."""
    return node(op, *args)


def power(f: Node, exponent: int) -> Node:
    """f^n for an integer n."""
    if exponent == 0:
        return expand(const(1), f.dim)
    if exponent == -1:
        return node("reciprocal", f)
    return f if exponent == 1 else node("pow", f, data=operator.index(exponent))


def extract(f: Node, start: int, dim: int) -> Node:
    """Components start to start + dim."""
    whole = node(
        "extract", f, data=(operator.index(start), operator.index(dim))
    )  # raises where they are not there
    if dim == f.dim:
        return f
    if f.op == "expand":
        return expand(f.args[0], dim)
    if f.op == "extract":
        return extract(f.args[0], f.data[0] + start, dim)
    if f.op in ("concat", "place"):
        first = f.data[0] if f.op == "place" else 0
        for part in f.args:
            if first <= start and start + dim <= first + part.dim:
                return extract(part, start - first, dim)
            first += part.dim
        if f.op == "place" and (start + dim <= f.data[0] or start >= first):
            return zeros(dim)
    return whole


def place(f: Node, start: int, dim: int) -> Node:
    """f at components start and on of dim, zeros around."""
    whole = node("place", f, data=(operator.index(start), operator.index(dim)))
    if dim == f.dim:
        return f
    return zeros(dim) if is_zero(f) else whole


def concat(*parts: Node) -> Node:
    """The components of one after those of the other."""
    found: list[Node] = []
    for part in (p for whole in parts for p in (whole.args if whole.op == "concat" else (whole,))):
        joined = _joined(found[-1], part) if found else None
        found[-1:] = [part] if not found else [joined] if joined else [found[-1], part]
    return node("concat", *found) if len(found) > 1 else found[0]


def _joined(a: Node, b: Node) -> Node | None:
    """Both as one, where they are neighbours in one formula."""
    if a.op != "extract" or b.op != "extract" or a.args != b.args:
        return None
    start = a.data[0]
    return extract(a.args[0], start, a.dim + b.dim) if start + a.dim == b.data[0] else None


def product(
    a: Node,
    b: Node,
    shape_a: Sequence[int],
    labels_a: str,
    shape_b: Sequence[int],
    labels_b: str,
    labels_out: str,
) -> Node:
    """Σ a[labels_a] · b[labels_b] over the labels that labels_out lacks, row-major.

    Each label is in two of the three at least, and once in each.
    """
    shape_a, shape_b = tuple(map(operator.index, shape_a)), tuple(map(operator.index, shape_b))
    data = (shape_a, labels_a, shape_b, labels_b, labels_out)
    whole = node("einsum", a, b, data=data)  # raises where they do not fit
    if is_zero(a) or is_zero(b):
        return zeros(whole.dim)
    (shape_a, labels_a), (shape_b, labels_b) = _axes(shape_a, labels_a), _axes(shape_b, labels_b)
    inside = dict.fromkeys(labels_a + labels_b)
    letter = {label: chr(ord("a") + k) for k, label in enumerate(inside)}
    labels_a, labels_b, labels_out = (
        "".join(letter[label] for label in labels if label in letter)
        for labels in (labels_a, labels_b, labels_out)
    )
    if (not labels_a and labels_b == labels_out) or (not labels_b and labels_a == labels_out):
        return a * b
    if labels_a == labels_b == labels_out:
        return a * b
    if labels_a == labels_b and "expand" in (a.op, b.op):
        return total(a * b)
    return node("einsum", a, b, data=(shape_a, labels_a, shape_b, labels_b, labels_out))


def _axes(shape: Sequence[int], labels: str) -> tuple[tuple[int, ...], str]:
    """The axes longer than 1."""
    long = [(size, label) for size, label in zip(shape, labels, strict=True) if size > 1]
    return tuple(size for size, _ in long), "".join(label for _, label in long)


# Values


def _of(function: Callable[..., Tensor]) -> Callable[[Sequence[Tensor], Any], Tensor]:
    return lambda args, data: function(*args)


def _sinxdivx(x: Tensor) -> Tensor:
    at_zero = x == 0
    safe = x.masked_fill(at_zero, 1)
    return (safe.sin() / safe).masked_fill(at_zero, 1)


def _one_hot(args: Sequence[Tensor], dim: int) -> Tensor:
    (x,) = args
    return ((x + 0.5).floor() == torch.arange(dim, device=x.device)).to(x.dtype)


def _concat(args: Sequence[Tensor], _: Any) -> Tensor:
    leading = torch.broadcast_shapes(*(a.shape[:-1] for a in args))  # type: ignore[no-untyped-call]
    return torch.cat([a.expand(*leading, a.shape[-1]) for a in args], -1)


def _einsum(args: Sequence[Tensor], data: Any) -> Tensor:
    """Batched matrix products: an i-only and a j-only factor meet only in the result."""
    shape_a, labels_a, shape_b, labels_b, labels_out = data
    a, b = (
        x.reshape(*x.shape[:-1], *shape) for x, shape in zip(args, (shape_a, shape_b), strict=True)
    )
    out = torch.einsum(f"...{labels_a},...{labels_b}->...{labels_out}", a, b)
    return out.flatten(-len(labels_out)) if labels_out else out[..., None]


def _pad(args: Sequence[Tensor], data: Any) -> Tensor:
    (x,), (start, dim) = args, data
    return torch.nn.functional.pad(x, (start, dim - start - x.shape[-1]))


# Derivatives


def _none(n: Node, g: Node) -> Contributions:
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
    log = apply("log", a + apply("equal", a, const(0)))  # log a, and 0 at 0
    return g * (b * node("powf", a, b - 1)), g * (log * n)


def _atan2(n: Node, g: Node) -> Contributions:
    a, b = n.args
    square = a * a + b * b
    share = g / (square + apply("equal", square, const(0)))
    return share * b, -(share * a)


def _ifelse(n: Node, g: Node) -> Contributions:
    c = n.args[0]
    nothing = const(0)
    return None, node("ifelse", c, g, nothing), node("ifelse", c, nothing, g)


def _sinxdivx_slope(x: Node, value: Node) -> Node:
    """(cos x − sin x / x) / x, by its series Σ_k (−1)^k 2k x^(2k−1) / (2k+1)! where |x| ≤ 2."""
    small = const(2) - apply("abs", x)
    safe = node("ifelse", small, const(2), x)
    square = x * x
    series = const(0)
    for k in range(14, 0, -1):
        series = series * square + const((-1) ** k * 2 * k / math.factorial(2 * k + 1))
    large = (apply("cos", safe) - apply("sinxdivx", safe)) / safe
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


OPERATIONS: dict[str, Operation] = {
    "add": Operation(_of(torch.add), lambda n, g: (g, g)),
    "sub": Operation(_of(torch.sub), lambda n, g: (g, -g)),
    "mul": Operation(_of(torch.mul), lambda n, g: (g * n.args[1], g * n.args[0])),
    "div": Operation(_of(torch.div), _div),
    "neg": Operation(_of(torch.neg), lambda n, g: (-g,)),
    "exp": Operation(_of(torch.exp), _slope(lambda x, e: e)),
    "log": Operation(_of(torch.log), lambda n, g: (g / n.args[0],)),
    "cos": Operation(_of(torch.cos), _slope(lambda x, c: -apply("sin", x))),
    "sin": Operation(_of(torch.sin), _slope(lambda x, s: apply("cos", x))),
    "asin": Operation(_of(torch.asin), _slope(lambda x, a: apply("rsqrt", 1 - x * x))),
    "acos": Operation(_of(torch.acos), _slope(lambda x, a: -apply("rsqrt", 1 - x * x))),
    "atan": Operation(_of(torch.atan), lambda n, g: (g / (1 + n.args[0] * n.args[0]),)),
    "sqrt": Operation(_of(torch.sqrt), _slope(lambda x, s: 0.5 * apply("rsqrt", x))),
    "rsqrt": Operation(
        _of(lambda x: x.rsqrt().masked_fill(x == 0, 0)), _slope(lambda x, r: -0.5 * power(r, 3))
    ),
    "reciprocal": Operation(_of(torch.reciprocal), _slope(lambda x, r: -(r * r))),
    "abs": Operation(_of(torch.abs), _slope(lambda x, a: apply("sign", x))),
    "sign": Operation(_of(torch.sign), _none),
    "step": Operation(_of(lambda x: (x >= 0).to(x.dtype)), _none),
    "floor": Operation(_of(torch.floor), _none),
    "round": Operation(lambda args, decimals: args[0].round(decimals=decimals), _none),
    "xlogx": Operation(_of(lambda x: x.xlogy(x)), _slope(lambda x, v: apply("log", x) + 1)),
    "sinxdivx": Operation(_of(_sinxdivx), _slope(_sinxdivx_slope)),
    "pow": Operation(
        lambda args, exponent: args[0].pow(exponent),
        lambda n, g: (g * (n.data * power(n.args[0], n.data - 1)),),
    ),
    "powf": Operation(_of(torch.pow), _powf),
    "atan2": Operation(_of(torch.atan2), _atan2),
    "equal": Operation(_of(lambda a, b: (a == b).to(a.dtype)), _none),
    "less": Operation(_of(lambda a, b: (a < b).to(a.dtype)), _none),
    "less_equal": Operation(_of(lambda a, b: (a <= b).to(a.dtype)), _none),
    "ifelse": Operation(_of(lambda c, a, b: torch.where(c >= 0, a, b)), _ifelse),
    "sum": Operation(
        _of(lambda x: x.sum(-1, keepdim=True)), lambda n, g: (expand(g, n.args[0].dim),)
    ),
    "expand": Operation(
        lambda args, dim: args[0].expand(*args[0].shape[:-1], dim), lambda n, g: (total(g),)
    ),
    "extract": Operation(
        lambda args, data: args[0].narrow(-1, *data),
        lambda n, g: (place(g, n.data[0], n.args[0].dim),),
    ),
    "place": Operation(_pad, lambda n, g: (extract(g, n.data[0], n.args[0].dim),)),
    "concat": Operation(_concat, _concat_derivative),
    "einsum": Operation(_einsum, _einsum_derivative),
    "sqdist": Operation(
        _of(lambda a, b: (a - b).square().sum(-1, keepdim=True)), _sqdist_derivative
    ),
    "argmin": Operation(_of(lambda x: x.argmin(-1, keepdim=True).to(x.dtype)), _none),
    "argmax": Operation(_of(lambda x: x.argmax(-1, keepdim=True).to(x.dtype)), _none),
    "one_hot": Operation(_one_hot, _none),
}
"""Each operation but the leaves `var` and `const`.

`pow` has an integer exponent as data, `round` its decimals, `expand` and `one_hot` a dimension,
`extract` (start, dimension), `place` (start, total dimension), `einsum` the arguments of `product`
behind the factors.  `ifelse`(c, a, b) is a where c ≥ 0; `one_hot` is of floor(x + ½); `argmin` and
`argmax` take the first of equals; `round` takes the even of two equally near.
"""
