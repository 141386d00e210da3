"""The contract of the seven products, `sparse_{op}`, the thin forms and `sparse_scale`.

Every mode of every op on every backend of this process: numba and torch, or with
TRITON_INTERPRET=1 the Triton kernels.  The cases are in tests.cases.products.

First gradients call every kernel with every turned table that second ones call, so float32 alone
goes to second order.  An interpreted program takes a millisecond: there, each case meets one of
the dtypes, and what runs the same kernels once more is left out.

Seen red with: the last term of a segment dropped, sums in the storage dtype, rows without terms
left unwritten, a gradient's roles not turned, the gradient of an accumulated sum not expanded, the
scale's gradient in the storage dtype, gradients of frozen inputs mixed up, entries of no segment
counted, repeats in gather_index counted once, a stride of the scale ignored, an indptr taken for
the identity, a random factor of 1 + 1e-7, and indices read by their type.
"""

import pytest
import torch

from tests.cases import products
from tests.conftest import BACKENDS, INTERPRETED
from torchweft.testing.contract import (
    Setting,
    check_index_types,
    check_layouts,
    check_repeatable,
    check_subsets,
    check_values,
)

pytestmark = pytest.mark.kernels

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SUITE = products.suite()

REPEATS = ("thin ", "sparse ", "wide")


def order(case, dtype):
    """Of the derivatives that are checked."""
    if INTERPRETED:
        return 0 if "skewed" in case.name else 1
    return 2 if dtype == torch.float32 and "wide" not in case.name else 1


SETTINGS = [
    pytest.param(case, Setting(dtype=dtype, order=order(case, dtype)), id=f"{case.name}-{dtype}")
    for i, case in enumerate(SUITE.cases)
    for j, dtype in enumerate(DTYPES)
    if not INTERPRETED or (i % 4 == j and not any(word in case.name for word in REPEATS))
]
FULL = SUITE.doors if INTERPRETED else SUITE.full


def named(case):
    return case.name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "setting"), SETTINGS)
def test_values_and_derivatives(case, setting, backend):
    check_values(case, setting._replace(backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", SUITE.doors, ids=named)
def test_second_derivatives(case, backend):
    check_values(case, Setting(backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FULL, ids=named)
@pytest.mark.parametrize("check", [check_layouts, check_repeatable, check_index_types])
def test_promises(check, case, backend):
    check(case, Setting(backend=backend, order=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", FULL, ids=named)
def test_subsets_of_inputs_that_require_grad(case, backend):
    check_subsets(case, Setting(backend=backend, order=1 if INTERPRETED else 2))
