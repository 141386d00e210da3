"""Reductions against the dense matrix of the pairs, on every backend.

Seen red with: a weight's variables taken for parameters, the blocks of rows used for a gradient of
columns, the gradient of a broadcast batch not summed, and a maximum that is not detached.
"""

import pytest
import torch

from tests.cases import reductions
from tests.conftest import INTERPRETED
from tests.covering import FULL
from torchweft.testing.contract import BODY_CHECKS, Setting, assert_same_bits, check_values, pose
from torchweft.testing.doors import DOOR_CHECKS, check_autocast, check_numerical

pytestmark = pytest.mark.kernels

SUITE = reductions.suite()
BACKEND = "triton" if INTERPRETED else "torch"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
natively = pytest.mark.skipif(INTERPRETED, reason="the doors do not depend on the backend")


def named(case):
    return case.name


def loop_dtypes(case):
    """A formula compiles for seconds in each dtype: in the short suite a reduction has one."""
    if FULL:
        return DTYPES[:2]
    return DTYPES[1:2] if case.name.startswith(("Sum", "Max")) else DTYPES[:1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", SUITE.cases, ids=named)
@pytest.mark.singly  # seconds an item in the interpreter
def test_values(case, dtype):
    check_values(case, Setting("cpu", dtype, BACKEND, 1))


@pytest.mark.parametrize("case", SUITE.full, ids=named)
@pytest.mark.parametrize("check", BODY_CHECKS[1:])
@pytest.mark.singly  # seconds an item in the interpreter
def test_body(check, case):
    check(case, Setting("cpu", torch.float32, BACKEND, 1))


@natively
@pytest.mark.parametrize("case", reductions.looped_cases(), ids=named)
def test_values_of_loops(case):
    """Numbers of 16 bits are computed in float32, by the same loops."""
    for dtype in loop_dtypes(case):
        check_values(case, Setting("cpu", dtype, "numba", 1))


@natively
@pytest.mark.parametrize("case", SUITE.full, ids=named)
@pytest.mark.parametrize("check", BODY_CHECKS[1:])
@pytest.mark.singly  # each item compiles for seconds
def test_body_of_loops(check, case):
    check(case, Setting("cpu", loop_dtypes(case)[0], "numba", 1))


@natively
@pytest.mark.parametrize("case", SUITE.doors, ids=named)
@pytest.mark.parametrize("check", [door for door in DOOR_CHECKS if door is not check_autocast])
@pytest.mark.singly  # cases share their operator
def test_door(check, case):
    check(case)


@natively
@pytest.mark.parametrize("case", SUITE.doors + SUITE.full, ids=named)
def test_autocast_changes_nothing(case):
    problem = pose(case, dtype=torch.float32)
    expected = case.call(*problem.inputs, **problem.tables)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = case.call(*problem.inputs, **problem.tables)
    assert_same_bits(found, expected, "under autocast")


@natively
@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical_gradients(case):
    check_numerical(case)


@natively
def test_far_clouds_are_as_accurate_as_near_ones():
    reductions.check_far_clouds("cpu")
