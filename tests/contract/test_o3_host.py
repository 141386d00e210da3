"""What a call costs the host once its kinds are settled: its launches, and few calls of functions.

Counted are calls of torchweft's own functions, which no other process disturbs; nothing runs on a
GPU. Seen red with: harmonics, contractions and linear maps that are not settled, weights of
couplings made by torch, kernels looked up one by one; matrices multiplied by a number, activations
by torch.  Of gradients' kernels: begun by the gradients, and in a call that nobody differentiates.
"""

import os
import sys
from collections import Counter

import pytest
import torch

import torchweft
from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.core import private
from torchweft.core.gpu import launcher
from torchweft.core.operators import tensor_list as list_op
from torchweft.core.operators.call_cache import CallCache
from torchweft.o3 import pointwise
from torchweft.o3.channelwise import operator
from torchweft.o3.channelwise.gpu import launch
from torchweft.o3.layers import symmetric_contraction
from torchweft.o3.layers.harmonics_and_radial import harmonics_and_radial
from torchweft.o3.mixing import launch as mixing_launch
from torchweft.o3.mixing import operator as mixing
from torchweft.o3.symmetric import operator as symmetric_operator
from torchweft.o3.tensor_product import evaluation

if INTERPRETED:
    pytest.skip("the interpreter settles no code", allow_module_level=True)

ROWS, EDGES = 16, 64
ITEMS = "64x0e+64x1o"
INSTRUCTIONS = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]


@pytest.fixture
def launched(monkeypatch):
    """Tensors on the CPU as if they were on a GPU; the launches of kernels."""
    made = []

    def loaded(kernel, arguments, options):
        return lambda programs, stream, values: made.append(kernel.__name__)

    monkeypatch.setattr(launcher, "_loaded", loaded)
    monkeypatch.setattr(launcher, "_compile_in_threads", lambda calls: None)
    monkeypatch.setattr(launcher, "_current_stream", lambda: 0)
    monkeypatch.setattr(private, "get_device", lambda: -1)
    monkeypatch.setattr(launcher.Kernel, "stored", lambda *given: True)
    for executor in (launch, mixing_launch, symmetric_operator):
        monkeypatch.setattr(executor, "processors", lambda device: 132)
    for asked in (pointwise, mixing):
        monkeypatch.setattr(asked, "_INTERPRETED", True)
    monkeypatch.setattr(pointwise, "_row_calls", CallCache())  # that no other test finds these
    monkeypatch.setattr(evaluation.ProductRecipe, "by_torch", lambda recipe, x: False)
    monkeypatch.setattr(operator, "_chosen", lambda *given: launch)
    monkeypatch.setattr(symmetric_contraction, "chosen_backend", lambda *given: "triton")
    return made


def harmonics():
    layer, x = o3.SphericalHarmonics(range(4), True), torch.randn(EDGES, 3)
    return lambda: layer(x)


def harmonics_by_name():
    x = torch.randn(2, EDGES, 3)
    return lambda: o3.spherical_harmonics("0e+1o+2e", x, False)


def harmonics_of_many_sizes():
    sizes = iter(range(1, EDGES))
    return lambda: o3.spherical_harmonics([1, 2], torch.ones(next(sizes), 3), True)


def linear():
    layer, x = o3.Linear(ITEMS, ITEMS), torch.randn(ROWS, 256)
    return lambda: layer(x)


def by_element():
    layer, x = o3.Linear(ITEMS, ITEMS, num_elements=3), torch.randn(ROWS, 256)
    element = torch.arange(ROWS) % 3
    return lambda: layer(x, element=element)


def contraction():
    layer, x = o3.SymmetricContraction(ITEMS, ITEMS, 3, 3), torch.randn(ROWS, 256)
    element = torch.arange(ROWS) % 3
    return lambda: layer(x, element)


def product(mode):
    layer = o3.TensorProduct(ITEMS, "0e+1o", ITEMS, [(*i, mode, True) for i in INSTRUCTIONS])
    x, y = torch.randn(ROWS, 256), torch.randn(ROWS, 4)
    return lambda: layer(x, y)


def convolution():
    instructions = [(*i, "uvu", True) for i in INSTRUCTIONS]
    layer = o3.TensorProductConv(ITEMS, "0e+1o", ITEMS, instructions)
    x, y = torch.randn(ROWS, 256), torch.randn(EDGES, 4)
    weight = torch.randn(EDGES, layer.weight_numel, requires_grad=True)
    src = torch.arange(EDGES) % ROWS
    graph = o3.Graph(src, src.flip(0), ROWS)
    return lambda: layer(x, y, weight, graph)


def network():
    net, x = o3.FullyConnectedNet([8, 16, 16, 5], torch.nn.functional.silu), torch.randn(EDGES, 8)
    return lambda: net(x)


def radial_basis():
    basis, r = o3.RadialBasis(5.0), torch.rand(EDGES, 1)
    return lambda: basis(r)


def functions_of_edges():
    harmonics, basis, v = (
        o3.SphericalHarmonics(range(4), True),
        o3.RadialBasis(5.0),
        torch.randn(EDGES, 3),
    )
    return lambda: harmonics_and_radial(harmonics, basis, v)


LAYERS = {
    "functions of edges": (functions_of_edges, ["rows"], 20),
    "network": (network, ["rows", "rows"], 62),
    "radial basis": (radial_basis, ["rows"], 18),
    "harmonics": (harmonics, ["rows"], 18),
    "harmonics by name": (harmonics_by_name, ["rows"], 18),
    "harmonics of many sizes": (harmonics_of_many_sizes, ["rows"], 18),
    "linear": (linear, ["mixing_direct"], 22),
    "by element": (by_element, ["mixing_direct"], 28),
    "contraction": (contraction, ["rows", "symmetric_z"], 39),
    "product": (lambda: product("uvu"), None, 18),
    "mixed product": (lambda: product("uvw"), None, 34),
    "convolution": (convolution, None, 18),
}
"""Kernels of a call, and how many of torchweft's functions it calls at most."""


@pytest.mark.parametrize("name", LAYERS)
def test_a_settled_call(name, launched):
    make, kernels, most = LAYERS[name]
    call = make()
    with torch.no_grad():
        for _ in range(2):
            call()
        launched.clear()
        found = calls(call)
    assert launched
    assert kernels is None or launched == kernels
    assert len(found) <= most, found


ORDERS = {
    "network": (
        lambda: o3.FullyConnectedNet([8, 12, 12, 5], torch.nn.functional.silu, variance_out=3.0),
        torch.randn(EDGES, 8),
        [
            (2, {"mm": 3}),
            (2, {"mm": 3}),
            # sums: a matrix has two gradients where it is used twice, and so has its product with x
            (3, {"mm": 9, "add": 3}),
        ],
    ),
    "radial basis": (
        lambda: o3.RadialBasis(4.0),
        torch.rand(EDGES, 1),
        [(1, {}), (1, {}), (1, {})],
    ),
}
"""A function, its argument, and of each order: launches, and operations of torch that compute.

Programs are not those of LAYERS: a kernel is loaded once.
"""


@pytest.mark.parametrize("name", ORDERS)
def test_kernels_of_each_order(name, launched):
    """A value, its gradient by the argument, and the gradients of that by all there is."""
    make, argument, expected = ORDERS[name]
    function = make()
    x = argument.clone().requires_grad_()
    grad, turn = torch.randn_like(function(x)), torch.randn_like(x)
    y, slope = [None], [None]

    def value():
        y[0] = function(x)

    def gradient():
        slope[0] = torch.autograd.grad(y[0], x, grad, create_graph=True)[0]

    def second():
        torch.autograd.grad(slope[0], (x, *function.parameters()), turn)

    for run, (launches, operations) in zip((value, gradient, second), expected, strict=True):
        launched.clear()
        assert computing(run) == operations
        assert launched == ["rows"] * launches


def test_items_without_a_path_take_no_launch(launched):
    """Neither of z nor of the gradient of x.   Seen red with: results filled with zeros before."""
    layer = o3.Linear("48x0e+16x1o", "32x0e+16x2e")
    x = torch.randn(ROWS, 96, requires_grad=True)

    def call():
        z = layer(x)
        torch.autograd.grad(z, x, z.detach())

    assert "zero" not in computing(call)
    assert launched == ["mixing_direct"] * 2


def test_weights_of_a_contraction_are_made_once(launched):
    """For its value and gradients of each order, and they have one gradient for all parameters.

    Seen red with: weights that each call makes of the parameters, whose gradients are added one
    by one.
    """
    irreps = "32x0e+32x1o"  # not those of LAYERS: a kernel is loaded once
    layer = o3.SymmetricContraction(irreps, irreps, 3, 3)
    x, element = torch.randn(ROWS, 128, requires_grad=True), torch.arange(ROWS) % 3
    parameters = [p for p in layer.parameters() if p.requires_grad]
    assert len(parameters) == 6
    z, slope = [None], [None]

    def value():
        z[0] = layer(x, element)

    def gradient():
        slope[0] = torch.autograd.grad(z[0], x, torch.ones_like(z[0]), create_graph=True)[0]

    def second():
        of = z[0], slope[0]
        torch.autograd.grad(of, (x, *parameters), [torch.ones_like(t) for t in of])

    found = []
    for run in (value, gradient, second):
        launched.clear()
        operations = computing(run)
        found.append((launched.count("rows"), operations.get("add", 0)))
    assert found == [(1, 0), (0, 0), (1, 2)]  # sums: of the gradients of x, and of weights


PASSED_ON = {
    "as_strided",
    "detach",
    "empty",
    "matmul",
    "new_empty",
    "resolve_conj",
    "t",
    "transpose",
}
"""Operations that compute nothing by themselves."""


def computing(function):
    """How often each operation of torch that computes is called."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], acc_events=True) as profile:
        function()
    names = [event.name for event in profile.events() if event.name.startswith("aten::")]
    named = Counter(name.removeprefix("aten::").rstrip("_") for name in names)
    return {name: count for name, count in named.items() if name not in PASSED_ON}


@pytest.fixture
def compiled(launched, monkeypatch):
    """In the list of launches, a name in brackets where a kernel begins to be compiled."""
    monkeypatch.setattr(launch, "_recipes", {})
    for module in (launch, symmetric_operator, pointwise):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    monkeypatch.setattr(launcher, "_made", set())
    monkeypatch.setattr(launcher.Kernel, "stored", lambda *given: False)
    monkeypatch.setattr(list_op, "_compiles", lambda tensor: True)
    monkeypatch.setattr(
        launcher,
        "_compile_in_threads",
        lambda calls: launched.extend([f"[{call.kernel._kernel.__name__}]" for call in calls]),
    )
    return launched


@pytest.mark.parametrize(
    ("make", "made"), [(convolution, ()), (contraction, ("rows",)), (lambda: product("uvu"), ())]
)
@pytest.mark.parametrize("trained", [True, False])
def test_kernels_of_gradients_are_compiled_with_those_of_the_call(make, made, trained, compiled):
    """All of them before the first launch, so that nothing is left for the gradients.

    Only the weights of a contraction are made before.
    """
    call = make()
    with torch.set_grad_enabled(trained):
        z = call()
    forward = [name for name in compiled if not name.startswith("[")]
    first = next(n for n, name in enumerate(compiled) if name in forward and name not in made)
    begun = [name for name in compiled[:first] if name.startswith("[")]
    assert not any(name.startswith("[") for name in compiled[first:])
    assert {f"[{name}]" for name in forward} <= set(begun)
    compiled.clear()
    if trained:
        z.sum().backward()
        assert compiled
        assert not any(name.startswith("[") for name in compiled)
        assert {f"[{name}]" for name in compiled} <= set(begun)
    else:
        assert len(begun) == len(set(forward))


def calls(function):
    """The names of torchweft's functions that a call calls."""
    found, home = [], os.path.dirname(torchweft.__file__)

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            found.append(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return found
