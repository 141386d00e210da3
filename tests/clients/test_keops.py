"""gpytorch's KeOps kernels on the stand-in for pykeops, by the tests that gpytorch ships.

Seen red with: batch dimensions taken off a product, a second factor's gradient left out.
"""

import unittest
import unittest.mock

import pytest
import torch

from tests.clients.stand_ins import import_over

gpytorch = import_over("pykeops", "gpytorch")
from gpytorch.kernels import keops
from gpytorch.test.base_keops_test_case import BaseKeOpsTestCase
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase

from tests.clients.agreement import assert_agree
from torchweft.reductions import LazyTensor

pytestmark = pytest.mark.filterwarnings("ignore")


class Beside(BaseKernelTestCase, BaseKeOpsTestCase):
    """A KeOps kernel beside the dense kernel of its name."""

    name = ""

    @property
    def k1(self):
        return getattr(keops, self.name)

    @property
    def k2(self):
        return getattr(gpytorch.kernels, self.name)

    def create_kernel_no_ard(self, **kwargs):
        return self.k1(**kwargs)

    def create_kernel_ard(self, num_dims, **kwargs):
        return self.k1(ard_num_dims=num_dims, **kwargs)


class TestRBFKernel(Beside, unittest.TestCase):
    name = "RBFKernel"


class TestMaternKernel(Beside, unittest.TestCase):
    name = "MaternKernel"


class TestPeriodicKernel(Beside, unittest.TestCase):
    name = "PeriodicKernel"


def product(kernel, x, v):
    """K v and its gradients in points and hyperparameters."""
    result = kernel(x, x) @ v
    given = [x, *kernel.parameters()]
    grads = torch.autograd.grad(result.sin().sum(), given)
    return {str(n): t.detach().double() for n, t in enumerate((result, *grads))}


@pytest.mark.parametrize("name", ["RBFKernel", "MaternKernel", "PeriodicKernel"])
def test_products_of_lazy_kernels(name):
    """Its own tests put dense tensors in place of lazy ones; here they are lazy."""

    def build(module, dtype):
        generator = torch.Generator().manual_seed(0)
        x, v = (torch.rand(2, 40, d, generator=generator, dtype=torch.float64) for d in (3, 2))
        kernel = getattr(module, name)(ard_num_dims=3).to(dtype)
        return product(kernel, x.to(dtype).requires_grad_(), v.to(dtype))

    with (
        gpytorch.settings.max_cholesky_size(2),
        unittest.mock.patch(
            "gpytorch.kernels.keops.keops_kernel.LazyTensor", side_effect=LazyTensor
        ) as lazy,
    ):
        found = build(keops, torch.float64)
    assert lazy.called
    exact, rounded = (build(gpytorch.kernels, d) for d in (torch.float64, torch.float32))
    assert_agree(found, exact, rounded)
