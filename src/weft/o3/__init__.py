"""Equivariant layers with e3nn's conventions; so far irreps and the layers without parameters."""

from weft.o3.irreps import Irrep, Irreps
from weft.o3.ops import gating, irrep_wise_linear, tensor_dot_uu
from weft.o3.plan import IrrepsInfo, irreps_info

__all__ = [
    "Irrep",
    "Irreps",
    "IrrepsInfo",
    "gating",
    "irrep_wise_linear",
    "irreps_info",
    "tensor_dot_uu",
]
