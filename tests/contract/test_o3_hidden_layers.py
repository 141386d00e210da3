"""Hidden layers of a network in one launch: values, gradients of three orders, launches.

In the interpreter, or on a GPU.  The oracle is the network layer by layer, in float64.  Seen red
with: the factor of the first matrix left out of its gradient, sums of the last tile alone, the term
of f'' left out, gradients through g counted twice, gradients of matrices computed for forces.
"""

import copy

import pytest
import torch
from torch.autograd import forward_ad

from tests.conftest import INTERPRETED
from torchweft import explain, o3
from torchweft.o3.hidden_layers import functions
from torchweft.o3.layers import networks
from torchweft.testing import assert_as_accurate, plain_error
from torchweft.testing.contract import assert_same_bits

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="kernels need a GPU"),
    pytest.mark.usefixtures("poisoned_memory"),
]

DEVICE = "cpu" if INTERPRETED else "cuda"
SILU = torch.nn.functional.silu
TILE = functions.TILE.blocks[0]
WIDTHS = {
    "MACE's": (8, 64, 64, 64),
    "NequIP's": (8, 64),
    "ragged": (5, 17, 64, 33, 9),
    "one number": (1, 1),
}


@pytest.fixture(autouse=True)
def served(monkeypatch):
    """Tensors of the interpreter are taken as those on a GPU."""
    monkeypatch.setattr(networks, "on_gpu", lambda tensor: True)


def network(widths, **options):
    torch.manual_seed(0)
    return o3.FullyConnectedNet([*widths, 3], SILU, variance_in=2.0, **options).to(DEVICE)


def by_layers(net):
    """The same network layer by layer, by torch's operations."""
    made = copy.deepcopy(net)
    made._fused = lambda layers: None
    for layer in made:
        layer.act = layer.act and o3.normalize2mom(SILU, backend="torch")
    return made


def draw(rows, width, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, width, generator=made).to(DEVICE)


def ramp(like):
    return torch.linspace(-1, 1, like.numel(), dtype=like.dtype, device=like.device).view_as(like)


def matrices(net):
    return [layer.weight for layer in net._layers()[:-1]]


def forces_and_their_loss(net, x):
    """h, the gradient of Σ c h² by x, and gradients of a loss of both: a training step's."""
    x = x.clone().requires_grad_()
    h = net.hidden(x)
    (slope,) = torch.autograd.grad((h * h * ramp(h)).sum(), x, create_graph=True)
    loss = (slope * slope * ramp(slope)).sum() + (h * ramp(h)).sum()
    return [h, slope, *torch.autograd.grad(loss, [x, *matrices(net)])]


def all_gradients(net, x):
    """First gradients by all, and gradients of those by all, twice."""
    x = x.clone().requires_grad_()
    found, value, inputs = [], (net.hidden(x) ** 2).sum(), [x, *matrices(net)]
    for order in range(3):
        first = torch.autograd.grad(value, inputs, create_graph=order < 2)
        found += first
        value = sum((g * ramp(g)).sum() for g in first)
    return found


def by_result(draws):
    """The results of draws: each of all draws in one tensor."""
    return [torch.stack(same) for same in zip(*draws, strict=True)]


def check(net, rows, compute):
    """Of as many draws as plain PyTorch on a GPU, of one in the interpreter, which is slow."""
    layers = by_layers(net)
    wide = copy.deepcopy(layers).double()
    draws = [draw(rows, net.hs[0], seed) for seed in range(32)]
    exact = [compute(wide, x.double()) for x in draws]
    plain = [compute(layers, x) for x in draws]
    own = [compute(net, x) for x in draws[: 1 if INTERPRETED else None]]
    for found, right, noisy in zip(*map(by_result, (own, exact, plain)), strict=True):
        assert_as_accurate(found, right[: len(found)], plain_error(noisy, right, found.dtype))


@pytest.mark.parametrize("rows", [1, TILE, 2 * TILE + 7])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.singly  # seconds an item in the interpreter
def test_values_forces_and_a_loss_of_them(widths, rows):
    check(network(WIDTHS[widths]), rows, forces_and_their_loss)


def test_gradients_of_three_orders():
    check(network((5, 17, 9)), TILE + 1, all_gradients)


def launched(function, monkeypatch):
    """The kinds of kernels that a call launches, and whether they store or sum more."""
    found, launch = [], functions._launched

    def recorded(spec, given):
        found.append((spec.kind, spec.more))
        return launch(spec, given)

    with monkeypatch.context() as patched:
        patched.setattr(functions, "_launched", recorded)
        function()
    return found


def test_launches(monkeypatch):
    """Without gradients t is not stored; forces sum no gradients of matrices."""
    net, x = network(WIDTHS["MACE's"]), draw(9, 8)
    with torch.no_grad():
        assert launched(lambda: net.hidden(x), monkeypatch) == [("rows", False)]
    moved = x.clone().requires_grad_()
    forces = launched(lambda: torch.autograd.grad(net.hidden(moved).sum(), moved), monkeypatch)
    assert forces == [("rows", True), ("back", False)]
    step = launched(lambda: forces_and_their_loss(net, x), monkeypatch)
    assert step[:2] == [("rows", True), ("back", False)]
    sums = [("second sums", False), ("sums", False)]
    assert sorted(step[2:]) == [("back", True), ("second", True), *sums, ("tangent", False)]


def test_one_launch_of_any_shape():
    net, x = network(WIDTHS["MACE's"]), draw(6, 8)
    with torch.no_grad():
        assert [made.kernel for made in explain(net.hidden, x).launches] == ["hidden_layers"]
        h = net.hidden(x)
        assert_same_bits(net.hidden(x.view(2, 3, 8)), h.view(2, 3, 64), "shape")
        assert_same_bits(net.hidden(x.t().contiguous().t()), h, "strides")
        assert_same_bits(net.hidden(x[:4]), h[:4], "rows")
        assert net.hidden(x[:0]).shape == (0, 64)
    assert_same_bits(net.hidden(x), h, "with gradients")
    assert all(g.shape == w.shape for g, w in zip(_of_none(net, x), matrices(net), strict=True))


def _of_none(net, x):
    found = torch.autograd.grad(net.hidden(x[:0]).sum(), matrices(net))
    assert not any(g.any() for g in found)
    return found


def test_repeatable():
    net, x = network(WIDTHS["MACE's"]), draw(2 * TILE + 7, 8)
    first, again = (forces_and_their_loss(net, x) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert_same_bits(one, other, "again")


def test_what_kernels_do_not_serve_goes_layer_by_layer(monkeypatch):
    """float64, autocast, other functions, wide layers, transforms and tangents."""
    x = draw(3, 8)
    cases = {
        "float64": lambda: network((8, 16)).double().hidden(x.double()),
        "tanh": lambda: o3.FullyConnectedNet([8, 16, 3], torch.tanh).to(DEVICE).hidden(x),
        "wide": lambda: network((8, 65)).hidden(x),
        "no layers": lambda: network((8,)).hidden(x),
        "transformed": lambda: torch.vmap(network((8, 16)).hidden)(x),
    }
    for case in cases.values():
        assert launched(case, monkeypatch) == []
    with torch.autocast(DEVICE, torch.bfloat16):
        assert network((8, 16)).hidden(x).dtype == torch.bfloat16
    with forward_ad.dual_level():
        dual = network((8, 16)).hidden(forward_ad.make_dual(x, x))
        assert forward_ad.unpack_dual(dual).tangent is not None
