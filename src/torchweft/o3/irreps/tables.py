"""Index tables of irreps: which component belongs to which irrep."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchweft.o3.irreps.irreps import Irreps, IrrepsLike
from torchweft.products.tables import Movable

__all__ = ["IrrepsInfo", "irreps_info"]


class _Fields(NamedTuple):
    rsqrt_dims: Tensor
    rdims: Tensor
    irrep_index: Tensor
    irrep_seg: Tensor
    num_irreps: int


class IrrepsInfo(Movable, _Fields):
    """The tables of `irreps_info`; `.to`, `.cuda`, `.cpu` move them.

    Fields: rsqrt_dims (I,) and rdims (I,), 1/√(2l+1) and 1/(2l+1) of each irrep; irrep_index (D,),
    the irrep of each component; irrep_seg (I+1,), where each irrep's components begin; num_irreps.
    """

    __slots__ = ()


def irreps_info(irreps: IrrepsLike) -> IrrepsInfo:
    """The tables of irreps, with one entry for each instance: "2x0e+1o" has three irreps.

    Args:
        irreps: "2x0e+1o", or what else `Irreps` reads.

    Returns:
        Tables on the CPU; factors in float64 (they are cast at the call).
    """
    dims = torch.tensor(
        [ir.dim for mul, ir in Irreps(irreps) for _ in range(mul)], dtype=torch.int64
    )
    index = torch.repeat_interleave(torch.arange(dims.numel()), dims)
    seg = torch.cat([dims.new_zeros(1), dims.cumsum(0)])
    return IrrepsInfo(dims.double().rsqrt(), 1 / dims.double(), index, seg, dims.numel())
