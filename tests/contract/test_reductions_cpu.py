"""Printed loops of reductions for the CPU against the matrix of pairs.

Seen red with: 2^x of the smallest number for 2^−∞, a total that does not move with its maximum.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.pairs import (
    SUMS,
    X,
    Y,
    data,
)
from torchweft.reductions.call import ReductionData, Sizes
from torchweft.reductions.formula.node import node
from torchweft.testing.contract import assert_same_bits

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)

from torchweft.reductions.engine import numba_path as cpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float64, torch.bfloat16, torch.float16]


def test_the_same_bits_on_any_number_of_threads():
    sizes = Sizes(1, 400, 3000)
    values = data(*sizes)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(cpu.sums(SUMS["gaussian"], ReductionData(values, sizes)))
    torch.set_num_threads(before)
    assert_same_bits(*found, "two threads against one")


def test_long_formulas_are_refused():
    f = SUMS["gaussian"]
    assert cpu.serves(f)
    assert cpu.serves(f, f)
    assert not cpu.serves(node("concat", *[X * Y] * cpu.MOST_TERMS_OF_A_LOOP))
