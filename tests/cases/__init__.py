"""The contract cases of each family, as data; `suites()` is what `make check` runs."""

from __future__ import annotations

from tests.cases import (
    channelwise,
    clifford,
    edge_vectors,
    instructed,
    o3,
    products,
    radial_linear,
    reductions,
    segments,
    symmetric,
    voxels,
)
from tests.cases.suite import Suite, joined

__all__ = ["Suite", "suites"]


def suites() -> dict[str, Suite]:
    """The cases of every family, by its name."""
    return {
        "products": joined(products.suite(), segments.suite()),
        "o3": joined(
            o3.suite(),
            channelwise.suite(),
            instructed.suite(),
            edge_vectors.suite(),
            radial_linear.suite(),
            symmetric.suite(),
        ),
        "clifford": clifford.suite(),
        "reductions": reductions.suite(),
        "voxels": voxels.suite(),
    }
