"""Equivariant layers with e3nn's conventions.

Options that layers and functions share:

layout: the order of each item in a row, "mul_ir" (e3nn's: the components of a copy are contiguous)
    or "ir_mul" (the copies of a component are contiguous).  Weights have one order.
backend: "triton", "numba", "torch", or None for the fastest that can serve.  A backend without
    kernels for a call raises BackendError.  Activation, BatchNorm, Dropout, Gate, Identity,
    LayerNorm, Norm, NormActivation and SO2Linear are torch's own operations: they take "torch" or
    None.
"""

from torchweft.o3.adapters.allegro import from_allegro
from torchweft.o3.adapters.e3nn import from_e3nn, to_e3nn
from torchweft.o3.adapters.mace import from_mace
from torchweft.o3.adapters.nequip import from_nequip
from torchweft.o3.adapters.sevennet import from_sevennet
from torchweft.o3.graph import Graph
from torchweft.o3.irreps import rotation
from torchweft.o3.irreps.irreps import Irrep, Irreps
from torchweft.o3.irreps.rotation import *  # noqa: F403
from torchweft.o3.irreps.wigner import so3_generators, su2_generators, wigner_3j, wigner_D
from torchweft.o3.layers.channels import (
    Gating,
    IrrepsInfo,
    IrrepWiseLinear,
    TensorDot,
    gating,
    irrep_wise_linear,
    irreps_info,
    tensor_dot_uu,
)
from torchweft.o3.layers.gates_and_norms import (
    Activation,
    BatchNorm,
    Dropout,
    Gate,
    LayerNorm,
    Norm,
    NormActivation,
)
from torchweft.o3.layers.harmonics_and_radial import (
    BesselBasis,
    PolynomialCutoff,
    SphericalHarmonics,
    soft_one_hot_linspace,
    spherical_harmonics,
)
from torchweft.o3.layers.linear import Identity, Linear
from torchweft.o3.layers.networks import FullyConnectedNet, moment, normalize2mom
from torchweft.o3.layers.so2 import SO2Linear, edge_rotation
from torchweft.o3.layers.symmetric_contraction import SymmetricContraction
from torchweft.o3.tensor_product.products import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorProduct,
    TensorProductConv,
    TensorSquare,
)

__all__ = [
    "Activation",
    "BatchNorm",
    "BesselBasis",
    "Dropout",
    "ElementwiseTensorProduct",
    "FullTensorProduct",
    "FullyConnectedNet",
    "FullyConnectedTensorProduct",
    "Gate",
    "Gating",
    "Graph",
    "Identity",
    "Irrep",
    "IrrepWiseLinear",
    "Irreps",
    "IrrepsInfo",
    "LayerNorm",
    "Linear",
    "Norm",
    "NormActivation",
    "PolynomialCutoff",
    "SO2Linear",
    "SphericalHarmonics",
    "SymmetricContraction",
    "TensorDot",
    "TensorProduct",
    "TensorProductConv",
    "TensorSquare",
    "edge_rotation",
    "from_allegro",
    "from_e3nn",
    "from_mace",
    "from_nequip",
    "from_sevennet",
    "gating",
    "irrep_wise_linear",
    "irreps_info",
    "moment",
    "normalize2mom",
    "so3_generators",
    "soft_one_hot_linspace",
    "spherical_harmonics",
    "su2_generators",
    "tensor_dot_uu",
    "to_e3nn",
    "wigner_3j",
    "wigner_D",
]
__all__ += rotation.__all__
