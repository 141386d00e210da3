"""torch's machinery around the Clifford operations: compile, export, transforms, autocast."""

import functools
from dataclasses import replace

import pytest

from tests.cases import clifford
from tests.conftest import BACKENDS, INTERPRETED
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
