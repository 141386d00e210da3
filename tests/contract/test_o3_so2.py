"""SO2Linear: against harmonics, as tensor products of one path, at the poles, doors, errors.

Seen red with: W_i of the other sign, half a turn left out below, a factor that counts one copy
more, order l left out, a turn where there is no direction; turns of degree 6 in another order.
"""

import itertools

import pytest
import torch

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import join, split
from torchweft.testing import assert_o3_equivariant, assert_within_bound
from torchweft.testing.contract import BODY_CHECKS, Case, Setting, assert_same_bits, check_values
from torchweft.testing.doors import DOOR_CHECKS, check_opcheck

if INTERPRETED:
    pytest.skip("there is no kernel to interpret", allow_module_level=True)

DOUBLE = torch.float64
DTYPES = (torch.float32, DOUBLE, torch.bfloat16, torch.float16)
IRREPS_IN, IRREPS_OUT = "2x0e+3x1o+2x1e+1x2e", "2x0e+1x0o+2x1o+2x2e+1x2o"


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def kernel(edge, degrees, order, turned):
    """D(R)ᵀ M D(R) by harmonics: M = Σ_l s_l C[:, l, :], s_l = (2l+1) Σ M C[:, l, :]."""
    first, out = degrees
    matrix = torch.zeros(2 * first + 1, 2 * out + 1, dtype=edge.dtype)
    for sign in {1, -1} if order else {1}:
        other = -sign if turned else sign
        matrix[first + sign * order, out + other * order] = sign if turned else 1
    found = 0
    for degree in range(abs(first - out), first + out + 1):
        table = o3.wigner_3j(first, degree, out, edge.dtype)
        s = (2 * degree + 1) * (matrix * table[:, degree]).sum()
        y = o3.spherical_harmonics(degree, edge, True, "norm")
        found = found + s * torch.einsum("abm,...b->...am", table, y)
    return found


def oracle(x, edge, weight, module):
    blocks = split(x, module.irreps_in, module.layout)
    out = [x.new_zeros(*x.shape[:-1], mul, ir.dim) for mul, ir in module.irreps_out]
    start = 0
    for i, k, order, turned, shape, factor in module.instructions:
        matrix = weight.narrow(-1, start, shape[0] * shape[1])
        start += shape[0] * shape[1]
        matrix = matrix.reshape(*weight.shape[:-1], *shape) * factor
        degrees = module.irreps_in[i].ir.l, module.irreps_out[k].ir.l
        turn = kernel(edge, degrees, order, turned)
        own = "z" * (weight.dim() - 1)
        out[k] = out[k] + torch.einsum(f"zua,zam,{own}uw->zwm", blocks[i], turn, matrix)
    return join(out, module.layout)


def call(x, edge, weight, module, backend=None):
    return module(x, edge, weight)


def case(mmax=None, shared=True, layout="mul_ir", parity="1o", irreps=(IRREPS_IN, IRREPS_OUT)):
    rows = 5
    module = o3.SO2Linear(
        *irreps,
        mmax,
        irreps_edge=parity,
        shared_weights=shared,
        internal_weights=False,
        layout=layout,
    )
    lead = () if shared else (rows,)
    inputs = (
        normal(rows, module.irreps_in.dim),
        normal(rows, 3, seed=1),
        normal(*lead, module.weight_numel, seed=2),
    )
    name = f"mmax={mmax} shared={shared} {layout} {parity}"
    tables = {"module": module}
    return Case(name, call, oracle, inputs, tables, polynomial=False, together=True, neighbours=64)


CASES = [
    case(),
    case(layout="ir_mul", parity="1e"),
    case(shared=False, mmax=1),
    case(shared=False, layout="ir_mul"),
    case(mmax=0),
]


def named(chosen):
    return chosen.name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chosen", CASES, ids=named)
def test_values(chosen, dtype):
    check_values(chosen, Setting(dtype=dtype, order=2 if dtype == DOUBLE else 1))


@pytest.mark.parametrize("check", BODY_CHECKS[1:], ids=lambda check: check.__name__)
@pytest.mark.parametrize("chosen", CASES[:3:2], ids=named)
@pytest.mark.singly  # seconds an item
def test_promises(chosen, check):
    check(chosen, Setting())


@pytest.mark.parametrize("check", [c for c in DOOR_CHECKS if c is not check_opcheck])
def test_doors(check):
    check(case(irreps=("1x0e+2x1o", "2x0e+1x1o")))


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
@pytest.mark.parametrize("parity", ["1o", "1e"])
@pytest.mark.parametrize("mmax", [None, 1])
def test_equivariant(mmax, parity, layout):
    module = o3.SO2Linear(IRREPS_IN, IRREPS_OUT, mmax, irreps_edge=parity, layout=layout).double()
    inputs = [normal(9, module.irreps_in.dim), normal(9, 3, seed=1)]
    irreps = [module.irreps_in, parity]
    assert_o3_equivariant(module, inputs, irreps, IRREPS_OUT, layout=layout)


def test_equivariant_to_degree_six():
    irreps = o3.Irreps("1x0e+2x5o+1x6e+1x6o")
    module = o3.SO2Linear(irreps, irreps).double()
    inputs = [normal(9, irreps.dim), normal(9, 3, seed=1)]
    assert_o3_equivariant(module, inputs, [irreps, "1o"], irreps)


PATHS = [(a, b, c) for a, b, c in itertools.product(range(4), repeat=3) if abs(a - c) <= b <= a + c]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_it_is_a_tensor_product_with_harmonics(path):
    """A path of uvw in a convolution, with W[m] = √(2l2+1) C[l1+m, l2, l3±m] W_uv."""
    l1, l2, l3 = path
    first, sh, out = o3.Irrep(l1, 1), o3.Irrep(l2, (-1) ** l2), o3.Irrep(l3, (-1) ** l2)
    instructions = [(0, 0, 0, "uvw", True)]
    conv = o3.TensorProductConv(
        [(2, first)], [(1, sh)], [(3, out)], instructions, internal_weights=True
    ).double()
    so2 = o3.SO2Linear([(2, first)], [(3, out)]).double()
    w = conv.weight.detach() * conv.instructions[0].path_weight
    table = (2 * l2 + 1) ** 0.5 * o3.wigner_3j(l1, l2, l3, DOUBLE)
    parts = []
    for instruction in so2.instructions:
        m = instruction.order
        assert instruction.turned == (l1 + l2 + l3) % 2
        c = table[l1 + m, l2, l3 - m if instruction.turned else l3 + m]
        parts.append(w * c / instruction.path_weight)
    x, edge, (src, dst) = (
        normal(4, 2 * first.dim),
        normal(9, 3, seed=1),
        torch.arange(18).view(2, 9),
    )
    src, dst = src % 4, dst % 4
    y = o3.spherical_harmonics(l2, edge, True, "component")
    exact = conv(x, y, None, src, dst).detach()
    messages = so2(x[src], edge, torch.cat(parts)).detach()
    found = torch.zeros_like(exact).index_add(0, dst, messages)
    assert_within_bound(found, exact, exact.abs() + exact.abs().max(), 64)


@pytest.mark.parametrize("parity", ["1o", "1e"])
def test_as_many_weights_as_paths(parity):
    edge = o3.Irrep(parity)
    for a, c in itertools.product(o3.Irrep.iterator(3), repeat=2):
        so2 = o3.SO2Linear([(1, a)], [(1, c)], irreps_edge=edge)
        harmonics = [o3.Irrep(degree, edge.p**degree) for degree in range(7)]
        assert so2.weight_numel == sum(c in list(a * b) for b in harmonics)


def test_gradients_at_the_poles_and_at_the_seam():
    """Finite, and those of the harmonics; along ±y, and where half a turn sets in."""
    chosen = case()
    x, _, weight = chosen.inputs
    edge = torch.tensor([[0, 2.0, 0], [0, -3, 0], [1, 0, 0], [1, -0.0, 2], [0, -1e-9, 1]]).double()
    compared = []
    for function in (chosen.oracle, call):
        leaf = edge.clone().requires_grad_()
        z = function(x, leaf, weight, chosen.tables["module"]).square().sum()
        (slope,) = torch.autograd.grad(z, leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), leaf)
        compared.append((slope.detach(), second))
    for exact, found in zip(*compared, strict=True):
        assert_within_bound(found, exact, exact.abs() + exact.abs().max(), 4096)


def test_no_direction():
    """An edge of length 0 passes scalars alone; nothing is nan, forward and backward."""
    module = o3.SO2Linear(IRREPS_IN, IRREPS_OUT).double()
    x, edge = normal(3, module.irreps_in.dim), torch.zeros(3, 3, dtype=DOUBLE).requires_grad_()
    z = module(x, edge)
    first = module.instructions[0]
    assert (first.i_in, first.i_out, first.path_shape) == (0, 0, (2, 2))
    exact = (x[:, :2] @ module.weight[:4].view(2, 2) * first.path_weight).detach()
    assert_within_bound(z[:, :2].detach(), exact, exact.abs() + exact.abs().max(), 8)
    assert z[:, 2:].abs().max() == 0
    (slope,) = torch.autograd.grad(z.square().sum(), edge, create_graph=True)
    (second,) = torch.autograd.grad((slope + edge).square().sum(), edge)
    assert slope.abs().max() == 0
    assert torch.isfinite(second).all()


def test_rotations_in_place_of_edges():
    module = o3.SO2Linear(IRREPS_IN, IRREPS_OUT).double()
    x, edge = normal(6, module.irreps_in.dim), normal(6, 3, seed=1)
    turn = o3.edge_rotation(edge)
    assert_same_bits(module(x, rotation=turn), module(x, edge), "by rotations")
    about_y = o3.matrix_y(normal(6, seed=2))
    exact, found = module(x, edge).detach(), module(x, rotation=about_y @ turn).detach()
    assert_within_bound(found, exact, exact.abs() + exact.abs().max(), 64)


def test_rows_broadcast():
    module = o3.SO2Linear(IRREPS_IN, IRREPS_OUT, shared_weights=False).double()
    x, edge = normal(4, 1, module.irreps_in.dim), normal(3, 3, seed=1)
    weight = normal(1, 1, module.weight_numel, seed=2)
    found = module(x, edge, weight)
    assert found.shape == (4, 3, module.irreps_out.dim)
    one = module(x[2], edge[1:2], weight[0])
    assert_within_bound(found[2, 1:2], one, one.abs() + one.abs().max(), 64)
    assert module(x[:0], edge, weight).shape == (0, 3, module.irreps_out.dim)


def test_variance_is_kept():
    module = o3.SO2Linear(IRREPS_IN, IRREPS_OUT, irreps_edge="1e").double()
    counts = {}
    for i in module.instructions:
        place = i.i_out, i.order
        counts[place] = counts.get(place, 0) + i.path_shape[0] * i.path_weight**2
    ones = torch.tensor(list(counts.values()), dtype=DOUBLE)
    assert_within_bound(ones, torch.ones_like(ones), torch.ones_like(ones), 8)


def test_nothing_in_or_out():
    x, edge = torch.randn(2, 0), torch.randn(2, 3)
    assert o3.SO2Linear("", "2x1o+0x0e")(x, edge).tolist() == [[0.0] * 6] * 2
    assert o3.SO2Linear("0x1o", "1x1o")(x, edge).tolist() == [[0.0] * 3] * 2
    assert o3.SO2Linear("1x1o", "")(edge, edge).shape == (2, 0)


def test_errors():
    module = o3.SO2Linear("1o", "1o")
    x, edge = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(DTypeError, match="neither was given of edge and rotation"):
        module(x)
    with pytest.raises(DTypeError, match="both were given of edge and rotation"):
        module(x, edge, rotation=torch.eye(3))
    with pytest.raises(DTypeError, match=r"edge is a list: it must be a torch\.Tensor"):
        module(x, [0.0, 1.0, 0.0])
    with pytest.raises(ShapeError, match=r"edge is \(2, 2\): it must be \(\.\.\., 3\)"):
        module(x, edge[:, :2])
    with pytest.raises(ShapeError, match=r"rotation is \(2, 3\): it must be \(\.\.\., 3, 3\)"):
        module(x, rotation=edge)
    with pytest.raises(ShapeError, match="leading dimensions of the inputs are"):
        module(x, edge[:1].expand(3, 3))
    with pytest.raises(ShapeError, match="irreps_edge is 2e: an edge is a vector"):
        o3.SO2Linear("1o", "1o", irreps_edge="2e")
    with pytest.raises(ShapeError, match="mmax is -1: a degree must be 0 or more"):
        o3.SO2Linear("1o", "1o", -1)
    assert repr(module) == "SO2Linear(1x1o -> 1x1o | 2 weights)"
