"""Prints the kernels of the fully connected product: pairs of blades, norms and scales of rows.

    t_(p,j)[b,n] = s[b,n] · Σ_((i,k) ∈ path p, e_i e_k = ±e_j) ± x_i[b,n] · y_k[b,n]

s is 1, or the product of both gates Φ(x₀) Φ(y₀).  The pairs of out grade g are the left factor of
one matrix product with the weights of its paths, so they lie as (blade j, row b, path p, feature
n), grade after grade.  A program owns neighbouring rows and features, a thread some of them with
all their blades in registers: x, y and every pair cross memory once.

For norms, and the scales of fp16 factors, a program owns a row and sweeps over its features, a
block at a time: once to sum or to find the largest, once more, from the cache, to write.
Bound: memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.programs.programs import LEAST_EPS
from torchweft.core.expressions.expr import SHRINK
from torchweft.core.gpu.launcher import Tile
from torchweft.core.printing.kernel import Frame
from torchweft.core.printing.modules import load

__all__ = [
    "Norm",
    "arrange_kernels",
    "layout",
    "norm_kernels",
    "pair_kernels",
    "pair_row_tile",
    "pair_tile",
    "row_tile",
    "scale_kernels",
]


class BladePair(NamedTuple):
    """A pair of a path and an out blade: its place in memory, and its terms.

    Args:
        before: pairs of earlier grades, and of earlier blades of its grade.
        paths: number of paths to its grade.
        path: its index among them.
        terms: (sign, left blade, right blade); none where the metric's zeros cancel them.
    """

    before: int
    paths: int
    path: int
    terms: tuple[tuple[int, int, int], ...]


class PairLayout(NamedTuple):
    """The layout of an algebra's pairs in memory.

    Args:
        pairs: by out grade, then blade, then path.
        paths: of each out grade, as places in `Algebra.paths`.
        groups: the out grades with as many blades and as many paths, g and n - g or one alone:
            their matrix products have one shape.
        most_terms: number of terms of the longest pair.
    """

    pairs: tuple[BladePair, ...]
    paths: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    most_terms: int


@functools.cache
def layout(algebra: Algebra) -> PairLayout:
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
        BladePair(before, per_blade[j], at, tuple(of_pair.get((j, path), ())))
        for j, before in enumerate(itertools.accumulate(per_blade[:-1], initial=0))
        for at, path in enumerate(paths[algebra.grades[j]])
    )
    shapes = [(blades, len(p)) for blades, p in zip(algebra.sizes, paths, strict=True)]
    groups = tuple(
        tuple(grade for grade, shape in enumerate(shapes) if shape == one)
        for one in dict.fromkeys(shapes)
    )
    return PairLayout(pairs, paths, groups, max(len(pair.terms) for pair in pairs))


def _kernel(
    gluon: bool,
    name: str,
    operands: str,
    strides: str,
    lines: list[str],
    blocks: str = "BLOCK",
    first: str = "z",
) -> Iterator[str]:
    """A kernel over rows and features.

    Args:
        gluon: whether it is Gluon; else Triton.
        name: of the kernel.
        operands: names of the pointers.
        strides: names of the numbers behind the counts of rows R and features F.
        lines: its body, with elements `e`, type `ACC`, and `block`, the size of a blade.
        blocks: names of the block sizes.
        first: the operand that says which type is computed in.
    """
    frame, dtype = Frame(gluon), f"{first}_ptr.dtype.element_ty"
    parameters = [f"{operand}_ptr" for operand in operands.split()]
    parameters += [
        "R",
        "F",
        *(f"stride_{name}" if len(name) > 1 else name for name in strides.split()),
    ]
    body = [
        *frame.layout(
            "tl.BlockedLayout([BLOCK // (32 * tl.num_warps())], [32], [tl.num_warps()], [0])"
        ),
        f"e = tl.arange(0, BLOCK{', layout=LAYOUT' * gluon})",
        f"ACC: tl.constexpr = tl.float64 if {dtype} == tl.float64 else tl.float32",
        "block = R.to(tl.int64) * F",
        "wide = R.to(tl.int64) * 0 + 1  # a factor of strides: their multiples may exceed 2^31",
        *lines,
    ]
    constants = (f"{block}: tl.constexpr" for block in blocks.split())
    return frame.function(f"{name}_kernel", [*parameters, *constants], body, ["R"])


def _module(name: str, gluon: bool, *kernels: Iterator[str]) -> ModuleType:
    return load(name, Frame(gluon).module(name, *kernels))


ROW = "row = tl.program_id(0).to(tl.int64)"
ROW_SWEEP = ("for first in range(0, F, BLOCK):", "    f = first + e", "    m = f < F")


@functools.cache
def pair_kernels(
    algebra: Algebra,
    gated: bool,
    scaled: bool,
    gluon: bool,
    gradients: str = "",
    finds: bool = False,
) -> ModuleType:
    """The module with `pairs_kernel`, or with the `turn_kernel` of some gradients.

    Args:
        algebra: that defines the pairs.
        gated: whether x and y are scaled by their gates.
        scaled: whether pairs, and what is computed from their gradients, have a factor for each
            row in `scale_ptr`.
        gluon: whether to print Gluon; else Triton, for the interpreter and other vendors.
        gradients: "x", "y" or "xy": what `turn_kernel` computes from the pairs' gradients.
        finds: whether `pairs_kernel` finds these factors, as its program owns a whole row.
    """
    name = "turn" if gradients else "pairs"
    operands = "x y t" + " scale" * scaled + "".join(f" g{v}" for v in gradients)
    lines = [
        "num_f = (F + BLOCK_F - 1) // BLOCK_F",
        "pid = tl.program_id(0)",
        "f = pid % num_f * BLOCK_F + e % BLOCK_F",
        "row = pid.to(tl.int64) // num_f * (BLOCK // BLOCK_F) + e // BLOCK_F",
        "m = (f < F) & (row < R)",
        *_loads(algebra),
    ]
    if finds:
        lines += _found(algebra)
    elif scaled:
        lines.append("scale = tl.load(scale_ptr + row, mask=row < R, other=0.0)")
    lines += _factor(gated, scaled)
    lines += _turn(algebra, gated, scaled, gradients) if gradients else _pairs(algebra)
    strides = "xb xr xf yb yr yf" + " gb" * bool(gradients)
    kernel = _kernel(gluon, name, operands, strides, lines, "BLOCK BLOCK_F", "x")
    return _module(f"clifford_{name}", gluon, kernel)


def pair_tile(algebra: Algebra, features: int, gradients: str = "") -> Tile:
    """(BLOCK, BLOCK_F): about 64 numbers of x, y and what else a thread keeps."""
    block = _most(algebra, gradients)
    return Tile((block, min(block, 1 << max(features - 1, 0).bit_length())), 4)


def pair_row_tile(algebra: Algebra, features: int) -> Tile | None:
    """The same for a program that owns one whole row; None if a row is too long."""
    block = max(128, 1 << max(features - 1, 0).bit_length())
    return Tile((block, block), 4) if block <= _most(algebra) else None


def _most(algebra: Algebra, gradients: str = "") -> int:
    return 128 * max(1, min(8, (16 if gradients else 32) // algebra.num_blades))


def power_of_two(row: str) -> list[str]:
    """`scale`, from 2⁻⁶⁰ to 2⁶⁰, which brings `bound` to at least 2¹⁴, below 2¹⁵; it is stored.

    Two of them multiply without overflow.  An fp32 number is below 2^(its exponent's bits − 126).
    """
    return [
        "k = tl.minimum(tl.maximum(141 - (bound.to(tl.int32, bitcast=True) >> 23), -60), 60)",
        "scale = ((127 + k) << 23).to(tl.float32, bitcast=True)",
        f"tl.store(scale_ptr + {row}, scale)",
    ]


def _loads(algebra: Algebra) -> list[str]:
    """The blades of x and y."""
    lines = []
    for name in "xy":
        for i in range(algebra.num_blades):
            at = f"(wide * {i} * stride_{name}b + row * stride_{name}r) + f * stride_{name}f"
            lines.append(f"{name}{i} = tl.load({name}_ptr + {at}, mask=m, other=0.0).to(ACC)")
    return lines


def _found(algebra: Algebra) -> list[str]:
    """The factor of the program's row: no pair has more terms, and no term is larger."""
    lines = []
    for name in "xy":
        most = f"most_{name}"
        lines.append(f"{most} = tl.abs({name}0)")
        others = range(1, algebra.num_blades)
        lines += [f"{most} = tl.maximum({most}, tl.abs({name}{i}))" for i in others]
    terms = layout(algebra).most_terms
    lines.append(f"bound = {terms}.0 * tl.max(most_x, 0) * tl.max(most_y, 0)")
    return lines + power_of_two("pid")


def _factor(gated: bool, scaled: bool) -> list[str]:
    """The factor s of all that is stored."""
    factors = ["scale"] * scaled
    lines = []
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
            at = f"g{name}_ptr + (wide * {i} * stride_gb + row * F) + f"
            value = f"s * d{name}{i}"
            if gated and i == 0:
                value += f" + of_gate * tl.exp(-0.5 * {name}0 * {name}0)"
            lines.append(f"tl.store({at}, ({value}).to(g{name}_ptr.dtype.element_ty), mask=m)")
    return lines


def _address(pair: BladePair) -> str:
    return f"t_ptr + ({pair.before} * block + {pair.path} * F + row * ({pair.paths} * F)) + f"


class Norm(NamedTuple):
    """A norm of rows, grade by grade.

    Args:
        kind: "euclidean" or "metric".
        eps: what is added to the mean squares.
    """

    kind: str
    eps: float

    @classmethod
    def of_words(cls, words: str) -> Norm | None:
        """As a program's key spells it, "euclidean 0x…"; None for ""."""
        if not words:
            return None
        kind, eps = words.split(" ")
        return cls(kind, float.fromhex(eps))

    def signs(self, algebra: Algebra) -> tuple[int, ...]:
        """The factor of each blade's square: 1, or what the metric makes of it."""
        return (1,) * algebra.num_blades if self.kind == "euclidean" else algebra.squares

    def shrunk(self) -> tuple[float, float]:
        """A factor κ for what is squared, and κ² eps."""
        kappa = SHRINK if self.eps >= LEAST_EPS else 1.0
        return kappa, kappa * kappa * self.eps

    def rescaled(self, algebra: Algebra) -> list[int]:
        """The grades that it rescales: those with a blade whose factor is not 0."""
        signs = self.signs(algebra)
        return [g for g, blades in enumerate(algebra.of_grade) if any(signs[j] for j in blades)]


def row_tile(features: int) -> Tile:
    """(BLOCK,): the features of a row that are in registers at a time."""
    return Tile((max(128, min(512, 1 << max(features - 1, 0).bit_length())),), 4)


@functools.cache
def norm_kernels(algebra: Algebra, norm: Norm, scaled: bool, gluon: bool) -> ModuleType:
    """The module with `norm_kernel` and `denorm_kernel`.

    norm_kernel: z_j = r_g a o_j, r_g = (mean_f |Σ_(j∈g) q_j (a o_j)²| + eps)^-½, and r.
    denorm_kernel: do_j = r_g (go_j − σ_g q_j z_j mean_f Σ_(j∈g) go_j z_j), σ the sign of that sum.
    scaled: o has a factor 1/a for each row, one of its own times one of all; do leaves with one
    of its own, in a range that fp16 holds.
    """
    forward, backward = _norm(algebra, norm, scaled), _denorm(algebra, norm, scaled)
    operands = "o scale all z r" if scaled else "o z r"
    return _module(
        "clifford_fc_norm",
        gluon,
        _kernel(gluon, "norm", operands, "zb rg", [ROW, *forward]),
        _kernel(gluon, "denorm", "g z r d" + " scale" * scaled, "gb gr gf zb rg", [ROW, *backward]),
    )


@functools.cache
def scale_kernels(blades: int, operands: str, terms: int, gluon: bool) -> ModuleType:
    """The module with `scale_kernel`: of each row, the scale of sums of so many products.

    scale[b] terms Π max|x[:,b]| lies just below 2¹⁵; operands: "x", or "xy" for products.
    """
    lines = [ROW, *(f"most_{v} = (e * 0).to(ACC)" for v in operands), *ROW_SWEEP]
    for v in operands:
        for i in range(blades):
            at = f"{v}_ptr + (wide * {i} * stride_{v}b + row * stride_{v}r) + f * stride_{v}f"
            value = f"tl.abs(tl.load({at}, mask=m, other=0.0).to(ACC))"
            lines.append(f"    most_{v} = tl.maximum(most_{v}, {value})")
    largest = " * ".join(f"tl.max(most_{v}, 0)" for v in operands)
    lines += [f"bound = {terms}.0 * {largest}", *power_of_two("row")]
    names, strides = " ".join(operands), " ".join(f"{v}b {v}r {v}f" for v in operands)
    kernel = _kernel(gluon, "scale", f"{names} scale", strides, lines, first="x")
    return _module("clifford_fc_scale", gluon, kernel)


@functools.cache
def arrange_kernels(scaled: bool, found: bool, gluon: bool) -> ModuleType:
    """The module with `arrange_kernel`: z[p] = a w[order[p]], a = 1 or the least of S numbers.

    w: (P, N, F) in any strides, z: (P, N, F) contiguous; a row is one p and n.
    scaled: a is the least of the numbers in `scale_ptr`; found: it goes to `least_ptr`.
    """
    lines = [ROW, *_least() * scaled]
    lines += ["tl.store(least_ptr, scale, mask=row == 0)"] * found
    lines += [
        "first_of_path = tl.load(order_ptr + row // N) * stride_wp",
        "start = first_of_path + row % N * stride_wn",
        *ROW_SWEEP,
        "    at = w_ptr + start + wide * f * stride_wf",
        "    value = tl.load(at, mask=m, other=0.0).to(ACC)" + " * scale" * scaled,
        _stored("z_ptr + row * F + f", "value"),
    ]
    operands = "w order" + " scale" * scaled + " z" + " least" * found
    kernel = _kernel(gluon, "arrange", operands, "N wp wn wf S", lines, first="w")
    return _module("clifford_fc_arrange", gluon, kernel)


def _least() -> list[str]:
    """`scale`, the least of the S numbers in `scale_ptr`."""
    return [
        "least = (e * 0).to(tl.float32) + float('inf')",
        "for first in range(0, S, BLOCK):",
        "    s = first + e",
        "    other = tl.load(scale_ptr + s, mask=s < S, other=float('inf'))",
        "    least = tl.minimum(least, other)",
        "scale = tl.min(least, 0)",
    ]


def _norm(algebra: Algebra, norm: Norm, scaled: bool) -> list[str]:
    blades, rescaled = range(algebra.num_blades), norm.rescaled(algebra)
    sweep = [*ROW_SWEEP]
    for j in blades:
        at = f"o_ptr + ({j} * block + row * F) + f"
        sweep.append(f"    o{j} = tl.load({at}, mask=m, other=0.0).to(ACC)" + " * undo" * scaled)
    lines = ["undo = 1.0 / (tl.load(scale_ptr + row) * tl.load(all_ptr))"] * scaled
    lines += [f"n{g} = (e * 0).to(ACC)" for g in rescaled]
    lines += sweep
    shrink, least = norm.shrunk()
    lines += [f"    s{j} = o{j} * {shrink!r}" for j in blades if algebra.grades[j] in rescaled]
    lines += [f"    n{g} += tl.abs({_size(algebra, norm, g, 's')})" for g in rescaled]
    for g in rescaled:
        lines.append(f"r{g} = {shrink!r} / tl.sqrt(tl.sum(n{g}, 0) / F + {least!r})")
        lines.append(f"tl.store(r_ptr + (wide * {g} * stride_rg + row), r{g})")
    lines += sweep
    for j, g in zip(blades, algebra.grades, strict=True):
        value = f"o{j} * r{g}" if g in rescaled else f"o{j}"
        lines.append(_stored(f"z_ptr + (wide * {j} * stride_zb + row * F) + f", value))
    return lines


def _denorm(algebra: Algebra, norm: Norm, scaled: bool) -> list[str]:
    rescaled, metric = norm.rescaled(algebra), norm.kind == "metric"
    sweep = [*ROW_SWEEP]
    for j in range(algebra.num_blades):
        at = f"g_ptr + (wide * {j} * stride_gb + row * stride_gr) + f * stride_gf"
        sweep.append(f"    g{j} = tl.load({at}, mask=m, other=0.0).to(ACC)")
        at = f"z_ptr + (wide * {j} * stride_zb + row * F) + f"
        sweep.append(f"    z{j} = tl.load({at}, mask=m, other=0.0).to(ACC)")
    lines = [f"c{g} = (e * 0).to(ACC)" for g in rescaled]
    lines += ["most_g = (e * 0).to(ACC)", "most_z = (e * 0).to(ACC)"] * scaled
    lines += sweep
    for g in rescaled:
        lines.append(f"    c{g} += " + " + ".join(f"g{j} * z{j}" for j in algebra.of_grade[g]))
    for j in range(algebra.num_blades) if scaled else ():
        lines += [f"    most_{v} = tl.maximum(most_{v}, tl.abs({v}{j}))" for v in "gz"]
    for g in rescaled:
        lines.append(f"r{g} = tl.load(r_ptr + (wide * {g} * stride_rg + row))")
        lines.append(f"c{g} = tl.sum(c{g}, 0) / F")
    lines += _bound(rescaled, len(rescaled) <= algebra.n) * scaled
    lines += sweep
    for g in rescaled if metric else ():
        size = _size(algebra, norm, g, "z")
        lines.append(f"    n{g} = {size}")
        lines.append(f"    n{g} = tl.where(n{g} > 0, c{g}, tl.where(n{g} < 0, -c{g}, n{g}))")
    for j, q in enumerate(norm.signs(algebra)):
        g = algebra.grades[j]
        own = f" {'-+'[q < 0]} z{j} * {'cn'[metric]}{g}" if q else ""
        value = f"(g{j}{own})" + f" * r{g}" * (g in rescaled)
        at = f"d_ptr + ({j} * block + row * F) + f"
        lines.append(_stored(at, value + " * scale" * scaled))
    return lines


def _bound(rescaled: list[int], whole: bool) -> list[str]:
    """|do| ≤ r (|go| + |z| |c|) with the largest of the row; |go| in grades not rescaled."""
    start = "most_g" if whole else "most_g * 0"
    lines = ["most_g = tl.max(most_g, 0)", "most_z = tl.max(most_z, 0)", f"bound = {start}"]
    lines += [
        f"bound = tl.maximum(bound, r{g} * (most_g + most_z * tl.abs(c{g})))" for g in rescaled
    ]
    return [*lines, *power_of_two("row")]


def _size(algebra: Algebra, norm: Norm, grade: int, name: str) -> str:
    """Σ_(j∈g) q_j o_j² of a row and feature."""
    signs = norm.signs(algebra)
    squares = [
        f" {'-' if signs[j] < 0 else '+'} {name}{j} * {name}{j}"
        for j in algebra.of_grade[grade]
        if signs[j]
    ]
    return "".join(squares).removeprefix(" +").strip()


def _stored(at: str, value: str) -> str:
    name = at.split(" ", 1)[0]
    return f"    tl.store({at}, ({value}).to({name}.dtype.element_ty), mask=m)"
