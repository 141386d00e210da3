"""The first call compiles at once what it is about to call, for the very dtypes that it then has.

Nothing runs on a GPU: machine code is a stub that notes its arguments.  Seen red with: a table of
int64 where int32 stood for it, an order left out, a kernel that is not announced, the gradient of
the input left out, absent tensors not told apart; before a map: its order not asked for, tiles that
the map itself makes, gradients that nobody records; rows of int64 that are read late; of a map:
keys that are there already, an order or words left out.
"""

import importlib

import pytest
import torch

import torchweft
from tests.conftest import INTERPRETED
from tests.contract.announced import watch
from torchweft.voxels import kernel_map
from torchweft.voxels.convolution import launch
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue
from torchweft.voxels.convolution.operator import compile_before, convolution
from torchweft.voxels.grid import geometry
from torchweft.voxels.maps import coordinates
from torchweft.voxels.maps.gpu import launch as map_launch
from torchweft.voxels.maps.gpu import tiles as preparation
from torchweft.voxels.maps.gpu.jobs import Job, PairJob, pairs_together, tiles_together
from torchweft.voxels.maps.gpu.tiles import Flags, SearchRemains, tiles_of

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)


@pytest.fixture
def seen(monkeypatch):
    caches = preparation._tile_kernels, launch._convolvers, launch._differentiators
    clears = [preparation.kernel_for.cache_clear, *(cache.clear for cache in caches)]
    for clear in clears:
        clear()
    monkeypatch.setattr(launch, "_compiled_layers", set())
    monkeypatch.setattr(map_launch, "_compiled_maps", set())
    yield watch(monkeypatch.setattr, frozenset({"N", "blocks", "panels"}))
    for clear in clears:
        clear()


@pytest.mark.parametrize("count", [500, 20_000])
@pytest.mark.parametrize("order", [None, "shuffled"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("channels", "groups"), [(32, 1), (4, 1), (32, 2)])
def test_a_training_step_is_compiled_at_once(count, order, strided, channels, groups, seen):
    announced, compiled = seen
    table = torch.full((27 if strided else 14, count), -1, dtype=torch.int32)
    back = torch.full((27, count), -1, dtype=torch.int32) if strided else None
    rows = None if order is None else torch.arange(count).int()
    x = torch.zeros(count, channels).half().requires_grad_()
    weight = torch.zeros(27, channels // groups, channels).half().requires_grad_()
    bias, g = torch.zeros(channels).half(), torch.zeros(count, channels).half()
    options = {"groups": groups, "precision": "ieee"}
    once = launch.turned(weight.detach(), groups)
    launch.compile_ahead(x, weight, bias, (table, back, rows, rows), **options)
    ahead = len(announced)
    launch.convolve(x, weight, table, rows, after=Epilogue(shift=bias), **options)
    launch.weight_gradient(x, g, table, rows, **options, offsets=27, mirrored=not strided)
    read = table if back is None else back
    launch.convolve(g, once, read, rows, flip=back is None, **options)
    assert len(announced) == ahead
    assert set(map(str, announced)) == set(map(str, compiled))


@pytest.mark.parametrize("count", [500, 20_000, 300_000])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("offsets", "channels"), [(27, 4), (27, 32), (125, 32), (125, 512)])
def test_what_is_compiled_ahead_is_what_is_called(count, offsets, shuffled, channels, seen):
    announced, compiled = seen
    count = min(count, 2**22 // channels)
    table = torch.full((offsets, count), -1, dtype=torch.int32)
    order = torch.arange(count).int() if shuffled else None
    x, g = torch.zeros(2, count, channels).half()
    weight = torch.zeros(offsets, channels, channels).half()
    options = {"groups": 1, "precision": "ieee"}
    launch.convolve(x, weight, table, order, **options)
    launch.weight_gradient(x, g, table, order, **options)
    assert len(announced) >= 5
    for made in announced:
        assert made in compiled
    assert all(made in announced for made in compiled)


def test_another_number_of_rows_finds_the_kernels_of_the_last(seen):
    """Seen red with the number of rows in the signature of a weight's gradient."""
    options = {"groups": 1, "precision": "ieee"}
    for count in (20_000, 30_000):
        table = torch.full((27, count), -1, dtype=torch.int32)
        x = torch.zeros(count, 32).half()
        launch.convolve(x, torch.zeros(27, 32, 32).half(), table, None, **options)
        launch.weight_gradient(x, x, table, None, **options)
    assert len(launch._convolvers) == len(launch._differentiators) == 1


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("channels", [4, 64])
def test_a_layer_is_compiled_before_its_map_is_made(shuffled, recorded, channels, seen):
    announced, compiled = seen
    tensor = torchweft.voxels.SparseTensor(*cloud(20_000, channels, shuffled))
    weight = torch.zeros(27, channels, channels).half()
    x = tensor.feats.requires_grad_(recorded)
    shape, options = geometry(3, 3, 1, 0, 1, mode="submanifold"), (1, "ieee", "triton")
    operands = x, weight.requires_grad_(recorded), None, NO_EPILOGUE
    compile_before(operands, tensor.coordinates, shape, options)
    before = len(announced)
    assert before >= (3 if recorded else 1)
    y = convolution(operands, kernel_map(tensor, 3), options)
    if recorded:
        y.backward(y)
    assert set(map(str, announced[:before])) <= set(map(str, compiled))
    tiles = ("key", "scan", "list", "turn", "mask")
    later = {made[0].__name__.removesuffix("_kernel") for made in announced[before:]}
    assert later == set(tiles)


@pytest.mark.parametrize(("dtype", "at_once"), [(torch.int32, 0), (torch.int64, 1)])
def test_rows_wait_for_a_layer_unless_they_are_copied(dtype, at_once, seen, monkeypatch):
    """Who gave rows of another type may write there again."""
    monkeypatch.setattr(coordinates, "kernels_serve", lambda device: True)
    feats, coords, *box = cloud(500, 4, False)
    tensor = torchweft.voxels.SparseTensor(feats, coords.to(dtype), *box)
    assert [made[0].__name__ for made in seen[1]] == ["pack_kernel"] * at_once
    assert tensor.coordinates.rows.dtype == torch.int32
    assert len(seen[1]) == 1


@pytest.mark.parametrize("count", [500, 20_000, 200_000])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kernel", [3, 2, 5])
def test_a_map_is_compiled_at_once(kernel, dtype, shuffled, count, seen, monkeypatch):
    """Keys, order, search and tiles; but rows that descend are known to when keys are there."""
    announced, compiled = seen
    for name in ("coordinates", "kernel_map", "packing"):
        module = importlib.import_module(f"torchweft.voxels.maps.{name}")
        monkeypatch.setattr(module, "kernels_serve", lambda device: True)
    monkeypatch.setattr(coordinates, "packing_of", coordinates.packing_of.__wrapped__)
    monkeypatch.setattr(Flags, "read", lambda flags: [False, shuffled, False, False])
    feats, coords, *box = cloud(count, 1, shuffled)
    tensor = torchweft.voxels.SparseTensor(feats, coords.to(dtype), *box)
    kernel_map(tensor, kernel)
    missing = {made[0].__name__ for made in compiled if made not in announced}
    assert missing <= ({"pack_kernel"} if dtype == torch.int64 else set())
    assert all(made in compiled for made in announced)


@pytest.mark.parametrize("order", [None, "shuffled"])
def test_a_strided_map_is_compiled_at_once(order, seen):
    """All four kernels, before the first of them runs."""
    announced, compiled = seen
    rows = cloud(500, 1, False)[1]
    own = None if order is None else torch.arange(500).int()
    shape = geometry(3, 3, 2, 1, 1, mode="strided")
    found = map_launch.candidates(rows, own, (1, 32, 32, 32), torch.int32, shape)
    ahead = [made[0].__name__ for made in announced]
    map_launch.level(found, ((0,) * 4, (1, 32, 32, 32)), 100)
    map_launch.meet(found, own, 500, 100, shape)
    assert ahead == [made[0].__name__ for made in announced]
    assert sorted(ahead) == sorted(made[0].__name__ for made in compiled)
    assert len(ahead) == 4


def test_pairs_of_several_tables_are_one_launch(seen):
    _, compiled = seen
    tables = [torch.full((14, count), -1, dtype=torch.int32) for count in (500, 2000)]
    for table in tables:
        tiles_of(table, None, 27)
    del compiled[:]
    pairs_together([PairJob(table, None, 27, True) for table in tables])
    assert [made[0].__name__ for made in compiled] == ["pair_kernel"]


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_tiles_of_several_tables_are_compiled_at_once(parts, seen):
    announced, compiled = seen
    tables = [torch.full((27, count), -1, dtype=torch.int32) for count in (500, 20_000)]
    given = [torch.zeros(parts, t.shape[1], dtype=torch.int32) if parts else None for t in tables]
    lefts = [SearchRemains(None, part) for part in given]
    tiles_together([Job(t, None, 27, left) for t, left in zip(tables, lefts, strict=True)])
    assert len(announced) == (4 if parts else 5)
    assert set(map(str, announced)) == set(map(str, compiled))


def cloud(count, channels, shuffled):
    """Features and voxels of a box of 64³, of which all is known that a map needs."""
    place = torch.arange(count) * 64**3 // count
    coords = torch.stack([place * 0, place // 4096, place // 64 % 64, place % 64], 1).int()
    if shuffled:
        coords = coords.flip(0)
    return torch.zeros(count, channels).half(), coords, (64, 64, 64), 1
