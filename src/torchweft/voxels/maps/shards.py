"""What maps need of a scene whose voxels stand on several ranks: where the other rows come from.

A tensor on a rank holds the voxels that the rank owns.  Its maps number rows further: own rows,
then those of other ranks that own outputs read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from torchweft.core.collectives import Group
from torchweft.errors import ShapeError

if TYPE_CHECKING:
    from torchweft.voxels.grid import Geometry
    from torchweft.voxels.maps.coordinates import Coordinates
    from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = ["Around", "Shards", "refuse"]


class Around(NamedTuple):
    """The rows that a map numbers."""

    voxels: Coordinates
    """Own voxels, then those of other ranks."""
    complete: Callable[[Tensor], Tensor]
    """Features of own voxels -> features of all of these."""


class Shards(Protocol):
    """How the voxels of a scene, at every stride, are spread over the ranks of a group."""

    group: Group | None

    def kernel_map(
        self, inputs: Coordinates, shape: Geometry, onto: Coordinates | None
    ) -> KernelMap:
        """The map of a layer onto own outputs, given or those of the geometry."""

    def transposed(self, found: KernelMap) -> KernelMap:
        """The map with its sides swapped, onto own voxels; `found` has rows around."""


def refuse(coordinates: Coordinates, what: str, remedy: str) -> None:
    """Raise where the voxels of other ranks would be missing.

    Raises:
        ShapeError: the voxels are spread over ranks.
    """
    if coordinates.shards is not None:
        raise ShapeError(
            f"{what} was given voxels that shard_voxels spread over ranks: it needs all voxels "
            f"in one process. {remedy}"
        )
