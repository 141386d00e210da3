"""Printed loops of reductions for the CPU against the matrix of pairs.

Seen red with: 2^x of the smallest number for 2^−∞, a total that does not move with its maximum;
minima of columns in ascending order, of intervals as they are listed, in which NaN is passed over;
maxima as their negatives, tensors of the first call kept.
"""

import weakref

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.pairs import (
    BLOCKS,
    COMPARED,
    SMALL,
    SUMS,
    A,
    B,
    X,
    Y,
    blocks,
    check_smallest,
    data,
    dense,
)
from torchweft.reductions import Genred
from torchweft.reductions.call import ReductionData, Sizes
from torchweft.reductions.engine import operator
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


def index_of_lowest(f, k, given):
    return cpu.lowest(f, given)[1]


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES], ids=str)
@pytest.mark.parametrize("name", COMPARED)
def test_lowest(name, dtype):
    sizes = Sizes(2, 70, 300)
    check_smallest(index_of_lowest, COMPARED[name], 1, data(*sizes, dtype), sizes)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("formula", ["distance", "ties", "all equal"])
def test_lowest_of_blocks(name, formula):
    check_smallest(index_of_lowest, COMPARED[formula], 1, data(*SMALL), SMALL, blocks(name))


def test_values_of_lowest():
    sizes = Sizes(2, 70, 300)
    values = data(*sizes)
    found, index = cpu.lowest(COMPARED["components"], ReductionData(values, sizes))
    score = dense(COMPARED["components"], values, sizes, torch.float32)
    assert_same_bits(found, score.amin(2, keepdim=True), "the smallest of all pairs")
    assert_same_bits(found, score.gather(2, index), "values at their indices")


@pytest.mark.parametrize("sizes", [Sizes(1, 70, 9), Sizes(1, 3, 9)], ids=str)
def test_the_first_nan_is_the_lowest(sizes):
    values = data(*sizes)
    first, second = values[2][0].unbind(1)
    first[:] = torch.tensor([0, -torch.inf, 1, torch.nan, 2, torch.nan, -torch.inf, 3, torch.inf])
    second[:] = torch.inf
    values[4].zero_()
    index = cpu.smallest(A + B, 0, ReductionData(values, sizes))
    assert index[0, :, 0].tolist() == [[3, 0]] * sizes.rows


@pytest.mark.parametrize("name", ["Min", "Max", "Min_ArgMin", "Max_ArgMax", "ArgMin", "ArgMax"])
@pytest.mark.parametrize("axis", [0, 1])
def test_minima_without_gradients(name, axis, monkeypatch):
    """They take values from the loop, those with gradients take them at the indices."""
    monkeypatch.setattr(operator, "LEAST_PAIRS_OF_LOOPS", 0)
    call = Genred("x * y", ["x = Vi(2)", "y = Vj(2)"], name, axis=axis)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, rows, 2, generator=generator).round(decimals=1) for rows in (40, 30))
    x[0, 3], y[1, 7, 0] = torch.nan, torch.inf
    found, expected = call(x, y), call(x.requires_grad_(), y)
    assert any(bool(taken) for taken in call._direct.values())
    pairs = zip(found, expected, strict=True) if "_" in name else [(found, expected)]
    for mine, other in pairs:
        assert mine.dtype == other.dtype
        assert_same_bits(mine, other.detach(), "minima without gradients")


def test_a_minimum_keeps_no_tensor(monkeypatch):
    monkeypatch.setattr(operator, "LEAST_PAIRS_OF_LOOPS", 0)
    call = Genred("x * y", ["x = Vi(2)", "y = Vj(2)"], "Min", axis=1)
    x = torch.ones(40, 2)
    call(x, torch.ones(30, 2))
    assert all(call._direct.values())
    gone = weakref.ref(x)
    del x
    assert gone() is None
