"""Fully connected products of 16-bit numbers sum in float32 on the CPU.

Red before: pairs and matrix products were rounded on the way, 20 to 390 times the bound.
"""

import pytest
import torch

from tests.cases.clifford_ops import Unsigned
from tests.conftest import BACKENDS, INTERPRETED
from torchweft import clifford
from torchweft.clifford import Algebra, reference
from torchweft.testing import assert_within_bound

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("metric", [(1, 1), (1, 1, 1)])
def test_fully_connected_products_round_once(metric, dtype, backend):
    algebra, generator = Algebra(metric), torch.Generator().manual_seed(0)
    shapes = ((algebra.num_blades, 17, 24),) * 2 + ((len(algebra.paths), 24, 9),)
    x, y, weight = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    given = [t.double() for t in (x, y, weight)]
    exact = reference.fully_connected(*given, algebra)
    magnitude = reference.fully_connected(*(t.abs() for t in given), Unsigned(metric))
    found = clifford.fully_connected_geometric_product(x, y, weight, algebra, backend=backend)
    assert_within_bound(found, exact, magnitude, 24 * algebra.num_blades)
