"""Activations and radial bases on a GPU: values, derivatives, and the kernels of each order.

Sizes are no multiples of what a kernel program takes.
"""

import pytest
import torch

from tests.contract import test_o3_activations as activations
from tests.contract import test_o3_radial as radial
from torchweft import o3
from torchweft.o3.layers.networks import between, is_printed
from torchweft.products.tiles import has_wgmma
from torchweft.testing import assert_within_bound

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", activations.FUNCTIONS)
@pytest.mark.parametrize("rows", [(1, 3), (5000, 67)])
def test_activations(name, dtype, rows):
    before, after = activations.BEFORE, activations.AFTER
    act = o3.normalize2mom(activations.FUNCTIONS[name])
    ends = activations.arguments(dtype)
    for x in (10 * torch.randn(rows, dtype=dtype), ends):
        assert is_printed(act, x.cuda())
        found = activations.derivatives(lambda x: between(act, before, x, after), x.cuda())
        t = before * x.double()
        for order, (y, formula) in enumerate(
            zip(found, activations.formulas(name, t), strict=True)
        ):
            factor = after * before**order
            size = factor * (1 + t.abs()) if name == "silu" else torch.full_like(t, factor)
            assert y.dtype == dtype
            stored = 16 if dtype == torch.float64 else 8  # the oracle rounds as often
            assert_within_bound(y.cpu(), factor * formula, size, 4, stored=stored)


@pytest.mark.parametrize("dtype", DTYPES)
def test_radial_basis(dtype):
    r = torch.linspace(0, 1.1 * radial.R_MAX, 1003, dtype=dtype)[:, None]
    found = radial.derivatives(o3.RadialBasis(radial.R_MAX, 5), r.cuda())
    bessel = o3.BesselBasis(radial.R_MAX, 5, backend="torch")
    cutoff = o3.PolynomialCutoff(radial.R_MAX, backend="torch")
    exact = radial.derivatives(lambda r: bessel(r) * cutoff(r), r.double())
    for order, (y, expected) in enumerate(zip(found, exact, strict=True)):
        radial.close(y.cpu(), expected, radial.slope_size(order), terms=64)


def test_kernels_of_each_order():
    """As test_o3_host has them, with those of torch: elementwise ones add two gradients alone."""
    net = o3.FullyConnectedNet([8, 64, 64, 64, 32], torch.nn.functional.silu).cuda()
    x = torch.randn(1001, 8, device="cuda", requires_grad=True)
    grad, turn = torch.randn(1001, 32, device="cuda"), torch.randn_like(x)

    def run():
        y = net(x)
        (slope,) = torch.autograd.grad(y, x, grad, create_graph=True)
        torch.autograd.grad(slope, (x, *net.parameters()), turn)

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    names = [event.name for event in profile.events() if event.device_type == on_gpu]
    elementwise = [name for name in names if "elementwise" in name]
    if has_wgmma(x.device):  # the hidden layers in one launch, see test_o3_hidden_layers
        assert names.count("hidden_layers") == 5
        assert not elementwise
        return
    assert names.count("rows") == 3 + 3 + 5
    assert all("add" in name for name in elementwise), elementwise
    assert len(elementwise) <= 2 + 3  # inputs of two functions, and three matrices
