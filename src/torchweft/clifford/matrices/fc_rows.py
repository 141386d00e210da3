"""Kernels for rows of the fully connected product: its norm, and the scales of fp16 factors.

A program owns a row and sweeps over its features, a block at a time: once to sum or to find the
largest, once more, from the cache, to write.  Bound: memory, each number read and written once.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.matrices.fc_kernels import ACCUMULATOR, DIALECTS, body, power_of_two
from torchweft.core.gpu.launcher import Tile
from torchweft.core.printing.modules import load

__all__ = ["Norm", "arrange_kernels", "norm_kernels", "row_tile", "scale_kernels"]

HEAD = """

{jit}(do_not_specialize=["R"])
def {name}_kernel({operands}R, F, {strides}BLOCK: tl.constexpr):
{arange}{accumulator}    row = tl.program_id(0).to(tl.int64)
"""

SWEEP = ("for first in range(0, F, BLOCK):", "    f = first + e", "    m = f < F")


class Norm(NamedTuple):
    """A norm of rows, grade by grade.

    Args:
        kind: "euclidean" or "metric".
        eps: what is added to the mean squares.
    """

    kind: str
    eps: float

    @classmethod
    def of_words(cls, words: str) -> Norm:
        """As a program's key spells it, "euclidean 0x…"."""
        kind, eps = words.split(" ")
        return cls(kind, float.fromhex(eps))

    def signs(self, algebra: Algebra) -> tuple[int, ...]:
        """The factor of each blade's square: 1, or what the metric makes of it."""
        return (1,) * algebra.num_blades if self.kind == "euclidean" else algebra.squares

    def rescaled(self, algebra: Algebra) -> list[int]:
        """The grades that it rescales: those with a blade whose square counts."""
        signs = self.signs(algebra)
        return [g for g, blades in enumerate(algebra.of_grade) if any(signs[j] for j in blades)]


def row_tile(features: int) -> Tile:
    """(BLOCK,): the features of a row that are in registers at a time."""
    return Tile((max(128, min(512, 1 << max(features - 1, 0).bit_length())),), 4)


@functools.cache
def norm_kernels(algebra: Algebra, norm: Norm, scaled: bool, dialect: str) -> ModuleType:
    """The module with `norm_kernel` and `denorm_kernel`.

    norm_kernel: z_j = r_g a o_j, r_g = (mean_f |Σ_(j∈g) q_j (a o_j)²| + eps)^-½, and r.
    denorm_kernel: do_j = r_g (go_j − σ_g q_j z_j mean_f Σ_(j∈g) go_j z_j), σ the sign of that sum.
    scaled: o has a factor 1/a for each row, one of its own times one of all; do leaves with one
    of its own, in a range that fp16 holds.
    """
    undo, scale = ("scale_ptr, all_ptr, ", "scale_ptr, ") if scaled else ("", "")
    forward = _head("norm", f"o_ptr, {undo}z_ptr, r_ptr, ", "stride_zb, stride_rg, ", dialect)
    forward += body(_norm(algebra, norm, scaled))
    strides = "stride_gb, stride_gr, stride_gf, stride_zb, stride_rg, "
    backward = _head("denorm", f"g_ptr, z_ptr, r_ptr, d_ptr, {scale}", strides, dialect)
    backward += body(_denorm(algebra, norm, scaled))
    return load("clifford_fc_norm", DIALECTS[dialect][0] + forward + backward)


@functools.cache
def scale_kernels(blades: int, operands: str, terms: int, dialect: str) -> ModuleType:
    """The module with `scale_kernel`: of each row, the scale of sums of so many products.

    scale[b] terms Π max|x[:,b]| lies just below 2¹⁵; operands: "x", or "xy" for products.
    """
    names = "".join(f"{v}_ptr, " for v in operands)
    strides = "".join(f"stride_{v}b, stride_{v}r, stride_{v}f, " for v in operands)
    lines = [f"most_{v} = (e * 0).to(ACC)" for v in operands] + [*SWEEP]
    for v in operands:
        for i in range(blades):
            at = f"{v}_ptr + (wide * {i} * stride_{v}b + row * stride_{v}r) + f * stride_{v}f"
            value = f"tl.abs(tl.load({at}, mask=m, other=0.0).to(ACC))"
            lines.append(f"    most_{v} = tl.maximum(most_{v}, {value})")
    largest = " * ".join(f"tl.max(most_{v}, 0)" for v in operands)
    lines += [f"bound = {terms}.0 * {largest}", *power_of_two("row")]
    head = _head("scale", f"{names}scale_ptr, ", strides, dialect, first="x")
    return load("clifford_fc_scale", DIALECTS[dialect][0] + head + body(lines))


@functools.cache
def arrange_kernels(scaled: bool, dialect: str) -> ModuleType:
    """The module with `arrange_kernel`: z[p] = a w[order[p]], a = 1 or the number in `scale_ptr`.

    w: (P, N, F) in any strides, z: (P, N, F) contiguous; a row is one p and n.
    """
    strides = "N, stride_wp, stride_wn, stride_wf, "
    operands = f"w_ptr, order_ptr, {'scale_ptr, ' * scaled}z_ptr, "
    lines = [
        "first_of_path = tl.load(order_ptr + row // N) * stride_wp",
        "start = first_of_path + row % N * stride_wn",
        *["scale = tl.load(scale_ptr)"] * scaled,
        *SWEEP,
        "    at = w_ptr + start + wide * f * stride_wf",
        "    value = tl.load(at, mask=m, other=0.0).to(ACC)" + " * scale" * scaled,
        _stored("z_ptr + row * F + f", "value"),
    ]
    head = _head("arrange", operands, strides, dialect, first="w")
    return load("clifford_fc_arrange", DIALECTS[dialect][0] + head + body(lines))


def _head(name: str, operands: str, strides: str, dialect: str, first: str = "z") -> str:
    _, jit, arange = DIALECTS[dialect]
    accumulator = ACCUMULATOR.format(first=first)
    return HEAD.format(
        jit=jit,
        arange=arange,
        accumulator=accumulator,
        name=name,
        operands=operands,
        strides=strides,
    )


def _norm(algebra: Algebra, norm: Norm, scaled: bool) -> list[str]:
    blades, rescaled = range(algebra.num_blades), norm.rescaled(algebra)
    sweep = [*SWEEP]
    for j in blades:
        at = f"o_ptr + ({j} * block + row * F) + f"
        sweep.append(f"    o{j} = tl.load({at}, mask=m, other=0.0).to(ACC)" + " * undo" * scaled)
    lines = ["undo = 1.0 / (tl.load(scale_ptr + row) * tl.load(all_ptr))"] * scaled
    lines += [f"n{g} = (e * 0).to(ACC)" for g in rescaled]
    lines += sweep
    lines += [f"    n{g} += tl.abs({_size(algebra, norm, g, 'o')})" for g in rescaled]
    for g in rescaled:
        lines.append(f"r{g} = 1.0 / tl.sqrt(tl.sum(n{g}, 0) / F + {norm.eps!r})")
        lines.append(f"tl.store(r_ptr + (wide * {g} * stride_rg + row), r{g})")
    lines += sweep
    for j, g in zip(blades, algebra.grades, strict=True):
        value = f"o{j} * r{g}" if g in rescaled else f"o{j}"
        lines.append(_stored(f"z_ptr + (wide * {j} * stride_zb + row * F) + f", value))
    return lines


def _denorm(algebra: Algebra, norm: Norm, scaled: bool) -> list[str]:
    rescaled, metric = norm.rescaled(algebra), norm.kind == "metric"
    sweep = [*SWEEP]
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
