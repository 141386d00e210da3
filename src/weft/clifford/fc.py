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

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.clifford import fc_launch
from weft.clifford.algebra import Algebra
from weft.clifford.fc_kernels import layout
from weft.clifford.fc_rows import Norm

__all__ = [
    "Norm",
    "backward",
    "backward_normalised",
    "forward",
    "forward_normalised",
    "saved_shapes",
]

MOST_BYTES = 12
"""Bytes of pairs at a time, for each number of x: rows are taken in parts that keep to it.

On an H200 at Cl(3,0), 4096 × 512 in TF32, forward and backward take 974 µs and 450 MiB; with a
half of it 1022 µs and 430 MiB, with a quarter 1102 µs and 342 MiB: small products leave SMs idle.
"""

REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")

Needed = Sequence[bool]


def forward(x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra, gated: bool) -> Tensor:
    """o_j[m] = Σ_(p,n) W[p,n,m] · t_(p,j)[n].

    x, y: (D, B, F_in), any strides; weight: (P, F_in, F_out); gated: scales x and y by their GELU
    gates.  Returns (D, B, F_out) in x's dtype.
    """
    scaled = _factors(x) == torch.float16
    source = _Source(x, y, algebra, gated, _factors(x))
    o, undo, _ = _product(source, weight, torch.float32 if scaled else x.dtype)
    return o if undo is None else o.mul_(undo.unsqueeze(1)).to(x.dtype)


def forward_normalised(
    x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra, gated: bool, norm: Norm
) -> list[Tensor]:
    """[z, r, scale]: z = the product over its size in each row and grade; the rest is saved."""
    o, undo, scale = _product(_Source(x, y, algebra, gated, _factors(x)), weight, _wide(x))
    z = o if o.dtype == x.dtype else torch.empty_like(o, dtype=x.dtype)
    r = o.new_empty(algebra.n + 1, o.shape[1])
    fc_launch.normalise(o, undo, z, r, norm, algebra)
    return [z, r, r.new_empty(0) if scale is None else scale]


def backward(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    go: Tensor,
    algebra: Algebra,
    gated: bool,
    needed: Needed = (True, True, True),
) -> list[Tensor | None]:
    """The gradients of x, y and weight where they are needed, else None; go: (D, B, F_out)."""
    source = _Source(x, y, algebra, gated, _factors(x))
    w, w_scale = _by_out_grade(weight, algebra, source.factors)
    parts = source.parts()
    if w_scale is None:
        return _gradients(source, w, [go[:, rows].contiguous() for rows in parts], None, needed)
    go_scale = fc_launch.row_scale(go, None, 1)
    scaled = [_scaled(go[:, p], go_scale[p, None], source.factors) for p in parts]
    scales = _scales(source.scale(), go_scale, w_scale, go.shape[2])
    return _gradients(source, w, scaled, scales, needed)


def backward_normalised(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    saved: Sequence[Tensor],
    gz: Tensor,
    algebra: Algebra,
    gated: bool,
    norm: Norm,
    needed: Needed = (True, True, True),
) -> list[Tensor | None]:
    """The same for `forward_normalised`, which returned `saved`; gz: the gradient of z."""
    source = _Source(x, y, algebra, gated, _factors(x))
    w, w_scale = _by_out_grade(weight, algebra, source.factors)
    z, r, t_scale = saved
    go_scale = None if w_scale is None else torch.empty_like(t_scale)
    of_product = []
    for rows in source.parts():
        go = gz.new_empty(gz[:, rows].shape, dtype=source.factors)
        of_rows = None if go_scale is None else go_scale[rows]
        fc_launch.denormalise(gz[:, rows], z[:, rows], r[:, rows], go, of_rows, norm, algebra)
        of_product.append(go)
    scales = None
    if w_scale is not None and go_scale is not None:
        scales = _scales(t_scale, go_scale, w_scale, gz.shape[2])
    return _gradients(source, w, of_product, scales, needed)


class _Source(NamedTuple):
    """What pairs are made of; they are made, and used up, for a part of the rows at a time."""

    x: Tensor
    y: Tensor
    algebra: Algebra
    gated: bool
    factors: torch.dtype

    def parts(self) -> list[slice]:
        """The rows in equal slices, as few as MOST_BYTES allows."""
        per_number = len(layout(self.algebra).pairs) * self.factors.itemsize
        parts = math.ceil(per_number / (self.algebra.num_blades * MOST_BYTES))
        count = self.x.shape[1]
        size = max(1, -(-count // parts))
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def scale(self) -> Tensor:
        """For each row a power of two that brings its pairs just below 2¹⁵."""
        return fc_launch.row_scale(self.x, self.y, layout(self.algebra).most_terms)

    def empty(self, rows: slice) -> Tensor:
        """Room for the pairs of some rows."""
        count = len(layout(self.algebra).pairs) * (rows.stop - rows.start) * self.x.shape[2]
        return self.x.new_empty(count, dtype=self.factors)

    def pairs(self, rows: slice, scale: Tensor | None) -> Tensor:
        """The pairs of some rows, times a factor for each."""
        x, y, t = self.x[:, rows], self.y[:, rows], self.empty(rows)
        scale = None if scale is None else scale[rows]
        fc_launch.pairs(x, y, scale, t, self.algebra, self.gated)
        return t

    def turn(
        self, rows: slice, factor: Tensor | None, dt: Tensor, gradients: Sequence[Tensor | None]
    ) -> None:
        """The gradients of x and y in some rows, from those of the pairs times a row's factor."""
        x, y = self.x[:, rows], self.y[:, rows]
        factor = None if factor is None else factor[rows]
        outputs = [None if g is None else g[:, rows] for g in gradients]
        fc_launch.turn(x, y, factor, dt, outputs, self.algebra, self.gated)


@contextlib.contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """No sums in 16 bits inside of the library's products, where ours would overflow.

    The numbers of fp16 factors, and of what is shrunk only at the end, fill all of their range.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_fp16_accumulation
    reductions = {
        name: (getattr(matmul, name), getattr(matmul, f"{name}_split_k")) for name in REDUCTIONS
    }
    try:
        matmul.allow_fp16_accumulation = False
        for name, (_, split_k) in reductions.items():
            setattr(matmul, name, (False, split_k))
        yield
    finally:
        matmul.allow_fp16_accumulation = before
        for name, value in reductions.items():
            setattr(matmul, name, value)


@_sums_in_fp32()
def _product(
    source: _Source, weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, undo, scale): the product is o times a factor undo for each row; scale is the pairs'."""
    w, w_scale = _by_out_grade(weight, source.algebra, source.factors)
    scale = undo = None
    if w_scale is not None:
        scale = source.scale()
        undo = 1 / (scale * w_scale)
    o = source.x.new_empty((*source.x.shape[:2], weight.shape[2]), dtype=dtype)
    matrices = _by_grade(w, source.algebra)
    for rows in source.parts():
        of_grade = _pairs_by_grade(source.pairs(rows, scale), source)
        for t, w_g, blades in zip(of_grade, matrices, source.algebra.of_grade, strict=True):
            batch, out = len(blades), o[blades.start : blades.stop, rows]
            _multiply(t.view(batch, -1, t.shape[1]), w_g.expand(batch, -1, -1), out)
    return o, undo, scale


@_sums_in_fp32()
def _gradients(
    source: _Source,
    w: Tensor,
    of_product: Sequence[Tensor],
    scales: _Scales | None,
    needed: Needed,
) -> list[Tensor | None]:
    """The gradients, from those of the product in each part of the rows, as factors."""
    x, algebra = source.x, source.algebra
    of_inputs = [x.new_empty(x.shape) if need else None for need in needed[:2]]
    gw = torch.zeros_like(w, dtype=_wide(w)) if needed[2] else None
    dims = [len(blades) for blades in algebra.of_grade]
    for rows, go in zip(source.parts(), of_product, strict=True):
        go_by_grade = go.flatten(0, 1).split_with_sizes([dim * go.shape[1] for dim in dims])
        if any(needed[:2]):
            dt = source.empty(rows)
            triples = zip(
                go_by_grade, _by_grade(w, algebra), _pairs_by_grade(dt, source), strict=True
            )
            for go_g, w_g, dt_g in triples:
                shrink = scales.shrink if scales else 1
                torch.addmm(dt_g, go_g, w_g.t(), beta=0, alpha=shrink, out=dt_g)
            source.turn(rows, scales and scales.turn, dt, of_inputs)
            del dt, dt_g, triples  # before the pairs, which take as much
        if gw is not None:
            of_grade = _pairs_by_grade(source.pairs(rows, scales and scales.pairs), source)
            for go_g, t, gw_g in zip(go_by_grade, of_grade, _by_grade(gw, algebra), strict=True):
                _add_product(gw_g, t.t(), go_g)
    if gw is not None:
        gw = gw.index_select(0, _places(algebra, w.device))
        gw = (gw.div_(scales.weight) if scales else gw).to(x.dtype)
    return [*of_inputs, gw]


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


def _scales(scale: Tensor, go_scale: Tensor, w_scale: Tensor, f_out: int) -> _Scales | None:
    if not scale.shape[0]:
        return None
    shrink = 2.0 ** -(15 + (f_out - 1).bit_length())
    of_weight = (scale * go_scale).amin()
    return _Scales(shrink, 1 / (go_scale * w_scale * shrink), of_weight / go_scale, of_weight)


def _factors(x: Tensor) -> torch.dtype:
    """The dtype of the factors of matrix products."""
    if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return torch.float16
    return x.dtype


def saved_shapes(x: Tensor, grades: int) -> tuple[list[int], list[int], torch.dtype]:
    """The shapes of what `forward_normalised` saves beside the result, and their dtype."""
    rows = x.shape[1]
    return [grades, rows], [rows if _factors(x) == torch.float16 else 0], _wide(x)


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(tensor.dtype, torch.float32)


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
    return _scaled(weight, scale, factors).index_select(0, order), scale.view(())


def _scaled(tensor: Tensor, scale: Tensor, factors: torch.dtype) -> Tensor:
    """The tensor times a scale, as contiguous factors."""
    return torch.mul(tensor, scale, out=tensor.new_empty(tensor.shape, dtype=factors))


@functools.lru_cache(maxsize=64)
def _order(algebra: Algebra, device: torch.device) -> Tensor:
    """The paths by out grade."""
    return torch.tensor(list(itertools.chain(*layout(algebra).paths)), device=device)


@functools.lru_cache(maxsize=64)
def _places(algebra: Algebra, device: torch.device) -> Tensor:
    """Where each path stands in `_order`."""
    return torch.argsort(_order(algebra, device))


def _by_grade(w: Tensor, algebra: Algebra) -> Sequence[Tensor]:
    """The matrices of each out grade one over the other, (paths·F_in, F_out)."""
    return w.flatten(0, 1).split_with_sizes([len(p) * w.shape[1] for p in layout(algebra).paths])


def _pairs_by_grade(t: Tensor, source: _Source) -> list[Tensor]:
    """The pairs of each out grade, (dim·rows, paths·F_in)."""
    algebra, features = source.algebra, source.x.shape[2]
    rows = t.shape[0] // (len(layout(algebra).pairs) * features)
    widths = [len(paths) * features for paths in layout(algebra).paths]
    heights = [len(blades) * rows for blades in algebra.of_grade]
    parts = t.split_with_sizes([h * w for h, w in zip(heights, widths, strict=True)])
    return [part.view(-1, width) for part, width in zip(parts, widths, strict=True)]


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, batched."""
    if out.dtype == a.dtype:
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
