"""Harmonics and radial functions of many rows on the CPU: loops against float64, of every order.

Seen red with: results stored or vectors read with the stride of another, Y_0 not stored, loops in
float32, in another dtype on two threads, 1/0 for the zero vector, negated memory read as it is, no
rows run; few rows served once many were, or by themselves; half precision, degrees 7 or 0 alone,
or no numba, served; the rows of a part of a tile left out, w_n by its series alone; a map's rows
turned about, a tangent 1.001 times as long.
"""

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import explain, o3
from torchweft.core.operators.call_cache import CallCache
from torchweft.o3 import pointwise
from torchweft.o3.layers.harmonics_and_radial import _evaluate
from torchweft.testing import assert_as_accurate, assert_within_bound
from torchweft.testing.doors import assert_same_bits

if INTERPRETED:
    pytest.skip("the CPU's own bodies are tested without Triton", allow_module_level=True)

FLOAT, SINGLE = torch.float64, torch.float32
ROWS = 20_000
POLES = torch.tensor([[0, 1, 0], [0, -1, 0], [0, 5, 0], [1e-9, 3, 0]], dtype=FLOAT)
CASES = {
    "to degree 2, of directions": ((0, 1, 2), True, SINGLE),
    "in any order, of vectors": ((3, 0, 1, 3), False, FLOAT),
    "degree 6, of directions": ((6,), True, SINGLE),
}


def vectors(dtype, rows=ROWS):
    """Random ones, then both poles."""
    torch.manual_seed(0)
    return torch.cat([torch.randn(rows - len(POLES), 3, dtype=FLOAT), POLES]).to(dtype)


def harmonics(degrees, normalize):
    return lambda x: o3.spherical_harmonics(list(degrees), x, normalize, "component")


def formula(degrees, normalize):
    return lambda x: _evaluate(degrees, x, normalize, "component")


def orders(function, x, grad, turn):
    """Y, d = ∂⟨grad, Y⟩/∂x, and ∂⟨turn, d⟩ by x and by grad."""
    x, grad = x.clone().requires_grad_(), grad.clone().requires_grad_()
    y = function(x)
    (d,) = torch.autograd.grad(y, x, grad, create_graph=True)
    return y, d, *torch.autograd.grad(d, (x, grad), turn)


def problem(name):
    degrees, normalize, dtype = CASES[name]
    x = vectors(dtype)
    grad = torch.randn(ROWS, sum(2 * degree + 1 for degree in degrees), dtype=dtype)
    return degrees, normalize, (x, grad, torch.randn(ROWS, 3, dtype=dtype))


def sizes(highest, normalize, x, grad, turn):
    """Of each order: a derivative of Y_l is l Y_l / |x| at most, and √(2l+1) components meet."""
    length, g, t = (a.double().norm(dim=-1, keepdim=True) for a in (x, grad, turn))
    size = 2 * highest + 1 if normalize else (2 * highest + 1) * length.clamp(min=1) ** highest
    slope = (highest + 1) ** 2 / length
    return size, size * slope * g, size * slope**2 * g * t, size * slope * t


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("poisoned_memory")
def test_values_and_gradients(name):
    degrees, normalize, given = problem(name)
    found = orders(harmonics(degrees, normalize), *given)
    exact = orders(formula(degrees, normalize), *[a.double() for a in given])
    bounds = sizes(max(degrees), normalize, *given)
    for a, b, size in zip(found, exact, bounds, strict=True):
        assert a.dtype == given[0].dtype
        magnitude = torch.broadcast_to(torch.as_tensor(size, dtype=FLOAT), b.shape)
        assert_within_bound(a, b, magnitude, (max(degrees) + 1) ** 2, stored=4)


def test_a_loop_serves_every_order():
    degrees, normalize, given = problem("to degree 2, of directions")
    told = explain(orders, harmonics(degrees, normalize), *given)
    assert [launch.backend for launch in told.launches] == ["numba"] * 3
    root = "harmonics 0,1,2 1 component"
    assert [launch.kernel for launch in told.launches] == [
        root,
        f"{root} | vjp 1 1",
        f"{root} | vjp 1 1 | vjp 11 1",
    ]


def test_the_same_bits_on_any_number_of_threads():
    degrees, normalize, given = problem("to degree 2, of directions")
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        found.append(orders(harmonics(degrees, normalize), *given))
    torch.set_num_threads(before)
    for again in found[1:]:
        for a, b in zip(again, found[0], strict=True):
            assert_same_bits(a, b, "threads")


def test_vectors_of_length_zero():
    """Y_0 as ever, zeros, and zero forces of both orders."""
    degrees, normalize, (x, grad, turn) = problem("to degree 2, of directions")
    x[::3] = 0
    y, d, dx, dgrad = (a[::3] for a in orders(harmonics(degrees, normalize), x, grad, turn))
    expected = torch.zeros_like(y)
    expected[:, 0] = 1
    assert_same_bits(y.detach(), expected, "values")
    for a in (d, dx, dgrad):
        assert_same_bits(a.detach().abs(), torch.zeros_like(a), "gradients")


@pytest.mark.parametrize("exponent", [-18, -13, 18])
def test_any_length(exponent):
    """Of x times 10^n, Y is the same, and gradients fall by that: float32 holds no cube of it."""
    degrees, normalize, (x, grad, turn) = problem("to degree 2, of directions")
    scaled = (x.double() * 10.0**exponent).to(SINGLE)
    found = orders(harmonics(degrees, normalize), scaled, grad, turn)
    exact = orders(formula(degrees, normalize), *[a.double() for a in (scaled, grad, turn)])
    bounds = sizes(2, normalize, scaled, grad, turn)
    for order in (0, 1, 3):  # the second by x falls by the square
        magnitude = torch.broadcast_to(torch.as_tensor(bounds[order]), exact[order].shape)
        assert_within_bound(found[order], exact[order], magnitude.double(), 9, stored=4)


def test_any_strides():
    call, x = harmonics((0, 1, 2), True), vectors(SINGLE)
    expected = call(x)
    assert expected.is_contiguous()
    turned = torch.view_as_complex(torch.stack([0 * x, -x], -1)).conj().imag
    assert turned.is_neg()
    strided = x.movedim(-1, 0).contiguous().movedim(0, -1)
    wide = torch.cat([x, x], 1)[:, :3]
    for other in (strided, wide, turned):
        assert_same_bits(call(other), expected, "strided")
    assert_same_bits(call(x.view(4, -1, 3)), expected.view(4, -1, 9), "more axes")
    one = call(x[:1].expand(ROWS, 3))
    assert_same_bits(one, one[:1].expand(ROWS, 9).contiguous(), "expanded")


def test_mapped_and_forward():
    """torch.func finds the same, forward and backward, and a map of small calls."""
    degrees, normalize, (x, grad, turn) = problem("to degree 2, of directions")
    call = harmonics(degrees, normalize)
    _, d, _, dgrad = orders(call, x, grad, turn)
    _, tangent = torch.func.jvp(call, (x,), (turn,))
    (slope,) = torch.func.vjp(call, x)[1](grad)
    assert_same_bits(slope, d, "backward")
    size = sizes(2, normalize, x, grad, turn)[3]
    assert_within_bound(tangent, dgrad.double(), size.expand_as(tangent), 9, stored=8)
    rows = torch.func.vmap(call)(x.view(4, -1, 3))
    size = torch.full((ROWS, 9), 5.0)
    assert_within_bound(rows.view(ROWS, 9), call(x).double(), size, 9, stored=8)


def launched(call, x):
    return [launch.backend for launch in explain(call, x).launches]


def test_few_rows_have_the_bits_of_torch_whatever_came_before():
    layer, x = o3.SphericalHarmonics([0, 1, 2], True, "norm"), vectors(SINGLE)
    few = layer(x[:20])
    assert launched(layer, x[:20]) == []
    assert launched(layer, x) == ["numba"]
    layer(x)
    assert_same_bits(layer(x[:20]), few, "few")
    assert_same_bits(layer(x[:20]), _evaluate((0, 1, 2), x[:20], True, "norm"), "torch")
    layer(x)
    fewest = -(-pointwise.LOOP_FROM_NUMBERS // 9)
    assert launched(layer, x[: fewest - 1]) == []
    assert launched(layer, x[:fewest]) == ["numba"]


def test_what_torch_serves(monkeypatch):
    x = vectors(SINGLE)
    assert launched(harmonics((7,), True), x) == []
    assert launched(harmonics((0, 0), True), x) == []
    assert launched(harmonics((1, 2), True), x.half()) == []
    monkeypatch.setattr(pointwise, "choose", lambda backend, device: "torch")
    assert launched(harmonics((1, 2), True), x) == []


def test_no_rows():
    (found,) = torch.ops.torchweft.o3_rows([torch.ones(0, 6)[:, :3]], "harmonics 0,1 1 norm")
    assert found.shape == (0, 4)


RADIAL = {"bessel": o3.BesselBasis(5.0), "cutoff": o3.PolynomialCutoff(5.0)}
RADIAL["basis"] = o3.RadialBasis(5.0, 4)


@pytest.mark.parametrize("name", RADIAL)
def test_radial_functions(name, monkeypatch):
    """One loop of each order; as near to float64 as torch's operations, at 0 and behind r_max too.

    Of 1100 lengths: seventeen tiles and a part of one.
    """
    function = RADIAL[name]
    r = torch.cat([torch.rand(1098, 1) * 6, torch.tensor([[0.0], [1e-4]])])
    given = r, torch.randn_like(function(r)), torch.randn_like(r)
    told = explain(orders, function, *given)
    assert [launch.backend for launch in told.launches] == ["numba"] * 3
    found = orders(function, *given)
    monkeypatch.setattr(pointwise, "choose", lambda backend, device: "torch")
    monkeypatch.setattr(pointwise, "_row_calls", CallCache())
    exact = orders(function, *[t.double() for t in given])
    for ours, plain, value in zip(found, orders(function, *given), exact, strict=True):
        assert_as_accurate(ours, value, (plain - value).abs().detach())
