"""spherical_harmonics: closed forms, the addition theorem, equivariance, gradients; e3nn's numbers.

Seen red with: sin and cos exchanged; b_lm without its root; the scale of degree l-2 forgotten;
r² left out; a gradient through the length of a zero vector; degrees sorted; a module without the
parity of its input; factors of degrees to 2 kept from inference mode or of fake tensors, or
shown to a tracer.
"""

import math

import numpy
import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.testing import assert_within_bound
from torchweft.testing.doors import assert_same_bits

pytestmark = pytest.mark.kernels

FLOAT = torch.float64
LMAX = 11
KINDS = {
    "component": lambda degree: 2 * degree + 1,
    "norm": lambda degree: 1,
    "integral": lambda degree: (2 * degree + 1) / (4 * math.pi),
}
POINTS = torch.tensor(
    [
        [1, 0, 0],
        [0, 1, 0],
        [0, -1, 0],
        [0, 0, -2],
        [0.435, 0.7644, 0.023],
        [1e-9, 3, 0],
        [-1, 2, 3],
    ],
    dtype=FLOAT,
)
"""Axes, both poles and a point near one, and others."""


def vectors(n=20, seed=0):
    torch.manual_seed(seed)
    return torch.cat([torch.randn(n, 3, dtype=FLOAT), POINTS])


def on_sphere(x):
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def close(found, expected, degree, size=None):
    """Rounding errors of a ladder of `degree` steps, each of the size of |Y|."""
    size = math.sqrt(2 * degree + 1) if size is None else size
    magnitude = torch.broadcast_to(torch.as_tensor(size, dtype=FLOAT), expected.shape)
    assert_within_bound(found, expected, magnitude, (degree + 1) ** 2, stored=4)


def test_worked_values():
    x = torch.tensor([1, 2, 3], dtype=FLOAT)
    found = o3.spherical_harmonics([1, 2], x, True, "component")
    root = [math.sqrt(3 / 14), math.sqrt(15) / 14]
    expected = [root[0], 2 * root[0], 3 * root[0], 3 * root[1], 2 * root[1]]
    expected += [-math.sqrt(5) / 14, 6 * root[1], 4 * root[1]]
    close(found, torch.tensor(expected, dtype=FLOAT), 2)
    rounded = (0.4629, 0.9258, 1.3887, 0.8299, 0.5533, -0.1597, 1.6599, 1.1066)
    assert [round(v, 4) for v in found.tolist()] == list(rounded)


def test_closed_forms():
    x, y, z = vectors().T
    length = vectors().square().sum(-1)
    third = [
        math.sqrt(35 / 8) * x * (3 * z * z - x * x),
        math.sqrt(105) * x * y * z,
        math.sqrt(21 / 8) * x * (5 * y * y - length),
        math.sqrt(7) / 2 * y * (5 * y * y - 3 * length),
        math.sqrt(21 / 8) * z * (5 * y * y - length),
        math.sqrt(105) / 2 * y * (z * z - x * x),
        math.sqrt(35 / 8) * z * (z * z - 3 * x * x),
    ]
    expected = torch.stack([torch.ones_like(x), *third], -1)
    found = o3.spherical_harmonics([0, 3], vectors(), False, "component")
    close(found, expected, 3, 9 * length.pow(1.5)[:, None] + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("degree", [*range(LMAX + 1), 20])
def test_addition_theorem(degree, kind):
    """Y_l(x)·Y_l(y) is |Y_l|² P_l(x·y): it fixes Y_l up to a rotation."""
    x, y = vectors(), vectors(seed=1)
    cosine = (on_sphere(x) * on_sphere(y)).sum(-1)
    before, legendre = torch.zeros_like(cosine), torch.ones_like(cosine)
    for k in range(degree):
        before, legendre = legendre, ((2 * k + 1) * cosine * legendre - k * before) / (k + 1)
    one, two = (o3.spherical_harmonics(degree, a, True, kind) for a in (x, y))
    size = KINDS[kind](degree)
    close((one * two).sum(-1), size * legendre, degree, 4 * size)


@pytest.mark.parametrize("degree", range(LMAX + 1))
def test_equivariance(degree):
    """Y(R x) = D(R) Y(x), reflections included."""
    torch.manual_seed(degree)
    turn = o3.rand_matrix(6, dtype=FLOAT)
    turn = torch.cat([turn, -turn])
    x = torch.randn(12, 3, dtype=FLOAT)
    irreps = o3.Irreps.spherical_harmonics(degree)[-1:]
    moved = torch.einsum("zij,zj->zi", irreps.D_from_matrix(turn), harmonics(irreps, x))
    length = x.norm(dim=-1, keepdim=True) ** degree
    turned = harmonics(irreps, torch.einsum("zij,zj->zi", turn, x))
    close(turned, moved, degree, (2 * degree + 1) * length)


def harmonics(degrees, x):
    return o3.spherical_harmonics(degrees, x, False, "component")


@pytest.mark.parametrize("degree", range(LMAX))
def test_next_degree_by_the_3j_symbol(degree):
    """Y_{l+1} = c C Y_l x with c > 0 and C = 3j(l+1, l, 1); ∂_k Y_{l+1} = (l+1) c C_k Y_l."""
    x = vectors()
    table = o3.wigner_3j(degree + 1, degree, 1, dtype=FLOAT)
    factor = (2 * degree + 3) / math.sqrt(degree + 1)
    lower = harmonics(degree, x)
    raised = torch.einsum("ijk,zj,zk->zi", table, lower, x)
    expected = harmonics(degree + 1, x)
    length = x.norm(dim=-1, keepdim=True)
    close(factor * raised, expected, degree + 1, 4 * (degree + 1) * length ** (degree + 1))
    jacobian = torch.func.vmap(torch.func.jacrev(lambda a: harmonics(degree + 1, a)))(x)
    slope = (degree + 1) * factor * torch.einsum("ijk,zj->zik", table, lower)
    close(jacobian, slope, degree + 1, 9 * (degree + 1) ** 2 * length[:, None] ** degree)


def test_orthonormal():
    """∫ Y Y' = δ over the sphere, by a rule that is exact to degree 13."""
    nodes, weights = map(torch.from_numpy, numpy.polynomial.legendre.leggauss(7))
    turns = 2 * math.pi * torch.arange(14, dtype=FLOAT) / 14
    points = o3.angles_to_xyz(turns[:, None], nodes.acos()).flatten(0, 1)
    areas = (2 * math.pi / 14 * weights).expand(14, 7).flatten()
    y = o3.spherical_harmonics(range(7), points, False)
    gram = torch.einsum("za,zb,z->ab", y, y, areas)
    close(gram, torch.eye(49, dtype=FLOAT), 6, 13)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_degrees_in_any_order(kind, normalize):
    x = vectors()
    x = x if normalize else on_sphere(x)
    wanted = [4, 1, 2, 3, 3, 9, 0]
    found = o3.spherical_harmonics(wanted, x, normalize, kind)
    parts = found.split([2 * degree + 1 for degree in wanted], -1)
    for degree, part in zip(wanted, parts, strict=True):
        alone = o3.spherical_harmonics(degree, x, normalize, kind)
        close(part, alone, degree)  # degrees to 2 alone are written out
    assert_same_bits(
        o3.spherical_harmonics(range(3), x, normalize, kind),
        o3.spherical_harmonics("0e+1o+2e", x, normalize, kind),
        "text",
    )
    assert_same_bits(
        o3.spherical_harmonics([1, 1, 2], x, normalize, kind),
        o3.spherical_harmonics(o3.Irreps("2x1e+2e"), x, normalize, kind),
        "irreps",
    )


def test_shapes():
    x = torch.randn(2, 5, 3)
    call = o3.spherical_harmonics
    assert call(2, x, True).shape == (2, 5, 5)
    assert call([0, 1], x[:0], True).shape == (0, 5, 4)
    assert call([0, 1], x[0, 0], False).shape == (4,)
    expected = call(range(4), x.contiguous(), True)
    strided = x.movedim(-1, 0).contiguous().movedim(0, -1)
    assert_same_bits(call(range(4), strided, True), expected, "strided")
    assert expected.is_contiguous()
    wide = x[:, :1].expand(2, 5, 3)
    assert_same_bits(call(3, wide, True), call(3, wide.contiguous(), True), "expanded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("degree", [0, 1, 3, LMAX])
def test_narrow_types(degree, dtype):
    x = on_sphere(vectors()).to(dtype)
    for normalize in (True, False):
        found = o3.spherical_harmonics(degree, x, normalize, "component")
        exact = o3.spherical_harmonics(degree, x.double(), normalize, "component")
        assert found.dtype == dtype
        assert_within_bound(found, exact, torch.full_like(exact, 4.0), (degree + 1) ** 2)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("degrees", [[1], range(5), [7]], ids=str)
def test_gradients(degrees, normalize):
    x = POINTS.clone().requires_grad_()
    if not normalize:
        x = torch.cat([POINTS, torch.zeros(1, 3, dtype=FLOAT)]).requires_grad_()

    def function(a):
        return o3.spherical_harmonics(degrees, a, normalize, "component")

    # an interpreted program takes milliseconds: there along few directions
    torch.autograd.gradcheck(function, x, check_forward_ad=True, fast_mode=INTERPRETED)
    torch.autograd.gradgradcheck(function, x, fast_mode=INTERPRETED)


def test_a_vector_of_length_zero():
    """An atom's edge to itself: Y_0 as ever, zeros, and zero forces of every order."""
    for dtype in (FLOAT, torch.float32, torch.float16):
        x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
        value = o3.spherical_harmonics(range(5), x, True, "component")
        expected = torch.zeros(2, 25, dtype=dtype)
        expected[:, 0] = 1
        assert_same_bits(value, expected, "value")
        derivative = value.sum()
        for _ in range(3):
            (slope,) = torch.autograd.grad(derivative, x, create_graph=True)
            assert_same_bits(slope, torch.zeros_like(x), "gradient")
            derivative = slope.sum() + slope.square().sum()
    x = torch.zeros(3, dtype=FLOAT, requires_grad=True)
    jacobian = torch.func.jacrev(lambda a: harmonics([1], a))(x)
    close(jacobian, math.sqrt(3) * torch.eye(3, dtype=FLOAT), 1)


@pytest.mark.parametrize("degree", [1, 2, 5, 8])
def test_harmonic_and_homogeneous(degree):
    """ΔY_l = 0 and x·∇Y_l = l Y_l, at the poles too."""
    slope = torch.func.jacrev(lambda a: harmonics(degree, a))

    def laplacian(a):
        return torch.func.jacfwd(slope)(a).diagonal(dim1=-2, dim2=-1).sum(-1)

    x = on_sphere(POINTS)
    radial = (torch.func.vmap(slope)(x) * x[:, None]).sum(-1)
    close(radial, degree * harmonics(degree, x), degree, 9 * degree**2)
    zero = torch.func.vmap(laplacian)(x)
    close(zero, torch.zeros_like(zero), degree, 9 * degree**4)


def test_module():
    x = vectors()
    module = o3.SphericalHarmonics("2x0e+1o+3o", True, "norm")
    assert (module.irreps_in, module.irreps_out) == ("1o", "2x0e+1o+3o")
    assert_same_bits(module(x), o3.spherical_harmonics([0, 0, 1, 3], x, True, "norm"), "module")
    assert not module.state_dict()
    assert o3.SphericalHarmonics([0, 1, 1, 2], True).irreps_out == "0e+2x1o+2e"
    assert o3.SphericalHarmonics(3, False).irreps_out == "3o"
    pseudo = o3.SphericalHarmonics("0e+1e+2e", True)
    assert (pseudo.irreps_in, pseudo.irreps_out) == ("1e", "0e+1e+2e")
    assert o3.SphericalHarmonics([1, 2], True, irreps_in="1e").irreps_out == "1e+2e"
    assert_same_bits(module.half()(x), module(x), "a module without numbers of its own")


@pytest.mark.parametrize("lmax", [2, 4])
def test_compile_export_and_vmap(lmax):
    module = o3.SphericalHarmonics(range(lmax + 1), True, "component")
    irreps = str(o3.Irreps.spherical_harmonics(lmax))

    def energy(a):
        return module(a) + o3.spherical_harmonics(irreps, a, False)

    x = vectors()
    cotangent = torch.randn(energy(x).shape, dtype=FLOAT)
    torch.compiler.reset()
    compiled = torch.compile(energy, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (len(x), 5):
        results = []
        for function in (energy, compiled):
            leaf = x[:n].clone().requires_grad_()
            value = function(leaf)
            (slope,) = torch.autograd.grad(value, leaf, cotangent[:n])
            results.append((value, slope))
        for found, expected in zip(*reversed(results), strict=True):
            assert_same_bits(found, expected, "compiled")
    assert_same_bits(torch.export.export(module, (x,)).module()(x), module(x), "exported")
    close(torch.func.vmap(energy)(x), energy(x), 4, energy(x).abs().max())


def test_first_called_in_inference_mode_or_with_fake_tensors():
    """What is kept for later calls is an ordinary tensor."""
    x = vectors()
    for degrees in ([0, 1, 1], [1, 0, 2]):
        with FakeTensorMode() as mode:
            assert harmonics(degrees, mode.from_tensor(x)).shape[0] == len(x)
        with torch.inference_mode():
            expected = harmonics(degrees, x).clone()
        found = harmonics(degrees, x.requires_grad_())
        assert_same_bits(found.detach(), expected, "in inference mode")
        assert torch.autograd.grad(found.sum(), x)[0].isfinite().all()
        with FakeTensorMode() as mode:
            assert harmonics(degrees, mode.from_tensor(x)).shape[0] == len(x)


def test_errors():
    x = torch.randn(4, 3)
    call = o3.spherical_harmonics
    with pytest.raises(DTypeError, match=r"x is a ndarray: it must be a torch\.Tensor"):
        o3.spherical_harmonics(1, torch.ones(4, 3).numpy(), True)
    with pytest.raises(ShapeError, match=r"x is \(4, 2\): it must be \(\.\.\., 3\)"):
        call(1, x[:, :2], True)
    with pytest.raises(DTypeError, match=r"x is torch\.int64: it must be floating-point"):
        call(1, x.long(), True)
    with pytest.raises(ShapeError, match="normalization is 'unit': it must be one of integral"):
        call(1, x, True, "unit")
    with pytest.raises(ShapeError, match="normalization is 'unit'"):
        o3.SphericalHarmonics(1, True, "unit")
    with pytest.raises(ShapeError, match="there are no degrees"):
        call([], x, True)
    with pytest.raises(ShapeError, match="l is -1: a degree must be 0 or more"):
        call([0, -1], x, True)
    with pytest.raises(DTypeError, match=r"l is 1\.0: a degree must be an integer"):
        call(1.0, x, True)
    with pytest.raises(ShapeError, match=r"irreps_out has 1e, but of 1x1o .* must be 1o"):
        o3.SphericalHarmonics("0e+4x1e", True, irreps_in="1o")
    with pytest.raises(ShapeError, match=r"irreps_out has 2o, but of 1x1o .* must be 2e"):
        call("0e+2o", x, True)
    with pytest.raises(ShapeError, match=r"irreps_in is 1x1e.1x3o: spherical harmonics are of one"):
        o3.SphericalHarmonics("0e", True, irreps_in="1e+3o")


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_e3nn(kind, normalize):
    from e3nn import o3 as theirs

    x = vectors()
    for degree in range(LMAX + 2):
        expected = theirs.spherical_harmonics(degree, x, normalize, kind)
        size = expected.norm(dim=-1, keepdim=True)
        close(o3.spherical_harmonics(degree, x, normalize, kind), expected, 2 * degree, size)
