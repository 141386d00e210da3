"""The contract of the Clifford operations, in every kind of algebra, on every backend.

The cases are in weft.testing.cases.clifford.  The operations of one product share their bodies,
so float32 goes to second order and the other dtypes meet the products and the chain alone.  An
interpreted program takes milliseconds: there, small algebras and first order.
"""

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from weft.testing.cases import clifford
from weft.testing.contract import (
    Setting,
    check_layouts,
    check_repeatable,
    check_subsets,
    check_values,
)

HALVES = (torch.bfloat16, torch.float16)
SUITE = clifford.suite()


def quick(case):
    """Whether a case is small enough to be interpreted."""
    blades, *batch, features = case.inputs[0].shape
    return blades <= 8 and blades * features * max(batch, default=1) <= 8 * clifford.ROWS * 33


CASES = [case for case in SUITE.cases if not INTERPRETED or quick(case)]
SINGLE = [case for case in SUITE.single if not INTERPRETED or quick(case)]
ORDER = 1 if INTERPRETED else 2


def named(case):
    return case.name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*CASES, *SINGLE], ids=named)
def test_values_and_derivatives(case, backend):
    check_values(case, Setting(backend=backend, order=ORDER))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, *HALVES])
@pytest.mark.parametrize("case", CASES[:: 3 if INTERPRETED else 1], ids=named)
def test_other_dtypes(case, dtype, backend):
    check_values(case, Setting(dtype=dtype, backend=backend, order=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SUITE.full[:: 2 if INTERPRETED else 1], ids=named)
@pytest.mark.parametrize("check", [check_layouts, check_repeatable, check_subsets])
def test_promises(check, case, backend):
    check(case, Setting(backend=backend, order=1))
