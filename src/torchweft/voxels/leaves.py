"""A SparseTensor as a tree of torch: its features, voxels and maps are leaves.

    feats · for each level: rows, order · for each of its maps: kept, back

So `torch.export` takes a tensor as an argument, whose maps are inputs of the program, and
`torchweft.capture` sees what a call depends on.  A *level* is the coordinates of one grid: the
tensor's own, and all that maps lead to; then those of earlier levels, which inverse layers return
to by the names of maps.  Boxes, strides, geometries and names are the structure; where the box and
the batch size were given, it does not depend on where the voxels are, except on whether their rows
ascend.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchweft.core import private
from torchweft.core.recorded import mark_fixed, varying
from torchweft.errors import ShapeError
from torchweft.voxels.grid import Geometry
from torchweft.voxels.maps.coordinates import Bounds, Coordinates, bounds_of
from torchweft.voxels.maps.gpu.planned import tiles_planned
from torchweft.voxels.maps.kernel_map import KernelMap, Maps
from torchweft.voxels.maps.shards import refuse
from torchweft.voxels.maps.tensor import HasVoxels, SparseTensor, sparse_of
from torchweft.voxels.norms.unpadded import unpadded_norms

__all__ = ["padded_sizes"]


class _Map(NamedTuple):
    """Of a map: its geometry, the level of its outputs, and whether these were given."""

    shape: Geometry
    outputs: int
    given: bool
    has_back: bool


_Grid = tuple[tuple[int, ...] | None, int | None, tuple[int, ...], Bounds | None]
"""The given shape, the given batch size, the stride, and bounds: None where nothing needs them."""


class _Level(NamedTuple):
    """Of a level; `coarse` are the strides that floors have been taken for, with the levels."""

    grid: _Grid
    ascends: bool
    has_order: bool
    maps: tuple[_Map, ...]
    coarse: tuple[tuple[tuple[int, ...], int], ...]


class _Structure(NamedTuple):
    """What is no leaf; `names` are maps of earlier levels, each with its level and number there."""

    levels: tuple[_Level, ...]
    names: tuple[tuple[str, int, int], ...]


_Kept = tuple[Geometry, Coordinates, bool, Tensor, Tensor | None]
"""A map of a level: geometry, outputs, whether these were given, and tables."""


def padded_sizes(
    tensor: SparseTensor | HasVoxels, factor: float = 1.25, **fills: float
) -> dict[str | tuple[str, int], Any]:
    """`sizes` for `torchweft.capture`: room for tensors of other voxels, with the same maps.

    A replay reads the voxels and maps of its argument. Rows of padding have no neighbours, and
    batch norms leave them out. The function must do so too: a loss gives them no weight, for
    example by a label that it ignores. Convolutions, batch norms and what acts on each row alone
    can be recorded; pools of samples and `dense()` cannot.

    Args:
        tensor: as for `prepare`, with all maps of the network; that knows none onto given
            coordinates. Its box and batch size (`spatial_shape`, `batch_size`) are those of every
            tensor; they must be given, unless all strided layers have outputs="floor", as
            MinkowskiEngine's. The rows of all tensors ascend, or of none.
        factor: room over the voxels of each level, at least 1.
        **fills: what fills the padding of other arguments that have a row for each voxel, for
            example `labels=-100`; without, their first rows are repeated.

    Returns:
        For the argument `sizes`, of a function that has one such tensor among its arguments.

    Raises:
        ShapeError: the tensor has no maps, a box that maps depend on was not given, or the factor
            is below 1.

    Cost: a replay copies all maps, and sorts their rows as the first call on a tensor does. Memory
    of gradients: two lists of all K offsets for each row of a map.

    Example:
        >>> import torch, torchweft
        >>> from torchweft import voxels
        >>> network = voxels.SubMConv3d(1, 4, 3)
        >>> coords = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]])
        >>> x = voxels.SparseTensor(torch.ones(2, 1), coords, (4, 4, 4), 1)
        >>> sizes = voxels.padded_sizes(voxels.prepare(network, x), 1.5)
        >>> run = torchweft.capture(network, x, sizes=sizes)
        >>> coords = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 2, 0, 0]])
        >>> more = voxels.SparseTensor(torch.ones(3, 1), coords, (4, 4, 4), 1)
        >>> len(run(voxels.prepare(network, more)))
        3
    """
    if not isinstance(factor, int | float) or not 1 <= factor < math.inf:
        raise ShapeError(
            f"factor is {factor!r}: it is the room over the voxels of the tensor, and must be 1 or "
            "more. Pass 1.25 for a quarter more voxels."
        )
    tensor = sparse_of(tensor)
    levels = _flatten(tensor)[1].levels
    boxes = {None in level.grid[:2] for level in levels}
    if len(boxes) > 1 or not levels[0].maps:
        shape, size = levels[0].grid[:2]
        raise ShapeError(
            f"tensor has {len(levels[0].maps)} maps, the spatial_shape {shape} and the batch_size "
            f"{size}: all clouds of a record have maps, and the same given box where strided "
            "layers read it. Pass spatial_shape and batch_size to SparseTensor (to torchsparse's, "
            "spatial_range=(batch, x, y, z)), and voxels.prepare(network, tensor)."
        )
    padding: list[dict[tuple[str, int], str | float]]
    padding = [{(f"rows_{i}", 0): -1} for i in range(len(levels))]
    padding[0] |= {("feats", 0): 0, **{(name, 0): fill for name, fill in fills.items()}}
    for i, level in enumerate(levels):
        if level.has_order:
            padding[i][f"order_{i}", 0] = f"rows_{i}"
        for n, spec in enumerate(level.maps):
            padding[spec.outputs][f"table_{i}_{n}", 1] = -1
            if spec.has_back:
                padding[i][f"back_{i}_{n}", 1] = -1
    return {f"rows_{i}": (factor, fill) for i, fill in enumerate(padding)}


def _flatten(tensor: SparseTensor) -> tuple[list[Any], _Structure]:
    remedy = "Run the network eagerly, or export it with a tensor of one process."
    refuse(tensor.coordinates, "torch.export or capture", remedy)
    levels = _reachable([tensor.coordinates])
    named = [(n, m) for n, m in sorted(tensor.maps.by_name.items()) if m.inputs not in levels]
    if named:
        levels = _reachable([tensor.coordinates, *(found.inputs for _, found in named)])
    numbers = {level: number for number, level in enumerate(levels)}
    leaves: list[Any] = []
    structures, places = [], {}
    built = any(levels.values())
    for i, (level, own) in enumerate(levels.items()):
        rows, order, maps = level.stored_rows, level.known_order, own + _given_maps(level, levels)
        leaves += [rows] if order is None else [rows, order]
        for n, (_, _, _, kept, back) in enumerate(maps):
            leaves += [kept] if back is None else [kept, back]
            places[id(kept)] = i, n
        grid = _given_grid(level) if built else level.grid
        structures.append(_structure_of(level, grid, order is not None, maps, numbers))
    mark_fixed(*[t for t in leaves if varying(t) is None])
    names = tuple([(name, *places[id(found.kept)]) for name, found in named])
    return [tensor.feats, *leaves], _Structure(tuple(structures), names)


def _flatten_with_keys(tensor: SparseTensor) -> tuple[list[tuple[Any, Any]], _Structure]:
    leaves, structure = _flatten(tensor)
    names = ["feats"]
    for i, level in enumerate(structure.levels):
        names += [f"rows_{i}", f"order_{i}"][: 1 + level.has_order]
        for n, spec in enumerate(level.maps):
            names += [f"table_{i}_{n}", f"back_{i}_{n}"][: 1 + spec.has_back]
    keys = map(private.GetAttrKey, names)
    return list(zip(keys, leaves, strict=True)), structure


def _reachable(roots: Sequence[Coordinates]) -> dict[Coordinates, list[_Kept]]:
    """All levels that maps lead to from some, in order, with their maps to computed voxels."""
    found: dict[Coordinates, list[_Kept]] = {}
    waiting = list(roots)
    while waiting:
        level = waiting.pop(0)
        if level not in found:
            found[level] = own = _own_maps(level)
            waiting += [outputs for _, outputs, *_ in own]
            waiting += [other for other in level.tables.values() if isinstance(other, Coordinates)]
    return found


def _own_maps(level: Coordinates) -> list[_Kept]:
    found: list[_Kept] = []
    known = level.foreseen | level.tables
    for shape in sorted([key for key in known if isinstance(key, Geometry)]):
        kept, back, outputs = known[shape]
        found.append((shape, level if outputs is None else outputs, False, kept, back))
    return found


def _given_maps(level: Coordinates, levels: Iterable[Coordinates]) -> list[_Kept]:
    """The maps of a level onto given voxels that are among the levels."""
    return [
        (shape, outputs, True, kept, back)
        for outputs in (levels if level.onto else ())
        for shape, (kept, back) in sorted(level.onto.get(outputs, {}).items())
    ]


def _structure_of(
    level: Coordinates,
    grid: _Grid,
    has_order: bool,
    maps: Sequence[_Kept],
    numbers: Mapping[Coordinates, int],
) -> _Level:
    found = [_Map(s, numbers[o], given, b is not None) for s, o, given, _, b in maps]
    coarse = sorted(
        (key, numbers[other])
        for key, other in level.tables.items()
        if isinstance(other, Coordinates)
    )
    return _Level(grid, level.seem_sorted, has_order, tuple(found), tuple(coarse))


def _given_grid(level: Coordinates) -> _Grid:
    """What was given of a grid: where maps are built, nothing needs the bounds of the voxels."""
    shape, size = level.given_shape, level.given_batch_size
    bounds = None if shape is None or size is None else bounds_of(size, shape)
    return shape, size, level.stride, bounds


def _unflatten(leaves: Iterable[Any], structure: _Structure) -> SparseTensor:
    """The tensor of leaves, which may be no tensors: torch puts other objects in their place."""
    feats, *rest = leaves
    left = iter(rest)
    levels, tables = [], []
    for level in structure.levels:
        found = Coordinates.of_ascending(next(left), *level.grid)
        found.know(level.ascends, next(left) if level.has_order else None)
        levels.append(found)
        tables.append([(next(left), next(left) if m.has_back else None) for m in level.maps])
    for inputs, level, own in zip(levels, structure.levels, tables, strict=True):
        inputs.tables.update((stride, levels[number]) for stride, number in level.coarse)
        for spec, (kept, back) in zip(level.maps, own, strict=True):
            outputs = levels[spec.outputs]
            if spec.given:
                inputs.onto.setdefault(outputs, {})[spec.shape] = kept, back
            else:
                other = None if outputs is inputs else outputs
                inputs.tables[spec.shape] = kept, back, other
    maps = Maps()
    for name, i, n in structure.names:
        spec = structure.levels[i].maps[n]
        sides = levels[i], levels[spec.outputs]
        maps.by_name[name] = KernelMap(*tables[i][n], *sides, spec.shape)
    if (run := varying(levels[0].stored_rows)) is not None:
        run.until_end(unpadded_norms(levels))
        run.until_end(tiles_planned(run))
    result = SparseTensor.__new__(SparseTensor)
    result.feats, result.coordinates, result.maps = feats, levels[0], maps
    return result


def _to_json(structure: _Structure) -> str:
    return json.dumps(structure)


def _from_json(text: str) -> _Structure:
    levels, names = _as_tuples(json.loads(text))
    found = []
    for grid, ascends, has_order, maps, coarse in levels:
        own = tuple(_Map(Geometry(*shape), *rest) for shape, *rest in maps)
        found.append(_Level(grid, ascends, has_order, own, coarse))
    return _Structure(tuple(found), names)


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


private.register_pytree_node(
    SparseTensor,
    _flatten,
    _unflatten,
    serialized_type_name="torchweft.voxels.SparseTensor",
    to_dumpable_context=_to_json,
    from_dumpable_context=_from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
