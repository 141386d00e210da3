"""Equivariant layers with e3nn's conventions.

Options that layers and functions share:

layout: the order of each item in a row, "mul_ir" (e3nn's: the components of a copy are contiguous)
    or "ir_mul" (the copies of a component are contiguous).  Weights have one order.
backend: "triton", "numba", "torch", or None for the fastest that can serve.  A backend without
    kernels for a call raises BackendError.  Activations, norms, Dropout, Extract, Gate, Identity,
    SO2Linear, networks and grids are torch's own operations: they take "torch" or None.
"""

from typing import TYPE_CHECKING

from torchweft.o3.adapters.allegro import from_allegro
from torchweft.o3.adapters.check import check
from torchweft.o3.adapters.e3nn import from_e3nn, to_e3nn
from torchweft.o3.adapters.mace import from_mace
from torchweft.o3.adapters.nequip import from_nequip
from torchweft.o3.adapters.sevennet import from_sevennet
from torchweft.o3.dynamics.calculator import calculator
from torchweft.o3.dynamics.neighbours import NeighbourList, neighbour_list
from torchweft.o3.graph import Graph
from torchweft.o3.grids.activations import S2Activation, SO3Activation
from torchweft.o3.grids.angles import (
    Legendre,
    SphericalHarmonicsAlphaBeta,
    spherical_harmonics_alpha,
    spherical_harmonics_alpha_beta,
)
from torchweft.o3.grids.rotations import SO3Grid
from torchweft.o3.grids.sphere import FromS2Grid, ToS2Grid, s2_grid, spherical_harmonics_s2_grid
from torchweft.o3.irreps import rotation
from torchweft.o3.irreps.irreps import Irrep, Irreps
from torchweft.o3.irreps.rotation import *  # noqa: F403
from torchweft.o3.irreps.wigner import (
    change_basis_real_to_complex,
    so3_generators,
    su2_generators,
    wigner_3j,
    wigner_D,
)
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
from torchweft.o3.layers.extract import Extract, ExtractIr
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
    RadialBasis,
    SphericalHarmonics,
    soft_one_hot_linspace,
    soft_unit_step,
    spherical_harmonics,
)
from torchweft.o3.layers.linear import Identity, Linear
from torchweft.o3.layers.networks import FullyConnectedNet, moment, normalize2mom
from torchweft.o3.layers.reduced_products import ReducedTensorProducts
from torchweft.o3.layers.so2 import SO2Linear, edge_rotation
from torchweft.o3.layers.symmetric_contraction import SymmetricContraction
from torchweft.o3.tensor_product.instructions import Instruction
from torchweft.o3.tensor_product.products import (
    ElementwiseTensorProduct,
    FullTensorProduct,
    FullyConnectedTensorProduct,
    TensorProduct,
    TensorProductConv,
    TensorSquare,
)
from torchweft.o3.tensors import CartesianTensor, SphericalTensor

__all__ = [
    "Activation",
    "BatchNorm",
    "BesselBasis",
    "CartesianTensor",
    "Dropout",
    "ElementwiseTensorProduct",
    "Extract",
    "ExtractIr",
    "FromS2Grid",
    "FullTensorProduct",
    "FullyConnectedNet",
    "FullyConnectedTensorProduct",
    "Gate",
    "Gating",
    "Graph",
    "Identity",
    "Instruction",
    "Irrep",
    "IrrepWiseLinear",
    "Irreps",
    "IrrepsInfo",
    "LayerNorm",
    "Legendre",
    "Linear",
    "NeighbourList",
    "Norm",
    "NormActivation",
    "PolynomialCutoff",
    "RadialBasis",
    "ReducedTensorProducts",
    "S2Activation",
    "SO2Linear",
    "SO3Activation",
    "SO3Grid",
    "SphericalHarmonics",
    "SphericalHarmonicsAlphaBeta",
    "SphericalTensor",
    "SymmetricContraction",
    "TensorDot",
    "TensorProduct",
    "TensorProductConv",
    "TensorSquare",
    "ToS2Grid",
    "calculator",
    "change_basis_real_to_complex",
    "check",
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
    "neighbour_list",
    "normalize2mom",
    "s2_grid",
    "so3_generators",
    "soft_one_hot_linspace",
    "soft_unit_step",
    "spherical_harmonics",
    "spherical_harmonics_alpha",
    "spherical_harmonics_alpha_beta",
    "spherical_harmonics_s2_grid",
    "su2_generators",
    "tensor_dot_uu",
    "to_e3nn",
    "wigner_3j",
    "wigner_D",
]
__all__ += rotation.__all__

_INSTEAD = {
    "FullTensorProductv2": "FullTensorProduct, which torch.compile takes whole",
    "bessel": "BesselBasis(x_max, n)(x[..., None])",
    "complete_basis": "torch.linalg.qr",
    "direct_sum": "torch.block_diag",
    "germinate_formulas": "ReducedTensorProducts, which reads formulas",
    "irfft": "torch.fft.irfft; ToS2Grid needs none",
    "orthonormalize": "torch.linalg.qr",
    "reduce_permutation": "ReducedTensorProducts, whose change_of_basis has the symmetries",
    "rfft": "torch.fft.rfft; FromS2Grid needs none",
}
"""Names of e3nn that are not here, and what does their work."""


if not TYPE_CHECKING:  # for checkers, only names that are here exist

    def __getattr__(name: str) -> object:
        if name in _INSTEAD:
            raise AttributeError(
                f"torchweft.o3 has no {name}, a name of e3nn: something else does its work. Use "
                f"{_INSTEAD[name]}."
            )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
