"""Generated Triton kernels of reductions against the matrix of pairs, in the interpreter.

Seen red with: terms past the end of an interval left in, intervals joined across lists, ties to
whichever comes first in a tile, products of a cloud too wide for them.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from tests.pairs import (
    DISTANCE,
    SUMS,
    A,
    B,
    P,
    X,
    Y,
    check_shifted,
    check_sums,
    data,
    part,
)
from weft.errors import BackendError
from weft.reductions.formula import const, node, var
from weft.reductions.ranges import Options, Sizes
from weft.testing.contract import assert_same_bits

if not INTERPRETED:
    pytest.skip("kernels run here in the interpreter alone", allow_module_level=True)

from weft.reductions import launch, tensor_cores

pytestmark = pytest.mark.usefixtures("poisoned_memory")
DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    "name", ["angles", "real powers", "choice", "rounded", "atan2", "quotients"]
)
def test_float64_is_float64(name):
    sizes = Sizes(1, 5, 33)
    check_sums(launch.sums, SUMS[name], data(*sizes, torch.float64), sizes)


def test_bits_repeat():
    sizes = Sizes(1, 40, 3000)
    values = data(*sizes)
    first, second = (
        launch.sums(SUMS["gaussian"], values, sizes, None, Options()) for _ in range(2)
    )
    assert_same_bits(first, second, "the same call again")


def test_long_formulas_are_refused():
    f = SUMS["gaussian"]
    assert launch.serves(f)
    assert launch.serves(f, f)
    assert not launch.serves(f, k=launch.WIDEST + 1)
    with pytest.raises(BackendError, match="1025 smallest values are asked for"):
        launch.smallest(f, 1025, data(1, 3, 3), Sizes(1, 3, 3), None, Options())
    assert not launch.serves(node("concat", *[X * Y] * launch.MOST))


GAUSSIAN = node("exp", -(node("sqdist", X, Y) * P)) * part(B, 0)


@pytest.fixture
def products(monkeypatch):
    """Tensor cores for few columns, and how often they were used."""
    monkeypatch.setattr(launch, "COLUMNS", 1)
    used, operands = [], tensor_cores.operands

    def counted(*args):
        found = operands(*args)
        used.append(int(found.guard))
        return found

    monkeypatch.setattr(tensor_cores, "operands", counted)
    return used


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [0.2, 1000.0])
def test_products(products, sign, scale):
    """Far away and narrow, or so wide that differences take over."""
    sizes = Sizes(2, 300, 150)
    values = data(*sizes)
    for index in (0, 1):
        values[index] = values[index] * scale + 1e4 * (scale < 1)
        values[index] = (values[index] * 64).round() / 64  # of which differences are exact
    f = GAUSSIAN if sign > 0 else -(A * GAUSSIAN) * 3
    check_sums(launch.sums, f, values, sizes)
    score = sign * -(2 * node("sqdist", X, Y)) + part(B, 0) * 0.5 - A if sign > 0 else A - DISTANCE
    for w in (const(1), part(B, 1)):  # of exponents 22 bits of 24 are kept
        check_shifted(launch.shifted, score, w, values, sizes, roundings=4)
    assert products == [int(scale < 1)] * 3


def test_ieee_takes_differences(products):
    sizes = Sizes(2, 300, 17)
    launch.sums(GAUSSIAN, data(*sizes), sizes, None, Options("ieee"))
    assert not products


@pytest.mark.parametrize("dim", [6, 33])
def test_products_of_many_dimensions(products, dim):
    sizes = Sizes(2, 300, 70)
    values = data(*sizes)
    generator = torch.Generator().manual_seed(dim)
    for index, length in ((0, 300), (1, 70)):
        values[index] = torch.randn(2, length, dim, generator=generator) * 0.1 + 100
    distance = node("sqdist", var(0, dim, 0), var(1, dim, 1))
    check_sums(launch.sums, node("exp", -distance) * A * part(B, 1), values, sizes)
    check_shifted(launch.shifted, 2 * -distance, const(1), values, sizes, roundings=4)
    assert products == [1, 1]
