"""Clifford algebra on multivectors: products, involutions, fused layers.

    out_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k

Layout (B, batch…, F): blades first, features last; `blade_dim=-1` for (batch…, F, B).  Networks of
the field are in `clifford.cegnn`, `.gatr`, `.lgatr` and `.convolution`, loaders of their weights in
`.checkpoints`.
"""

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.functions import involutions, versors
from torchweft.clifford.functions import products as ops
from torchweft.clifford.functions.involutions import *  # noqa: F403
from torchweft.clifford.functions.products import *  # noqa: F403
from torchweft.clifford.functions.versors import *  # noqa: F403
from torchweft.clifford.layers import basic as nn
from torchweft.clifford.layers.basic import *  # noqa: F403
from torchweft.clifford.layers.equilinear import EquiLinear

__all__ = [
    "Algebra",
    "EquiLinear",
    *involutions.__all__,
    *nn.__all__,
    *ops.__all__,
    *versors.__all__,
]
