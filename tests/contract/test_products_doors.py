"""torch's machinery around the products: the doors do not depend on the backend."""

import pytest

from tests.conftest import INTERPRETED
from weft.testing.cases import products
from weft.testing.doors import DOOR_CHECKS, check_numerical

if INTERPRETED:
    pytest.skip("the doors are checked without TRITON_INTERPRET", allow_module_level=True)


@pytest.mark.parametrize("case", products.door_cases(), ids=lambda case: case.name)
@pytest.mark.parametrize("check", DOOR_CHECKS)
def test_door(check, case):
    check(case)


@pytest.mark.parametrize("op", products.OPS)
def test_numerical_gradients_in_every_mode(op):
    for case in products.small_cases(op):
        check_numerical(case)
