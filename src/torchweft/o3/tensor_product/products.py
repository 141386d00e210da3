"""Tensor products of irreps, row by row; `o3.irreps.instructions` lists the modes.

z[i_out] = Σ factor · weight · x[i_in1] ⊗ y[i_in2]      over the instructions into i_out

TensorProduct                 instructions are given
FullyConnectedTensorProduct   every pair into every output that it couples to, weights mix all
ElementwiseTensorProduct      copy u of x with copy u of y, into all they couple to
FullTensorProduct             every copy of x with every copy of y, into all they couple to
TensorSquare                  x with itself: what symmetry leaves of both
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operands import same_kind
from torchweft.errors import ShapeError
from torchweft.o3.irreps.instructions import IRREP_NORMALIZATIONS, chosen
from torchweft.o3.irreps.irreps import Irrep, Irreps, IrrepsLike, MulIr
from torchweft.o3.irreps.layout import broadcast, check_rows
from torchweft.o3.tensor_product.module import InstructedModule

__all__ = [
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedTensorProduct",
    "TensorProduct",
    "TensorSquare",
    "paired",
]


class TensorProduct(InstructedModule):
    """z = Σ factor · weight · x ⊗ y, row by row.

    Args:
        irreps_in1: of x.
        irreps_in2: of y.
        irreps_out: of z; items that no instruction reaches are zero.
        instructions: (i_in1, i_in2, i_out, mode, has_weight) or with a path_weight, 1 by default.
        in1_var: variance of each item of x; None is 1.
        in2_var: variance of each item of y; None is 1.
        out_var: variance that each item of z shall have; None is 1.
        irrep_normalization: "component" (None), "norm" or "none".
        path_normalization: "element" (None), "path" or "none".
        internal_weights: whether the module owns its weight; None: where it is shared.
        shared_weights: one weight for all rows (None), or one a row.
        layout: "mul_ir", e3nn's, or "ir_mul", of x, y and z; weights have one order.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.  numba holds
            channelwise modes; where triton or numba lacks a part, a call raises BackendError.

    Raises:
        WeftError: instructions that do not fit the irreps, with the reason.

    Attributes as e3nn's: irreps_in1, irreps_in2, irreps_out, instructions (with factors in place
    of path weights), weight_numel, weight, output_mask.  Factors and 3j symbols are float64 on the
    host, whatever the dtype of the module.
    """

    def forward(
        self, x: Tensor, y: Tensor, weight: Tensor | Sequence[Tensor] | None = None
    ) -> Tensor:
        """The product.

        Args:
            x: (…, D1); its leading dimensions, y's and those of own weights broadcast.
            y: (…, D2).
            weight: (weight_numel,), or (…, weight_numel) without shared_weights, or a list of one
                for each instruction that has weights; None: the module's.

        Returns:
            (…, D_out) in the inputs' dtype.
        """
        z = self._cached(x, y, weight)
        if z is not None:
            return z
        check_rows("x", x, self.irreps_in1, self)
        check_rows("y", y, self.irreps_in2, self)
        flat = self.checked_weight(weight)
        x, y, *given = same_kind(x=x, y=y, weight=flat)
        flat = given[0] if given else None
        own = [] if flat is None or self.shared_weights else [flat]
        batch = broadcast([t.shape[:-1] for t in (x, y, *own)])
        x, y, *own = (_rows(t, batch) for t in (x, y, *own))
        flat = own[0] if own else flat
        if len(batch) == 1:  # first: a checkpoint's second call is like the first
            self._cache(x, y, flat, None)
            z = self._cached(x, y, flat)
            return self.recipe(x, y, flat) if z is None else z
        return self.recipe(x, y, flat).view(*batch, self.irreps_out.dim)

    def right(self, y: Tensor, weight: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """(…, D1, D_out): the matrix b with z = x @ b, for y (…, D2) and weights as in a call."""
        flat = self.checked_weight(weight)
        if flat is not None and not self.shared_weights:
            flat = flat.unsqueeze(-2)
        unit = torch.eye(self.irreps_in1.dim, dtype=y.dtype, device=y.device)
        return TensorProduct.forward(self, unit, y.unsqueeze(-2), flat)


def _rows(x: Tensor, batch: torch.Size) -> Tensor:
    """(rows, D) of (…, D): one row for each of the broadcast dimensions."""
    if x.shape[:-1] == batch and len(batch) == 1:
        return x
    width = x.shape[-1]
    return x.expand(*batch, width).reshape(math.prod(batch), width)


Given = tuple[int, int, int, str, bool, float]


class FullyConnectedTensorProduct(TensorProduct):
    """z_w = Σ_uv weight_uvw x_u ⊗ y_v over every pair of items that couples to z's.

    Args:
        irreps_in1: of x.
        irreps_in2: of y.
        irreps_out: of z.
        irrep_normalization: see TensorProduct.
        path_normalization: see TensorProduct.
        **options: further ones of TensorProduct.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        **options: Any,
    ) -> None:
        first, second, out = Irreps(irreps_in1), Irreps(irreps_in2), Irreps(irreps_out)
        instructions = [
            (i, j, k, "uvw", True)
            for i, a in enumerate(first)
            for j, b in enumerate(second)
            for k, c in enumerate(out)
            if c.ir in a.ir * b.ir
        ]
        options |= {"path_normalization": path_normalization}
        super().__init__(
            first, second, out, instructions, irrep_normalization=irrep_normalization, **options
        )


class ElementwiseTensorProduct(TensorProduct):
    """z_u = x_u ⊗ y_u, without weights; the output has all irreps that the pairs couple to.

    Args:
        irreps_in1: of x, simplified.
        irreps_in2: of y, simplified; as many irreps, copies counted.
        filter_ir_out: keep only these irreps of the output.
        irrep_normalization: see TensorProduct.
        **options: further ones of TensorProduct.

    Raises:
        ShapeError: x and y have different numbers of irreps.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: Iterable[Irrep | str] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        pairs = list(paired(Irreps(irreps_in1).simplify(), Irreps(irreps_in2).simplify()))
        keep = _filter(filter_ir_out)
        out: list[MulIr] = []
        instructions = []
        for n, (a, b) in enumerate(pairs):
            for ir in a.ir * b.ir:
                if keep is None or ir in keep:
                    instructions.append((n, n, len(out), "uuu", False))
                    out.append(MulIr(a.mul, ir))
        first, second = ([pair[n] for pair in pairs] for n in range(2))
        super().__init__(
            first, second, out, instructions, irrep_normalization=irrep_normalization, **options
        )


class FullTensorProduct(TensorProduct):
    """z_uv = x_u ⊗ y_v, without weights; the output has all irreps, sorted.

    Args:
        irreps_in1: of x, simplified.
        irreps_in2: of y, simplified.
        filter_ir_out: keep only these irreps of the output.
        irrep_normalization: see TensorProduct.
        **options: further ones of TensorProduct.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        filter_ir_out: Iterable[Irrep | str] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        first, second = Irreps(irreps_in1).simplify(), Irreps(irreps_in2).simplify()
        keep = _filter(filter_ir_out)
        found = [
            ((i, j), MulIr(a.mul * b.mul, ir))
            for i, a in enumerate(first)
            for j, b in enumerate(second)
            for ir in a.ir * b.ir
            if keep is None or ir in keep
        ]
        out, place, _ = Irreps([item for _, item in found]).sort()
        instructions = [(*pair, place[n], "uvuv", False) for n, (pair, _) in enumerate(found)]
        super().__init__(
            first, second, out, instructions, irrep_normalization=irrep_normalization, **options
        )


class TensorSquare(TensorProduct):
    """z = x ⊗ x by its irreps: all of them without weights, or mixed into irreps_out with weights.

    Of a copy with itself the odd degrees vanish; of two copies u < v each is taken once.  Factors
    make the output of normal x have the variance 1 ("component"), or the norm 1 ("norm").

    Args:
        irreps_in: of x, simplified.
        irreps_out: of z, simplified; None: all irreps, sorted, without weights.
        filter_ir_out: without irreps_out, keep only these irreps.
        irrep_normalization: "component" (None), "norm" or "none".
        **options: further ones of TensorProduct.

    Raises:
        ShapeError: both irreps_out and filter_ir_out are given.
    """

    def __init__(
        self,
        irreps_in: IrrepsLike,
        irreps_out: IrrepsLike | None = None,
        filter_ir_out: Iterable[Irrep | str] | None = None,
        irrep_normalization: str | None = None,
        **options: Any,
    ) -> None:
        irreps = Irreps(irreps_in).simplify()
        normalization = chosen("irrep_normalization", irrep_normalization, IRREP_NORMALIZATIONS)
        if irreps_out is None:
            out, instructions = _all_squares(irreps, _filter(filter_ir_out), normalization)
        elif filter_ir_out is None:
            out = Irreps(irreps_out).simplify()
            instructions = list(_mixed_squares(irreps, out, normalization))
        else:
            raise ShapeError(
                "irreps_out and filter_ir_out are both given: the first says what the output is, "
                "the second chooses from all there is. Pass one of both."
            )
        super().__init__(irreps, irreps, out, instructions, irrep_normalization="none", **options)
        self.irreps_in = irreps

    def __repr__(self) -> str:
        return super().__repr__().replace(f" x {self.irreps_in}", "", 1)

    def forward(  # type: ignore[override]  # one factor
        self, x: Tensor, weight: Tensor | Sequence[Tensor] | None = None
    ) -> Tensor:
        """(…, D_out) of x (…, D) and weights as in TensorProduct."""
        return super().forward(x, x, weight)


def paired(first: Irreps, second: Irreps) -> Iterator[tuple[MulIr, MulIr]]:
    """The items of both, cut where either has another irrep: pairs of as many copies."""
    if first.num_irreps != second.num_irreps:
        raise ShapeError(
            f"irreps_in1 {first} has {first.num_irreps} irreps and irreps_in2 {second} has "
            f"{second.num_irreps}: copy u of one meets copy u of the other. Pass as many in both."
        )
    left, right = list(first), list(second)
    while left:
        a, b = left.pop(0), right.pop(0)
        count = min(a.mul, b.mul)
        if a.mul > count:
            left.insert(0, MulIr(a.mul - count, a.ir))
        if b.mul > count:
            right.insert(0, MulIr(b.mul - count, b.ir))
        yield MulIr(count, a.ir), MulIr(count, b.ir)


def _filter(given: Iterable[Irrep | str] | None) -> frozenset[Irrep] | None:
    return None if given is None else frozenset(Irrep(ir) for ir in given)


def _all_squares(
    irreps: Irreps, keep: frozenset[Irrep] | None, normalization: str
) -> tuple[Irreps, list[Given]]:
    """Every irrep of x ⊗ x, sorted, and the instructions."""
    out: list[MulIr] = []
    raw: list[Given] = []

    def add(i: int, j: int, mode: str, mul: int, ir: Irrep, weight: float) -> None:
        raw.append((i, j, len(out), mode, False, weight))
        out.append(MulIr(mul, ir))

    for i, j in _upper(len(irreps)):
        (mul, first), (mul2, second) = irreps[i], irreps[j]
        for ir in first * second:
            if keep is not None and ir not in keep:
                continue
            weight = _size(first, second, ir, normalization)
            if i < j:
                add(i, j, "uvuv", mul * mul2, ir, weight)
                continue
            if mul > 1:
                add(i, i, "uvu<v", mul * (mul - 1) // 2, ir, weight)
            if ir.l % 2 == 0:
                add(i, i, "uuu", mul, ir, _own_size(first, ir, normalization))
    found, place, _ = Irreps(out).sort()
    return found, [(i, j, place[k], mode, flag, weight) for i, j, k, mode, flag, weight in raw]


def _mixed_squares(irreps: Irreps, out: Irreps, normalization: str) -> Iterator[Given]:
    """Instructions that mix every irrep of x ⊗ x into the outputs."""
    for i, j in _upper(len(irreps)):
        (mul, first), (_, second) = irreps[i], irreps[j]
        for k, (_, ir) in enumerate(out):
            if ir not in first * second:
                continue
            weight = _size(first, second, ir, normalization)
            if i < j:
                yield i, j, k, "uvw", True, weight
                continue
            if mul > 1:
                yield i, i, k, "u<vw", True, weight
            if ir.l % 2 == 0:
                yield i, i, k, "uuw", True, _own_size(first, ir, normalization)


def _upper(count: int) -> Iterator[tuple[int, int]]:
    return ((i, j) for i in range(count) for j in range(i, count))


def _size(first: Irrep, second: Irrep, out: Irrep, normalization: str) -> float:
    """The path weight of two different copies."""
    return {"component": out.dim, "norm": first.dim * second.dim, "none": 1}[normalization]


def _own_size(ir: Irrep, out: Irrep, normalization: str) -> float:
    """The path weight of a copy with itself: its components are not independent."""
    if normalization == "component":
        return out.dim / (ir.dim + 2) if out.l == 0 else out.dim / 2
    if normalization == "norm":
        return ir.dim if out.l == 0 else ir.dim * (ir.dim + 2) / 2
    return 1
