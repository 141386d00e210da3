"""The contract of the Clifford operations, in every kind of algebra.

The cases are in tests.cases.clifford.  The operations of one product share their bodies,
so float32 goes to second order, up to four dimensions, and the other dtypes meet the products and
the chain alone.  An interpreted program takes milliseconds: there, small algebras and first order.
On the CPU calls as small as these are torch's, whatever the backend; the loops that numba compiles
have a test of their own.
"""

import math

import pytest
import torch

from tests.cases import clifford
from tests.conftest import INTERPRETED
from torchweft.clifford.programs import operator as cpu
from torchweft.testing.contract import (
    Setting,
    check_layouts,
    check_repeatable,
    check_subsets,
    check_values,
)

pytestmark = pytest.mark.kernels

BACKEND = "triton" if INTERPRETED else "torch"
SUITE = clifford.suite()


def quick(case):
    """Whether a case is small enough to be interpreted: up to eight blades, 65 rows of 8."""
    blades, *batch, features = case.inputs[0].shape
    return blades <= 8 and blades * math.prod(batch) * features <= 8 * 65 * 8


CASES = [case for case in SUITE.cases if not INTERPRETED or quick(case)]
SINGLE = [case for case in SUITE.single if not INTERPRETED or quick(case)]
LOOPED = [
    clifford.make_case(op, metric, batch=(clifford.ROWS,))
    for op, metric in [
        ("geometric", (0, 1)),
        ("weighted", (1, 1)),
        ("chain euclidean", (1, 1)),
    ]
]
"""Of four blades: a loop of eight compiles three times as long."""
# interpreted, the kernels of each of the two families: matrix products, and rows of a chain
FULL = SUITE.full[2:6:2] if INTERPRETED else SUITE.full


def order(case):
    """Second, where a program of it takes no seconds."""
    return 1 if INTERPRETED or len(case.inputs[0]) > 16 else 2


def named(case):
    return case.name


@pytest.mark.parametrize("case", [*CASES, *SINGLE], ids=named)
def test_values_and_derivatives(case):
    check_values(case, Setting(backend=BACKEND, order=order(case)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES[::3], ids=named)
@pytest.mark.singly  # each item compiles for seconds
def test_other_dtypes(case, dtype):
    check_values(case, Setting(dtype=dtype, backend=BACKEND, order=1))


@pytest.mark.parametrize("case", FULL, ids=named)
@pytest.mark.parametrize("check", [check_layouts, check_repeatable, check_subsets])
def test_promises(check, case):
    check(case, Setting(backend=BACKEND, order=1))


@pytest.mark.skipif(INTERPRETED, reason="numba's loops need no interpreter")
@pytest.mark.parametrize("case", LOOPED, ids=named)
def test_loops(case, monkeypatch):
    """By numba, whatever the size."""
    monkeypatch.setattr(cpu, "COMPILED", 0)
    for check in (check_values, check_layouts):
        check(case, Setting(backend="numba", order=1))
