"""z[n,M] = Σ_{t ∈ segment M} s[t] · x[n,index1[t]] ∘ y[n,index2[t]], batched and indexed.

Seven products in every mode, with gradients of any order; see docs/families/products.md.
"""

from torchweft.products import infos, ops, sparse
from torchweft.products.infos import *  # noqa: F403
from torchweft.products.ops import *  # noqa: F403
from torchweft.products.sparse import *  # noqa: F403

__all__ = [*infos.__all__, *ops.__all__, *sparse.__all__]
