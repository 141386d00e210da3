"""Clifford algebra on multivectors: products, involutions, fused layers.

    out_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k

Layout (B, batch…, F): blades first, features last; `blade_dim=-1` for (batch…, F, B).  Networks of
the field are in `clifford.cegnn`, `.gatr`, `.lgatr` and `.convolution`, loaders of their weights in
`.checkpoints`.
"""

from weft.clifford import involutions, nn, ops, versors
from weft.clifford.algebra import Algebra
from weft.clifford.equilinear import EquiLinear
from weft.clifford.involutions import *  # noqa: F403
from weft.clifford.nn import *  # noqa: F403
from weft.clifford.ops import *  # noqa: F403
from weft.clifford.versors import *  # noqa: F403

__all__ = [
    "Algebra",
    "EquiLinear",
    *involutions.__all__,
    *nn.__all__,
    *ops.__all__,
    *versors.__all__,
]
