"""Numba's loops give the tables of the torch code, to the bit, on any number of threads.

Seen red with: the box of a line not asked for; given keys written to; an empty box not empty.
"""

import pytest
import torch

from tests.cases.voxels import random_cloud
from tests.conftest import INTERPRETED
from torchweft import voxels
from torchweft.core import backend
from torchweft.errors import BackendError
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels.grid import geometry
from torchweft.voxels.maps import numba_path
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import Maps

if INTERPRETED:
    pytest.skip("the CPU's own loops are tested without Triton", allow_module_level=True)

BOXES = {1: (40,), 2: (12, 9), 3: (7, 5, 9), 4: (5, 3, 4, 6)}
LEVELS = {
    "submanifold": {"kernel_size": 3, "mode": "submanifold"},
    "submanifold, even": {"kernel_size": 2, "dilation": 2, "mode": "submanifold"},
    "submanifold, wide": {"kernel_size": 5, "dilation": 3, "mode": "submanifold"},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1, "mode": "strided"},
    "strided by 3, dilated": {"kernel_size": 4, "stride": 3, "dilation": 2, "mode": "strided"},
    "longer than the box": {"kernel_size": 3, "dilation": 30, "mode": "strided"},
    "transposed": {"kernel_size": 3, "stride": 2, "padding": 1, "mode": "transposed"},
    "floor": {"kernel_size": 3, "stride": 2, "mode": "floor"},
}


def rows_of(dim, shuffled, batch=2):
    """Rows (batch, s0, …) of a random cloud, ascending or not."""
    generator = torch.Generator().manual_seed(dim)
    rows = random_cloud(BOXES[dim], batch, generator).coords
    order = torch.randperm(len(rows), generator=generator)
    columns = rows.long() @ torch.tensor([64**n for n in reversed(range(1 + dim))])
    return rows[order if shuffled else columns.argsort()]


def map_of(rows, dim, shape):
    return Maps().get(Coordinates(rows, BOXES[dim], 2), shape)


def assert_same_maps(found, wanted):
    for name in ("sources", "targets"):
        assert_same_bits(getattr(found, name), getattr(wanted, name), name)
    for name in ("rows", "keys"):
        results = getattr(found.outputs, name), getattr(wanted.outputs, name)
        assert_same_bits(*results, f"{name} of the outputs")


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dim", BOXES)
@pytest.mark.parametrize("level", LEVELS)
def test_loops_give_the_tables_of_the_torch_code(level, dim, shuffled, threads, monkeypatch):
    rows, shape = rows_of(dim, shuffled), geometry(dim, **LEVELS[level])
    monkeypatch.setattr(numba_path, "SERIAL", 0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = map_of(rows, dim, shape)
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(numba_path, "loops_serve", lambda device: False)
    assert_same_maps(found, map_of(rows, dim, shape))


@pytest.mark.parametrize("level", ["strided", "transposed"])
def test_pairs_past_int32_are_the_same(level, monkeypatch):
    rows, shape = rows_of(3, True), geometry(3, **LEVELS[level])
    found = map_of(rows, 3, shape)
    monkeypatch.setattr(numba_path, "WIDE", 0)
    assert_same_maps(found, map_of(rows, 3, shape))


@pytest.mark.parametrize("level", ["submanifold", "strided", "transposed", "floor"])
def test_a_map_searches_nothing(level, monkeypatch):
    """Red before: a search for each offset, 137 in a network of five levels."""
    rows, shape = rows_of(3, True), geometry(3, **LEVELS[level])

    def search(*args, **kwargs):
        raise AssertionError("a search in a map of loops")

    monkeypatch.setattr(torch, "searchsorted", search)
    monkeypatch.setattr(torch, "unique", search)
    map_of(rows, 3, shape)


@pytest.mark.parametrize("sizes", [(3,), (2**11,), (2**11 + 1,), (2**31, 2**31)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_keys_are_sorted_by_all_of_their_bits(sizes, count):
    generator = torch.Generator().manual_seed(0)
    most = torch.tensor(sizes).prod()
    keys = torch.randint(0, int(most), (count,), generator=generator)
    keys[count // 2 :] = keys[: count - count // 2]  # stable
    given = keys.clone()
    placed, order = numba_path.ascending(keys, sizes)
    wanted, its_order = torch.sort(given, stable=True)
    assert_same_bits(placed, wanted, "keys")
    assert_same_bits(order.long(), its_order, "their order")
    assert_same_bits(numba_path.distinct(keys, sizes), torch.unique(given), "distinct keys")
    assert_same_bits(keys, given, "the keys that were given")


def test_a_requested_loop_that_is_not_installed_raises(monkeypatch):
    for cached in (backend.choose, backend._why_not):
        cached.cache_clear()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(backend, "_installed", lambda package: package != "numba")
            with pytest.warns(UserWarning, match=r"numba is not installed: .* pip install numba"):
                assert not numba_path.loops_serve("cpu")
            assert not numba_path.loops_serve("cpu")  # and no second warning, an error here
            layer = voxels.SubMConv3d(2, 3, 3, backend="numba")
            tensor = voxels.SparseTensor(torch.ones(1, 2), torch.zeros(1, 4, dtype=torch.int32))
            with pytest.raises(BackendError, match=r"numba'.* not installed: pip install numba"):
                layer(tensor)
            layer.backend = None
            assert layer(tensor).F.shape == (1, 3)
    finally:
        for cached in (backend.choose, backend._why_not):
            cached.cache_clear()
