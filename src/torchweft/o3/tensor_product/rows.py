"""Tensor products of irreps with weights, by instructions; `o3.irreps.instructions` lists modes.

z[i_out] = Σ factor · weight · x[i_in1] ⊗ y[i_in2]      over the instructions into i_out
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.core.operators.operands import same_kind
from torchweft.o3.irreps.layout import broadcast, check_rows
from torchweft.o3.tensor_product.module import InstructedModule

__all__ = ["TensorProduct"]


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
        z = self.again(x, y, weight)
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
            self.settle(x, y, flat, None)
            z = self.again(x, y, flat)
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
