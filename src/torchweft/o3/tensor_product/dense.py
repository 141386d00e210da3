"""One instruction by torch's own operations, which autograd sees; no operator.

    t[u,v,m] = Σ_ij f C[i,j,m] x[u,i] y[v,j]        u and v one letter: of copies side by side

z is t times the weight, summed over the letters that z lacks.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, transformed, unwatched
from torchweft.o3.irreps.instructions import Instruction
from torchweft.o3.irreps.wigner import wigner_3j

__all__ = ["dense_product", "exact"]

Degrees = tuple[int, int, int]


def dense_product(
    instruction: Instruction, degrees: Degrees, a: Tensor, b: Tensor, weight: Tensor | None
) -> Tensor:
    """(rows, mul, 2l+1) of a (rows, mul1, 2l1+1), b and a weight (…, *path_shape).

    What sums the copies of one factor sums them first: uvu and uvv are uuu of such sums.
    """
    mode, factor = instruction.mode, instruction.path_weight
    if mode.pairs:
        u, v = torch.triu_indices(a.shape[1], a.shape[1], 1, device=a.device).unbind()
        a, b = a[:, u], b[:, v]
    if mode.first == mode.second:
        met = _side_by_side(degrees, factor, a, b)
    elif mode.out in ("u", "v"):
        a, b, weight = _of_one_letter(mode.out, a, b, weight)
        met = _side_by_side(degrees, factor, a, b)
    elif mode.mixes and weight is not None:
        return _mixed(degrees, factor, a, b, weight)
    else:
        met = _all_pairs(degrees, factor, a, b).flatten(1, 2)
        weight = None if weight is None else weight.flatten(-2)
    if not mode.mixes:
        return met if weight is None else met * weight.unsqueeze(-1)
    return met.sum(1, keepdim=True) if weight is None else (met.mT @ weight).mT


def exact(x: Tensor) -> bool:
    """Whether torch rounds no factor of a product, and sums in x's dtype."""
    if x.dtype == torch.float64:
        return True
    backends: Any = torch.backends
    return x.dtype == torch.float32 and backends.mkldnn.matmul.fp32_precision in ("none", "ieee")


def _of_one_letter(
    out: str, a: Tensor, b: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both factors with the copies of the output, and what is left of weight_uv."""
    if out == "v":
        weight = None if weight is None else weight.mT
        b, a, weight = _of_one_letter("u", b, a, weight)
        return a, b, weight
    if b.shape[1] == 1:
        return a, b, None if weight is None else weight.squeeze(-1)
    return a, b.sum(1, keepdim=True) if weight is None else weight @ b, None


def _side_by_side(degrees: Degrees, factor: float, a: Tensor, b: Tensor) -> Tensor:
    """(rows, u, 2l3+1) of copies u of a (rows, u, 2l1+1) and b; one copy of either serves all.

    A scalar scales, and what makes a scalar is an inner product.
    """
    l1, l2, l3 = degrees
    if 0 in degrees:
        scale = factor / math.sqrt(2 * max(degrees) + 1)
        found = a * (b if scale == 1 else b * scale)
        return found if l1 == 0 or l2 == 0 else found.sum(-1, keepdim=True)
    matrices = (b @ _table(degrees, factor, b)).view(*b.shape[:2], 2 * l1 + 1, 2 * l3 + 1)
    if b.shape[1] == 1:
        return a @ matrices.squeeze(1)
    return (a.unsqueeze(2) @ matrices).squeeze(2)


def _mixed(degrees: Degrees, factor: float, a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """(rows, w, 2l3+1) = Σ_uv weight_uvw t_uv: copies of a are mixed, then meet those of b."""
    u, v, w = weight.shape[-3:]
    if u == 1 or v == 1:
        return _mixed_alone(degrees, factor, a, b, weight.flatten(-3, -2))
    own = weight.dim() > 3
    if degrees[0] == 0 or degrees[2] == 0 or (degrees[1] == 0 and not own):
        return _mixed_with_scalars(degrees, factor, a, b, weight)
    (rows, _, i), m = a.shape, 2 * degrees[2] + 1
    turned = a.mT if own else a.mT.flatten(0, 1)  # one matrix, or one a row
    mixed = (turned @ weight.flatten(-2)).view(rows, i * v, w)
    matrices = (b @ _table(degrees, factor, b)).view(rows, v, i, m).transpose(1, 2).flatten(1, 2)
    return (matrices.mT @ mixed).mT


def _mixed_alone(degrees: Degrees, factor: float, a: Tensor, b: Tensor, matrix: Tensor) -> Tensor:
    """The same where one factor has one copy: those of the other are mixed before or after.

    Whatever has fewer components: of scalars it is a third of the work that it is of vectors.
    """
    if b.shape[1] == 1 and degrees[0] < degrees[2]:
        return _side_by_side(degrees, factor, _mix(a, matrix), b)
    if a.shape[1] == 1 and degrees[1] < degrees[2]:
        return _side_by_side(degrees, factor, a, _mix(b, matrix))
    return _mix(_side_by_side(degrees, factor, a, b), matrix)


def _mix(a: Tensor, matrix: Tensor) -> Tensor:
    """(rows, w, 2l+1) of a (rows, u, 2l+1) and a matrix (…, u, w)."""
    if matrix.dim() > 2:
        return (a.mT @ matrix).mT
    # torch would copy a matrix for each row where it does not see that one serves all
    found = a.mT.flatten(0, 1) @ matrix
    return found.view(a.shape[0], a.shape[2], matrix.shape[1]).mT


def _mixed_with_scalars(
    degrees: Degrees, factor: float, a: Tensor, b: Tensor, weight: Tensor
) -> Tensor:
    """The same where a, b or z is scalars: the 3j symbol is the unit matrix by 1/√(2l+1)."""
    scale = factor / math.sqrt(2 * max(degrees) + 1)
    if degrees[0] and degrees[1]:
        met = (a @ b.mT).flatten(1) * scale
        return (met.unsqueeze(1) @ weight.flatten(-3, -2)).mT
    if degrees[0]:
        a, b, weight = b, a, weight.transpose(-3, -2)
    mixed = (scale * a).mT @ weight.flatten(-2)
    return (b.mT @ mixed.view(a.shape[0], *weight.shape[-2:])).mT


def _all_pairs(degrees: Degrees, factor: float, a: Tensor, b: Tensor) -> Tensor:
    """(rows, u, v, 2l3+1) of copies u of a and v of b."""
    (rows, u, i), v, m = a.shape, b.shape[1], 2 * degrees[2] + 1
    if u == 1 or v == 1:
        return _side_by_side(degrees, factor, a, b).view(rows, u, v, m)
    matrices = (b @ _table(degrees, factor, b)).view(rows, v, i, m).transpose(1, 2)
    return (a @ matrices.flatten(2)).view(rows, u, v, m)


def _table(degrees: Degrees, factor: float, like: Tensor) -> Tensor:
    """(2l2+1, (2l1+1) (2l3+1)), a factor times the 3j symbol; kept, unless torch is tracing."""
    plain = not compiling() and not transformed() and unwatched(like)  # no question to a tracer
    return (_kept if plain else _made)(degrees, factor, like.dtype, like.device)


def _made(degrees: Degrees, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    table = factor * wigner_3j(*degrees, torch.float64, device)
    return table.movedim(1, 0).flatten(1).to(dtype)


@functools.lru_cache(maxsize=4096)
def _kept(degrees: Degrees, factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A table that autograd may keep."""
    with torch.inference_mode(False):
        return _made(degrees, factor, dtype, device)
