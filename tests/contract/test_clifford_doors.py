"""torch's machinery around the Clifford operations: compile, export, transforms, autocast."""

import functools
from dataclasses import replace

import pytest

from tests.conftest import BACKENDS, INTERPRETED
from weft.testing.cases import clifford
from weft.testing.doors import DOOR_CHECKS, check_autocast, check_numerical

if INTERPRETED:
    pytest.skip("the doors are checked without TRITON_INTERPRET", allow_module_level=True)

SUITE = clifford.suite()


def named(case):
    return case.name


@pytest.mark.parametrize("case", SUITE.doors, ids=named)
@pytest.mark.parametrize("check", DOOR_CHECKS)
def test_door(check, case):
    check(case)


@pytest.mark.parametrize("case", SUITE.small, ids=named)
def test_numerical_gradients(case):
    check_numerical(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SUITE.doors, ids=named)
def test_autocast_does_not_reach_into_a_body(case, backend):
    check_autocast(replace(case, call=functools.partial(case.call, backend=backend)))
