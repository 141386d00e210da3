"""torch's machinery around sparse convolution: the doors do not depend on the backend.

Seen red with: a fake input gradient with the weight's channels of one group, autocast left on
inside a body, the wrong operand in the slot of a gradient.
"""

import functools
from dataclasses import replace

import pytest
import torch

from tests.cases import voxels
from tests.conftest import INTERPRETED
from torchweft.errors import ShapeError
from torchweft.testing.doors import DOOR_CHECKS, check_autocast, check_numerical
from torchweft.voxels import SparseTensor, kernel_map, sparse_conv

if INTERPRETED:
    pytest.skip("the doors are checked without TRITON_INTERPRET", allow_module_level=True)

SUITE = voxels.suite()
COORDS = torch.tensor([[0, 1, 1], [0, 0, 1], [0, 2, 2]])


def named(case):
    return case.name


@pytest.mark.parametrize("case", SUITE.doors, ids=named)
@pytest.mark.parametrize("check", DOOR_CHECKS)
@pytest.mark.singly  # cases share their operator
def test_door(check, case):
    check(case)


@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical_gradients(case):
    check_numerical(case)


@pytest.mark.parametrize("case", SUITE.doors, ids=named)
def test_autocast_does_not_reach_into_a_body(case):
    check_autocast(replace(case, call=functools.partial(case.call, backend="torch")))


def test_tables_made_under_a_transform_outlive_it():
    """Seen red without `below_transforms`: tables were wrappers of a transform that had ended."""
    kept = []

    def loss(x):
        kept.append(SparseTensor(x, COORDS.clone(), (3, 3), 1))
        return sparse_conv(kept[0], torch.ones(9, 2, 2), 3).feats.sum()

    torch.func.grad(loss)(torch.randn(3, 2))
    found = kernel_map(kept[0], 3)
    for table in (found.sources, kept[0].coordinates.rows, kept[0].coordinates.order):
        assert table.data_ptr()


def test_coordinates_cannot_be_mapped():
    def conv(coords):
        return sparse_conv(SparseTensor(torch.ones(3, 2), coords), torch.ones(9, 2, 2), 3).feats

    with pytest.raises(ShapeError, match=r"shape \(3, 3\) is mapped by torch.vmap"):
        torch.vmap(conv)(torch.stack([COORDS, COORDS]))
