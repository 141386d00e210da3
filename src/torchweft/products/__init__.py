"""z[n,M] = Σ_{t ∈ segment M} s[t] · x[n,index1[t]] ∘ y[n,index2[t]], batched and indexed.

Seven products in every mode, with gradients of any order; see docs/families/products.md.
"""

from torchweft.core.table_copies import forget
from torchweft.products import functions, infos
from torchweft.products.functions import *  # noqa: F403
from torchweft.products.infos import *  # noqa: F403
from torchweft.products.segments import functions as _segments
from torchweft.products.segments.functions import *  # noqa: F403

__all__ = [*functions.__all__, *infos.__all__, *_segments.__all__, "forget"]
