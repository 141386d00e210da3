"""z[n,M] = Σ_{t ∈ segment M} s[t] · x[n,index1[t]] ∘ y[n,index2[t]], batched and indexed.

Seven products in every mode, with gradients of any order; see docs/families/products.md.
"""

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from torchweft.products import functions, infos
from torchweft.products.functions import *  # noqa: F403
from torchweft.products.infos import *  # noqa: F403

__all__ = [*functions.__all__, *infos.__all__]

if TYPE_CHECKING:

    class ProductFunction(Protocol):
        """A public function of a product."""

        explain: Any

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def __getattr__(name: str) -> ProductFunction: ...
