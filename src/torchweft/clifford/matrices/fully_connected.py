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
from torchweft.core.expressions.program import accumulator

__all__ = [
    "Norm",
    "backward",
    "forward",
    "saved_shapes",
]

MOST_PAIRS = 96 << 20
"""Numbers of pairs at a time: rows are taken in parts that keep to it.

Less memory, but small products leave SMs idle, and each part costs the host ten launches.  The
products o, dt, dW of Cl(3,0), 4096 × 512, in bf16 take 140, 154, 135 µs at once on an H200 (as many
pairs as here), 146, 160, 143 in two parts, 155, 177, 167 in four.  Grade by grade they took 147,
164, 146, and 196, 200, 207 in four; one grouped Triton product for all grades 153, 197, 145, and
165, 223, 178.
"""

REDUCTIONS = {
    torch.float16: "allow_fp16_reduced_precision_reduction",
    torch.bfloat16: "allow_bf16_reduced_precision_reduction",
}
"""Whether products of factors of a dtype may sum parts in 16 bits."""

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
        r = x.new_empty((algebra.n + 1, x.shape[1]), dtype=accumulator(x.dtype))
    for rows in source.parts():
        with _sums_in_fp32(source.factors):
            o = _product(source, matrices, rows, scale)
        if norm is not None and r is not None:
            scales = None if scale is None else (_rows(scale, rows, 0), w_scale)
            launch.normalise(o, scales, _rows(z, rows), _rows(r, rows), norm, algebra)
        else:
            z[:, rows] = o if scale is None else o.div_((scale[rows] * w_scale)[:, None])
        del o
    if r is None:
        return [z]
    return [z, r, matrices, w_scale, r.new_empty(0) if scale is None else scale]


def saved_shapes(x: Tensor, weight: Tensor, grades: int) -> list[tuple[Sequence[int], torch.dtype]]:
    """The shapes and dtypes of what `forward` returns behind z with a norm."""
    rows, wide, factors = x.shape[1], accumulator(x.dtype), _factors(x)
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
    # those of the forward pass, whatever torch's setting is by now
    factors = _factors(x) if norm is None else saved[2].dtype
    source, grad_scale = _PairSource(x, y, algebra, gated, factors), None
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
        of_rows = None if grad_scale is None else _rows(grad_scale, rows, 0)
        part = _rows(grad, rows)
        if norm is None:
            if of_rows is None:
                return part.to(source.factors).contiguous()
            return _scaled(part, of_rows[:, None])
        go = grad.new_empty(part.shape, dtype=source.factors)
        launch.denormalise(part, _rows(z, rows), _rows(r, rows), go, of_rows, norm, algebra)
        return go

    parts: Iterable[Tensor] = map(of_product, source.parts())
    scales = None
    if scale is not None and grad_scale is not None and len(scale):
        if norm is not None:  # finds the scales of all rows, under one of which gw sums
            parts = list(parts)
        scales = _scales(scale, grad_scale, w_scale, grad.shape[2])
    with _sums_in_fp32(source.factors):
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

    def products(self, rows: slice, w: Tensor) -> tuple[_Product, ...]:
        """The matrix products of some rows."""
        return _products(self.algebra, rows.stop - rows.start, *w.shape[1:])

    def empty(self, rows: slice) -> Tensor:
        """Memory for the pairs of some rows."""
        count = len(layout(self.algebra).pairs) * (rows.stop - rows.start) * self.x.shape[2]
        return self.x.new_empty(count, dtype=self.factors)

    def pairs(self, rows: slice, scale: Tensor | None, t: Tensor, finds: bool = False) -> None:
        """t = the pairs of some rows, times a factor for each, which is given or found."""
        scale = None if scale is None else _rows(scale, rows, 0)
        x, y = _rows(self.x, rows), _rows(self.y, rows)
        launch.pairs(x, y, scale, t, self.algebra, self.gated, finds)

    def turn(
        self, rows: slice, factor: Tensor | None, dt: Tensor, gradients: Sequence[Tensor | None]
    ) -> None:
        """The gradients of x and y in some rows, from those of the pairs times a row's factor."""
        factor = None if factor is None else _rows(factor, rows, 0)
        x, y = _rows(self.x, rows), _rows(self.y, rows)
        outputs = [None if g is None else _rows(g, rows) for g in gradients]
        launch.turn(x, y, factor, dt, outputs, self.algebra, self.gated)


class _ArrangedWeight(NamedTuple):
    """The matrices by out grade, as factors, and their scale: empty where factors need none."""

    matrices: Tensor
    scale: Tensor


@contextlib.contextmanager
def _sums_in_fp32(factors: torch.dtype) -> Iterator[None]:
    """Disable 16-bit sums inside torch's products, where the numbers here would overflow.

    The numbers of fp16 factors, and of what is shrunk only at the end, fill all of their range.
    """
    matmul, reduction = torch.backends.cuda.matmul, REDUCTIONS.get(factors)
    accumulates = factors == torch.float16 and matmul.allow_fp16_accumulation
    reduces = reduction is not None and getattr(matmul, reduction)
    split_k = reduces and getattr(matmul, f"{reduction}_split_k")
    try:
        if accumulates:
            matmul.allow_fp16_accumulation = False
        if reduces:
            setattr(matmul, str(reduction), (False, split_k))
        yield
    finally:
        if accumulates:
            matmul.allow_fp16_accumulation = True
        if reduces:
            setattr(matmul, str(reduction), (True, split_k))


def _product(source: _PairSource, w: Tensor, rows: slice, scale: Tensor | None) -> Tensor:
    """The product of some rows (D, rows, F_out), sums as they are; finds the scale of each row."""
    t = source.empty(rows)
    source.pairs(rows, scale, t, finds=True)
    shape = (source.x.shape[0], rows.stop - rows.start, w.shape[2])
    o = source.x.new_empty(shape, dtype=accumulator(source.x.dtype))
    for at in source.products(rows, w):
        _multiply(at.t(t), at.w(w), at.o(o))
    return o


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
        sums = make(w, dtype=accumulator(w.dtype))
    for rows, go in zip(source.parts(), of_product, strict=True):
        _part_gradients(source, w, rows, go, scales, of_inputs, sums)
    if sums is not None:
        gw = x.new_empty(w.shape)
        launch.arrange(sums, _places(algebra, w.device), scales and scales.weight, gw)
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
    t, products = source.empty(rows), source.products(rows, w)
    if any(g is not None for g in of_inputs):
        for at in products:
            _multiply(at.o(go), at.w.turned(w), at.t(t), alpha=scales.shrink if scales else 1)
        source.turn(rows, scales and scales.turn, t, of_inputs)
    if sums is not None:
        source.pairs(rows, scales and scales.pairs, t)
        for at in products:
            _multiply(at.t.turned(t), at.o(go), at.w(sums), beta=1 if rows.start else 0)


class _Scales(NamedTuple):
    """Powers of two that keep the factors of the backward pass in fp16's range.

    Args:
        shrink: factor of every dt: these are sums of F_out products below 2³⁰.
        turn: for each row the inverse of `shrink`, of the scale of go and of the weight's.
        pairs: for each row; its product with go's scale is constant, since gw sums over the rows.
        weight: the inverse of that constant.
    """

    shrink: float
    turn: Tensor
    pairs: Tensor
    weight: Tensor


def _scales(scale: Tensor, go_scale: Tensor, w_scale: Tensor, f_out: int) -> _Scales:
    bits, rows = 15 + (f_out - 1).bit_length(), len(scale)
    turn, pairs, weight = (scale.new_empty(n) for n in (rows, rows, 1))
    launch.meet(bits, scale, go_scale, w_scale, turn, pairs, weight)
    return _Scales(2.0**-bits, turn, pairs, weight)


def _factors(x: Tensor) -> torch.dtype:
    """The dtype of the factors of matrix products."""
    if not x.shape[-1]:  # nothing to find a scale of
        return accumulator(x.dtype)
    if x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return torch.float16
    return x.dtype


def _by_out_grade(weight: Tensor, source: _PairSource) -> _ArrangedWeight:
    """The matrices with the paths of an out grade together, as factors."""
    order = _order(source.algebra, weight.device)
    w = weight.new_empty(weight.shape, dtype=source.factors)
    if not source.scaled:
        launch.arrange(weight, order, None, w)
        return _ArrangedWeight(w, weight.new_empty(0, dtype=accumulator(weight.dtype)))
    scales = weight.new_empty(weight.shape[1], dtype=torch.float32)
    launch.row_scale(weight, None, 1, scales)
    scale = scales.new_empty(())
    launch.arrange(weight, order, scales, w, scale)
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


class _Matrices(NamedTuple):
    """A batch of matrices inside a contiguous tensor.

    Args:
        size: of the batch.
        stride: its strides.
        offset: numbers before it.
    """

    size: tuple[int, int, int]
    stride: tuple[int, int, int]
    offset: int

    def __call__(self, tensor: Tensor) -> Tensor:
        """The matrices in a tensor."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def turned(self, tensor: Tensor) -> Tensor:
        """The transposed matrices in a tensor."""
        (count, height, width), (apart, down, across) = self.size, self.stride
        place = tensor.storage_offset() + self.offset
        return tensor.as_strided((count, width, height), (apart, across, down), place)


class _Product(NamedTuple):
    """The matrix products o = t w of out grades where these have one shape.

    Args:
        t: the pairs, (dim·rows, paths·F_in).
        w: the matrices one over the other, (paths·F_in, F_out).
        o: the rows, (dim·rows, F_out).
    """

    t: _Matrices
    w: _Matrices
    o: _Matrices


@functools.lru_cache(maxsize=1024)
def _products(algebra: Algebra, rows: int, f_in: int, f_out: int) -> tuple[_Product, ...]:
    """The matrix products of all out grades."""
    heights = [dim * rows for dim in algebra.sizes]
    widths = [len(paths) * f_in for paths in layout(algebra).paths]
    columns = [f_out for _ in widths]

    def batches(heights: list[int], widths: list[int]) -> Iterator[_Matrices]:
        sizes = [height * width for height, width in zip(heights, widths, strict=True)]
        starts = list(itertools.accumulate(sizes, initial=0))
        for group in layout(algebra).groups:
            first, last = group[0], group[-1]
            size = (len(group), heights[first], widths[first])
            yield _Matrices(size, (starts[last] - starts[first], size[2], 1), starts[first])

    of = batches(heights, widths), batches(widths, columns), batches(heights, columns)
    return tuple(_Product(*batch) for batch in zip(*of, strict=True))


def _rows(tensor: Tensor, rows: slice, dim: int = 1) -> Tensor:
    """Some rows of a tensor: itself where these are all."""
    count = rows.stop - rows.start
    return tensor if count == tensor.shape[dim] else tensor.narrow(dim, rows.start, count)


def _multiply(a: Tensor, b: Tensor, out: Tensor, alpha: float = 1, beta: float = 0) -> None:
    """out = alpha·a @ b + beta·out, batched, in the dtype of out."""
    if a.dtype == out.dtype:
        torch.baddbmm(out, a, b, alpha=alpha, beta=beta, out=out)
    elif a.is_cuda:
        torch.baddbmm(out, a, b, out.dtype, alpha=alpha, beta=beta, out=out)
    else:
        torch.baddbmm(out, a.to(out.dtype), b.to(out.dtype), alpha=alpha, beta=beta, out=out)
