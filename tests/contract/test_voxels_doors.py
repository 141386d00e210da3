"""torch's machinery around sparse convolution: the doors do not depend on the backend.

Seen red with: a fake input gradient with the weight's channels of one group, autocast left on
inside a body, the wrong operand in the slot of a gradient.
"""

import functools
from dataclasses import replace

import pytest

from tests.conftest import INTERPRETED
from weft.testing.cases import voxels
from weft.testing.doors import DOOR_CHECKS, check_autocast, check_numerical

if INTERPRETED:
    pytest.skip("the doors are checked without TRITON_INTERPRET", allow_module_level=True)

SUITE = voxels.suite()


def named(case):
    return case.name


@pytest.mark.parametrize("case", SUITE.doors, ids=named)
@pytest.mark.parametrize("check", DOOR_CHECKS)
def test_door(check, case):
    check(case)


@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical_gradients(case):
    check_numerical(case)


@pytest.mark.parametrize("case", SUITE.doors, ids=named)
def test_autocast_does_not_reach_into_a_body(case):
    check_autocast(replace(case, call=functools.partial(case.call, backend="torch")))
