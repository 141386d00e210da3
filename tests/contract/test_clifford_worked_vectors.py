"""The worked vectors of the seeds' formulas, on every backend and the oracle.

They are printed to six decimals: half of the last digit is their error.
"""

import pytest
import torch

from tests.conftest import BACKENDS
from torchweft import clifford
from torchweft.clifford import Algebra, reference

pytestmark = pytest.mark.kernels

PRINTED = 0.5e-6
PLANE, SPACE = Algebra((1, 1)), Algebra((1, 1, 1))


@pytest.fixture(params=[*BACKENDS, "oracle"])
def backend(request):
    return request.param


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def product(backend, x, y, algebra, weight=None):
    if backend == "oracle":
        return reference.product(x, y, algebra, weight)
    return clifford.geometric_product(x, y, algebra, weight, backend=backend)


def chain(backend, x, y, weight, algebra, normalize):
    if backend == "oracle":
        out = reference.product(reference.gate(x), reference.gate(y), algebra, weight)
        return reference.rms_norm(out, algebra) if normalize else out
    return clifford.gelu_geometric_product_norm(
        x, y, weight, algebra, normalize=normalize, backend=backend
    )


def same(found, expected, error=0.0):
    expected = torch.tensor(expected, dtype=torch.float64).reshape(found.shape)
    torch.testing.assert_close(found.detach().cpu(), expected, rtol=0, atol=error)


def counted(algebra, features=1):
    """Path p has the weight p + 1."""
    paths = torch.arange(1, len(algebra.paths) + 1, dtype=torch.float64)
    return paths.expand(features, -1).clone()


X2, Y2 = column(1, 2, 3, 4), column(5, 6, 7, 8)
X3, Y3 = column(*range(1, 9)), column(*range(8, 0, -1))


def test_products_of_the_plane(backend):
    same(product(backend, X2, Y2, PLANE), [6, 20, 14, 24])
    same(product(backend, X2, Y2, PLANE, counted(PLANE)), [-119, 170, -31, 196])


def test_products_of_space(backend):
    same(product(backend, X3, Y3, SPACE), [0, 36, 60, -72, 88, -36, 116, 114])
    weighted = [-440, 283, 666, -1363, 1431, -672, 1935, 2002]
    same(product(backend, X3, Y3, SPACE, counted(SPACE)), weighted)


def test_gates_and_norm(backend):
    gated = chain(backend, X2, Y2, counted(PLANE), PLANE, normalize=False)
    same(gated, [-100.119996, 143.028566, -26.081680, 164.903523], PRINTED)
    normed = chain(backend, X2, Y2, counted(PLANE), PLANE, normalize=True)
    same(normed, [-1, 0.983777, -0.179395, 1], PRINTED)


def test_the_fused_operator_and_its_gradients(backend):
    x = torch.tensor([(1, -1), (2, 0), (3, 1), (4, 2)], dtype=torch.float64)[:, None]
    y = torch.tensor([(0.5, 1), (1, -1), (0, 2), (-1, 1)], dtype=torch.float64)[:, None]
    weight = torch.stack([counted(PLANE)[0], 11 - counted(PLANE)[0]]) / 10
    go = torch.tensor([(1, 2), (-1, 0), (0, 1), (3, -1)], dtype=torch.float64)[:, None]
    leaves = [a.requires_grad_() for a in (x, y, weight)]
    out = chain(backend, *leaves, PLANE, normalize=True)
    gx, gy, gw = torch.autograd.grad(out, leaves, go)
    same(
        out,
        [1.414123, -0.016023, 0.741054, 0.081616, -1.200507, -0.054411, -1.404972, -0.161185],
        PRINTED,
    )
    same(gx[0], [-0.239635, -0.376620], PRINTED)
    same(gy[0], [1.652558, -0.297351], PRINTED)
    same(gw[0], [0.003978, -0.209054, -0.534978, 0.015913, -0.421357,
                 -0.344091, -1.604935, 0.031826, 0.566142, 1.069957], PRINTED)  # fmt: skip


@pytest.mark.parametrize("algebra", [PLANE, SPACE], ids=["2d", "3d"])
@pytest.mark.parametrize("fully_connected", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_the_seeds_names(algebra, fully_connected, normalize):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(algebra.num_blades, 4, 3, generator=generator) for _ in range(2))
    paths = len(algebra.paths)
    shape = (paths, 3, 3) if fully_connected else (3, paths)
    weight = torch.randn(shape, generator=generator)
    kind = "fcgp" if fully_connected else "sgp"
    seed = getattr(clifford, f"fused_gelu_{kind}_norm_{algebra.n}d")
    ours = clifford.gelu_geometric_product_norm(x, y, weight, algebra, normalize, fully_connected)
    torch.testing.assert_close(seed(x, y, weight, normalize), ours, rtol=0, atol=0)
    torch.testing.assert_close(seed(x, y, weight), seed(x, y, weight, True), rtol=0, atol=0)
