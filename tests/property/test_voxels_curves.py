"""Space-filling curves: bijections; a Hilbert curve never jumps.

Seen red with: an exchange kept where the bit is set, a word's bits lost, words sorted in the
wrong order, the Gray code left encoded.
"""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies

from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.grid import hilbert_keys, hilbert_order, z_keys, z_order

ORDERS = {"z": (z_order, z_keys), "hilbert": (hilbert_order, hilbert_keys)}
CUBES = [(1, 6), (2, 1), (2, 5), (3, 1), (3, 4), (4, 1), (4, 3)]


def cube(dim: int, bits: int, low: int = -5) -> torch.Tensor:
    return torch.tensor(list(itertools.product(range(low, low + 2**bits), repeat=dim)))


@pytest.mark.parametrize(("dim", "bits"), CUBES)
@pytest.mark.parametrize("name", ORDERS)
def test_the_keys_of_a_full_cube_are_all_numbers(name, dim, bits):
    keys = ORDERS[name][1](cube(dim, bits))
    assert keys.shape[0] == 1
    assert sorted(keys[0].tolist()) == list(range(2 ** (dim * bits)))


@pytest.mark.parametrize(("dim", "bits"), CUBES)
def test_a_hilbert_curve_goes_from_neighbour_to_neighbour(dim, bits):
    cells = cube(dim, bits)
    cells = cells[torch.randperm(len(cells), generator=torch.Generator().manual_seed(0))]
    steps = cells[hilbert_order(cells)].diff(dim=0).abs()
    assert steps.sum(1).tolist() == [1] * (len(cells) - 1)


def test_z_order_interleaves_the_bits():
    cells = torch.tensor([(0, 0), (0b101, 0b011), (0b100, 0b111)])
    assert z_keys(cells).tolist() == [[0, 0b100111, 0b110101]]


coordinate = strategies.integers(-(2**31), 2**31 - 1)
clouds = strategies.integers(1, 4).flatmap(
    lambda dim: strategies.lists(strategies.tuples(*[coordinate] * dim), min_size=1, unique=True)
)


@pytest.mark.parametrize("name", ORDERS)
@hypothesis.given(rows=clouds)
def test_no_two_voxels_share_a_key_and_the_order_ascends(name, rows):
    order, keys = (f(torch.tensor(rows)) for f in ORDERS[name])
    assert sorted(order.tolist()) == list(range(len(rows)))
    ascending = [tuple(key) for key in keys[:, order].T.tolist()]
    assert ascending == sorted(set(ascending))
    assert len(ascending) == len(rows)


@pytest.mark.parametrize("name", ORDERS)
def test_no_voxel_and_wrong_voxels(name):
    order = ORDERS[name][0]
    assert order(torch.zeros(0, 3, dtype=torch.int32)).shape == (0,)
    with pytest.raises(DTypeError, match=r"torch\.float32: a curve runs through integers\. Pass"):
        order(torch.zeros(2, 3))
    with pytest.raises(ShapeError, match=r"\(2, 5\): they must be \(N, d\), .* Leave the batch"):
        order(torch.zeros(2, 5, dtype=torch.int32))
    with pytest.raises(DTypeError, match=r"coords is a list: it must be a torch\.Tensor\. Pass"):
        order([[0, 1]])
