"""z[n,M] = Σ_{t ∈ segment M} s[t] · x[n,index1[t]] ∘ y[n,index2[t]], batched and indexed.

Seven products in every mode, with gradients of any order; see docs/families/products.md.
"""

from weft.products import infos, ops, sparse
from weft.products.infos import *  # noqa: F403
from weft.products.ops import *  # noqa: F403
from weft.products.sparse import *  # noqa: F403

__all__ = [*infos.__all__, *ops.__all__, *sparse.__all__]
