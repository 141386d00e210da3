"""Convolution on graphs: the guide's numbers, forces, graphs, radial weights, doors, errors.

Its contract (values, derivatives, every subset, doors) is in test_o3_tensor_product.

Seen red with: src and dst exchanged, num_nodes taken from dst, radial weights of another edge; an
entry of a symbol of degree 6 one thousandth too large; the first call settled behind its result.
"""

import functools
import itertools
import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.conftest import INTERPRETED
from torchweft import o3
from torchweft.errors import DTypeError, IndexRangeError, ShapeError
from torchweft.testing import assert_o3_equivariant, assert_within_bound
from torchweft.testing.contract import assert_same_bits

if INTERPRETED:
    pytest.skip("kernels have a contract of their own", allow_module_level=True)

DOUBLE = torch.float64
HAND = o3.TensorProductConv(
    "1x0e+1x1o",
    "1x1o",
    "1x0e+1x1o",
    [(1, 0, 0, "uuu", True), (0, 0, 1, "uuu", True)],
)
X = torch.tensor([[1.0, 2, 3, 4], [2, 0, 1, 0]], dtype=DOUBLE)
Y = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 2]], dtype=DOUBLE)
W = torch.tensor([[1.0, 1], [2, -1], [1, 3]], dtype=DOUBLE)
SRC, DST = torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1])


def layer(layout="mul_ir", **options):
    return o3.TensorProductConv(
        "4x0e+4x1o",
        "0e+1o+2e",
        "4x0e+4x1o+4x1e",
        [
            (0, 0, 0, "uvu", True),
            (1, 1, 0, "uvu", True),
            (0, 1, 1, "uvu", True),
            (1, 2, 1, "uvu", True),
            (1, 1, 2, "uvu", True),
        ],
        layout=layout,
        **options,
    )


def problem(conv, nodes=6, edges=20, dtype=DOUBLE):
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, nodes, (2, edges), generator=generator)
    x, y, w = (
        torch.randn(n, d, generator=generator, dtype=DOUBLE).to(dtype)
        for n, d in (
            (nodes, conv.irreps_in1.dim),
            (edges, conv.irreps_in2.dim),
            (edges, conv.weight_numel),
        )
    )
    return x, y, w, src, dst


def test_the_convolution_by_hand():
    exact = torch.tensor([[2 / math.sqrt(3), 0, -2, 0], [2 / math.sqrt(3), 1, 0, 12]], dtype=DOUBLE)
    assert_within_bound(HAND(X, Y, W, SRC, DST), exact, exact.abs() + 12, 4)
    assert_within_bound(HAND(X, Y, W, o3.Graph(SRC, DST, 2)), exact, exact.abs() + 12, 4)


def test_more_rows_than_sources():
    found = HAND(X, Y, W, SRC, DST, 5)
    assert_same_bits(found[:2], HAND(X, Y, W, SRC, DST), "the first rows")
    assert found[2:].tolist() == [[0.0] * 4] * 3
    one = HAND(X, Y[:0], W[:0], SRC[:0], DST[:0])
    assert one.tolist() == [[0.0] * 4] * 2


def test_the_order_of_edges_does_not_matter():
    conv = layer()
    x, y, w, src, dst = problem(conv)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    exact = conv(x, y, w, src, dst)
    found = conv(x, y[order], w[order], src[order], dst[order])
    assert_within_bound(found, exact, exact.abs() + exact.abs().max(), 64)


def test_radial_weights():
    conv = layer()
    x, y, _, src, dst = problem(conv)
    h, a = torch.randn(20, 8, dtype=DOUBLE), torch.randn(8, conv.weight_numel, dtype=DOUBLE)
    expected = conv(x, y, h @ a, src, dst)
    found = conv(x, y, src=src, dst=dst, num_nodes=6, radial=h, radial_weight=a)
    assert_same_bits(found, expected, "radial")
    graph = o3.Graph(src, dst, 6)
    assert_same_bits(conv(x, y, src=graph, radial=h, radial_weight=a), expected, "on a graph")


@pytest.mark.parametrize("shared", [False, True])
def test_empty_weights_that_need_gradients(shared):
    """Seen red with: their gradient, written where the number 1 of all products stands."""
    conv = o3.TensorProductConv(
        "1x0e+1x1o", "1x1o", "1x0e+1x1o", [(1, 0, 0, "uuu", False), (0, 0, 1, "uuu", False)],
        shared_weights=shared, internal_weights=False,
    )  # fmt: skip
    exact, x = conv(X, Y, None, SRC, DST), X.clone().requires_grad_()
    empty = torch.zeros((0,) if shared else (3, 0), dtype=DOUBLE, requires_grad=True)
    for weight in (empty, None):
        z = conv(x, Y, weight, SRC, DST)
        assert_same_bits(z.detach(), exact, "values")
        z.square().sum().backward()
    assert empty.grad is None or not empty.grad.numel()


def test_weights_of_the_module_are_shared():
    conv = layer(internal_weights=True).double()
    x, y, _, src, dst = problem(conv)
    assert conv.shared_weights
    tp = o3.TensorProduct(
        conv.irreps_in1,
        conv.irreps_in2,
        conv.irreps_out,
        [i[:5] for i in conv.instructions],
    ).double()
    tp.load_state_dict(conv.state_dict())
    exact = torch.zeros(6, conv.irreps_out.dim, dtype=DOUBLE).index_add(0, dst, tp(x[src], y))
    found = conv(x, y, None, src, dst).detach()
    assert_within_bound(found, exact.detach(), exact.detach().abs() + exact.abs().max(), 64)


@pytest.mark.parametrize("layout", ["mul_ir", "ir_mul"])
def test_equivariant(layout):
    conv = layer(layout)
    x, y, w, src, dst = problem(conv)
    assert_o3_equivariant(
        lambda x, y: conv(x, y, w, src, dst),
        [x, y],
        [conv.irreps_in1, conv.irreps_in2],
        conv.irreps_out,
        layout=layout,
    )


def test_equivariant_to_degree_six():
    irreps = o3.Irreps.spherical_harmonics(6)
    paths = [
        (i, j, k, "uvu", True)
        for i, j, k in itertools.product(range(7), repeat=3)
        if abs(i - j) <= k <= i + j and (i + j + k) % 2 == 0
    ]
    conv = o3.TensorProductConv(irreps, irreps, irreps, paths)
    x, y, w, src, dst = problem(conv)
    assert_o3_equivariant(lambda x, y: conv(x, y, w, src, dst), [x, y], [irreps, irreps], irreps)


def energy(conv, positions, x, radial, src, dst):
    vectors = positions[dst] - positions[src]
    y = o3.spherical_harmonics(range(3), vectors, True, "component")
    h = torch.exp(-vectors.square().sum(-1, keepdim=True) * torch.arange(1.0, 4, dtype=DOUBLE))
    return conv(conv(x, y, h @ radial, src, dst)[:, :16], y, h @ radial, src, dst).square().sum()


def test_forces_are_the_slope_of_the_energy():
    """Against central differences of every coordinate, in float64; self loops have no force."""
    conv = layer()
    generator = torch.Generator().manual_seed(0)
    randn = torch.randn
    positions = randn(6, 3, generator=generator, dtype=DOUBLE)
    x = randn(6, 16, generator=generator, dtype=DOUBLE)
    radial = randn(3, conv.weight_numel, generator=generator, dtype=DOUBLE)
    src, dst = torch.randint(0, 6, (2, 24), generator=generator)
    leaf = positions.clone().requires_grad_()
    (slope,) = torch.autograd.grad(energy(conv, leaf, x, radial, src, dst), leaf)
    assert torch.isfinite(slope).all()
    step = 2.0**-17  # the cube root of the round-off: both errors of the quotient are least
    found = torch.zeros_like(positions)
    for i in range(6):
        for k in range(3):
            moved = torch.zeros_like(positions)
            moved[i, k] = step
            up, down = (energy(conv, positions + s * moved, x, radial, src, dst) for s in (1, -1))
            found[i, k] = (up - down) / (2 * step)
    size = slope.abs().max()
    assert (found - slope).abs().max() < 64 * step**2 * size


def test_force_training():
    """Gradients of forces by x, the radial weights and positions agree with differences."""
    conv = layer()
    generator = torch.Generator().manual_seed(0)
    src, dst = torch.tensor([0, 1, 2, 2, 1]), torch.tensor([1, 0, 1, 2, 2])
    inputs = [
        torch.randn(*shape, generator=generator, dtype=DOUBLE).requires_grad_()
        for shape in ((3, 3), (3, 16), (3, conv.weight_numel))
    ]

    def run(positions, x, radial):
        return energy(conv, positions, x, radial, src, dst) / 1000

    torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("call", ["tensors", "graph"])
def test_compiled_and_exported(call):
    conv = layer()
    x, y, w, src, dst = problem(conv)
    where = (o3.Graph(src, dst, 6),) if call == "graph" else (src, dst, 6)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x, y, w, *where), conv(x, y, w, *where), "compiled")
    if call == "tensors":
        program = torch.export.export(conv, (x, y, w, *where)).module()
        assert_same_bits(program(x, y, w, *where), conv(x, y, w, *where), "exported")


@pytest.mark.parametrize("kind", ["convolution", "product"])
def test_the_first_call_may_be_checkpointed(kind):
    """It keeps for the backward pass what the second one does, of kinds that are settled."""
    paths = [(0, 0, 0, "uvu", True), (1, 1, 0, "uvu", True), (0, 1, 1, "uvu", True)]
    irreps, rows = "4x0e+4x1o", len(SRC)
    if kind == "convolution":
        module = o3.TensorProductConv(irreps, "0e+1o", irreps, paths)
        call, nodes = functools.partial(module, src=o3.Graph(SRC, DST, 2)), 2
    else:
        module = o3.TensorProduct(irreps, "0e+1o", irreps, paths, shared_weights=False)
        call, nodes = module, rows
    shapes = (nodes, 16), (rows, 4), (rows, module.weight_numel)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    z = checkpoint(call, *leaves, use_reentrant=False)
    found = torch.autograd.grad(z.square().sum(), leaves)
    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other, "a gradient")


def test_errors():
    conv = layer()
    x, y, w, src, dst = problem(conv)
    graph = o3.Graph(src, dst, 6)
    cases = [
        ((x, y, w), {}, DTypeError, "src is missing: each edge reads row"),
        ((x, y, w, src), {}, DTypeError, "dst is missing"),
        ((x, y, w, graph, dst), {}, ShapeError, "a Graph was given with dst or num_nodes"),
        ((x, y, w, src[:3], dst), {}, ShapeError, "src has 3 edges and dst has 20"),
        ((x[:3], y, w, src, dst), {"num_nodes": 6}, IndexRangeError, "there are 3 rows of x"),
        ((x, y, w, src, dst, 2), {}, IndexRangeError, "there are 2 rows to add to"),
        ((x, y[:4], w, src, dst), {}, ShapeError, r"y is \(4, 9\) but the graph has 20 edges"),
        ((x, y, w[:4], src, dst), {}, ShapeError, r"weight is \(4, 20\) but the graph has 20"),
        ((x[:4], y, w, graph), {}, ShapeError, r"x is \(4, 16\) but the graph has 6 sources"),
        ((x[:, :3], y, w, src, dst), {}, ShapeError, r"takes 4x0e\+4x1o: it must be \(…, 16\)"),
        ((x, y, None, src, dst), {}, ShapeError, r"weight is missing: .* takes \(…, 20\)"),
        ((x, y, w, src, dst), {"radial": w}, ShapeError, "weight, radial were given with"),
        (
            (x, y, None, src, dst),
            {"radial": w, "radial_weight": w[:3]},
            ShapeError,
            r"they must be \(E, H\) and \(H, 20\)",
        ),
    ]
    for args, options, error, text in cases:
        with pytest.raises(error, match=text):
            conv(*args, **options)
