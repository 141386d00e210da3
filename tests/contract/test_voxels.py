"""The contract of sparse convolution: every layer, every width of channels, groups, empty clouds.

The cases are in tests.cases.voxels.  float32 goes to second order, the other dtypes to
first.  Interpreted, the smaller clouds meet one of the dtypes each.

Seen red with: groups in the wrong order in the input's gradient, offsets of the inputs' table
turned round, sums in the storage dtype, the bias added after the rounding, row 0 counted for
offsets without a pair.
"""

import pytest
import torch

from tests.cases import voxels
from tests.conftest import INTERPRETED
from torchweft.testing.contract import (
    Setting,
    check_index_types,
    check_layouts,
    check_repeatable,
    check_subsets,
    check_values,
)

pytestmark = pytest.mark.kernels

BACKEND = "triton" if INTERPRETED else "torch"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUITE = voxels.suite()


def quick(case):
    """Whether a case is small enough to be interpreted."""
    x, weight, _ = case.inputs
    return len(x) <= 108 and len(weight) <= 36 and weight[0].numel() <= 64 * 31


SETTINGS = [
    pytest.param(
        case, Setting(dtype=dtype, backend=BACKEND, order=order), id=f"{case.name}-{dtype}"
    )
    for i, case in enumerate(SUITE.cases)
    for j, dtype in enumerate(DTYPES)
    if not INTERPRETED or (quick(case) and i % 4 == j)
    for order in [2 if dtype == torch.float32 and not INTERPRETED else 1]
]
FULL = SUITE.full[1:3] if INTERPRETED else SUITE.full


def named(case):
    return case.name


@pytest.mark.parametrize(("case", "setting"), SETTINGS)
def test_values_and_derivatives(case, setting):
    check_values(case, setting)


@pytest.mark.parametrize("case", FULL, ids=named)
@pytest.mark.parametrize(
    "check", [check_layouts, check_repeatable, check_subsets, check_index_types]
)
@pytest.mark.singly  # seconds an item in the interpreter
def test_promises(check, case):
    check(case, Setting(backend=BACKEND, order=1))
