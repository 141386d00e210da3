"""Gaussian-like reductions on tensor cores: the exponent of a pair is one product of 16 numbers.

For f = exp(g |u − v|² + a + b) w, where u and a vary with i, v, b and w with j, g with neither,

    g |u − v|² + a + b = g |u|² + a − 2 g u·v + g |v|² + b

A float16 keeps 11 bits, as many as tf32 at half the time; high and low parts, each rounded, 22:

    [uh, uh, ul, αh, αl, 1, 1] · [vh, vl, vh, 1, 1, βh, βl]      α = g |u|² + a, β = g |v|² + b

holds the exponent up to 2⁻²² of its terms, which the distances of the points to their centre bound.
That is for D ≤ 4 coordinates; for up to WIDEST the product is −2 g u·v alone, by three products of
float16 ("tf32x3") of high and low parts, or by one where a lower precision is asked for.  Both
factors are scaled by √(2 |g|), so they lie in the range of float16 where exponents do.  The centre
is the mean of v.

Sums of vectors take one exponential a pair for all components:

    f_ij = concat of  exp(exponent) · r_i · c_j    and    exp(exponent) · r_i · c_j · (u_i − v_j)
    S_i = Σ_j exp(exponent) C_j,  C = [c, c v],  Σ_j f_ij = r_i S_i or r_i (u_i S_i[c] − S_i[c v])

with u and v less the centre, so gradients of a sum are sums of this kind.  A few columns of C are
added up pair by pair (a product of tf32 parts would be as fast, with eight times the error of plain
sums: tensor cores cut digits off at every step); many are a second product, P @ C, in bfloat16
parts of 24 bits: six products.

Where the bound is not that of float32, or where one of many columns has numbers that are not finite
or too large for parts, nothing is written, and a guard on the device makes the kernel of
differences run: no cloud, wherever it lies, is summed less exactly, and the host never waits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.backend import interpreted
from torchweft.core.gpu.launcher import (
    Call,
    Kernel,
    Launcher,
    Queued,
    Tile,
    compile_together,
    current_device,
    launch_all,
    processors,
)
from torchweft.core.printing.modules import written
from torchweft.reductions.call import ReductionData
from torchweft.reductions.formula.evaluate import evaluate
from torchweft.reductions.formula.kernel_forms import WIDEST, Exponent, exponent, factors, moments
from torchweft.reductions.formula.node import Node, const
from torchweft.reductions.gpu.source import TILES_PER_BLOCK

__all__ = ["allowed", "cached_kernel", "high_low", "may_serve", "moment_sums", "padded", "products"]

GAUSSIAN_KERNELS = "torchweft.reductions.gpu.gaussian_kernels"

PRODUCT_TILES = {
    "split": Tile((64, 128, TILES_PER_BLOCK), 4, 3),
    "three": Tile((128, 128, TILES_PER_BLOCK), 8, 2),
    "three, wide": Tile((128, 64, TILES_PER_BLOCK), 4, 1),
    "three, no wgmma": Tile((64, 32, TILES_PER_BLOCK), 8, 1),
    "one": Tile((128, 64, TILES_PER_BLOCK), 4, 3),
    "one, wide": Tile((128, 128, TILES_PER_BLOCK), 8, 2),
}
"""Tiles of products on tensor cores."""

MOMENT_TILES = {
    ("few", True): Tile((64, 64, 32), 4, 3, registers=128),
    ("few", False): Tile((64, 64, 32), 4, 2, registers=128),
    ("many", True): Tile((64, 64, 16), 4, 2),
    ("many", False): Tile((64, 64, 16), 4, 2),
}
"""Tiles of sums of few and of many columns, where the exponent is one product and elsewhere."""

LEAST_ROWS = 256
"""Rows for each processor from which the rows alone make enough programs."""

LEAST_COLUMNS = 2**12
"""Columns from which products are worth their preparation."""

FEW_MOMENTS = 4
"""Columns of C that are added up pair by pair."""

MOMENTS_PER_PRODUCT = 64
"""Columns of C in one product."""

MOST_MOMENTS = 512
"""Columns of C up to which exponentials are computed again for each product."""

PRODUCT_WIDTH = 16
"""Least length of a product: high and low parts are 3 D + 4 numbers for D coordinates."""

LARGEST_EXPONENT = {"sums": 8.0, "shifted": 256.0}
"""Bound of the terms of a product, as powers of 2.

The error of an exponent is 2⁻²² of its terms: 2e-6 of a sum, and 6e-5 of a logarithm of one, which
is what the rounding of scores of that size costs in float32.
"""

LARGEST_FACTOR, LARGEST_SPLIT_FACTOR = 2.0**28, 2.0**12
"""Largest exponents whose factors float16 holds, and that float16 holds themselves."""

LARGEST_PARTS = 2.0**100
"""Largest numbers that bfloat16 parts can hold."""

PADDED_EXPONENT, PADDED_SPLIT_EXPONENT = -1e30, -3e4
"""Half the exponent of a column that fills a tile up."""

TERMS_PER_PROGRAM = 1024

LOG2E = 1 / math.log(2)


class Split(NamedTuple):
    """exp(exponent) · rows · columns, of one component."""

    exponent: Exponent
    rows: Node
    columns: Node

    @property
    def in_one_product(self) -> bool:
        """Whether one product of high and low parts holds the whole exponent."""
        return 3 * self.exponent.left.dim + 4 <= PRODUCT_WIDTH


class ProductOperands(NamedTuple):
    """Operands of a kernel of products.

    Args:
        guard: int32, 1 where the bound holds, else 0, once the checks have run.
        narrow: int32, 1 where terms of rows and of columns alone may become factors, else 0; None
            where the choice does not depend on the data.
        x: rows of the left factor, (B, M, width), or (B, M, 2, width) with high and low parts.
        y: rows of the right factor, (B, N filled up to whole tiles, width) or (B, ·, 2, width).
        a: addends of rows, where they are neither in the product nor in the factors, else None.
        b: addends of columns.
        rows: factors of rows.
        columns: factors of columns, 0 where they fill a tile up.
        width: length of the product.
        checks: launches that set the guards.
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


def allowed(data: ReductionData) -> bool:
    """Whether a call may use tensor cores."""
    blocks, options = data.blocks, data.options
    plain = blocks is None and options.accumulate == "auto" and options.precision != "ieee"
    single = all(v.dtype == torch.float32 for v in data.values.values())
    return plain and single and torch.version.hip is None


def may_serve(data: ReductionData) -> bool:
    """Whether rows alone make enough programs, and columns pay for the preparation."""
    batch, rows, columns = data.sizes
    enough = batch * rows >= LEAST_ROWS * processors(data.like.device) and columns >= LEAST_COLUMNS
    return enough and allowed(data)


@functools.lru_cache(maxsize=256)
def split(f: Node, w: Node | None = None) -> Split | None:
    """The parts of exp(exponent) times factors of i and of j, or of the exponent f and weight w.

    None for formulas of other kinds.
    """
    if w is not None:
        found = exponent(f)
        plain = found is not None and w.dim == 1 and w.cats <= {1, 2}
        return Split(found, const(1), w) if found is not None and plain else None
    pairs = [n for n in factors(f) if {0, 1} <= n.cats]
    if f.dim != 1 or len(pairs) != 1 or pairs[0].op != "exp":
        return None
    if (found := exponent(pairs[0].args[0])) is None:
        return None
    rows, columns = const(1), const(1)
    for n in factors(f):
        if 1 in n.cats and n is not pairs[0]:
            columns = columns * n
        elif n is not pairs[0]:
            rows = rows * n
    return Split(found, rows, columns)


# sums and shifted sums of numbers


def products(
    kind: str, formulas: Sequence[Node], data: ReductionData, results: Sequence[Tensor]
) -> tuple[Any, ...]:
    """The guard of a Gaussian-like reduction, and the launches that precede the kernel of pairs.

    Empty where tensor cores do not serve it.
    """
    if not may_serve(data) or (found := split(*formulas)) is None:
        return ()
    device, precision = data.like.device, data.options.precision
    tile = PRODUCT_TILES[_way(found, precision or "tf32x3", device)]
    most = LARGEST_EXPONENT[kind] if precision is None else math.inf
    made = operands(found, data, tile.blocks[1], most)
    weighted = kind == "shifted" and found.columns is not const(1)
    mixes = found.in_one_product and precision is None and not weighted
    # the few additions of exponents take half the time of sums
    among = narrowed(made) if kind == "sums" and made.a is not None else (made,)
    batch, rows, _ = data.sizes
    tiles = -(-rows // tile.blocks[0])
    name, queued = f"split_{kind}_kernel", []
    for m in among:
        numbers = (rows, m.y.shape[1], tiles)
        constants: tuple[Any, ...] = (m.width, m.a is not None, m.x.dim() - 2, mixes)
        given = [m.x, m.y, m.a, m.b, m.rows, m.columns, m.guard, *results]
        if kind == "shifted":
            constants = (weighted, *constants)
            del given[4]
        launcher = _launcher(name, batch * tiles, numbers, constants, tile, device)
        room = sum(t.nbytes for t in m if isinstance(t, Tensor))
        queued.append(Queued(launcher, given, room))
    return made.guard, *among[0].checks, *queued


@functools.lru_cache(maxsize=4096)
def _launcher(
    name: str,
    programs: int,
    numbers: tuple[int, ...],
    constants: tuple[Any, ...],
    tile: Tile,
    _: torch.device,
) -> Launcher:
    """One for each device, to which compiled code belongs."""
    return Launcher(written(GAUSSIAN_KERNELS, name), programs, (), numbers, constants, tile)


@functools.lru_cache(maxsize=4096)
def cached_kernel(
    module: str, name: str, constants: tuple[Any, ...], tile: Tile, _: torch.device
) -> Kernel:
    """One for each device, to which compiled code belongs."""
    return Kernel(written(module, name), (), constants, tile)


def _way(found: Split, precision: str, device: torch.device) -> str:
    """The key of PRODUCT_TILES."""
    if found.in_one_product:
        return "split"
    wide = ", wide" if found.exponent.left.dim > WIDEST // 2 else ""
    if precision != "tf32x3":
        return f"one{wide}"
    if not interpreted() and torch.cuda.get_device_capability(device) < (9, 0):
        return "three, no wgmma"
    return f"three{wide}"


def operands(f: Split, data: ReductionData, width: int, most: float) -> ProductOperands:
    """The operands of a kernel of products: factors in float16, the rest in float32.

    Args:
        f: the formula.
        data: variables of float32.
        width: columns of a tile: the right operand is filled up to whole tiles.
        most: bound of the exponents, as powers of 2; for that of sums, terms of rows and of columns
            alone become factors.
    """
    e, (batch, rows, columns) = f.exponent, data.sizes
    u, v = _evaluated(e.left, data, rows), _evaluated(e.right, data, columns)
    centre = _centre_of(v)
    u, v = (u - centre).double(), (v - centre).double()
    g, to_left, to_right = _roots(
        e.factor.data if e.factor.op == "const" else _evaluated(e.factor, data, 1).double()
    )
    gu2, gv2 = (g * (p * p).sum(-1, keepdim=True) for p in (u, v))
    alpha = gu2 + LOG2E * _evaluated(e.rows, data, rows)
    beta = gv2 + LOG2E * _evaluated(e.columns, data, columns)
    terms = (gu2, gv2, alpha, beta)
    guard = _one(u)
    largest = LARGEST_SPLIT_FACTOR if f.in_one_product else LARGEST_FACTOR
    checks = within(terms, min(most, largest), guard)
    left, right = to_left * u, to_right * v
    more = -columns % width
    outside = _evaluated(f.rows, data, rows).contiguous()
    weights = pad(_evaluated(f.columns, data, columns), (0, 0, 0, more)).contiguous()
    if f.in_one_product:
        (uh, ul), (vh, vl) = high_low(left), high_low(right)
        one = uh.new_ones(batch, 1, 1)
        x = torch.cat((uh, uh, ul, *high_low(alpha), *[one.expand(-1, rows, -1)] * 2), -1)
        y = torch.cat((vh, vl, vh, *[one.expand(-1, columns, -1)] * 2, *high_low(beta)), -1)
        x, y = padded(x), _padded_columns(y, more)
        width = PRODUCT_WIDTH
        return ProductOperands(guard, None, x, y, None, None, outside, weights, width, checks)
    x, y = (_parts_of_factor(t, data.options.precision or "tf32x3") for t in (left, right))
    y = pad(y, (0, 0) * (y.dim() - 2) + (0, more)).contiguous()
    width = x.shape[-1]
    if most == LARGEST_EXPONENT["sums"]:
        outside = (outside * alpha.exp2()).float()
        weights = weights * pad(beta.exp2().float(), (0, 0, 0, more))
        return ProductOperands(guard, None, x, y, None, None, outside, weights, width, checks)
    b = pad(beta.float(), (0, 0, 0, more), value=2 * PADDED_EXPONENT)
    narrow = _one(u)
    checks += within(terms, LARGEST_EXPONENT["sums"], narrow)
    a = alpha.float()
    return ProductOperands(guard, narrow, x, y, a, b, outside, weights, width, checks)


def _evaluated(f: Node, data: ReductionData, length: int) -> Tensor:
    """(B, length, dim): a formula of rows, of columns or of parameters."""
    return evaluate(f, data.values).to(data.like).expand(data.sizes.batch, length, f.dim)


def _centre_of(points: Tensor) -> Tensor:
    """Their mean, (B, 1, D)."""
    # torch takes 4 to 34 ms to load each kernel that is new: few different ones are used here
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
    """Launches that set the guard to 0 where a term exceeds the bound or is NaN."""
    tile = Tile((TERMS_PER_PROGRAM,), 4, 1)
    queued = []
    for t in terms:
        programs = -(-t.numel() // TERMS_PER_PROGRAM)
        launcher = _launcher("within_kernel", programs, (t.numel(),), (most,), tile, t.device)
        queued.append(Queued(launcher, [t, guard], t.nbytes))
    return tuple(queued)


def narrowed(made: ProductOperands) -> tuple[ProductOperands, ProductOperands]:
    """Operands with terms of rows and columns as factors, where they may be, and for all others."""
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


def _parts_of_factor(t: Tensor, precision: str) -> Tensor:
    """The operand of a product, filled up to a power of 2."""
    parts = [padded(part) for part in high_low(t)]
    return torch.stack(parts, -2) if precision == "tf32x3" else parts[0]


def _padded_columns(columns: Tensor, more: int) -> Tensor:
    """Columns of a power of 2 of numbers, followed by columns whose exponentials are 0."""
    dim = columns.shape[-1]
    columns = padded(pad(columns, (0, 0, 0, more)))
    if more:
        columns[:, -more:, dim - 2 : dim] = PADDED_SPLIT_EXPONENT
    return columns


def padded(rows: Tensor) -> Tensor:
    """Rows of a power of 2 of numbers, filled up with zeros."""
    dim = rows.shape[-1]
    width = max(PRODUCT_WIDTH, 1 << (dim - 1).bit_length())
    return pad(rows, (0, width - dim)).contiguous()


def high_low(a: Tensor) -> tuple[Tensor, Tensor]:
    """Two float16 whose sum keeps 22 bits of a float64."""
    high = a.half()
    return high, (a - high.double()).half()


# sums of vectors


def moment_sums(f: Node, data: ReductionData) -> tuple[Tensor, Tensor] | None:
    """(B, M, f.dim) sums of a Gaussian times vectors, and the guard that says if they hold.

    None for other formulas, and for too many columns.
    """
    of = moments(f) if f.dim > 1 else None
    if of is None or not may_serve(data):
        return None
    _, rows, columns = data.sizes
    names: dict[tuple[Node, bool], int] = {}
    for t in of.terms:
        names.setdefault((t.columns, False), t.columns.dim)
        if t.sign:
            names.setdefault((t.columns, True), of.exponent.left.dim)
    count = sum(names.values())
    if count > MOST_MOMENTS:
        return None
    one = Split(of.exponent, const(1), const(1))
    tile = MOMENT_TILES["few" if count <= FEW_MOMENTS else "many", one.in_one_product]
    exact = data._replace(options=data.options._replace(precision=None))
    made = operands(one, exact, tile.blocks[1], LARGEST_EXPONENT["sums"])
    v = _evaluated(of.exponent.right, data, columns)
    centre = _centre_of(v)
    found = [_evaluated(c, data, columns) * (v - centre if turned else 1) for c, turned in names]
    weights = pad(torch.cat(found, -1), (0, 0, 0, made.columns.shape[1] - columns)) * made.columns
    summed = _moments(made, weights, tile, rows)
    apart = torch.split(summed * made.rows, list(names.values()), -1)
    at = dict(zip(names, apart, strict=True))
    u = _evaluated(of.exponent.left, data, rows) - centre
    results = []
    for t in of.terms:
        s = at[t.columns, False]
        moment = t.sign * (u * s - at[t.columns, True]) if t.sign else s
        results.append(_evaluated(t.rows, data, rows) * moment)
    return torch.cat(results, -1), made.guard


def _moments(made: ProductOperands, weights: Tensor, tile: Tile, rows: int) -> Tensor:
    """(B, M, E): P @ C."""
    batch, columns, count = weights.shape
    few, parts = count <= FEW_MOMENTS, made.x.dim() - 2
    block = count if few else min(MOMENTS_PER_PRODUCT, max(16, 1 << (count - 1).bit_length()))
    blocks = -(-count // block)
    checks = made.checks
    if few:
        stored = weights.transpose(1, 2).contiguous()
    else:
        stored = _bfloat16_parts(pad(weights, (0, blocks * block - count)))
        checks += within([weights], LARGEST_PARTS, made.guard)
    out = weights.new_empty(batch, blocks * block, rows)
    tiles = -(-rows // tile.blocks[0])
    name = f"{'few' if few else 'many'}_moments_kernel"
    with current_device(weights):
        kernel = cached_kernel(
            GAUSSIAN_KERNELS, name, (made.width, parts, block), tile, weights.device
        )
        given = [made.x, made.y, stored, made.guard, out]
        numbers = (rows, columns, tiles, blocks)
        calls = [Call(check.launcher.kernel, check.operands) for check in checks]
        compile_together([Call(kernel, given, numbers), *calls])
        launch_all(checks)
        kernel(batch * tiles * blocks, given, numbers, out.nbytes + stored.nbytes)
    return out[:, :count].transpose(1, 2)


def _bfloat16_parts(a: Tensor) -> Tensor:
    """(3, ...) bfloat16 whose sum is a float32."""
    high = a.bfloat16()
    middle = (a - high.float()).bfloat16()
    low = (a - high.float() - middle.float()).bfloat16()
    return torch.stack((high, middle, low))
