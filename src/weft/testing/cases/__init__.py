"""The contract cases of each family, as data; `suites()` is what `weft check` runs."""

from __future__ import annotations

from weft.testing.cases import clifford, o3, products
from weft.testing.cases.suite import Suite

__all__ = ["Suite", "suites"]


def suites() -> dict[str, Suite]:
    """The cases of every family, by its name."""
    return {"products": products.suite(), "o3": o3.suite(), "clifford": clifford.suite()}
