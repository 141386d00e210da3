"""All maps of a recipe at once: the host waits for the GPU once, for the voxels of all levels.

The coarse levels are found one from the other without their numbers of voxels, in memory for as
many as the last cloud of the network lets expect.  The numbers are read back together, and tables
and tiles are built for exactly as many.  Where gradients are recorded, the pairs that gradients of
weights read are listed too: the host waits once more, for the numbers of pairs of large tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from torchweft.core.backend import kernels_serve
from torchweft.core.operators.operator import (
    below_transforms,
    compiling,
    outside_graphs,
    recording,
)
from torchweft.voxels.grid import Geometry
from torchweft.voxels.maps.coordinates import Coordinates, Grid
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.maps.gpu.jobs import Job, PairJob, pairs_together, tiles_together
from torchweft.voxels.maps.gpu.tiles import Flags, SearchRemains
from torchweft.voxels.maps.kernel_map import (
    MapTables,
    build_map,
    grid_after,
    map_kernels_serve,
    meet,
    submanifold_tables,
    tables_of,
)
from torchweft.voxels.maps.packing import Packing
from torchweft.voxels.maps.recipes import Step, note_again, recipe_of

__all__ = ["ask", "build_levels", "foresee", "list_maps"]

SPARE, LEAST_SPARE = 1.25, 1024
"""Room for voxels of a level, over those expected: a factor, and a number."""


def foresee(module: nn.Module, voxels: Coordinates) -> None:
    """Build what a network asked of the last cloud, if kernels build maps.

    Args:
        module: the network's first layer.
        voxels: of the cloud; nothing happens unless they are asked for their first map.
    """
    if not (compiling() or voxels.asked or voxels.level or voxels.shards):
        _begun(module, voxels)


def ask(network: nn.Module, voxels: Coordinates, tables_only: bool = False) -> bool:
    """Ask for all maps that a network asked of the last cloud; whether that is known."""
    if voxels.level or voxels.shards:
        return False
    recipe, known = _begun(network, voxels, tables_only), {0: voxels}
    for step in recipe:
        inputs = known.get(step.inputs)
        if inputs is not None:
            _, _, outputs = tables_of(inputs, step.shape)
            known.setdefault(step.outputs, inputs if outputs is None else outputs)
            note_again(inputs, step)
    return bool(recipe)


def _begun(module: nn.Module, voxels: Coordinates, tables_only: bool = False) -> list[Step]:
    """The recipe of a module, whose maps are built at once where kernels build them."""
    recipe = list(recipe_of(module, voxels).values())
    if recipe and not voxels.asked and len(voxels) and kernels_serve(voxels.device.type):
        _build(voxels, recipe, recording() and not tables_only, tables_only)
    return recipe


def build_levels(cloud: Coordinates, recipe: Sequence[Step]) -> dict[int, Coordinates]:
    """The voxels of the levels of a recipe, with its maps: at once where kernels build them."""
    if recipe and len(cloud) and kernels_serve(cloud.device.type):
        _build(cloud, recipe, recording())
    known = {0: cloud}
    for step in recipe:
        inputs = known.get(step.inputs)
        if inputs is not None:
            if step.shape not in inputs.foreseen:
                inputs.foreseen[step.shape] = build_map(inputs, step.shape)
            outputs = inputs.foreseen[step.shape][2]
            known.setdefault(step.outputs, inputs if outputs is None else outputs)
    return known


MapRead = tuple[Step, Tensor, Tensor | None, Coordinates, Coordinates]
"""Who reads a map, its tables, and the voxels that these number as outputs and as inputs."""


def list_maps(maps: Sequence[MapRead]) -> None:
    """Build the tiles of maps, and where gradients are recorded the pairs, if kernels read them."""
    recorded = recording()
    read = [m for m in maps if len(m[3]) and kernels_serve(m[3].device.type)]
    tiles_together([job for each in read for job in _jobs(each, recorded)])
    if recorded:
        pairs_together([job for each in read for job in _pair_jobs(each)])


class _Level(NamedTuple):
    """The outputs of a step before the host knows their number: the first of the rows."""

    step: Step
    found: map_launch.Candidates
    voxels: Coordinates
    packing: Packing
    grid: Grid


@below_transforms
@outside_graphs
def _build(
    cloud: Coordinates, recipe: Sequence[Step], recorded: bool, tables_only: bool = False
) -> None:
    """The maps of a recipe; recorded: with what gradients read; tables_only: without tiles.

    Outside of inference mode gradients are always recorded, so the caller knows whether they are.
    """
    new = [step for step in recipe if step.inputs != step.outputs]
    centred = [step for step in recipe if step.shape.mode == "submanifold"]
    seen = Flags(cloud.device, max(len(new) + -len(new) % 4, Flags.WIDTH))

    def launched() -> tuple[list[_Level], dict[Geometry, MapTables], list[Job]]:
        levels, later = _levels(cloud, new, seen), list[Job]()
        seen.written()
        own = [step.shape for step in centred if not step.inputs]
        return levels, {shape: _centred(cloud, shape, recorded, later) for shape in own}, later

    levels, tables, later = cloud.valid(launched)
    cloud.foreseen.update(tables)
    known = _known(cloud, levels, seen.read() if levels else [])
    for step in recipe:
        inputs, outputs = known.get(step.inputs), known.get(step.outputs)
        if inputs is None or outputs is None:
            continue
        if step.shape.mode == "submanifold" and inputs is not cloud:
            inputs.foreseen[step.shape] = _centred(inputs, step.shape, recorded, later)
        elif step.shape.mode == "floor":
            written = None if outputs is inputs else outputs
            inputs.foreseen[step.shape] = *meet(inputs, outputs, step.shape), written
        if step.shape.mode != "submanifold" and step.shape in inputs.foreseen:
            later += _jobs(_map_read(inputs, step), recorded)
    tiles_together([] if tables_only else later)
    if recorded:
        of = [(known.get(step.inputs), step) for step in recipe]
        made = [_map_read(i, step) for i, step in of if i is not None and step.shape in i.foreseen]
        pairs_together([job for each in made for job in _pair_jobs(each)])


def _map_read(inputs: Coordinates, step: Step) -> MapRead:
    table, back, outputs = inputs.foreseen[step.shape]
    return step, table, back, inputs if outputs is None else outputs, inputs


def _centred(inputs: Coordinates, shape: Geometry, recorded: bool, later: list[Job]) -> MapTables:
    """The tables of a submanifold map, whose tiles are left to a list."""
    tables = submanifold_tables(inputs, shape, later)
    if recorded and tables[1] is not None:
        _, order, _ = inputs.unchecked()
        later.append(Job(tables[1], order, shape.num_offsets, SearchRemains()))
    return tables


def _jobs(read: MapRead, recorded: bool) -> Iterator[Job]:
    """The tiles that layers, and gradients of their inputs, read of a map that was built."""
    step, table, back, outputs, inputs = read
    forward, inverse = (layer is not None for layer in step.layers)
    if forward or (inverse and recorded):
        yield Job(table, outputs.order, len(table), SearchRemains())
    if back is not None and (inverse or (forward and recorded)):
        yield Job(back, inputs.order, len(back), SearchRemains())


def _pair_jobs(read: MapRead) -> Iterator[PairJob]:
    """The lists of pairs that gradients of weights read of a map that was built."""
    step, table, back, outputs, inputs = read
    forward, inverse = step.layers
    if forward:
        yield PairJob(table, outputs.order, step.shape.num_offsets, back is None)
    if inverse and back is not None:
        yield PairJob(back, inputs.order, step.shape.num_offsets, mirrored=False)


def _known(
    cloud: Coordinates, levels: Sequence[_Level], counts: Sequence[int]
) -> dict[int, Coordinates]:
    """The voxels of all levels whose numbers were read, with the maps that found them."""
    known = {0: cloud}
    for level, count in zip(levels, counts, strict=False):
        step, inputs = level.step, known.get(level.step.inputs)
        if inputs is None or count > len(level.voxels):
            continue  # it was expected to be smaller: built when it is asked for
        known[step.outputs] = outputs = _shortened(level, count)
        if step.shape.mode == "floor":
            inputs.tables[step.shape.stride] = outputs
            continue
        of = level.found, inputs.order, len(inputs), count, step.shape
        inputs.foreseen[step.shape] = *map_launch.meet(*of), outputs
    return known


def _levels(cloud: Coordinates, steps: Sequence[Step], seen: Flags) -> list[_Level]:
    """The levels that derive from a cloud, each from the one that its step reads."""
    found: list[_Level] = []
    voxels, expected = {0: cloud}, {0: float(len(cloud))}
    for step in steps:
        inputs = voxels.get(step.inputs)
        box = None if inputs is None or step.outputs in voxels else _served(inputs, step.shape)
        if inputs is None or box is None:
            continue
        packing, grid, shape = box
        number = expected[step.outputs] = expected[step.inputs] * step.growth
        _, order, rows = inputs.unchecked()
        sizes, chances = packing.sizes, map_launch.candidates_of_an_input(shape)
        room = min(chances * len(inputs), math.prod(sizes), int(SPARE * number) + LEAST_SPARE)
        met = map_launch.candidates(rows, order, sizes, packing.dtype, shape)
        rows, keys = map_launch.level(met, packing.box, room, seen, len(found))
        level = Coordinates.ascending(packing, keys, *grid, rows)
        voxels[step.outputs] = level
        found.append(_Level(step, met, level, packing, grid))
    return found


def _served(inputs: Coordinates, shape: Geometry) -> tuple[Packing, Grid, Geometry] | None:
    """The box of a layer's outputs if kernels find them, and the geometry that does.

    None: they are found when they are asked for.
    """
    if shape.mode == "floor":
        packing = inputs.cells_packing(shape)
        if packing is None:
            return None
        return packing, inputs.coarse_grid(shape), map_launch.cells(packing.box, shape.stride)
    if shape.mode not in ("strided", "transposed") or not inputs.boxed:
        return None
    if not all(0 < n <= 2**31 for n in shape.output_shape(inputs.spatial_shape)):
        return None
    packing, grid = grid_after(inputs, shape)
    return (packing, grid, shape) if map_kernels_serve(inputs, packing, shape) else None


def _shortened(level: _Level, count: int) -> Coordinates:
    """The outputs of a step, now that their number is known."""
    keys, _, rows = level.voxels.unchecked()
    return Coordinates.ascending(level.packing, keys[:count], *level.grid, rows[:count])
