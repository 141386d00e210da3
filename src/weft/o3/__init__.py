"""Equivariant layers with e3nn's conventions."""

from weft.o3.conv import TensorProductConv
from weft.o3.dropout import Dropout
from weft.o3.gate import Activation, Gate
from weft.o3.graph import Graph
from weft.o3.harmonics import SphericalHarmonics, spherical_harmonics
from weft.o3.identity import Identity
from weft.o3.irreps import Irrep, Irreps
from weft.o3.linear import Linear
from weft.o3.loaders import from_e3nn, from_mace, from_nequip
from weft.o3.nn import Gating, IrrepWiseLinear, TensorDot
from weft.o3.norms import BatchNorm, LayerNorm, Norm, NormActivation
from weft.o3.ops import gating, irrep_wise_linear, tensor_dot_uu
from weft.o3.plan import IrrepsInfo, irreps_info
from weft.o3.products import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorSquare,
)
from weft.o3.radial import BesselBasis, PolynomialCutoff, soft_one_hot_linspace
from weft.o3.rotation import (
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
from weft.o3.so2 import SO2Linear, edge_rotation
from weft.o3.symmetric_contraction import SymmetricContraction
from weft.o3.tensor_product import TensorProduct
from weft.o3.wigner import so3_generators, su2_generators, wigner_3j, wigner_D

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
