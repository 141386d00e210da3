"""The recipe of a network: which maps it asks for, in which order, of the voxels of a cloud.

Coordinates note what is asked of them and of all that derive from them.  What a network asked of
one cloud is its recipe for the next one, whose maps are then built together.  A wrong recipe costs
time alone: maps that it lacks are built when they are asked for.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from torchweft.voxels.grid import Geometry

if TYPE_CHECKING:
    from torchweft.voxels.maps.coordinates import Coordinates

__all__ = ["Step", "note", "note_inverse", "recipe_of"]


class Step(NamedTuple):
    """A map that a network asked for.

    Args:
        inputs: the level that it reads: 0 for the cloud itself, others derive from it.
        shape: its geometry.
        outputs: the level that it writes.
        growth: outputs for each input.
        inverse: whether an inverse layer reads it too.
    """

    inputs: int
    shape: Geometry
    outputs: int
    growth: float
    inverse: bool = False


_recipes: weakref.WeakKeyDictionary[nn.Module, list[Step]] = weakref.WeakKeyDictionary()


def note(inputs: Coordinates, shape: Geometry, outputs: Coordinates) -> None:
    """Note that the map of a geometry was asked for, and which voxels it writes."""
    if outputs.asked is not inputs.asked:
        newest = max([step.outputs for step in inputs.asked], default=inputs.level)
        outputs.asked, outputs.level = inputs.asked, newest + 1
    growth = len(outputs) / max(len(inputs), 1)
    inputs.asked.append(Step(inputs.level, shape, outputs.level, growth))


def note_inverse(inputs: Coordinates, shape: Geometry) -> None:
    """Note that a map was asked for by an inverse layer."""
    for n, step in enumerate(inputs.asked):
        if step.inputs == inputs.level and step.shape == shape:
            inputs.asked[n] = step._replace(inverse=True)


def recipe_of(module: nn.Module, voxels: Coordinates) -> list[Step]:
    """What a network asked of the last cloud; of these voxels from now on.

    Args:
        module: the network, or the layer that asks first.
        voxels: of a cloud, of which nothing was asked.
    """
    recipe = _recipes.get(module, [])
    _recipes[module] = voxels.asked
    return recipe
