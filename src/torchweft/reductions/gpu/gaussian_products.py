"""Gaussian-like reductions on tensor cores: the exponent of a pair is one product of 16 numbers.

For f = exp(g |u − v|² + a + b) w, where u and a vary with i, v, b and w with j, g with neither,

    g |u − v|² + a + b = g |u|² + a − 2 g u·v + g |v|² + b

A float16 keeps 11 bits, as many as tf32 at half the time; high and low parts, each rounded, 22:

    [uh, uh, ul, αh, αl, 1, 1] · [vh, vl, vh, 1, 1, βh, βl]      α = g |u|² + a, β = g |v|² + b

holds it up to 2⁻²² of its terms, which the points' distances to their centre bound.  That is for
D ≤ 4 coordinates; for up to WIDEST the product is −2 g u·v alone, by three of float16 ("tf32x3") of
high and low parts, or by one where less is asked for.  Both factors are scaled by √(2 |g|), so they
lie in the range of float16 where exponents do.  The centre is the mean of v.
Where that bound is not that of float32, nothing is written and a guard, on the device, tells the
kernel of differences to run: no cloud, wherever it lies, is summed less exactly, and nobody waits
for the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.gpu.launcher import Launcher, Queued, Tile, current_device, launch_all
from torchweft.core.printing.modules import written
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.kernel_forms import Exponent, exponent, factors
from torchweft.reductions.formula.node import Node, const

__all__ = [
    "SHIFTED",
    "SUMS",
    "WIDTH",
    "Operands",
    "Split",
    "centre_of",
    "high_low",
    "is_split",
    "narrowed",
    "operands",
    "split",
    "to_power_of_2",
    "within",
]

WIDTH = 16
"""Least numbers of a product: high and low parts are 3 D + 4 of them for D coordinates."""

SUMS, SHIFTED = 8.0, 256.0
"""Exponents, in powers of 2, up to which the terms of a product may go.

The error of an exponent is 2⁻²² of its terms: 2e-6 of a sum, and 6e-5 of a logarithm of one, which
is what the rounding of scores of that size costs in float32.
"""

LOG2E = 1 / math.log(2)
LARGEST, LARGEST_SPLIT = 2.0**28, 2.0**12
"""Exponents whose factors float16 holds; and those that it holds themselves."""

LOWEST, LOWEST_SPLIT = -1e30, -3e4
"""Half the exponent of a column that fills a tile up."""


class Split(NamedTuple):
    """exp(exponent) · rows · columns, of one component."""

    exponent: Exponent
    rows: Node
    columns: Node


@functools.lru_cache(maxsize=256)
def split(f: Node) -> Split | None:
    """The parts of a formula that is exp(exponent) times factors of i and of j; else None."""
    if f.dim != 1:
        return None
    pairs = [n for n in factors(f) if {0, 1} <= n.cats]
    if len(pairs) != 1 or pairs[0].op != "exp":
        return None
    found = exponent(pairs[0].args[0])
    if found is None:
        return None
    rows, columns = const(1), const(1)
    for n in factors(f):
        if 1 in n.cats and n is not pairs[0]:
            columns = columns * n
        elif n is not pairs[0]:
            rows = rows * n
    return Split(found, rows, columns)


def is_split(f: Split) -> bool:
    """Whether all of the exponent is one product of high and low parts."""
    return 3 * f.exponent.left.dim + 4 <= WIDTH


class Operands(NamedTuple):
    """Of a kernel of products.

    Args:
        guard: 1 where the bound holds, else 0, int32; `checks` come before.
        narrow: 1 where terms of rows and of columns alone may become factors, else 0; None where
            that is settled.
        x: the rows of the left factor, (B, M, width); with high and low parts apart (B, M, 2, ·).
        y: those of the right, (B, whole tiles of N, ·).
        a: what is added for rows, where it is not in the product or the factors, else None.
        b: for columns.
        rows: factors of rows.
        columns: factors of columns, 0 where they fill a tile up.
        width: of the product.
        checks: launches that settle the guards.
    """

    guard: Tensor
    narrow: Tensor | None
    x: Tensor
    y: Tensor
    a: Tensor | None
    b: Tensor | None
    rows: Tensor
    columns: Tensor
    width: int
    checks: tuple[Queued, ...]


def operands(
    f: Split,
    values: Mapping[int, Tensor],
    sizes: tuple[int, int, int],
    width: int,
    most: float,
    precision: str,
) -> Operands:
    """The operands of a kernel of products: factors in float16, the rest in float32.

    Args:
        f: the formula.
        values: the variables by index, (B or 1, M or N or 1, dim), float32.
        sizes: batch entries, rows and columns.
        width: columns of a tile: the operand is filled up to whole tiles.
        most: how large exponents may be, in powers of 2; where that is SUMS, terms of rows and of
            columns alone become factors.
        precision: of products that are not of high and low parts.
    """
    e = f.exponent
    like = next(iter(values.values()))

    def evaluated(f: Node, length: int) -> Tensor:
        return evaluate(f, values).to(like).expand(sizes[0], length, f.dim)

    u, v = evaluated(e.left, sizes[1]), evaluated(e.right, sizes[2])
    centre = centre_of(v)
    u, v = (u - centre).double(), (v - centre).double()
    g, to_left, to_right = _roots(
        e.factor.data if e.factor.op == "const" else evaluated(e.factor, 1).double()
    )
    gu2, gv2 = (g * (p * p).sum(-1, keepdim=True) for p in (u, v))
    alpha = gu2 + LOG2E * evaluated(e.rows, sizes[1])
    beta = gv2 + LOG2E * evaluated(e.columns, sizes[2])
    terms = (gu2, gv2, alpha, beta)
    guard = _one(like)
    checks = within(terms, min(most, LARGEST_SPLIT if is_split(f) else LARGEST), guard)
    left, right = to_left * u, to_right * v
    more = -sizes[2] % width
    outside = evaluated(f.rows, sizes[1]).contiguous()
    weights = pad(evaluated(f.columns, sizes[2]), (0, 0, 0, more)).contiguous()
    if not is_split(f):
        x, y = (_parts(t, precision) for t in (left, right))
        y = pad(y, (0, 0) * (y.dim() - 2) + (0, more)).contiguous()
        width = x.shape[-1]
        if most == SUMS:
            outside = (outside * alpha.exp2()).float()
            weights = weights * pad(beta.exp2().float(), (0, 0, 0, more))
            return Operands(guard, None, x, y, None, None, outside, weights, width, checks)
        b = pad(beta.float(), (0, 0, 0, more), value=2 * LOWEST)
        narrow = _one(like)
        a, checks = alpha.float(), (*checks, *within(terms, SUMS, narrow))
        return Operands(guard, narrow, x, y, a, b, outside, weights, width, checks)
    (uh, ul), (vh, vl) = high_low(left), high_low(right)
    one = uh.new_ones(sizes[0], 1, 1)
    rows = torch.cat((uh, uh, ul, *high_low(alpha), *[one.expand(-1, sizes[1], -1)] * 2), -1)
    columns = torch.cat((vh, vl, vh, *[one.expand(-1, sizes[2], -1)] * 2, *high_low(beta)), -1)
    x, y = _filled(rows, 0, 0.0), _filled(columns, more, LOWEST_SPLIT)
    return Operands(guard, None, x, y, None, None, outside, weights, WIDTH, checks)


def centre_of(points: Tensor) -> Tensor:
    """Their mean, (B, 1, D)."""
    # torch loads a kernel when it is first used, 4 to 34 ms: here few are, and of few kinds
    return points.sum(1, keepdim=True) * (1 / points.shape[1])


def _roots(factor: float | Tensor) -> tuple[Any, Any, Any]:
    """g = log₂e · factor, −sign(g) √(2 |g|) and √(2 |g|)."""
    g = LOG2E * factor
    if isinstance(g, float):
        root = math.sqrt(2 * abs(g))
        return g, -math.copysign(root, g), root
    roots = (2 * g.abs()).sqrt()
    return g, -g.sign() * roots, roots


def _one(like: Tensor) -> Tensor:
    return torch.ones((), dtype=torch.int32, device=like.device)


def within(terms: Sequence[Tensor], most: float, guard: Tensor) -> tuple[Queued, ...]:
    """Launches that make the guard 0 where a term exceeds the bound; NaN exceeds it."""
    return tuple([Queued(_bound(t.numel(), most, t.device), [t, guard], t.nbytes) for t in terms])


@functools.lru_cache(maxsize=256)
def _bound(count: int, most: float, _: torch.device) -> Launcher:
    """Compiled code belongs to a device."""
    kernel = written("torchweft.reductions.gpu.kernels", "within_kernel")
    return Launcher(kernel, -(-count // TERMS), (), (count,), (most,), Tile((TERMS,), 4, 1))


TERMS = 1024
"""Terms of a program."""


def narrowed(made: Operands) -> tuple[Operands, Operands]:
    """Those with terms of rows and columns as factors, where they may be; and for all others."""
    narrow, a, b = made.narrow, made.a, made.b
    assert narrow is not None
    assert a is not None
    assert b is not None
    with current_device(narrow):
        launch_all(made.checks)
    rows, columns = made.rows * a.exp2(), made.columns * b.exp2()
    made = made._replace(checks=())
    near = made._replace(guard=narrow, a=None, b=None, rows=rows, columns=columns)
    return near, made._replace(guard=made.guard * (1 - narrow))


def _parts(t: Tensor, precision: str) -> Tensor:
    """The operand of a product, filled up to a power of 2."""
    parts = [to_power_of_2(part) for part in high_low(t)]
    return torch.stack(parts, -2) if precision == "tf32x3" else parts[0]


def _filled(rows: Tensor, more: int, value: float) -> Tensor:
    """Rows of a power of 2 of numbers, `more` of them with `value` in their last two columns."""
    dim = rows.shape[-1]
    rows = to_power_of_2(pad(rows, (0, 0, 0, more)))
    if more and value:
        rows[:, -more:, dim - 2 : dim] = value
    return rows


def to_power_of_2(rows: Tensor) -> Tensor:
    """Rows of a power of 2 of numbers, filled up with zeros."""
    dim = rows.shape[-1]
    return pad(rows, (0, max(WIDTH, 1 << (dim - 1).bit_length()) - dim)).contiguous()


def high_low(a: Tensor) -> tuple[Tensor, Tensor]:
    """Two float16 whose sum keeps 22 bits of a float64."""
    high = a.half()
    return high, (a - high.double()).half()
