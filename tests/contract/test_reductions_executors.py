"""The executors of loops and of kernels against the matrix of pairs.

In the interpreter these are the generated Triton kernels, else the CPU's printed loops.
Seen red with: terms past the end of an interval left in, intervals joined across lists, ties to
whichever comes first in a tile, a total that does not move with its maximum, one chain of additions
for all components of a distance.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.covering import FULL
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
from torchweft.reductions import Genred
from torchweft.reductions.call import Options, ReductionData, Sizes
from torchweft.reductions.formula.node import node, var
from torchweft.testing.bounds import assert_as_accurate

if INTERPRETED:
    from torchweft.reductions.gpu import launch as executor
else:
    from torchweft.reductions.engine import numba_path as executor

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("poisoned_memory")]
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


OF_COMPONENTS = {
    "distance": (lambda x, y: node("sqdist", x, y), lambda x, y: (x - y).square().sum(-1)),
    "differences": (
        lambda x, y: node("sum", node("abs", x - y)),
        lambda x, y: (x - y).abs().sum(-1),
    ),
}


@pytest.mark.parametrize("dim", [16, 100, 300] if INTERPRETED else [16, 100 if FULL else 48])
@pytest.mark.parametrize("name", OF_COMPONENTS)
@pytest.mark.singly  # each item compiles for seconds
def test_sums_of_components(name, dim):
    """Of one column: the sum of a pair's components itself."""
    made, plain = OF_COMPONENTS[name]
    generator = torch.Generator().manual_seed(dim)
    x, y = (torch.rand(1, rows, dim, generator=generator) for rows in (400, 1))
    f = made(var(0, dim, 0), var(1, dim, 1))
    found = executor.sums(f, ReductionData({0: x, 1: y}, Sizes(1, 400, 1)))
    exact = plain(x.double(), y.double())
    assert_as_accurate(found[..., 0], exact, plain(x, y) - exact)


def test_values_of_the_nearest():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(300, 64, generator=generator) for _ in range(2))
    nearest = Genred("SqDist(x, y)", ["x = Vi(64)", "y = Vj(64)"], "KMin", axis=1, opt_arg=10)
    plain, exact = (
        (x.to(t)[:, None] - y.to(t)).square().sum(-1).sort(1).values[:, :10]
        for t in (torch.float32, torch.float64)
    )
    assert_as_accurate(nearest(x, y), exact, plain - exact)


def test_a_score_of_minus_infinity_is_nothing():
    sizes = Sizes(1, 3, 100)
    values = data(*sizes)
    values[2][:, :99] = -torch.inf
    f, w = SHIFTED["exponent of columns"]
    check_shifted(executor.shifted, f, w, values, sizes)
    values[2][:] = -torch.inf
    top, total = executor.shifted(f, w, ReductionData(values, sizes))
    assert bool((top == -torch.inf).all())
    assert not total.any()
