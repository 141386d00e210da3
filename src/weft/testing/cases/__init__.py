"""The contract cases of each family, as data; `suites()` is what `weft check` runs."""

from __future__ import annotations

from weft.testing.cases import clifford, o3, products, reductions, voxels
from weft.testing.cases.suite import Suite

__all__ = ["Suite", "suites"]


def suites() -> dict[str, Suite]:
    """The cases of every family, by its name."""
    families = {
        "products": products,
        "o3": o3,
        "clifford": clifford,
        "reductions": reductions,
        "voxels": voxels,
    }
    return {name: family.suite() for name, family in families.items()}
