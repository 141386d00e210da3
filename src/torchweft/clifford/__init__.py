"""Clifford algebra on multivectors: products, involutions, versors, fused layers and networks.

    out_j = Σ_(i,k) sign(i,k) · w[path] · x_i · y_k

Layout (B, batch…, F): blades first, features last; `blade_dim=-1` for (batch…, F, B).  The networks
of the field (`GATr`, `LGATr`, `EGCL`, `CliffordConv2d` …) and the converters of their checkpoints
(`from_gatr`, `from_lgatr`, `from_cegnn`, `from_cliffordlayers`) are here too.
"""

from torchweft.clifford import embedding, functions, versors
from torchweft.clifford.algebra import PGA, SPACETIME, Algebra
from torchweft.clifford.embedding import *  # noqa: F403
from torchweft.clifford.functions import *  # noqa: F403
from torchweft.clifford.layers import (
    attention,
    basic,
    cegnn,
    cegnn_networks,
    checkpoints,
    convolution,
    equilinear,
    lgatr,
    slim,
    transformers,
)
from torchweft.clifford.layers.attention import *  # noqa: F403
from torchweft.clifford.layers.basic import *  # noqa: F403
from torchweft.clifford.layers.cegnn import *  # noqa: F403
from torchweft.clifford.layers.cegnn_networks import *  # noqa: F403
from torchweft.clifford.layers.checkpoints import *  # noqa: F403
from torchweft.clifford.layers.convolution import *  # noqa: F403
from torchweft.clifford.layers.equilinear import *  # noqa: F403
from torchweft.clifford.layers.lgatr import *  # noqa: F403
from torchweft.clifford.layers.slim import *  # noqa: F403
from torchweft.clifford.layers.transformers import *  # noqa: F403
from torchweft.clifford.versors import *  # noqa: F403

__all__ = [
    "PGA",
    "SPACETIME",
    "Algebra",
    *attention.__all__,
    *basic.__all__,
    *cegnn.__all__,
    *cegnn_networks.__all__,
    *checkpoints.__all__,
    *convolution.__all__,
    *equilinear.__all__,
    *embedding.__all__,
    *functions.__all__,
    *lgatr.__all__,
    *slim.__all__,
    *transformers.__all__,
    *versors.__all__,
]
