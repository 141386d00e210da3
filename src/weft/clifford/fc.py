"""The fully connected product on GPUs: pairs of blades, then one matrix product an out grade.

    o_j[m] = Σ_(p,n) W[p,n,m] · t_(p,j)[n],   t_(p,j)[n] = s[n] Σ_((i,k) ∈ p → j) ± x_i[n] y_k[n]

    t_g (dim_g·B, P_g·F_in) from x, y;   o_g = t_g W_g
    dt_g = do_g W_gᵀ;   dx, dy from dt, x, y;   dW_g = t_gᵀ do_g

The paths of an out grade stand side by side along K, so that sums over paths happen in the
accumulator of the library's matrix product.  Factors are in the dtype of x, with two exceptions.
Where torch allows TF32, fp32 factors are fp16 numbers under a power of two for each row: a mantissa
of the same 10 bits at twice the rate and half the bytes, and the power of two stands in for TF32's
wider exponent: what is 2⁻²⁹ of the largest number of its row, or more, keeps all its bits.  fp16
factors have it too, since pairs of numbers in range need not be.  No atomics: results repeat.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.clifford import fc_launch
from weft.clifford.algebra import Algebra
from weft.clifford.fc_kernels import Norm, layout

__all__ = ["Norm", "backward", "forward", "forward_normalised"]

FORWARD_BYTES, BACKWARD_BYTES = 12, 6
"""Bytes of pairs at a time, for each number of x: rows are taken in parts that keep to it."""


def forward(x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra, gated: bool) -> Tensor:
    """o_j[m] = Σ_(p,n) W[p,n,m] · t_(p,j)[n].

    x, y: (D, B, F_in), any strides; weight: (P, F_in, F_out); gated: scales x and y by their GELU
    gates.  Returns (D, B, F_out) in x's dtype.
    """
    scaled = _factors(x) == torch.float16
    o, undo, _ = _product(x, y, weight, algebra, gated, torch.float32 if scaled else x.dtype)
    return o if undo is None else o.mul_(undo.unsqueeze(1)).to(x.dtype)


def forward_normalised(
    x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra, gated: bool, norm: Norm
) -> list[Tensor]:
    """[z, r, scale]: the product over its size in each row, grade by grade, and what is saved."""
    wide = torch.promote_types(x.dtype, torch.float32)
    o, undo, scale = _product(x, y, weight, algebra, gated, wide)
    z = o if x.dtype == wide else torch.empty_like(o, dtype=x.dtype)
    r = o.new_empty(algebra.n + 1, o.shape[1])
    fc_launch.normalise(o, undo, z, r, norm, algebra)
    return [z, r, x.new_empty(0) if scale is None else scale]


def _product(
    x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra, gated: bool, wide: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, undo, scale): the product is o times a factor undo for each row; scale is the pairs'."""
    factors = _factors(x)
    w, w_scale = _by_out_grade(weight, algebra, factors)
    scale = undo = None
    if w_scale is not None:
        scale = fc_launch.row_scale(x, y, _most_terms(algebra))
        undo = 1 / (scale * w_scale)
    o = x.new_empty((algebra.num_blades, x.shape[1], weight.shape[2]), dtype=wide)
    for rows in _parts(x, algebra, factors, FORWARD_BYTES):
        t = _pairs(x, y, scale, rows, algebra, gated, factors)
        for grade in _grades(t, w, algebra):
            _multiply(grade.t, grade.w.expand(len(grade.t), -1, -1), o[grade.blades, rows])
    return o, undo, scale


def backward(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    go: Tensor,
    algebra: Algebra,
    gated: bool,
    needed: Sequence[bool] = (True, True, True),
    saved: Sequence[Tensor] = (),
    norm: Norm | None = None,
) -> list[Tensor | None]:
    """The gradients of x, y and weight where they are needed, else None.

    go: (D, B, F_out), the gradient of the product; with a norm that of the result of
    `forward_normalised`, and `saved` all that it returned.
    """
    factors = _factors(x)
    w, w_scale = _by_out_grade(weight, algebra, factors)
    parts = list(_parts(x, algebra, factors, BACKWARD_BYTES))
    go_scale = None if w_scale is None else go.new_empty(go.shape[1], dtype=torch.float32)
    of_product = [_upstream(go, go_scale, rows, saved, norm, algebra, factors) for rows in parts]
    scales = None
    if w_scale is not None and go_scale is not None and parts:
        scale = saved[2] if saved else fc_launch.row_scale(x, y, _most_terms(algebra))
        scales = _scales(scale, go_scale, w_scale, go.shape[2])
    inputs = [
        torch.empty_like(x, memory_format=torch.contiguous_format) if n else None
        for n in needed[:2]
    ]
    gw = (
        torch.zeros_like(w, dtype=torch.promote_types(x.dtype, torch.float32))
        if needed[2]
        else None
    )
    for rows in parts:
        do = of_product.pop(0)
        if any(needed[:2]):
            dt = _empty_pairs(x, rows, algebra, factors)
            for grade in _grades(dt, w, algebra):
                w_t = grade.w.t().expand(len(grade.t), -1, -1)
                _multiply(do[grade.blades], w_t, grade.t, scales.shrink if scales else 1)
            outputs = [None if g is None else g[:, rows] for g in inputs]
            factor = scales.turn[rows] if scales else None
            fc_launch.turn(x[:, rows], y[:, rows], factor, dt, outputs, algebra, gated)
            del dt
        if gw is not None:
            t = _pairs(x, y, scales.pairs if scales else None, rows, algebra, gated, factors)
            for grade in _grades(t, gw, algebra):
                _add_product(grade.w, grade.t.flatten(0, 1).t(), do[grade.blades].flatten(0, 1))
    if gw is not None:
        gw = gw.index_select(0, _places(algebra, weight.device))
        gw = (gw.div_(scales.weight) if scales else gw).to(weight.dtype)
    return [*inputs, gw]


def _upstream(
    go: Tensor,
    scale: Tensor | None,
    rows: slice,
    saved: Sequence[Tensor],
    norm: Norm | None,
    algebra: Algebra,
    factors: torch.dtype,
) -> Tensor:
    """The gradient of the product in some rows, contiguous, as factors; fills their scales."""
    go = go[:, rows]
    of_rows = None if scale is None else scale[rows]
    if norm is not None:
        z, r, _ = saved
        do = torch.empty_like(go, dtype=factors, memory_format=torch.contiguous_format)
        fc_launch.denormalise(go, z[:, rows], r[:, rows], do, of_rows, norm, algebra)
        return do
    if of_rows is None:
        return go.contiguous()
    of_rows.copy_(fc_launch.row_scale(go, None, 1))
    return (go * of_rows.unsqueeze(1)).to(factors)


class _Scales(NamedTuple):
    """Powers of two that keep the factors of the backward pass in fp16's range.

    Args:
        shrink: of every dt: they are sums of F_out products below 2³⁰.
        turn: of each row, what undoes it, the scale of go and the weight's.
        pairs: of each row: times go's it is one number, since gw sums over the rows.
        weight: that number.
    """

    shrink: float
    turn: Tensor
    pairs: Tensor
    weight: Tensor


def _scales(scale: Tensor, go_scale: Tensor, w_scale: Tensor, f_out: int) -> _Scales:
    shrink = 2.0 ** -(15 + (f_out - 1).bit_length())
    of_weight = (scale * go_scale).amin()
    return _Scales(shrink, 1 / (go_scale * w_scale * shrink), of_weight / go_scale, of_weight)


def _factors(x: Tensor) -> torch.dtype:
    """The dtype of the factors of matrix products."""
    if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return torch.float16
    return x.dtype


def _by_out_grade(
    weight: Tensor, algebra: Algebra, factors: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The matrices with the paths of an out grade together, as factors; their scale, if scaled."""
    order = _order(algebra, weight.device)
    if factors != torch.float16:
        return weight.index_select(0, order), None
    scale = (
        fc_launch.row_scale(weight.reshape(1, -1, weight.shape[2]), None, 1).amin().view(1, 1, 1)
    )
    return (weight * scale).to(factors).index_select(0, order), scale.view(())


@functools.lru_cache(maxsize=64)
def _order(algebra: Algebra, device: torch.device) -> Tensor:
    """The paths by out grade."""
    return torch.tensor(list(itertools.chain(*layout(algebra).paths)), device=device)


@functools.lru_cache(maxsize=64)
def _places(algebra: Algebra, device: torch.device) -> Tensor:
    """Where each path stands in `_order`."""
    return torch.argsort(_order(algebra, device))


def _most_terms(algebra: Algebra) -> int:
    return max(len(pair.terms) for pair in layout(algebra).pairs)


def _parts(x: Tensor, algebra: Algebra, factors: torch.dtype, most_bytes: int) -> Iterator[slice]:
    """The rows in equal slices, so few that the pairs of one take most_bytes a number of x."""
    per_number = len(layout(algebra).pairs) * factors.itemsize / algebra.num_blades
    size = max(1, -(-x.shape[1] // math.ceil(per_number / most_bytes)))
    return (slice(start, min(start + size, x.shape[1])) for start in range(0, x.shape[1], size))


class _Grade(NamedTuple):
    """An out grade: its blades, pairs (dim, rows, paths·F_in) and matrices (paths·F_in, F_out)."""

    blades: slice
    t: Tensor
    w: Tensor


def _grades(t: Tensor, w: Tensor, algebra: Algebra) -> Iterator[_Grade]:
    """The parts of pairs, and of matrices by out grade, that belong to each grade."""
    start = first = 0
    rows = t.numel() // (len(layout(algebra).pairs) * w.shape[1])
    for blades, paths in zip(algebra.of_grade, layout(algebra).paths, strict=True):
        shape = (len(blades), rows, len(paths) * w.shape[1])
        of_grade = t[start : start + math.prod(shape)].view(shape)
        matrices = w[first : first + len(paths)].flatten(0, 1)
        yield _Grade(slice(blades.start, blades.stop), of_grade, matrices)
        start, first = start + math.prod(shape), first + len(paths)


def _empty_pairs(x: Tensor, rows: slice, algebra: Algebra, factors: torch.dtype) -> Tensor:
    count = len(layout(algebra).pairs) * (rows.stop - rows.start) * x.shape[2]
    return x.new_empty(count, dtype=factors)


def _pairs(
    x: Tensor,
    y: Tensor,
    scale: Tensor | None,
    rows: slice,
    algebra: Algebra,
    gated: bool,
    factors: torch.dtype,
) -> Tensor:
    t = _empty_pairs(x, rows, algebra, factors)
    of_rows = None if scale is None else scale[rows]
    fc_launch.pairs(x[:, rows], y[:, rows], of_rows, t, algebra, gated)
    return t


def _multiply(a: Tensor, b: Tensor, out: Tensor, alpha: float = 1) -> None:
    """out = alpha · a @ b, batched."""
    if alpha != 1:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    elif out.dtype == a.dtype:
        torch.bmm(a, b, out=out)
    elif a.is_cuda:
        torch.bmm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.bmm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the dtype of total."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a.to(total.dtype) @ b.to(total.dtype)
