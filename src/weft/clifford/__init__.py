"""Clifford algebra on multivectors: products, involutions, fused layers.

    out_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k

Layout (B, batch…, F): blades first, features last; `blade_dim=-1` for (batch…, F, B).
"""

from weft.clifford import involutions, ops, versors
from weft.clifford.algebra import Algebra
from weft.clifford.involutions import *  # noqa: F403
from weft.clifford.ops import *  # noqa: F403
from weft.clifford.versors import *  # noqa: F403

__all__ = ["Algebra", *ops.__all__, *involutions.__all__, *versors.__all__]
