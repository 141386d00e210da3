"""torch's machinery around the Clifford operations: compile, export, transforms, autocast."""

import functools
from dataclasses import replace

import pytest
import torch

from tests.cases import clifford
from tests.conftest import BACKENDS, INTERPRETED
from torchweft.clifford import Algebra, fully_connected_geometric_product
from torchweft.testing.doors import DOOR_CHECKS, check_autocast, check_compile, check_numerical

if INTERPRETED:
    pytest.skip("the doors are checked without TRITON_INTERPRET", allow_module_level=True)

SUITE = clifford.suite()
DOORS = [
    (check, case)
    for check in DOOR_CHECKS
    for case in SUITE.doors
    # on the CPU a product and a norm: test_clifford_nn compiles a layer of both
    if check is not check_compile or "chain fully connected" not in case.name
]


def named(case):
    return case.name


@pytest.mark.parametrize(
    ("check", "case"), DOORS, ids=[f"{check.__name__}-{case.name}" for check, case in DOORS]
)
@pytest.mark.singly  # cases share their operator
def test_door(check, case):
    check(case)


@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical_gradients(case):
    check_numerical(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SUITE.doors, ids=named)
def test_autocast_does_not_reach_into_a_body(case, backend):
    check_autocast(replace(case, call=functools.partial(case.call, backend=backend)))


def test_fully_connected_products_of_meta_tensors():
    """Red before: autocast, which was turned off whether it was on or not, knows no such device."""
    algebra = Algebra.cl(2)
    shapes = (4, 5, 3), (len(algebra.paths), 3, 6)
    x, weight = (torch.empty(shape, device="meta") for shape in shapes)
    z = fully_connected_geometric_product(x, x, weight, algebra)
    assert (z.device.type, z.shape) == ("meta", (4, 5, 6))
