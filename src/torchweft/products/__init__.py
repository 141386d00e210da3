"""z[n,M] = Σ_{t ∈ segment M} s[t] · x[n,index1[t]] ∘ y[n,index2[t]], batched and indexed.

Seven products in every mode, with gradients of any order; see docs/families/products.md.
"""

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from torchweft.products import functions, tables
from torchweft.products.functions import *  # noqa: F403
from torchweft.products.tables import *  # noqa: F403

__all__ = [*functions.__all__, *tables.__all__]

if TYPE_CHECKING:

    class Product(Protocol):
        """A generated function."""

        explain: Any

        def __call__(self, *args: Any, **kwargs: Any) -> Tensor: ...

    def __getattr__(name: str) -> Product: ...
