"""The fully connected product on GPUs: pairs of blades, then one matrix product an out grade.

    o_j[m] = Σ_(p,n) W[p,n,m] · t_(p,j)[n],   t_(p,j)[n] = s[n] Σ_((i,k) ∈ p → j) ± x_i[n] y_k[n]

    t_g (dim_g·B, P_g·F_in) from x, y;   o_g = t_g W_g
    dt_g = do_g W_gᵀ;   dx, dy from dt, x, y;   dW_g = t_gᵀ do_g

The paths of an out grade stand side by side along K, so that sums over paths happen in the
accumulator of the library's matrix product; out grades of one shape are one batch.  Factors are in
the dtype of x, with two exceptions.  Where torch allows TF32, fp32 factors are fp16 numbers under a
power of two for each row: a mantissa of the same 10 bits at twice the rate and half the bytes.
fp16 factors have it too, since pairs of numbers in range need not be.  No atomics: results repeat.

What TF32 keeps and fp16 factors lose.  A number keeps its 11 bits from 2⁻²⁹ of a bound, below it
has an error of 2⁻⁴⁰ of the bound, which is
    of pairs   terms · max|x| · max|y| of the row; in dW, of the row that adds the most
    of do      the largest of the row, of W the largest of all
    of dt      F_out times both
So rows of any size are alike, but features of a row, or matrices, that span more than 8 decades are
not.  Powers of two end at 2^±60: rows of products below 2⁻⁴⁵ have less room.  dt is rounded once
more.  Emulated with rows over 24 decades, the worst row of dx had 2.4 times the error of TF32, and
1.3 times without gates.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.matrices import launch
from torchweft.clifford.matrices.source import Norm, layout

__all__ = [
    "Norm",
    "backward",
    "forward",
    "saved_shapes",
]

MOST_PAIRS = 48 << 20
"""Numbers of pairs at a time: rows are taken in parts that keep to it.

Less memory, but small products leave SMs idle.  The products o, dt, dW of Cl(3,0), 4096 × 512, in
bf16 take 140, 154, 135 µs at once on an H200, 146, 160, 143 in two parts (as many pairs as here),
155, 177, 167 in four.  Grade by grade they took 147, 164, 146, and 196, 200, 207 in four; one
grouped Triton product for all grades 153, 197, 145, and 165, 223, 178.
"""

REDUCTIONS = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")

Needed = Sequence[bool]


def forward(
    x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra, gated: bool, norm: Norm | None = None
) -> list[Tensor]:
    """[z, …]: z_j[m] = Σ_(p,n) W[p,n,m] · t_(p,j)[n], with `norm` over its size by row and grade.

    x, y: (D, B, F_in), any strides; weight: (P, F_in, F_out); gated: scales x and y by their GELU
    gates.  z: (D, B, F_out) in x's dtype; with a norm, `backward` needs what follows it.
    """
    source = _PairSource(x, y, algebra, gated, _factors(x))
    (matrices, w_scale), scale = _by_out_grade(weight, source), _row_scales(source)
    z, r = x.new_empty((*x.shape[:2], weight.shape[2])), None
    if norm is not None:
        r = x.new_empty((algebra.n + 1, x.shape[1]), dtype=_wide(x))
    for rows in source.parts():
        o = _product(source, matrices, rows, scale)
        if norm is not None and r is not None:
            scales = None if scale is None else (scale[rows], w_scale)
            launch.normalise(o, scales, z[:, rows], r[:, rows], norm, algebra)
        else:
            z[:, rows] = o if scale is None else o.div_((scale[rows] * w_scale)[:, None])
        del o
    if r is None:
        return [z]
    return [z, r, matrices, w_scale, r.new_empty(0) if scale is None else scale]


def saved_shapes(x: Tensor, weight: Tensor, grades: int) -> list[tuple[Sequence[int], torch.dtype]]:
    """The shapes and dtypes of what `forward` returns behind z with a norm."""
    rows, wide, factors = x.shape[1], _wide(x), _factors(x)
    scaled = factors == torch.float16
    return [
        ([grades, rows], wide),
        (weight.shape, factors),
        ([], wide) if scaled else ([0], wide),
        ([rows if scaled else 0], wide),
    ]


def backward(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    saved: Sequence[Tensor],
    grad: Tensor,
    algebra: Algebra,
    gated: bool,
    norm: Norm | None = None,
    needed: Needed = (True, True, True),
) -> list[Tensor | None]:
    """The gradients of x, y and weight where they are needed, else None.

    saved: the results of `forward` with a norm; grad: (D, B, F_out), the gradient of z.
    """
    source, grad_scale = _PairSource(x, y, algebra, gated, _factors(x)), None
    if norm is None:
        (matrices, w_scale), scale = _by_out_grade(weight, source), _row_scales(source)
        if scale is not None:
            grad_scale = torch.empty_like(scale)
            launch.row_scale(x, y, layout(algebra).most_terms, scale)
            launch.row_scale(grad, None, 1, grad_scale)
    else:
        z, r, matrices, w_scale, scale = saved
        grad_scale = torch.empty_like(scale) if source.scaled else None

    def of_product(rows: slice) -> Tensor:
        """The gradient of the product in some rows, as factors."""
        of_rows = None if grad_scale is None else grad_scale[rows]
        if norm is None:
            part = grad[:, rows]
            return part.contiguous() if of_rows is None else _scaled(part, of_rows[:, None])
        go = grad.new_empty(grad[:, rows].shape, dtype=source.factors)
        launch.denormalise(grad[:, rows], z[:, rows], r[:, rows], go, of_rows, norm, algebra)
        return go

    parts: Iterable[Tensor] = map(of_product, source.parts())
    if scale is None or grad_scale is None:
        return _gradients(source, matrices, parts, None, needed)
    if norm is not None:  # finds the scales of all rows, under one of which gw sums
        parts = list(parts)
    scales = _scales(scale, grad_scale, w_scale, grad.shape[2])
    return _gradients(source, matrices, parts, scales, needed)


class _PairSource(NamedTuple):
    """The operands of the pairs, which are computed for a part of the rows at a time."""

    x: Tensor
    y: Tensor
    algebra: Algebra
    gated: bool
    factors: torch.dtype

    @property
    def scaled(self) -> bool:
        """Whether factors need scales."""
        return self.factors == torch.float16

    def parts(self) -> list[slice]:
        """The rows in equal slices, as few as MOST_PAIRS allows."""
        _, count, features = self.x.shape
        parts = math.ceil(len(layout(self.algebra).pairs) * count * features / MOST_PAIRS)
        size = max(1, -(-count // max(1, parts)))
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def empty(self, rows: slice) -> Tensor:
        """Memory for the pairs of some rows."""
        count = len(layout(self.algebra).pairs) * (rows.stop - rows.start) * self.x.shape[2]
        return self.x.new_empty(count, dtype=self.factors)

    def pairs(self, rows: slice, scale: Tensor | None, t: Tensor, finds: bool = False) -> None:
        """t = the pairs of some rows, times a factor for each, which is given or found."""
        x, y = self.x[:, rows], self.y[:, rows]
        scale = None if scale is None else scale[rows]
        launch.pairs(x, y, scale, t, self.algebra, self.gated, finds)

    def turn(
        self, rows: slice, factor: Tensor | None, dt: Tensor, gradients: Sequence[Tensor | None]
    ) -> None:
        """The gradients of x and y in some rows, from those of the pairs times a row's factor."""
        x, y = self.x[:, rows], self.y[:, rows]
        factor = None if factor is None else factor[rows]
        outputs = [None if g is None else g[:, rows] for g in gradients]
        launch.turn(x, y, factor, dt, outputs, self.algebra, self.gated)


class _ArrangedWeight(NamedTuple):
    """The matrices by out grade, as factors, and their scale: empty where factors need none."""

    matrices: Tensor
    scale: Tensor


@contextlib.contextmanager
def _sums_in_fp32() -> Iterator[None]:
    """Disable 16-bit sums inside torch's products, where the numbers here would overflow.

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
def _product(source: _PairSource, w: Tensor, rows: slice, scale: Tensor | None) -> Tensor:
    """The product of some rows (D, rows, F_out), sums as they are; finds the scale of each row."""
    x, algebra = source.x, source.algebra
    t = source.empty(rows)
    source.pairs(rows, scale, t, finds=True)
    o = x.new_empty((x.shape[0], rows.stop - rows.start, w.shape[2]), dtype=_wide(x))
    operands = _pairs_by_grade(t, source), _by_grade(w, algebra), _blades_by_grade(o, algebra)
    for t_g, w_g, o_g in _batches(algebra, *operands):
        _multiply(t_g, w_g, o_g)
    return o


@_sums_in_fp32()
def _gradients(
    source: _PairSource,
    w: Tensor,
    of_product: Iterable[Tensor],
    scales: _Scales | None,
    needed: Needed,
) -> list[Tensor | None]:
    """The gradients, from those of the product in each part of the rows, as factors."""
    x, algebra = source.x, source.algebra
    of_inputs = [x.new_empty(x.shape) if need else None for need in needed[:2]]
    sums = gw = None
    if needed[2]:
        make = torch.empty_like if x.shape[1] else torch.zeros_like
        sums = make(w, dtype=_wide(w))
    for rows, go in zip(source.parts(), of_product, strict=True):
        _part_gradients(source, w, rows, go, scales, of_inputs, sums)
    if sums is not None:
        gw = x.new_empty(w.shape)
        undo = scales and scales.weight.reciprocal()
        launch.arrange(sums, _places(algebra, w.device), undo, gw)
    return [*of_inputs, gw]


def _part_gradients(
    source: _PairSource,
    w: Tensor,
    rows: slice,
    go: Tensor,
    scales: _Scales | None,
    of_inputs: Sequence[Tensor | None],
    sums: Tensor | None,
) -> None:
    """The gradients of x and y in some rows, and what these rows add to the weight's."""
    algebra, t = source.algebra, source.empty(rows)
    of_t, of_go = _pairs_by_grade(t, source), _blades_by_grade(go, algebra)
    if any(g is not None for g in of_inputs):
        for go_g, w_g, dt_g in _batches(algebra, of_go, _by_grade(w, algebra), of_t):
            _multiply(go_g, w_g.mT, dt_g, alpha=scales.shrink if scales else 1)
        source.turn(rows, scales and scales.turn, t, of_inputs)
    if sums is not None:
        source.pairs(rows, scales and scales.pairs, t)
        for t_g, go_g, sum_g in _batches(algebra, of_t, of_go, _by_grade(sums, algebra)):
            _multiply(t_g.mT, go_g, sum_g, beta=1 if rows.start else 0)


class _Scales(NamedTuple):
    """Powers of two that keep the factors of the backward pass in fp16's range.

    Args:
        shrink: factor of every dt: these are sums of F_out products below 2³⁰.
        turn: for each row the inverse of `shrink`, of the scale of go and of the weight's.
        pairs: for each row; its product with go's scale is constant, since gw sums over the rows.
        weight: that constant.
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


def _wide(tensor: Tensor) -> torch.dtype:
    """The dtype of sums."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _by_out_grade(weight: Tensor, source: _PairSource) -> _ArrangedWeight:
    """The matrices with the paths of an out grade together, as factors."""
    order = _order(source.algebra, weight.device)
    w = weight.new_empty(weight.shape, dtype=source.factors)
    if not source.scaled:
        launch.arrange(weight, order, None, w)
        return _ArrangedWeight(w, weight.new_empty(0, dtype=_wide(weight)))
    rows = weight.reshape(1, -1, weight.shape[2])
    of_rows = weight.new_empty(rows.shape[1], dtype=torch.float32)
    launch.row_scale(rows, None, 1, of_rows)
    scale = of_rows.amin()
    launch.arrange(weight, order, scale, w)
    return _ArrangedWeight(w, scale)


def _row_scales(source: _PairSource) -> Tensor | None:
    """Memory for the scales of the rows' pairs; None where factors need none."""
    return source.x.new_empty(source.x.shape[1], dtype=torch.float32) if source.scaled else None


def _scaled(tensor: Tensor, scale: Tensor) -> Tensor:
    """The tensor times a scale, as contiguous factors."""
    return torch.mul(tensor, scale, out=tensor.new_empty(tensor.shape, dtype=torch.float16))


@functools.lru_cache(maxsize=64)
def _order(algebra: Algebra, device: torch.device) -> Tensor:
    """The paths by out grade."""
    return torch.tensor(list(itertools.chain(*layout(algebra).paths)), device=device)


@functools.lru_cache(maxsize=64)
def _places(algebra: Algebra, device: torch.device) -> Tensor:
    """Position of each path in `_order`."""
    return torch.argsort(_order(algebra, device))


def _by_grade(w: Tensor, algebra: Algebra) -> Sequence[Tensor]:
    """The matrices of each out grade one over the other, (paths·F_in, F_out)."""
    return w.flatten(0, 1).split_with_sizes([len(p) * w.shape[1] for p in layout(algebra).paths])


def _blades_by_grade(o: Tensor, algebra: Algebra) -> Sequence[Tensor]:
    """The rows of each out grade, (dim·rows, F_out)."""
    return o.flatten(0, 1).split_with_sizes([dim * o.shape[1] for dim in algebra.sizes])


def _pairs_by_grade(t: Tensor, source: _PairSource) -> Sequence[Tensor]:
    """The pairs of each out grade, (dim·rows, paths·F_in)."""
    algebra, features = source.algebra, source.x.shape[2]
    rows = t.shape[0] // (len(layout(algebra).pairs) * features)
    widths = [len(paths) * features for paths in layout(algebra).paths]
    heights = [dim * rows for dim in algebra.sizes]
    parts = t.split_with_sizes([h * w for h, w in zip(heights, widths, strict=True)])
    return [part.view(-1, width) for part, width in zip(parts, widths, strict=True)]


def _batches(algebra: Algebra, *by_grade: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The matrices of out grades in batches, where their products have one shape."""
    for group in layout(algebra).groups:
        yield [_batch([matrices[grade] for grade in group]) for matrices in by_grade]


def _batch(matrices: Sequence[Tensor]) -> Tensor:
    """One matrix, or two of one shape in one tensor, as a batch without a copy."""
    first, last = matrices[0], matrices[-1]
    apart = last.storage_offset() - first.storage_offset()
    return first.as_strided((len(matrices), *first.shape), (apart, *first.stride()))


def _multiply(a: Tensor, b: Tensor, out: Tensor, alpha: float = 1, beta: float = 0) -> None:
    """out = alpha·a @ b + beta·out, batched, in the dtype of out."""
    if a.dtype == out.dtype:
        torch.baddbmm(out, a, b, alpha=alpha, beta=beta, out=out)
    elif a.is_cuda:
        torch.baddbmm(out, a, b, out.dtype, alpha=alpha, beta=beta, out=out)
    else:
        torch.baddbmm(out, a.to(out.dtype), b.to(out.dtype), alpha=alpha, beta=beta, out=out)
