"""Kernels of the fully connected product: pairs of blades, back from their gradients, the norm.

    t_(p,j)[b,n] = s[b,n] · Σ_((i,k) ∈ path p, e_i e_k = ±e_j) ± x_i[b,n] · y_k[b,n]

s is 1, or the product of both gates Φ(x₀) Φ(y₀).  The pairs of out grade g are the left factor of
one matrix product with the weights of its paths, so they lie as (blade j, row b, path p, feature
n), grade after grade.  A program owns neighbouring rows and features, a thread some of them with
all their blades in registers: x, y and every pair cross memory once.  Bound: memory.
"""

from __future__ import annotations

import functools
import itertools
from types import ModuleType
from typing import NamedTuple

import triton
import triton.language as tl

from weft.clifford.algebra import Algebra
from weft.core import emit
from weft.core.launcher import Tile

__all__ = [
    "DIALECTS",
    "Layout",
    "Norm",
    "Pair",
    "layout",
    "norm_kernels",
    "norm_tile",
    "pair_kernels",
    "pair_tile",
    "scale_kernel",
]


class Pair(NamedTuple):
    """One of the pairs: where it lies, and its terms.

    Args:
        before: pairs of earlier grades, and of earlier blades of its grade.
        paths: how many paths lead to its grade.
        path: which of them it belongs to.
        terms: (sign, left blade, right blade); none where the metric's zeros cancel them.
    """

    before: int
    paths: int
    path: int
    terms: tuple[tuple[int, int, int], ...]


class Layout(NamedTuple):
    """How an algebra's pairs lie in memory.

    Args:
        pairs: by out grade, then blade, then path.
        paths: of each out grade, as places in `Algebra.paths`.
    """

    pairs: tuple[Pair, ...]
    paths: tuple[tuple[int, ...], ...]


@functools.cache
def layout(algebra: Algebra) -> Layout:
    """The pairs of an algebra."""
    of_pair: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for term in algebra.terms:
        i, j, k, sign = term
        path = algebra.path_of[algebra.grades_of(term)]
        of_pair.setdefault((j, path), []).append((sign, i, k))
    paths = tuple(
        tuple(p for p, (_, out, _) in enumerate(algebra.paths) if out == grade)
        for grade in range(algebra.n + 1)
    )
    per_blade = [len(paths[grade]) for grade in algebra.grades]
    pairs = tuple(
        Pair(before, per_blade[j], at, tuple(of_pair.get((j, path), ())))
        for j, before in enumerate(itertools.accumulate(per_blade[:-1], initial=0))
        for at, path in enumerate(paths[algebra.grades[j]])
    )
    return Layout(pairs, paths)


@triton.jit(do_not_specialize=["R"])
def scale_kernel(
    x_ptr, y_ptr, scale_ptr,
    R, F, stride_xb, stride_xr, stride_xf, stride_yb, stride_yr, stride_yf,
    TERMS: tl.constexpr, D: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """scale[b] = 2^k with 2^14 ≤ scale[b] · TERMS · max|x[:,b]| · max|y[:,b]| < 2^15.

    |k| ≤ 60, so that two scales multiply without overflow.  y may be None.  A program owns a row.
    """
    row = tl.program_id(0).to(tl.int64)
    blade = tl.arange(0, D)[:, None]  # [D, 1]
    x_ptr += row * stride_xr
    x_most = tl.zeros((D, BLOCK_F), tl.float32)
    y_most = tl.zeros((D, BLOCK_F), tl.float32)
    for first in range(0, F, BLOCK_F):
        f = first + tl.arange(0, BLOCK_F)[None, :]  # [1, BLOCK_F]
        x = tl.load(x_ptr + blade * stride_xb + f * stride_xf, mask=f < F, other=0.0)
        x_most = tl.maximum(x_most, tl.abs(x.to(tl.float32)))
        if y_ptr is not None:
            at = y_ptr + row * stride_yr + blade * stride_yb + f * stride_yf
            y = tl.load(at, mask=f < F, other=0.0)
            y_most = tl.maximum(y_most, tl.abs(y.to(tl.float32)))
    bound = TERMS * tl.max(tl.max(x_most, axis=1), axis=0)
    if y_ptr is not None:
        bound *= tl.max(tl.max(y_most, axis=1), axis=0)
    exponent = 127 - (bound.to(tl.int32, bitcast=True) >> 23)  # of 1 / bound, rounded up
    k = tl.minimum(tl.maximum(exponent + 14, -60), 60)
    tl.store(scale_ptr + row, ((127 + k) << 23).to(tl.float32, bitcast=True))


DIALECTS = {
    "gluon": (
        "from triton.experimental import gluon\n"
        "from triton.experimental.gluon import language as tl\n",
        "@gluon.jit",
        "    LAYOUT: tl.constexpr = tl.BlockedLayout(\n"
        "        [BLOCK // (32 * tl.num_warps())], [32], [tl.num_warps()], [0])\n"
        "    e = tl.arange(0, BLOCK, layout=LAYOUT)\n",
    ),
    "triton": (
        "import triton\nimport triton.language as tl\n",
        "@triton.jit",
        "    e = tl.arange(0, BLOCK)\n",
    ),
}
"""Imports, decorator, and the numbers of a program's elements.

Gluon is told the layout that Triton would search for: large kernels compile in seconds instead of
minutes.  Triton's own spelling is for the interpreter and for other vendors.
"""

ACCUMULATOR = """\
    ACC: tl.constexpr = tl.float64 if {first}_ptr.dtype.element_ty == tl.float64 else tl.float32
    block = R.to(tl.int64) * F
"""

PAIRS_HEAD = """

{jit}(do_not_specialize=["R"])
def {name}_kernel(
    x_ptr, y_ptr, t_ptr, {operands}R, F,
    stride_xb, stride_xr, stride_xf, stride_yb, stride_yr, stride_yf, {strides}
    BLOCK: tl.constexpr, BLOCK_F: tl.constexpr,
):
{arange}{accumulator}    num_f = (F + BLOCK_F - 1) // BLOCK_F
    pid = tl.program_id(0)
    f = pid % num_f * BLOCK_F + e % BLOCK_F
    row = pid.to(tl.int64) // num_f * (BLOCK // BLOCK_F) + e // BLOCK_F
    m = (f < F) & (row < R)
"""

NORM_HEAD = """

{jit}(do_not_specialize=["R"])
def {name}_kernel({operands}R, F, {strides}BLOCK: tl.constexpr):
{arange}{accumulator}    row = tl.program_id(0).to(tl.int64)
"""


@functools.cache
def pair_kernels(
    algebra: Algebra, gated: bool, scaled: bool, dialect: str, gradients: str = ""
) -> ModuleType:
    """The module with `pairs_kernel`, or with the `turn_kernel` of some gradients.

    Args:
        algebra: whose pairs.
        gated: whether x and y are scaled by their gates.
        scaled: whether pairs, and what is computed from their gradients, have a factor for each
            row in `scale_ptr`.
        dialect: a key of DIALECTS.
        gradients: "x", "y" or "xy": what `turn_kernel` computes from the pairs' gradients.
    """
    name = "turn" if gradients else "pairs"
    operands = "scale_ptr, " * scaled + "".join(f"g{v}_ptr, " for v in gradients)
    imports, jit, arange = DIALECTS[dialect]
    head = PAIRS_HEAD.format(
        jit=jit,
        arange=arange,
        accumulator=ACCUMULATOR.format(first="x"),
        name=name,
        operands=operands,
        strides="stride_gb," if gradients else "",
    )
    lines = _loads(algebra, gated, scaled)
    lines += _turn(algebra, gated, scaled, gradients) if gradients else _pairs(algebra)
    return emit.load(f"clifford_{name}", imports + head + _text(lines))


def pair_tile(algebra: Algebra, features: int, gradients: str = "") -> Tile:
    """(BLOCK, BLOCK_F): about 64 numbers of x, y and what else a thread keeps."""
    block = 128 * max(1, min(8, (16 if gradients else 32) // algebra.num_blades))
    return Tile((block, min(block, 1 << max(features - 1, 0).bit_length())), 4)


def _loads(algebra: Algebra, gated: bool, scaled: bool) -> list[str]:
    """The blades of x and y, and the factor s of all that is stored."""
    lines = []
    for name in "xy":
        for i in range(algebra.num_blades):
            at = f"({i} * stride_{name}b + row * stride_{name}r) + f * stride_{name}f"
            lines.append(f"{name}{i} = tl.load({name}_ptr + {at}, mask=m, other=0.0).to(ACC)")
    factors = []
    if scaled:
        lines.append("scale = tl.load(scale_ptr + row, mask=row < R, other=0.0)")
        factors = ["scale"]
    if gated:
        lines += [f"gate_{v} = 0.5 + 0.5 * tl.erf({v}0 * 0.7071067811865476)" for v in "xy"]
        factors += ["gate_x", "gate_y"]
    return [*lines, f"s = {' * '.join(factors)}" if factors else "s = 1.0"]


def _pairs(algebra: Algebra) -> list[str]:
    """The pairs of x and y, written."""
    lines = []
    for pair in layout(algebra).pairs:
        products = [f"{'-' if sign < 0 else '+'} x{i} * y{k}" for sign, i, k in pair.terms]
        value = " ".join(products).removeprefix("+ ")
        value = f"s * ({value})" if products else "row * 0"
        lines.append(f"tl.store({_address(pair)}, ({value}).to(t_ptr.dtype.element_ty), mask=m)")
    return lines


def _turn(algebra: Algebra, gated: bool, scaled: bool, gradients: str) -> list[str]:
    """The gradients of the pairs, read, become gradients of x and y.

    dx and dy are at first those of the product without gates.  x's gate is one factor of it all:
    its gradient adds φ(x₀) Φ(y₀) Σ_i x_i dx_i to that of x₀.
    """
    lines, seen = [], set()
    for pair in filter(lambda pair: pair.terms, layout(algebra).pairs):
        lines.append(f"g = tl.load({_address(pair)}, mask=m, other=0.0).to(ACC)")
        for name in gradients:
            for sign, i, k in pair.terms:
                target, other = (f"dx{i}", f"y{k}") if name == "x" else (f"dy{k}", f"x{i}")
                operation = "+=" if target in seen else "="
                lines.append(f"{target} {operation} {'-' * (sign < 0)}g * {other}")
                seen.add(target)
    for name in gradients:
        blades = range(algebra.num_blades)
        if gated:
            rest = f"gate_{'y' if name == 'x' else 'x'}" + " * scale" * scaled
            dot = " + ".join(f"{name}{i} * d{name}{i}" for i in blades)
            lines.append(f"of_gate = {rest} * 0.3989422804014327 * ({dot})")
        for i in blades:
            at = f"g{name}_ptr + ({i} * stride_gb + row * F) + f"
            value = f"s * d{name}{i}"
            if gated and i == 0:
                value += f" + of_gate * tl.exp(-0.5 * {name}0 * {name}0)"
            lines.append(f"tl.store({at}, ({value}).to(g{name}_ptr.dtype.element_ty), mask=m)")
    return lines


def _address(pair: Pair) -> str:
    return f"t_ptr + ({pair.before} * block + {pair.path} * F + row * ({pair.paths} * F)) + f"


class Norm(NamedTuple):
    """Which norm, see `weft.clifford.rms_norm`.

    Args:
        kind: "euclidean" or "metric".
        eps: what is added to the mean squares.
    """

    kind: str
    eps: float


@functools.cache
def norm_kernels(algebra: Algebra, norm: Norm, scaled: bool, dialect: str) -> ModuleType:
    """The module with `norm_kernel` and `denorm_kernel`; a program owns a row.

    norm_kernel: z_j = r_g a o_j, r_g = (mean_f |Σ_(j∈g) q_j (a o_j)²| + eps)^-½, and r.
    denorm_kernel: do_j = r_g (go_j − σ_g q_j z_j mean_f Σ_(j∈g) go_j z_j), σ the sign of that sum.
    scaled: o has a factor a for each row; do leaves with one, in a range that fp16 holds.
    """
    imports, jit, arange = DIALECTS[dialect]
    spell = {"jit": jit, "arange": arange}
    undo, scale = ("undo_ptr, ", "scale_ptr, ") if scaled else ("", "")
    text = NORM_HEAD.format(
        name="norm",
        operands=f"o_ptr, {undo}z_ptr, r_ptr, ",
        strides="",
        accumulator=ACCUMULATOR.format(first="o"),
        **spell,
    )
    text += _text(_norm(algebra, norm, scaled))
    text += NORM_HEAD.format(
        name="denorm",
        operands=f"g_ptr, z_ptr, r_ptr, d_ptr, {scale}",
        strides="stride_gb, stride_gr, stride_gf, stride_zb, stride_rg, ",
        accumulator=ACCUMULATOR.format(first="z"),
        **spell,
    )
    text += _text(_denorm(algebra, norm, scaled))
    return emit.load("clifford_fc_norm", imports + text)


def norm_tile(features: int) -> Tile:
    """(BLOCK,): the features of a row that are in registers at a time."""
    block = max(128, min(512, 1 << max(features - 1, 0).bit_length()))
    return Tile((block,), 4)


def _norm(algebra: Algebra, norm: Norm, scaled: bool) -> list[str]:
    blades = range(algebra.num_blades)
    sweep = ["for first in range(0, F, BLOCK):", "    f = first + e", "    m = f < F"]
    for j in blades:
        at = f"o_ptr + ({j} * block + row * F) + f"
        sweep.append(f"    o{j} = tl.load({at}, mask=m, other=0.0).to(ACC)" + " * undo" * scaled)
    lines = ["undo = tl.load(undo_ptr + row)"] * scaled
    lines += [f"n{g} = (e * 0).to(ACC)" for g in _rescaled(algebra, norm)]
    lines += sweep
    for g in _rescaled(algebra, norm):
        size = _size(algebra, norm, g, "o")
        lines.append(f"    n{g} += " + (f"tl.abs({size})" if norm.kind == "metric" else size))
    for g in range(algebra.n + 1):
        if g in _rescaled(algebra, norm):
            lines.append(f"r{g} = 1.0 / tl.sqrt(tl.sum(n{g}, 0) / F + {norm.eps!r})")
            lines.append(f"tl.store(r_ptr + {g} * R.to(tl.int64) + row, r{g})")
    lines += sweep
    for j in blades:
        g = algebra.grades[j]
        value = f"o{j} * r{g}" if g in _rescaled(algebra, norm) else f"o{j}"
        at = f"z_ptr + ({j} * block + row * F) + f"
        lines.append(f"    tl.store({at}, ({value}).to(z_ptr.dtype.element_ty), mask=m)")
    return lines


def _denorm(algebra: Algebra, norm: Norm, scaled: bool) -> list[str]:
    blades = range(algebra.num_blades)
    rescaled = _rescaled(algebra, norm)
    sweep = ["for first in range(0, F, BLOCK):", "    f = first + e", "    m = f < F"]
    for j in blades:
        at = f"g_ptr + ({j} * stride_gb + row * stride_gr) + f * stride_gf"
        sweep.append(f"    g{j} = tl.load({at}, mask=m, other=0.0).to(ACC)")
        at = f"z_ptr + ({j} * stride_zb + row * F) + f"
        sweep.append(f"    z{j} = tl.load({at}, mask=m, other=0.0).to(ACC)")
    lines = [f"c{g} = (e * 0).to(ACC)" for g in rescaled]
    lines += ["most_g = (e * 0).to(ACC)", "most_z = (e * 0).to(ACC)"] * scaled
    lines += sweep
    for g in rescaled:
        lines.append(f"    c{g} += " + " + ".join(f"g{j} * z{j}" for j in algebra.of_grade[g]))
    for j in blades if scaled else ():
        lines.append(f"    most_g = tl.maximum(most_g, tl.abs(g{j}))")
        lines.append(f"    most_z = tl.maximum(most_z, tl.abs(z{j}))")
    for g in rescaled:
        lines.append(f"r{g} = tl.load(r_ptr + {g} * stride_rg + row)")
        lines.append(f"c{g} = tl.sum(c{g}, 0) / F")
    if scaled:
        lines += _scale_of_row(algebra, rescaled)
    lines += sweep
    for g in rescaled if norm.kind == "metric" else ():
        size = _size(algebra, norm, g, "z")
        lines += [f"    n{g} = {size}", f"    n{g} = tl.where(n{g} < 0, -c{g}, c{g})"]
    for j in blades:
        g = algebra.grades[j]
        value = f"g{j}"
        if g in rescaled:
            q = algebra.squares[j] if norm.kind == "metric" else 1
            mean = f"n{g}" if norm.kind == "metric" else f"c{g}"
            value = f"r{g} * (g{j} {'-+'[q < 0]} z{j} * {mean})" if q else f"r{g} * g{j}"
        value = f"({value}) * scale" if scaled else f"({value})"
        at = f"d_ptr + ({j} * block + row * F) + f"
        lines.append(f"    tl.store({at}, ({value}).to(d_ptr.dtype.element_ty), mask=m)")
    return lines


def _scale_of_row(algebra: Algebra, rescaled: list[int]) -> list[str]:
    """The largest power of two, up to 2^60, that keeps r (|g| + |z| |c|) below 2^15."""
    lines = ["most_g = tl.max(most_g, 0)", "most_z = tl.max(most_z, 0)"]
    lines.append("bound = most_g" if len(rescaled) <= algebra.n else "bound = most_g * 0.0")
    lines += [
        f"bound = tl.maximum(bound, r{g} * (most_g + most_z * tl.abs(c{g})))" for g in rescaled
    ]
    return [
        *lines,
        "k = tl.minimum(tl.maximum(141 - (bound.to(tl.int32, bitcast=True) >> 23), -60), 60)",
        "scale = ((127 + k) << 23).to(tl.float32, bitcast=True)",
        "tl.store(scale_ptr + row, scale)",
    ]


def _rescaled(algebra: Algebra, norm: Norm) -> list[int]:
    """The grades that the norm rescales: the metric one leaves those without non-null blades."""
    if norm.kind == "euclidean":
        return list(range(algebra.n + 1))
    return [g for g, js in enumerate(algebra.of_grade) if any(algebra.squares[j] for j in js)]


def _size(algebra: Algebra, norm: Norm, grade: int, name: str) -> str:
    """Σ_(j∈g) q_j o_j² of a row and feature."""
    text = ""
    for j in algebra.of_grade[grade]:
        q = algebra.squares[j] if norm.kind == "metric" else 1
        text += f" {'-+'[q > 0]} {name}{j} * {name}{j}" if q else ""
    return text.removeprefix(" +").strip()


def _text(lines: list[str]) -> str:
    return "".join(f"    {line}\n" for line in lines)
