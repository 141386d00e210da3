"""exp, log and inverse of versors, and algebras of more than five dimensions, on every backend.

exp is held against the exponential of the matrix b ↦ (x ↦ b x), by plain PyTorch's own error.
"""

import functools

import pytest
import torch

from tests.conftest import BACKENDS, INTERPRETED
from torchweft import clifford
from torchweft.clifford import Algebra, reference
from torchweft.errors import ShapeError
from torchweft.testing import assert_as_accurate, assert_within_bound, plain_error
from torchweft.testing.contract import assert_same_bits

EVERY = [(1, 1), (1, 1, 1), (1, -1, -1, -1), (0, 1, 1, 1), (1, 1, 1, 1, -1)]
METRICS = [(0, 1, -1)] if INTERPRETED else EVERY
pytestmark = [pytest.mark.kernels, pytest.mark.parametrize("backend", BACKENDS)]


def bivectors(algebra, seed=0, size=0.4, rows=11):
    generator = torch.Generator().manual_seed(seed)
    b = size * torch.randn(algebra.num_blades, rows, 3, dtype=torch.float64, generator=generator)
    return clifford.grade_project(b, 2, algebra)


def by_matrices(b, algebra):
    """exp(b) is what the exponential of the matrix of x ↦ b x does to 1."""
    matrices = torch.einsum("i...,ijk->...jk", b, algebra.cayley(b.dtype))
    return torch.linalg.matrix_exp(matrices)[..., 0].movedim(-1, 0)


def by_squaring(b, algebra, halvings=3, terms=14):
    """The same, by the series of a smaller argument, squared again: the formula of exp."""
    matrices = torch.einsum("i...,ijk->...jk", b / 2**halvings, algebra.cayley(b.dtype))
    one = torch.eye(algebra.num_blades, dtype=b.dtype)
    found = one
    for k in range(terms, 0, -1):
        found = one + matrices @ found / k
    for _ in range(halvings):
        found = found @ found
    return found[..., 0].movedim(-1, 0)


@pytest.mark.parametrize("metric", METRICS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exp(metric, dtype, backend):
    algebra = Algebra(metric)
    b = bivectors(algebra).to(dtype)
    exact = by_matrices(b.double(), algebra)
    beside = b.float() * (1 + torch.finfo(torch.float32).eps)
    noise = plain_error(by_squaring(beside, algebra), exact, dtype)
    assert_as_accurate(clifford.exp(b, algebra, backend=backend), exact, noise)


@pytest.mark.parametrize("metric", METRICS, ids=str)
def test_log_undoes_exp(metric, backend):
    """Within the change of b that float32's rounding of the rotor would make."""
    algebra = Algebra(metric)
    b = bivectors(algebra, seed=1)
    found = clifford.log(clifford.exp(b, algebra, backend=backend), algebra, backend=backend)
    rounded = clifford.log(by_matrices(b, algebra).float(), algebra, backend=backend)
    assert_as_accurate(found, b, plain_error(rounded, b, torch.float64))


@pytest.mark.parametrize("metric", METRICS, ids=str)
def test_inverse(metric, backend):
    algebra = Algebra(metric)
    versor = by_matrices(bivectors(algebra, seed=2), algebra) * 1.7
    inverse = clifford.inverse(versor, algebra, backend=backend)
    product = clifford.geometric_product(versor, inverse, algebra, backend=backend)
    one = torch.zeros_like(product)
    one[0] = 1
    size = reference.product(versor.abs(), inverse.abs(), Algebra((1,) * algebra.n))
    size = size.abs() + clifford.norm(versor, algebra) * inverse.abs().sum(0)
    assert_within_bound(product, one, size, terms=algebra.num_blades, stored=2)


@pytest.mark.parametrize("metric", [(1,), *METRICS, (1, 1, 1, 1, 1), (0, 1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inverse_of_what_is_no_versor(metric, dtype, backend):
    """As accurate as a solution by the multivector's matrix.  Red before: reverse(x)/⟨x x̃⟩₀."""
    algebra, generator = Algebra(metric), torch.Generator().manual_seed(0)
    x = torch.randn(algebra.num_blades, 61, 3, dtype=torch.float64, generator=generator).to(dtype)
    x[0] += 4 * algebra.num_blades**0.5  # none is nearly singular: errors are alike

    def solved(given):
        matrices = torch.einsum("i...,ijk->...jk", given, algebra.cayley(given.dtype))
        one = torch.eye(algebra.num_blades, dtype=given.dtype)[0]
        return torch.linalg.solve(matrices, one.expand(matrices.shape[:-1])).movedim(-1, 0)

    exact = solved(x.double())
    narrow = x.float() if dtype == torch.float32 else (x * (1 + torch.finfo(dtype).eps)).float()
    noise = plain_error(solved(narrow), exact, dtype)
    assert_as_accurate(clifford.inverse(x, algebra, backend=backend), exact, noise)


def test_gradients_of_an_inverse(backend):
    x = torch.tensor([[1.0], [0.5], [-0.3], [0.2]], dtype=torch.float64)[..., None]
    for metric in ((1, 1), (1, -1)):
        function = functools.partial(clifford.inverse, algebra=Algebra(metric), backend=backend)
        leaf = x.clone().requires_grad_()
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(function, leaf, fast_mode=INTERPRETED)  # along one random direction


def test_inverse_of_what_has_none_is_not_a_number(backend):
    x = torch.zeros(8, 1, 2)
    x[0, 0, 1] = x[1, 0, 1] = 1  # 0, and 1 + e1
    assert not clifford.inverse(x, Algebra((1, 1, 1)), backend=backend).isfinite().any()


def test_inverse_needs_five_dimensions_or_fewer(backend):
    with pytest.raises(ShapeError, match=r"n = 6: it needs n ≤ 5.*reverse\(v\)"):
        clifford.inverse(torch.ones(64, 1, 1), Algebra((1,) * 6), backend=backend)


@pytest.mark.parametrize("name", ["exp", "log", "inverse", "norm", "rms_norm", "gelu", "reverse"])
def test_autocast_keeps_float32(name, backend):
    """As torch keeps exp, log, norm and reciprocal.  Red before: bfloat16."""
    algebra = Algebra((1, 1))
    x = clifford.exp(bivectors(algebra).float(), algebra, backend=backend)
    expected = getattr(clifford, name)(x, algebra, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        found = getattr(clifford, name)(x, algebra, backend=backend)
        narrow = getattr(clifford, name)(x.bfloat16(), algebra, backend=backend)
    assert_same_bits(found, expected, name)
    assert narrow.dtype == (torch.bfloat16 if name in ("gelu", "reverse") else torch.float32)


def test_gradients_at_zero_and_at_a_plane(backend):
    algebra = Algebra((1, 1) if INTERPRETED else (1, 1, 1))
    blades, plane = algebra.num_blades, algebra.grades.index(2)
    zero = torch.zeros(blades, 1, 1, dtype=torch.float64, requires_grad=True)
    clifford.exp(zero, algebra, backend=backend)[plane].sum().backward()
    assert zero.grad.flatten().tolist() == [float(blade == plane) for blade in range(blades)]
    b = bivectors(algebra, rows=2).requires_grad_()
    torch.autograd.gradcheck(lambda b: clifford.exp(b, algebra, backend=backend), b, fast_mode=True)


def test_six_dimensions_run_in_torch(backend):
    """The oracle holds half a million numbers there: two columns of it, and the paths."""
    if backend != "torch":
        pytest.skip("kernels are generated up to five dimensions")
    algebra = Algebra((1, 1, -1, 0, 1, 1))
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randint(-3, 4, (64, 2, 2), generator=generator).double() for _ in range(2))
    table = algebra.cayley(torch.float64)
    expected = torch.einsum("ijk,i...,k...->j...", table, x, y)
    found = clifford.geometric_product(x, y, algebra)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    weight = torch.ones(2, len(algebra.paths), dtype=torch.float64, requires_grad=True)
    weighted = clifford.geometric_product(x, y, algebra, weight)
    torch.testing.assert_close(weighted, expected, rtol=0, atol=0)
    weighted.sum().backward()
    torch.testing.assert_close(weight.grad.sum(), expected.sum(), rtol=0, atol=0)


def _of(blades):
    """Integers by blade, in float64."""
    x = torch.zeros(8, 1, 1, dtype=torch.float64)
    for blade, value in blades.items():
        x[blade] = value
    return x


SPACE = Algebra.cl(3)


@pytest.mark.parametrize(
    ("function", "x", "y", "expected"),
    [
        (clifford.commutator, {4: 1}, {5: 2}, {6: -2}),  # e12 with e13
        (clifford.commutator, {0: 3, 1: 1}, {4: 1}, {2: 1}),
        (clifford.anticommutator, {0: 3, 1: 1}, {4: 1, 1: 2}, {0: 2, 1: 6, 4: 3}),
        (clifford.project, {1: 1, 2: 2, 3: 3}, {4: 2}, {1: 1, 2: 2}),
        (clifford.reject, {1: 1, 2: 2, 3: 3}, {4: 2}, {3: 3}),
        (clifford.project, {4: 1, 5: 2, 0: 7}, {1: 1, 2: 1}, {0: 7}),
        (clifford.meet, {4: 1}, {5: 1}, {1: 1}),  # two planes share a line
    ],
)
def test_commutators_and_projections(function, x, y, expected, backend):
    """Seen red with: the halves exchanged, a projection by b instead of its inverse."""
    a, b = (_of(blades).movedim(0, -1).requires_grad_() for blades in (x, y))
    found = function(a, b, SPACE, blade_dim=-1, backend=backend)
    assert found.flatten().tolist() == _of(expected).flatten().tolist()
    if not INTERPRETED:
        call = functools.partial(function, algebra=SPACE, blade_dim=-1, backend=backend)
        assert torch.autograd.gradcheck(call, (a, b))
