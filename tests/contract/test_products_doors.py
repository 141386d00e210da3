"""torch's machinery around the products: the doors do not depend on the backend.

Seen red with: autocast left on inside a body (torch's products there narrow the sums again), dual
numbers not routed, a fake result without N, a mapped scale taken for a shared one, N taken from
the mapped dimension.
"""

import functools
from dataclasses import replace

import pytest

from tests.cases import products
from tests.conftest import BACKENDS, INTERPRETED
from torchweft.testing.doors import DOOR_CHECKS, check_autocast, check_numerical

if INTERPRETED:
    pytest.skip("the doors are checked without TRITON_INTERPRET", allow_module_level=True)


@pytest.mark.parametrize("case", products.door_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("check", DOOR_CHECKS)
@pytest.mark.singly  # cases share their operator
def test_door(check, case):
    check(case)


@pytest.mark.parametrize("op", products.OPS)
def test_numerical_gradients_in_every_mode(op):
    for case in products.small_cases(op):
        check_numerical(case)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", products.door_cases(), ids=lambda case: case.name)
def test_autocast_does_not_reach_into_a_body(case, backend):
    check_autocast(replace(case, call=functools.partial(case.call, backend=backend)))
