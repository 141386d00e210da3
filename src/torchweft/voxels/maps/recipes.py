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

__all__ = ["Key", "Step", "note", "note_again", "note_reader", "recipe_of"]

Key = tuple[int, Geometry]
"""The level that a map reads, and its geometry."""


class Step(NamedTuple):
    """A map that a network asked for.

    Args:
        inputs: the level that it reads: 0 for the cloud itself, others derive from it.
        shape: its geometry.
        outputs: the level that it writes.
        growth: outputs for each input.
        layers: of layers that read it, and of inverse layers, whether a weight needs a gradient;
            None: there are none, as where only a pool reads it.
    """

    inputs: int
    shape: Geometry
    outputs: int
    growth: float
    layers: tuple[bool | None, bool | None] = (None, None)


_recipes: weakref.WeakKeyDictionary[nn.Module, dict[Key, Step]] = weakref.WeakKeyDictionary()


def note(inputs: Coordinates, shape: Geometry, outputs: Coordinates) -> None:
    """Note that the map of a geometry was asked for, and which voxels it writes."""
    if outputs.asked is not inputs.asked:
        newest = max([step.outputs for step in inputs.asked.values()], default=inputs.level)
        outputs.asked, outputs.level = inputs.asked, newest + 1
    growth = len(outputs) / max(len(inputs), 1)
    inputs.asked[inputs.level, shape] = Step(inputs.level, shape, outputs.level, growth)


def note_reader(inputs: Coordinates, shape: Geometry, inverse: bool, trained: bool) -> None:
    """Note that a layer reads a map that was asked for, and whether its weight needs a gradient."""
    key = inputs.level, shape
    step = inputs.asked.get(key)
    known = None if step is None else step.layers[inverse]
    if step is not None and (known is None or trained > known):
        layers = (step.layers[0], trained) if inverse else (trained, step.layers[1])
        inputs.asked[key] = step._replace(layers=layers)


def note_again(inputs: Coordinates, step: Step) -> None:
    """Note who read a map of the last cloud, before anybody reads that of this one."""
    key = inputs.level, step.shape
    if key in inputs.asked:
        inputs.asked[key] = inputs.asked[key]._replace(layers=step.layers)


def recipe_of(module: nn.Module, voxels: Coordinates) -> dict[Key, Step]:
    """What a network asked of the last cloud; of these voxels from now on.

    Args:
        module: the network, or the layer that asks first.
        voxels: of a cloud, of which nothing was asked.
    """
    recipe = _recipes.get(module, {})
    _recipes[module] = voxels.asked
    return recipe
