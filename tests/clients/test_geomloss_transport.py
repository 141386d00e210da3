"""SamplesLoss beside geomloss', in float64: the same numbers for the same arguments.

geomloss' own |x − y| is no less than 1e-4, so for p = 1 it is given the exact cost; its `backward`
of the unbalanced weight is never called, so its unbalanced gradients keep the weight ρ + ε / 2.
Seen red with: one step at the diameter in place of two.
"""

import inspect

import pytest
import torch

pytest.importorskip("geomloss")
from geomloss import SamplesLoss as Original

from tests.transports import clouds, distance
from torchweft.reductions import SamplesLoss
from torchweft.testing import assert_as_accurate

pytestmark = pytest.mark.filterwarnings("ignore")


def results(loss, inputs):
    """The value and its gradients; or the potentials, before which geomloss may have a 1."""
    inputs = [t.clone().requires_grad_() for t in inputs]
    found = loss(*inputs)
    if isinstance(found, tuple):
        return [t.detach().view_as(w) for t, w in zip(found, inputs[::2], strict=True)]
    return [found.detach(), *torch.autograd.grad(found.sum(), inputs)]


def assert_same(found, exact):
    """To a few thousand roundings, of sums over steps and points, in float64."""
    for one, true in zip(found, exact, strict=True):
        size = true.abs().max().expand_as(true)
        assert_as_accurate(one, true, 4096 * torch.finfo(torch.float64).eps * size)


OPTIONS = {
    "default": {},
    "raw": {"debias": False, "scaling": 0.8, "blur": 0.1},
    "diameter": {"diameter": 3.0, "backend": "tensorized"},
    "potentials": {"potentials": True},
    "raw potentials": {"potentials": True, "debias": False, "blur": 0.02},
    "cost": {"cost": lambda x, y: (x[:, :, None] - y[:, None]).pow(4).sum(-1), "blur": 0.3},
}


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("name", OPTIONS)
def test_balanced(name, p):
    inputs, options = clouds(rows=30, columns=20), {"p": p, **OPTIONS[name]}
    theirs = {"cost": distance, **options} if p == 1 else options
    assert_same(results(SamplesLoss(**options), inputs), results(Original(**theirs), inputs))


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("potentials", [True, False])
def test_unbalanced(debias, potentials):
    """Masses of 0.8 and 1.5; gradients in the points differ by (ρ + ε) / (ρ + ε / 2)."""
    a, x, b, y = clouds(batch=(2,), rows=30, columns=20)
    options = {"reach": 0.4, "debias": debias, "potentials": potentials, "diameter": 2.0}
    ours, theirs = (
        results(f(**options), (0.8 * a, x, 1.5 * b, y)) for f in (SamplesLoss, Original)
    )
    if not potentials:
        rho, eps = 0.4**2, 0.05**2
        factor = (rho + eps) / (rho + eps / 2)
        constant = 0 if debias else eps / 2  # of the masses, when these alone change
        ours, theirs = (
            [v, ga + of_masses, gx, gb + of_masses, gy]
            for (v, ga, gx, gb, gy), of_masses in ((ours, constant), (theirs, 0))
        )
        theirs = [theirs[0], *(factor * t for t in theirs[1:])]
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["gaussian", "laplacian", "energy"])
def test_kernels(name):
    """geomloss' kernels of a distance see 1e-4 where points coincide: clouds of other points."""
    inputs = clouds(rows=30, columns=20)
    if name == "gaussian":
        assert_same(*(results(f(name, blur=0.3), inputs) for f in (SamplesLoss, Original)))
        return
    ours, theirs = (results(f(name, blur=0.3), inputs) for f in (SamplesLoss, Original))
    error = (ours[0] - theirs[0]).abs()
    assert float(error) <= 1e-4 / 0.3  # what a distance of 1e-4 in place of 0 makes at most


def test_signature():
    """Names, order and defaults, but for `truncate`, which ours bounds."""
    ours, theirs = (inspect.signature(f).parameters for f in (SamplesLoss, Original))
    assert list(ours) == list(theirs)
    differing = {name for name in ours if ours[name].default != theirs[name].default}
    assert differing == {"truncate"}
