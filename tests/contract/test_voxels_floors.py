"""Floors, and maps onto given voxels, by kernels: the bits of torch's operations, few launches.

Seen red with: a remainder of negative numbers, a box that does not begin at 0, batches that begin
past 0, rows of a map taken for places.
"""

import pytest
import torch

from tests.contract.test_voxels_maps import with_kernels
from torchweft.core.backend import interpreted
from torchweft.core.gpu.launcher import Kernel
from torchweft.testing.contract import assert_same_bits
from torchweft.voxels.grid import geometry
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import meet

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not interpreted(), reason="in the interpreter kernels serve the CPU too"),
]

SHAPES = {
    "k3 s2": (3, 2, 1),
    "k2 s2": (2, 2, 1),
    "k1 s3": (1, 3, 1),
    "k3 s2 d2": ((3, 4), 2, 2),
    "k5 s1 and s3": ((5, 3), (1, 3), (1, 2)),
    "k3 s1": (3, 1, 1),
}


def rows(count, low, seed, batches=(0, 2)):
    """Distinct voxels in no order."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(*batches, (count, 1), generator=generator)
    voxels = torch.randint(low, low + 13, (count, 2), generator=generator)
    found = torch.unique(torch.cat([batch, voxels], 1).int(), dim=0)
    return found[torch.randperm(len(found), generator=generator)]


def both(monkeypatch, build):
    """What kernels and torch's operations build."""
    found = []
    for serve in (True, False):
        with monkeypatch.context() as patch:
            with_kernels(patch, serve)
            found.append(build())
    return found


@pytest.mark.parametrize("low", [-7, 0, 5])
@pytest.mark.parametrize("name", SHAPES)
def test_floors_and_their_maps(name, low, monkeypatch):
    kernel, stride, dilation = SHAPES[name]
    shape = geometry(2, kernel, stride, 0, dilation, mode="floor")

    def build():
        inputs = Coordinates(rows(60, low, 0, (1, 3)))
        outputs = inputs.coarse(shape)
        deeper = outputs.coarse(shape)
        maps = *meet(inputs, outputs, shape), *meet(outputs, deeper, shape)
        return outputs.rows, outputs.grid, deeper.rows, deeper.grid, *maps

    for n, (one, other) in enumerate(zip(*both(monkeypatch, build), strict=True)):
        if isinstance(one, tuple):
            assert one == other
        else:
            assert_same_bits(one, other, f"{n}")


@pytest.mark.parametrize("mode", ["strided", "floor", "transposed", "floor-transposed"])
@pytest.mark.parametrize("low", [-9, 3])
def test_maps_onto_given_voxels(mode, low, monkeypatch):
    """Which lie in another box, of samples that the inputs may lack, in any order."""
    padding = 1 if mode in ("strided", "transposed") else 0
    shape = geometry(2, 3, 2, padding, (1, 2), mode=mode)
    fine, coarse = rows(70, low, 1), rows(40, low // 2 - 2, 2, (1, 3))

    def build():
        sides = [Coordinates(fine), Coordinates(coarse)]
        return meet(*(sides[::-1] if shape.transposed else sides), shape)

    for one, other in zip(*both(monkeypatch, build), strict=True):
        assert (one >= 0).any()
        assert_same_bits(one, other, mode)


def test_nothing_meets_nothing(monkeypatch):
    shape = geometry(2, 3, 2, 0, 1, mode="floor")
    none = torch.empty(0, 3, dtype=torch.int32)
    for fine, coarse in ((rows(9, 0, 0), none), (none, rows(9, 0, 0)), (none, none)):
        given = Coordinates(fine), Coordinates(coarse)
        for one, other in zip(*both(monkeypatch, lambda g=given: meet(*g, shape)), strict=True):
            assert_same_bits(one, other, "tables")


def test_few_launches(monkeypatch):
    """Those of torch beside them are a sort, a sum and what fills the tables."""
    launched, plain = [], Kernel.__call__

    def call(kernel, *args):
        launched.append(kernel._kernel.__name__.removesuffix("_kernel"))
        return plain(kernel, *args)

    with_kernels(monkeypatch, True)
    monkeypatch.setattr(Kernel, "__call__", call)
    shape = geometry(2, 3, 2, 0, 1, mode="floor")
    inputs = Coordinates(torch.unique(rows(20, 0, 0), dim=0), (16, 16), 2)
    del launched[:]
    outputs = inputs.coarse(shape)
    meet(inputs, outputs, shape)
    assert launched == ["pack", "candidates", "fresh", "level", "onto"]
