"""Linear maps by grade: kernels against the oracle, and both bodies of the gradient.

Seen red with: the grade of a blade one too low, tiles that keep to the first half of their columns,
a bias on every blade, a mask of rows left off, sums that begin at a grade's second part.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft.clifford import Algebra
from torchweft.clifford.matrices.operators import linear, weight_gradient
from torchweft.testing import assert_within_bound

pytestmark = pytest.mark.kernels

KINDS = [torch.float16, torch.bfloat16]
SHAPES = [(1, 1, 8, 8), (2, 130, 72, 40), (3, 33, 64, 264), (4, 5, 136, 128)]
"""n, rows, F_in, F_out: one tile and several, none of them whole."""


def draw(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def by_grade(x, weight, n):
    """The oracle: every blade by its matrix."""
    grades = torch.tensor(Algebra((1,) * n).grades)
    return torch.bmm(x, weight[grades])


def check_rows(x, weight, bias, n, out):
    wide = [t.double() for t in (x, weight)]
    exact, size = by_grade(*wide, n), by_grade(*(t.abs() for t in wide), n)
    if bias is not None:
        exact[0] += bias.double()
        size[0] += bias.double().abs()
    assert_within_bound(out, exact, size, x.shape[-1] + 1)


def check_gradient(x, grad, n, out):
    grades = torch.tensor(Algebra((1,) * n).grades)
    sizes = [[t.double(), t.double().abs()] for t in (x, grad)]
    exact, size = (
        torch.zeros(n + 1, *out.shape[1:]).double().index_add_(0, grades, torch.bmm(a.mT, b))
        for a, b in zip(*sizes, strict=True)
    )
    assert_within_bound(out, exact, size, x.shape[0] * x.shape[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *KINDS])
@pytest.mark.parametrize("rows", [0, 1, 7, 256])
def test_map_and_its_gradient(rows, dtype):
    n, algebra = 2, Algebra((1, 1))
    x, grad = draw(4, rows, 5, dtype=dtype), draw(4, rows, 3, dtype=dtype)
    weight, bias = draw(n + 1, 5, 3, dtype=dtype), draw(3, dtype=dtype)
    check_rows(x, weight, bias, n, linear(x, weight, bias, signature=algebra.signature))
    check_gradient(x, grad, n, weight_gradient(x, grad, algebra.signature))


if INTERPRETED:
    from torchweft.clifford.matrices import launch

    @pytest.mark.usefixtures("poisoned_memory")
    @pytest.mark.parametrize("turned_in", [False, True])
    @pytest.mark.parametrize("dtype", KINDS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_kernel_of_rows(shape, dtype, turned_in):
        n, rows, f_in, f_out = shape
        x = draw(2**n, rows, f_in, dtype=dtype)
        weight = draw(n + 1, f_in, f_out, dtype=dtype)
        if turned_in:
            weight = weight.mT.contiguous().mT
        for bias in (None, draw(f_out, dtype=dtype)):
            z = x.new_empty(2**n, rows, f_out)
            launch.rows(x, weight, bias, n, z)
            check_rows(x, weight, bias, n, z)

    @pytest.mark.usefixtures("poisoned_memory")
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *KINDS])
    @pytest.mark.parametrize(("n", "parts"), [(1, 1), (3, 2), (4, 3)])
    def test_sums_by_grade(n, parts, dtype):
        wide = torch.promote_types(dtype, torch.float32)
        partials = draw(2**n * parts, 33, 17, dtype=wide)
        grades = torch.tensor(Algebra((1,) * n).grades).repeat_interleave(parts)
        exact, size = (
            torch.zeros(n + 1, 33, 17).double().index_add_(0, grades, t.double())
            for t in (partials, partials.abs())
        )
        found = launch.sum_by_grade(partials, n, parts, dtype)
        assert_within_bound(found, exact, size, len(partials))

    @pytest.mark.usefixtures("poisoned_memory")
    @pytest.mark.parametrize("shape", [(1, 1, 1), (3, 65, 130)])
    def test_turned_matrices(shape):
        weight = draw(*shape)
        found = launch.turned(weight)
        torch.testing.assert_close(found, weight, rtol=0, atol=0)
        assert found.mT.is_contiguous()
