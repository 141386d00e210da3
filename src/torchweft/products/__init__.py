"""z[n,M] = Σ_{t ∈ segment M} s[t] · x[n,index1[t]] ∘ y[n,index2[t]], batched and indexed.

Seven products in every mode, with gradients of any order; see docs/families/products.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

from torchweft.core.table_copies import forget
from torchweft.products import functions, infos
from torchweft.products.functions import *  # noqa: F403
from torchweft.products.infos import *  # noqa: F403
from torchweft.products.segments import functions as _segments
from torchweft.products.segments.functions import *  # noqa: F403

if TYPE_CHECKING:
    from torchweft.reductions.graphs import knn_graph, radius_graph

__all__ = [
    *functions.__all__,
    *infos.__all__,
    *_segments.__all__,
    "forget",
    "knn_graph",
    "radius_graph",
]

if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> Any:
        """Graphs of near points are found by reductions, which are loaded when first used."""
        if name in ("knn_graph", "radius_graph"):
            return getattr(importlib.import_module("torchweft.reductions.graphs"), name)
        raise AttributeError(f"module 'torchweft.products' has no attribute {name!r}")
