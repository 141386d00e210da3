"""Every module of every family with a batch for a rank: `build(name)`, `batch(name, rank)`.

A module stands behind a parameter of its own, so that it trains where it has none, and so that
gradients pass through it.
"""

from __future__ import annotations

import functools

import torch
from torch import nn

from tests.nearness import beside, model_beside
from torchweft import clifford, o3, products, voxels
from torchweft.clifford import PGA, Algebra
from torchweft.reductions import SamplesLoss, Vi, Vj

DOUBLE = torch.float64
SPACE, STA, F = Algebra.cl(3), Algebra.cl(1, 3), 4
ROWS = (5, 3)
"""Uneven batches: rank r has ROWS[r % 2] rows."""


class Scaled(nn.Module):
    """module(scale · x, …), of voxels the features: FSDP2 finds no other tensors in results."""

    def __init__(self, module):
        super().__init__()
        self.scale, self.module = nn.Parameter(torch.full((1,), 0.75)), module

    def forward(self, x, *rest):
        y = x * self.scale if torch.is_tensor(x) else x.replace(x.feats * self.scale)
        z = self.module(y, *rest)
        return z.feats if isinstance(z, voxels.SparseTensor) else z


class Kernel(nn.Module):
    """Σ_j exp(−|x_i − y_j|²) b_j as a reduction inside a module."""

    def __init__(self):
        super().__init__()
        self.y, self.b = nn.Parameter(torch.randn(7, 3)), nn.Parameter(torch.randn(7, 2))

    def forward(self, x):
        distance = ((Vi(x) - Vj(self.y)) ** 2).sum(-1)
        return (-distance).exp() @ self.b


class Message(nn.Module):
    """x[src] ∘ W y by edges: a product inside a module."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x, y, src):
        return products.indexed_mul(x, self.linear(y), src)


def rows(*shape):
    """(n, *shape) of n rows."""
    return lambda n: (torch.randn(n, *shape, dtype=DOUBLE),)


def pairs(*shapes):
    return lambda n: tuple(torch.randn(n, *shape, dtype=DOUBLE) for shape in shapes)


def multivectors(algebra, features=F, scalars=None, times=1):
    """(blades, n, features), and (n, scalars)."""

    def made(n):
        x = [torch.randn(algebra.num_blades, n, features, dtype=DOUBLE) for _ in range(times)]
        return (*x, *([] if scalars is None else [torch.randn(n, scalars, dtype=DOUBLE)]))

    return made


def conditional(components, order):
    """Items x (components, n, F), s (n, 3), and others y (components, 3, 2), t (3, 2)."""

    def made(n):
        shapes = {"x": (components, n, F), "y": (components, 3, 2), "s": (n, 3), "t": (3, 2)}
        return tuple(torch.randn(*shapes[name], dtype=DOUBLE) for name in order)

    return made


def edges(n):
    """A ring of n nodes, and edges back."""
    node = torch.arange(n)
    return torch.cat([node, (node + 1) % n]), torch.cat([(node + 1) % n, node])


def cloud(channels=2, dim=3):
    def made(n):
        coords = (torch.rand(1, *(n,) * dim) < 0.6).nonzero()
        feats = torch.randn(len(coords), channels, dtype=DOUBLE)
        return (voxels.SparseTensor(feats, coords, (n,) * dim, 1),)

    return made


def conv_batch(n):
    graph = o3.Graph(*edges(n), n)
    x, y, w = (torch.randn(*s, dtype=DOUBLE) for s in ((n, 6), (2 * n, 3), (2 * n, 2)))
    return x, y, w, graph


def egcl_batch(n):
    return torch.randn(8, n, F, dtype=DOUBLE), clifford.message_plan(*edges(n), n)


def cg_batch(n):
    shapes = ((n, 3), (8, n, F), (8, 2 * n, 3), (8, n, 1), (n, 2))
    h, x, *attributes = (torch.randn(*shape, dtype=DOUBLE) for shape in shapes)
    return h, x, clifford.message_plan(*edges(n), n), *attributes


def tagging_batch(n):
    momenta, scalars = (torch.randn(2, n, width, dtype=DOUBLE) for width in (4, 2))
    plan = clifford.message_plan(*edges(2 * n), 2 * n)
    return momenta, scalars, plan, torch.ones(2, n, dtype=DOUBLE)


def message_batch(n):
    return (*pairs((4,))(n), torch.randn(2 * n, 3, dtype=DOUBLE), edges(n)[0])


SILU = nn.functional.silu
O3 = {
    "Activation": (lambda: o3.Activation("2x0e+3x0o", [torch.tanh, torch.tanh]), rows(5)),
    "BatchNorm": (lambda: o3.BatchNorm("2x0e+1o"), rows(5)),
    "BesselBasis": (lambda: o3.BesselBasis(4.0), rows(1)),
    "Dropout": (lambda: o3.Dropout("2x0e+1o", 0.0), rows(5)),
    "ElementwiseTensorProduct": (
        lambda: o3.ElementwiseTensorProduct("2x1o", "2x1o"),
        pairs((6,), (6,)),
    ),
    "Extract": (lambda: o3.Extract("2x0e+1o", ["1o", "2x0e"], [(1,), (0,)]), rows(5)),
    "ExtractIr": (lambda: o3.ExtractIr("2x0e+1o", "1o"), rows(5)),
    "FromS2Grid": (lambda: o3.FromS2Grid((6, 5), 2), rows(6, 5)),
    "FullTensorProduct": (lambda: o3.FullTensorProduct("2x1o", "2x1o"), pairs((6,), (6,))),
    "FullyConnectedNet": (lambda: o3.FullyConnectedNet([3, 8, 2], SILU), rows(3)),
    "FullyConnectedTensorProduct": (
        lambda: o3.FullyConnectedTensorProduct("2x1o", "1o", "3x0e+2e"),
        pairs((6,), (3,)),
    ),
    "Gate": (lambda: o3.Gate("2x0e", [torch.tanh], "3x0e", [SILU], "3x1o"), rows(14)),
    "Gating": (lambda: o3.Gating("2x0e+1o"), pairs((5, F), (3, F))),
    "Identity": (lambda: o3.Identity("2x0e+1o", "2x0e+1o"), rows(5)),
    "IrrepWiseLinear": (lambda: o3.IrrepWiseLinear("2x0e+1o", 3, 4), rows(5, 3)),
    "LayerNorm": (lambda: o3.LayerNorm("2x0e+1o"), rows(5)),
    "Legendre": (lambda: o3.Legendre([0, 1, 2]), pairs((1,), (1,))),
    "Linear": (lambda: o3.Linear("2x0e+1o", "3x0e+2x1o", biases=True), rows(5)),
    "Norm": (lambda: o3.Norm("2x0e+1o"), rows(5)),
    "NormActivation": (lambda: o3.NormActivation("2x0e+1o", torch.tanh, bias=True), rows(5)),
    "PolynomialCutoff": (lambda: o3.PolynomialCutoff(4.0), rows(1)),
    "RadialBasis": (lambda: o3.RadialBasis(4.0), rows(1)),
    "ReducedTensorProducts": (
        lambda: o3.ReducedTensorProducts("ij=ji", i="1o"),
        pairs((3,), (3,)),
    ),
    "S2Activation": (lambda: o3.S2Activation("0e+1o+2e", torch.tanh, 6), rows(9)),
    "SO2Linear": (lambda: o3.SO2Linear("2x0e+2x1o", "3x1o"), pairs((8,), (3,))),
    "SO3Activation": (lambda: o3.SO3Activation(1, 1, torch.tanh, 4), rows(10)),
    "SphericalHarmonics": (lambda: o3.SphericalHarmonics("0e+1o+2e", True), rows(3)),
    "SphericalHarmonicsAlphaBeta": (
        lambda: o3.SphericalHarmonicsAlphaBeta([0, 1, 2]),
        pairs((), ()),
    ),
    "SymmetricContraction": (
        lambda: o3.SymmetricContraction("4x0e+4x1o", "4x0e", 2, 3),
        lambda n: (*rows(16)(n), torch.arange(n) % 3),
    ),
    "TensorDot": (lambda: o3.TensorDot("2x0e+1o"), pairs((5, F), (5, F))),
    "TensorProduct": (
        lambda: o3.TensorProduct("2x1o", "1o", "2x0e", [(0, 0, 0, "uvu", True)]),
        pairs((6,), (3,)),
    ),
    "TensorProductConv": (
        lambda: o3.TensorProductConv("2x1o", "1o", "2x0e", [(0, 0, 0, "uvu", True)]),
        conv_batch,
    ),
    "TensorSquare": (lambda: o3.TensorSquare("2x1o", "3x0e"), rows(6)),
    "ToS2Grid": (lambda: o3.ToS2Grid(2, (6, 5)), rows(9)),
    "normalize2mom": (lambda: o3.normalize2mom(torch.tanh), rows(5)),
}
GATR = (F, 2, F, 3, 1, 8)
CLIFFORD = {
    "AxialGATr": (
        lambda: clifford.AxialGATr(*GATR, blocks=2, heads=2),
        lambda n: (torch.randn(16, n, 3, F, dtype=DOUBLE), torch.randn(n, 3, 3, dtype=DOUBLE)),
    ),
    "ConditionalLGATr": (
        lambda: clifford.ConditionalLGATr(*GATR, 2, 2, blocks=1, heads=(2, 2)),
        conditional(16, "xyst"),
    ),
    "ConditionalLGATrBlock": (
        lambda: clifford.ConditionalLGATrBlock(F, 3, 2, 2, heads=(2, 2)),
        conditional(16, "xsyt"),
    ),
    "ConditionalLGATrSlim": (
        lambda: clifford.ConditionalLGATrSlim(*GATR, 2, 2, blocks=1, heads=2),
        conditional(4, "xyst"),
    ),
    "CrossAttention": (
        lambda: clifford.CrossAttention(F, 3, 2, 2, heads=2),
        conditional(16, "xsyt"),
    ),
    "GradeDropout": (lambda: clifford.GradeDropout(0.0), multivectors(PGA, scalars=3)),
    "LGATrCrossAttention": (
        lambda: clifford.LGATrCrossAttention(F, 3, 2, 2, heads=2),
        conditional(16, "xsyt"),
    ),
    "LGATrSlim": (
        lambda: clifford.LGATrSlim(*GATR, blocks=1, heads=2),
        lambda n: (torch.randn(4, n, F, dtype=DOUBLE), torch.randn(n, 3, dtype=DOUBLE)),
    ),
    "RotaryEncoding": (lambda: clifford.RotaryEncoding(4), rows(4)),
    "CEMLP": (lambda: clifford.CEMLP(F, 3, SPACE), multivectors(SPACE)),
    "CGLayer": (lambda: clifford.CGLayer(F, 3, SPACE), cg_batch),
    "ConvexHullCGMLP": (lambda: clifford.ConvexHullCGMLP(2, 2), rows(2, 5)),
    "LorentzCGGNN": (lambda: clifford.LorentzCGGNN(2, 3, 1, 2, 4, 2, 1, 0.0), tagging_batch),
    "O3CGMLP": (lambda: clifford.O3CGMLP(3, 2, num_layers=2), rows(3, 3)),
    "O5CGMLP": (clifford.O5CGMLP, rows(2, 5)),
    "CliffordConv1d": (lambda: clifford.CliffordConv1d(SPACE, 2, 3, 3), rows(2, 5, 8)),
    "CliffordConv2d": (lambda: clifford.CliffordConv2d(Algebra.cl(2), 2, 3, 3), rows(2, 5, 5, 4)),
    "CliffordConv3d": (lambda: clifford.CliffordConv3d(SPACE, 2, 3, 3), rows(2, 4, 4, 4, 8)),
    "CliffordLayer": (lambda: clifford.CliffordLayer(F, 3), multivectors(SPACE)),
    "EGCL": (lambda: clifford.EGCL(F, SPACE), egcl_batch),
    "EquiLayerNorm": (lambda: clifford.EquiLayerNorm(), multivectors(PGA, scalars=3)),
    "EquiLinear": (lambda: clifford.EquiLinear(F, 3), multivectors(PGA)),
    "FullyConnectedGeometricProduct": (
        lambda: clifford.FullyConnectedGeometricProduct(F, 3, SPACE),
        multivectors(SPACE, times=2),
    ),
    "FullyConnectedSteerableGeometricProduct": (
        lambda: clifford.FullyConnectedSteerableGeometricProduct(F, 3, SPACE),
        multivectors(SPACE),
    ),
    "GATr": (lambda: clifford.GATr(*GATR, blocks=1, heads=2), multivectors(PGA, scalars=3)),
    "GATrBlock": (
        lambda: clifford.GATrBlock(F, 3, 2),
        lambda n: (*multivectors(PGA, scalars=3)(n), torch.randn(16, n, 1, dtype=DOUBLE)),
    ),
    "GeometricBilinear": (
        lambda: clifford.GeometricBilinear(F, 4, 3, 2),
        lambda n: (*multivectors(PGA, scalars=3)(n), torch.randn(16, n, 1, dtype=DOUBLE)),
    ),
    "GeometricMLP": (
        lambda: clifford.GeometricMLP(F, 3),
        lambda n: (*multivectors(PGA, scalars=3)(n), torch.randn(16, n, 1, dtype=DOUBLE)),
    ),
    "GeometricProduct": (
        lambda: clifford.GeometricProduct(F, SPACE),
        multivectors(SPACE, times=2),
    ),
    "GradeNormalization": (lambda: clifford.GradeNormalization(F, SPACE), multivectors(SPACE)),
    "LGATr": (lambda: clifford.LGATr(*GATR, blocks=1, heads=2), multivectors(STA, scalars=3)),
    "LGATrAttention": (
        lambda: clifford.LGATrAttention(F, 3, 2),
        multivectors(STA, scalars=3),
    ),
    "LGATrBlock": (lambda: clifford.LGATrBlock(F, 3, 2), multivectors(STA, scalars=3)),
    "LGATrMLP": (lambda: clifford.LGATrMLP(F, 3), multivectors(STA, scalars=3)),
    "MVLayerNorm": (lambda: clifford.MVLayerNorm(F, SPACE), multivectors(SPACE)),
    "MVSiLU": (lambda: clifford.MVSiLU(F, SPACE), multivectors(SPACE)),
    "MixedLinear": (lambda: clifford.MixedLinear(F, 2, 3, 2), multivectors(PGA, scalars=3)),
    "MultivectorGELU": (clifford.MultivectorGELU, multivectors(SPACE)),
    "MultivectorLinear": (lambda: clifford.MultivectorLinear(F, 3, SPACE), multivectors(SPACE)),
    "MultivectorRMSNorm": (lambda: clifford.MultivectorRMSNorm(SPACE), multivectors(SPACE)),
    "ScalarGatedNonlinearity": (
        clifford.ScalarGatedNonlinearity,
        multivectors(SPACE, scalars=3),
    ),
    "SelfAttention": (lambda: clifford.SelfAttention(F, 3, 2), multivectors(PGA, scalars=3)),
    "SteerableGeometricProduct": (
        lambda: clifford.SteerableGeometricProduct(F, SPACE),
        multivectors(SPACE),
    ),
}


def inverse():
    down = voxels.SparseConv3d(2, 3, 2, 2, indice_key="down")
    return voxels.SparseSequential(down, voxels.SparseInverseConv3d(3, 2, 2, indice_key="down"))


VOXELS = {
    "SparseConv3d": (lambda: voxels.SparseConv3d(2, 3, 3, 2, 1), cloud()),
    "SparseConvTranspose3d": (lambda: voxels.SparseConvTranspose3d(2, 3, 2, 2), cloud()),
    "SparseInverseConv3d": (inverse, cloud()),
    "SubMConv3d": (lambda: voxels.SubMConv3d(2, 3, 3), cloud()),
    "SparseGroupNorm": (lambda: voxels.SparseGroupNorm(1, 2), cloud()),
    "SparseInstanceNorm": (lambda: voxels.SparseInstanceNorm(2, affine=True), cloud()),
    "SparseLayerNorm": (lambda: voxels.SparseLayerNorm(2), cloud()),
    "GlobalPool": (voxels.GlobalPool, cloud()),
    "SparseAvgPool": (lambda: voxels.SparseAvgPool(2, 2), cloud()),
    "SparseMaxPool": (lambda: voxels.SparseMaxPool(2, 2), cloud()),
    "SparseUpsample": (lambda: voxels.SparseUpsample(2), cloud()),
    "SparseSequential": (
        lambda: voxels.SparseSequential(voxels.SubMConv3d(2, 3, 3), nn.ReLU()),
        cloud(),
    ),
}
OTHERS = {
    "SamplesLoss": (lambda: SamplesLoss(blur=0.5), pairs((3,), (3,))),
    "reduction": (Kernel, rows(3)),
    "product": (Message, message_batch),
}
FAMILIES = {"o3": O3, "clifford": CLIFFORD, "voxels": VOXELS, "others": OTHERS}
CASES = O3 | CLIFFORD | VOXELS | OTHERS
OF_OTHER_DIMENSIONS = {
    f"{kind}{dim}"
    for kind in ("SparseConv", "SparseConvTranspose", "SparseInverseConv", "SubMConv")
    for dim in ("1d", "2d", "4d", "3D")
} | {"SparseConvTransposed3D", "SparseConvolution", "SparseInverseConvolution"}
BASES = {"MultivectorModule", "SO3Grid", "SparseModule"}
"""Without a forward of their own."""
OVER_RANKS = {"SparseBatchNorm"}
"""Of which each rank's result depends on all: tests of their own."""


def build(name, seed=None):
    """The module, in float64, with the same parameters at every call; with a seed see `beside`.

    Parameters are small, so that gradients of deep networks are not much larger than one.
    """
    torch.manual_seed(0)
    module = Scaled(CASES[name][0]()).double()
    for parameter in module.module.parameters():
        nn.init.normal_(parameter, 0.0, 0.25)
    return module if seed is None else model_beside(module, seed)


def batch(name, rank, seed=None):
    """The arguments of a rank; with a seed see `beside`."""
    torch.manual_seed(1 + rank)
    given = CASES[name][1](ROWS[rank % 2])
    return given if seed is None else tuple(_beside(x, seed) for x in given)


def _beside(x, seed):
    if isinstance(x, voxels.SparseTensor):
        return x.replace(*beside([x.feats], seed))
    floating = torch.is_tensor(x) and x.is_floating_point()
    return beside([x], seed)[0] if floating else x


@functools.cache
def public_modules():
    """Names of the modules of all families."""
    from torchweft import reductions

    families = (clifford, o3, products, reductions, voxels)
    return {
        name
        for family in families
        for name in family.__all__
        if isinstance(getattr(family, name), type) and issubclass(getattr(family, name), nn.Module)
    }
