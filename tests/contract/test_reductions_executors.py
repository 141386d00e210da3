"""The executors of loops and of kernels against the matrix of pairs.

In the interpreter these are the generated Triton kernels, else the CPU's printed loops.
Seen red with: terms past the end of an interval left in, intervals joined across lists, ties to
whichever comes first in a tile, a total that does not move with its maximum.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.pairs import (
    BLOCKS,
    COMPARED,
    SHIFTED,
    SIZES,
    SMALL,
    SUMS,
    blocks,
    check_shifted,
    check_smallest,
    check_sums,
    data,
)
from weft.reductions.ranges import Options, Sizes

if INTERPRETED:
    from weft.reductions import launch as executor
else:
    from weft.reductions import cpu as executor

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", SUMS)
def test_formulas(name):
    sizes = Sizes(2, 21, 40)
    values = data(2, 40, 21) if name == "swapped" else data(*sizes)
    check_sums(executor.sums, SUMS[name], values, sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes(sizes):
    values = data(*sizes)
    check_sums(executor.sums, SUMS["gaussian"], values, sizes)
    check_shifted(executor.shifted, *SHIFTED["weights of columns"], values, sizes)
    check_smallest(executor.smallest, COMPARED["distance"], 3, values, sizes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype):
    sizes = Sizes(2, 17, 70)
    values = data(*sizes, dtype)
    check_sums(executor.sums, SUMS["gradient"], values, sizes)
    check_shifted(executor.shifted, *SHIFTED["plain"], values, sizes)
    check_smallest(executor.smallest, COMPARED["ties"], 5, values, sizes)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    values = data(*SMALL)
    check_sums(executor.sums, SUMS["gaussian"], values, SMALL, blocks(name))
    check_shifted(executor.shifted, *SHIFTED["weights of pairs"], values, SMALL, blocks(name))
    check_smallest(executor.smallest, COMPARED["distance"], 4, values, SMALL, blocks(name))
    check_smallest(executor.smallest, COMPARED["ties"], 2, values, SMALL, blocks(name))


def test_long_lists():
    sizes = Sizes(1, 40, 5000)
    listed = blocks("holes")._replace(j_ends=torch.tensor([3000, 5000, 4000, 4900]))
    values = data(*sizes)
    check_sums(executor.sums, SUMS["rows outside"], values, sizes, listed)
    check_shifted(executor.shifted, *SHIFTED["plain"], values, sizes, listed)
    check_smallest(executor.smallest, COMPARED["distance"], 3, values, sizes, listed)


@pytest.mark.parametrize("name", SHIFTED)
def test_shifted(name):
    sizes = Sizes(2, 9, 300)
    check_shifted(executor.shifted, *SHIFTED[name], data(*sizes), sizes)


@pytest.mark.parametrize("name", COMPARED)
@pytest.mark.parametrize("k", [1, 2, 5, 40])
def test_smallest(name, k):
    sizes = Sizes(1, 9, 150)
    check_smallest(executor.smallest, COMPARED[name], k, data(*sizes), sizes)


@pytest.mark.parametrize("accumulate", ["kahan", "float64"])
def test_accumulation(accumulate):
    sizes = Sizes(1, 5, 5000)
    values, options = data(*sizes), Options(accumulate=accumulate)
    for name in ("gaussian", "columns alone"):
        check_sums(executor.sums, SUMS[name], values, sizes, None, options)
    check_shifted(executor.shifted, *SHIFTED["plain"], values, sizes, None, options)


def test_a_score_of_minus_infinity_is_nothing():
    sizes = Sizes(1, 3, 100)
    values = data(*sizes)
    values[2][:, :99] = -torch.inf
    f, w = SHIFTED["exponent of columns"]
    check_shifted(executor.shifted, f, w, values, sizes)
    values[2][:] = -torch.inf
    top, total = executor.shifted(f, w, values, sizes, None, Options())
    assert bool((top == -torch.inf).all())
    assert not total.any()
