"""Tensor products of irreps with weights, by instructions; see weft.o3.instructions for the modes.

z[i_out] = Σ factor · weight · x[i_in1] ⊗ y[i_in2]      over the instructions into i_out
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.operands import same_kind
from weft.o3.evaluation import recipe_of
from weft.o3.instructions import Operands, instructions_of
from weft.o3.irreps import Irreps, IrrepsLike
from weft.o3.layout import broadcast, check_layout, check_rows
from weft.o3.module import WeightedModule

__all__ = ["InstructedModule", "TensorProduct"]


class InstructedModule(WeightedModule):
    """What tensor products of rows and of edges share: irreps, instructions, weights.

    Args: those of TensorProduct.
    """

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        instructions: Iterable[Sequence[Any]],
        in1_var: Iterable[float] | None,
        in2_var: Iterable[float] | None,
        out_var: Iterable[float] | None,
        irrep_normalization: str | None,
        path_normalization: str | None,
        internal_weights: bool | None,
        shared_weights: bool,
        layout: str,
        backend: str | None,
    ) -> None:
        check_layout(layout)
        operands = Operands(Irreps(irreps_in1), Irreps(irreps_in2), Irreps(irreps_out))
        found = instructions_of(
            instructions,
            operands,
            in1_var,
            in2_var,
            out_var,
            irrep_normalization,
            path_normalization,
        )
        super().__init__(found, operands.out, internal_weights, shared_weights)
        self.irreps_in1, self.irreps_in2 = operands.in1, operands.in2
        self.layout, self.backend = layout, backend
        self.recipe = recipe_of(operands, found, layout, shared_weights, backend)

    def __repr__(self) -> str:
        paths = sum(math.prod(instruction.path_shape) for instruction in self.instructions)
        return (
            f"{type(self).__name__}({self.irreps_in1.simplify()} x {self.irreps_in2.simplify()} "
            f"-> {self.irreps_out.simplify()} | {paths} paths | {self.weight_numel} weights)"
        )


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

    def __init__(
        self,
        irreps_in1: IrrepsLike,
        irreps_in2: IrrepsLike,
        irreps_out: IrrepsLike,
        instructions: Iterable[Sequence[Any]],
        in1_var: Iterable[float] | None = None,
        in2_var: Iterable[float] | None = None,
        out_var: Iterable[float] | None = None,
        irrep_normalization: str | None = None,
        path_normalization: str | None = None,
        internal_weights: bool | None = None,
        shared_weights: bool | None = None,
        *,
        layout: str = "mul_ir",
        backend: str | None = None,
    ) -> None:
        super().__init__(
            irreps_in1,
            irreps_in2,
            irreps_out,
            instructions,
            in1_var,
            in2_var,
            out_var,
            irrep_normalization,
            path_normalization,
            internal_weights,
            True if shared_weights is None else shared_weights,
            layout,
            backend,
        )

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
        check_rows("x", x, self.irreps_in1, self)
        check_rows("y", y, self.irreps_in2, self)
        flat = self.checked_weight(weight)
        x, y, *given = same_kind(x=x, y=y, weight=flat)
        flat = given[0] if given else None
        own = [] if flat is None or self.shared_weights else [flat.shape[:-1]]
        batch = broadcast([x.shape[:-1], y.shape[:-1], *own])
        x, y = _rows(x, batch), _rows(y, batch)
        rows = self.recipe(x, y, _rows(flat, batch) if own and flat is not None else flat)
        return rows.view(*batch, self.irreps_out.dim)

    def right(self, y: Tensor, weight: Tensor | Sequence[Tensor] | None = None) -> Tensor:
        """(…, D1, D_out): the matrix b with z = x @ b, for y (…, D2) and weights as in a call."""
        flat = self.checked_weight(weight)
        if flat is not None and not self.shared_weights:
            flat = flat.unsqueeze(-2)
        unit = torch.eye(self.irreps_in1.dim, dtype=y.dtype, device=y.device)
        return TensorProduct.forward(self, unit, y.unsqueeze(-2), flat)


def _rows(x: Tensor, batch: torch.Size) -> Tensor:
    """(rows, D) of (…, D): one row for each of the broadcast dimensions."""
    width = x.shape[-1]
    return x.expand(*batch, width).reshape(math.prod(batch), width)
