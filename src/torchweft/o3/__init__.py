"""Equivariant layers with e3nn's conventions."""

from torchweft.o3.edges.graph import Graph
from torchweft.o3.irreps.irreps import Irrep, Irreps
from torchweft.o3.irreps.rotation import (
    angles_to_axis_angle,
    angles_to_matrix,
    angles_to_quaternion,
    angles_to_xyz,
    axis_angle_to_angles,
    axis_angle_to_matrix,
    axis_angle_to_quaternion,
    compose_angles,
    compose_axis_angle,
    compose_quaternion,
    identity_angles,
    identity_quaternion,
    inverse_angles,
    inverse_quaternion,
    matrix_to_angles,
    matrix_to_axis_angle,
    matrix_to_quaternion,
    matrix_x,
    matrix_y,
    matrix_z,
    quaternion_to_angles,
    quaternion_to_axis_angle,
    quaternion_to_matrix,
    rand_angles,
    rand_axis_angle,
    rand_matrix,
    rand_quaternion,
    xyz_to_angles,
)
from torchweft.o3.irreps.tables import IrrepsInfo, irreps_info
from torchweft.o3.irreps.wigner import so3_generators, su2_generators, wigner_3j, wigner_D
from torchweft.o3.layers.channel_functions import gating, irrep_wise_linear, tensor_dot_uu
from torchweft.o3.layers.channel_modules import Gating, IrrepWiseLinear, TensorDot
from torchweft.o3.layers.dropout import Dropout
from torchweft.o3.layers.gate import Activation, Gate
from torchweft.o3.layers.harmonics import SphericalHarmonics, spherical_harmonics
from torchweft.o3.layers.identity import Identity
from torchweft.o3.layers.linear import Linear
from torchweft.o3.layers.loaders import from_e3nn, from_mace, from_nequip
from torchweft.o3.layers.norms import BatchNorm, LayerNorm, Norm, NormActivation
from torchweft.o3.layers.radial import BesselBasis, PolynomialCutoff, soft_one_hot_linspace
from torchweft.o3.layers.so2 import SO2Linear, edge_rotation
from torchweft.o3.layers.symmetric_contraction import SymmetricContraction
from torchweft.o3.tensor_product.conv import TensorProductConv
from torchweft.o3.tensor_product.named import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorSquare,
)
from torchweft.o3.tensor_product.rows import TensorProduct

__all__ = [
    "Activation",
    "BatchNorm",
    "BesselBasis",
    "Dropout",
    "ElementwiseTensorProduct",
    "FullTensorProduct",
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
    "angles_to_axis_angle",
    "angles_to_matrix",
    "angles_to_quaternion",
    "angles_to_xyz",
    "axis_angle_to_angles",
    "axis_angle_to_matrix",
    "axis_angle_to_quaternion",
    "compose_angles",
    "compose_axis_angle",
    "compose_quaternion",
    "edge_rotation",
    "from_e3nn",
    "from_mace",
    "from_nequip",
    "gating",
    "identity_angles",
    "identity_quaternion",
    "inverse_angles",
    "inverse_quaternion",
    "irrep_wise_linear",
    "irreps_info",
    "matrix_to_angles",
    "matrix_to_axis_angle",
    "matrix_to_quaternion",
    "matrix_x",
    "matrix_y",
    "matrix_z",
    "quaternion_to_angles",
    "quaternion_to_axis_angle",
    "quaternion_to_matrix",
    "rand_angles",
    "rand_axis_angle",
    "rand_matrix",
    "rand_quaternion",
    "so3_generators",
    "soft_one_hot_linspace",
    "spherical_harmonics",
    "su2_generators",
    "tensor_dot_uu",
    "wigner_3j",
    "wigner_D",
    "xyz_to_angles",
]
