"""Plausible wrong inputs of the functions that are used most: an error of ours, never a bare one.

Each tensor of a good call, which goes before and fills the caches, is replaced by what is no
strided tensor, or by one of another rank.  Red before: a NotImplementedError of torch for sparse
and nested tensors in every family, an AttributeError for None, lists and arrays in many functions.
"""

import contextlib

import pytest
import torch

from torchweft import clifford, o3, products, reductions, voxels
from torchweft.errors import DTypeError, IndexRangeError, ShapeError, WeftError
from torchweft.reductions import Genred, KernelSolve, Pm, SamplesLoss, Vi, Vj, cluster

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]

NOT_STRIDED = {
    "sparse": (torch.Tensor.to_sparse, r"layout torch\.sparse_coo: .* strided .*to_dense"),
    "nested": (lambda t: torch.nested.nested_tensor([t, t]), r"nested tensor: .*to_padded_tensor"),
    "jagged": (
        lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged),
        r"nested tensor: .* Pass torch\.nested\.to_padded_tensor",
    ),
}
OTHERS = {
    "None": lambda t: None,
    "a list": torch.Tensor.tolist,
    "an array": torch.Tensor.numpy,
    "a text": str,
    "a number": lambda t: t.flatten()[0],
    "empty": lambda t: t[:0],
}

SRC, DST, SEG = torch.tensor([0, 1, 2, 4]), torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 4])
X, Y = torch.rand(7, 3), torch.rand(9, 3)
LABELS = torch.tensor([0, 0, 1, 1, 2, 2, 2])
MULTIVECTORS = torch.rand(8, 5, 4)
ALGEBRA = clifford.Algebra((1, 1, 1))
PATHS = len(ALGEBRA.paths)
FEATS = torch.rand(20, 4)
COORDS = torch.stack([torch.zeros(20), torch.arange(20) // 5, torch.arange(20) % 5], 1).long()
VOXELS = voxels.SparseTensor(FEATS, COORDS, (8, 8), 1)
WEIGHTED = o3.TensorProduct("2x1o", "1o", "2x0e", [(0, 0, 0, "uvu", True)], shared_weights=False)
CONV = o3.TensorProductConv("2x1o", "1o", "2x0e", [(0, 0, 0, "uvu", True)], shared_weights=False)
INFO = o3.irreps_info("2x0e+1o")
GENRED = Genred("Exp(-SqDist(x,y))*b", ["x=Vi(3)", "y=Vj(3)", "b=Vj(2)"], axis=1)
SOLVE = KernelSolve("Exp(-SqDist(x,y))*b", ["x=Vi(3)", "y=Vj(3)", "b=Vj(2)"], "b", axis=1)


def convolution(feats, weight, bias, scale, shift, residual):
    steps = {"scale": scale, "shift": shift, "residual": residual}
    return voxels.sparse_conv(VOXELS.replace(feats), weight, 3, bias, **steps)


CALLS = {
    "indexed_mul_scale_gather": (
        products.indexed_mul_scale_gather,
        (torch.rand(3, 5, 4), torch.rand(3, 6, 4), torch.rand(4), SRC, DST, SEG),
    ),
    "mul_segment": (products.mul_segment, (torch.rand(3, 4, 2), torch.rand(3, 4, 2), SEG)),
    "indexed_outer": (
        products.indexed_outer,
        (torch.rand(3, 5, 4), torch.rand(3, 6, 2), SRC, DST),
    ),
    "spherical_harmonics": (lambda x: o3.spherical_harmonics([0, 1], x, True), (X,)),
    "angles_to_matrix": (o3.angles_to_matrix, (torch.rand(4), torch.rand(4), torch.rand(4))),
    "axis_angle_to_matrix": (o3.axis_angle_to_matrix, (torch.rand(4, 3), torch.rand(4))),
    "D_from_matrix": (o3.Irreps("0e+1o").D_from_matrix, (torch.eye(3)[None],)),
    "o3.Linear": (o3.Linear("2x0e+1o", "3x0e+2x1o"), (torch.rand(5, 5),)),
    "TensorProduct": (WEIGHTED, (torch.rand(4, 6), torch.rand(4, 3), torch.rand(4, 2))),
    "TensorProductConv": (
        lambda *given: CONV(*given, num_nodes=5),
        (torch.rand(5, 6), torch.rand(4, 3), torch.rand(4, 2), SRC, DST),
    ),
    "radial": (
        lambda x, y, h, a: CONV(x, y, src=SRC, dst=DST, num_nodes=5, radial=h, radial_weight=a),
        (torch.rand(5, 6), torch.rand(4, 3), torch.rand(4, 8), torch.rand(8, 2)),
    ),
    "Graph": (lambda src, dst: o3.Graph(src, dst, 5), (SRC, DST)),
    "Gate": (o3.Gate("2x0e", [torch.tanh], "0e", [torch.tanh], "1o"), (torch.rand(5, 6),)),
    "Norm": (o3.Norm("2x0e+1o"), (torch.rand(5, 5),)),
    "BatchNorm": (o3.BatchNorm("2x0e+1o"), (torch.rand(5, 5),)),
    "tensor_dot_uu": (
        lambda x, y: o3.tensor_dot_uu(x, y, INFO),
        (torch.rand(5, 5, 2), torch.rand(5, 5, 2)),
    ),
    "BesselBasis": (o3.BesselBasis(5.0), (torch.rand(5, 1),)),
    "PolynomialCutoff": (o3.PolynomialCutoff(5.0), (torch.rand(5, 1),)),
    "RadialBasis": (o3.RadialBasis(5.0), (torch.rand(5, 1),)),
    "soft_one_hot_linspace": (
        lambda x: o3.soft_one_hot_linspace(x, 0.0, 1.0, 4, "gaussian", True),
        (torch.rand(5),),
    ),
    "geometric_product": (
        lambda x, y: clifford.geometric_product(x, y, ALGEBRA),
        (MULTIVECTORS, MULTIVECTORS),
    ),
    "fully_connected_geometric_product": (
        lambda *given: clifford.fully_connected_geometric_product(*given, ALGEBRA),
        (MULTIVECTORS, MULTIVECTORS, torch.rand(PATHS, 4, 6)),
    ),
    "gelu_geometric_product_norm": (
        lambda *given: clifford.gelu_geometric_product_norm(*given, ALGEBRA),
        (MULTIVECTORS, MULTIVECTORS, torch.rand(4, PATHS)),
    ),
    "reverse": (lambda x: clifford.reverse(x, ALGEBRA), (MULTIVECTORS,)),
    "CliffordLayer": (clifford.CliffordLayer(4, 3), (MULTIVECTORS,)),
    "MultivectorLinear": (clifford.MultivectorLinear(4, 6, ALGEBRA), (MULTIVECTORS,)),
    "Vi": (Vi, (X,)),
    "K @ b": (
        lambda x, y, b: (-Vi(x).sqdist(Vj(y))).exp() @ b,
        (X, Y, torch.rand(9, 2)),
    ),
    "argKmin": (lambda x, y: Vi(x).sqdist(Vj(y)).argKmin(2, dim=1), (X, Y)),
    "a parameter": (lambda x, p: (Vi(x) * Pm(p)).sum(1), (X, torch.rand(3))),
    "Genred": (GENRED, (X, Y, torch.rand(9, 2))),
    "KernelSolve": (lambda x, b: SOLVE(x, x, b, alpha=1.0), (X, torch.rand(7, 2))),
    "SamplesLoss": (SamplesLoss("gaussian"), (X, Y)),
    "sinkhorn_divergence": (
        reductions.sinkhorn_divergence,
        (torch.full((7,), 1 / 7), X, torch.full((9,), 1 / 9), Y),
    ),
    "grid_cluster": (lambda x: cluster.grid_cluster(x, 0.5), (X,)),
    "sort_clusters": (cluster.sort_clusters, (X, LABELS)),
    "cluster_centroids": (cluster.cluster_centroids, (X, LABELS)),
    "from_matrix": (
        cluster.from_matrix,
        (SEG[None, :2], SEG[None, :2], torch.ones(1, 1, dtype=torch.bool)),
    ),
    "SparseTensor": (lambda f, c: voxels.SparseTensor(f, c, (8, 8), 1), (FEATS, COORDS)),
    "from_dense": (voxels.SparseTensor.from_dense, (torch.rand(1, 2, 3, 3),)),
    "sparse_conv": (
        convolution,
        (FEATS, torch.rand(9, 4, 6), *(torch.rand(6) for _ in range(3)), torch.rand(20, 6)),
    ),
    "voxelize": (
        lambda p, f, b: voxels.voxelize(p, 0.5, f, b),
        (torch.rand(20, 2), FEATS, COORDS[:, 0]),
    ),
    "devoxelize": (lambda p: voxels.devoxelize(VOXELS, p, 0.5), (torch.rand(20, 2),)),
    "z_order": (voxels.z_order, (COORDS[:, 1:],)),
}


def replaced(name, change):
    """The call with one tensor after the other replaced."""
    function, given = CALLS[name]
    for _ in range(2):
        function(*given)
    for place, tensor in enumerate(given):
        yield lambda p=place, t=tensor: function(*given[:p], change(t), *given[p + 1 :])


@pytest.mark.parametrize("kind", NOT_STRIDED)
@pytest.mark.parametrize("name", CALLS)
def test_sparse_and_nested_tensors(name, kind):
    change, match = NOT_STRIDED[kind]
    for call in replaced(name, change):
        with pytest.raises(DTypeError, match=match):
            call()


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("name", CALLS)
def test_no_bare_errors(name, kind):
    for call in replaced(name, OTHERS[kind]):
        with contextlib.suppress(WeftError):  # some are served: no bias, an empty batch
            call()


TEXTS = {
    "a map of features": (lambda: voxels.kernel_map(FEATS, 3), DTypeError, r"tensor is a Tensor: "),
    "an offset that is not there": (
        lambda: voxels.kernel_map(VOXELS, 3).pairs(9),
        IndexRangeError,
        r"k is 9 but the map has 9 offsets: it must lie in 0\.\.8\. Pass",
    ),
    "an offset that is no number": (
        lambda: voxels.kernel_map(VOXELS, 3).pairs("1"),
        DTypeError,
        r"k is '1': it must be an integer\. Pass",
    ),
    "counts": (lambda: voxels.greedy_group(3), DTypeError, r"slots is a int: .* Pass counts"),
    "a number of offsets": (
        lambda: voxels.build_masks(voxels.kernel_map(VOXELS, 3), None, 20),
        DTypeError,
        r"num_offsets is None: it must be an integer\. Pass",
    ),
    "a path for a state": (
        lambda: voxels.from_spconv("model.pt", VOXELS),
        DTypeError,
        r"a str and a SparseTensor were given: .* Pass torch\.load",
    ),
    "instructions": (
        lambda: o3.TensorProduct("0e", "0e", "0e", None),
        DTypeError,
        r"instructions is a NoneType: it must be a list of them\. Write",
    ),
    "an instruction": (
        lambda: o3.TensorProduct("0e", "0e", "0e", [1]),
        DTypeError,
        r"instruction 0 is 1: it must be .* Write",
    ),
    "functions": (
        lambda: o3.Activation("0e", ["tanh"]),
        DTypeError,
        r"the functions are \['tanh'\]: they must be .* Pass",
    ),
    "complex rows": (
        lambda: o3.Norm("0e")(torch.ones(2, 1) * 1j),
        DTypeError,
        r"x is torch\.complex64: rows of irreps are real\. Pass x\.real",
    ),
    "integers for a vector": (
        lambda: o3.axis_angle_to_matrix(torch.ones(2, 3).long(), torch.ones(2)),
        DTypeError,
        r"axis is torch\.int64: it must be floating-point\. Pass axis\.float",
    ),
    "angles of two dtypes": (
        lambda: o3.angles_to_matrix(torch.ones(2), torch.ones(2).double(), torch.ones(2)),
        DTypeError,
        r"dtypes are alpha torch\.float32, beta torch\.float64, .* one real dtype\. Convert",
    ),
    "a radius": (
        lambda: o3.BesselBasis("5"),
        DTypeError,
        r"r_max is '5': it must be a number\. Pass",
    ),
    "features": (
        lambda: clifford.CliffordLayer(2.5, 3),
        DTypeError,
        r"n_features is 2\.5: it must be an integer\. Give",
    ),
    "an algebra": (
        lambda: clifford.grade_project(MULTIVECTORS, 1, (1, 1, 1)),
        DTypeError,
        r"algebra is a tuple: it must be .* Pass Algebra",
    ),
    "a formula": (
        lambda: Genred(None, ["x = Vi(3)"]),
        DTypeError,
        r"formula is None and aliases are .* texts\. Write",
    ),
    "aliases": (lambda: Genred("x", "x = Vi(3)"), DTypeError, r"aliases are 'x = Vi\(3\)'.*Write"),
    "an output": (
        lambda: reductions.generic_sum("x", 3, "x = Vi(3)"),
        ValueError,
        r"3 is given as a variable: it must read like .* Write",
    ),
    "a reduction": (
        lambda: Genred("x", ["x = Vi(3)"], ["Sum"]),
        ShapeError,
        r"the reduction is \['Sum'\]: it must be one of .* Pass",
    ),
    "labels": (
        lambda: cluster.cluster_centroids(X[:5], LABELS),
        ShapeError,
        r"x is \(5, 3\) but there are 7 labels: .* Pass the labels",
    ),
    "a scale": (
        lambda: products.sparse_mul(
            torch.rand(3, 5, 4),
            torch.rand(3, 6, 4),
            products.SparseProductInfo([1.0], SRC, DST, SEG),
        ),
        DTypeError,
        r"scale is a list: it must be a torch\.Tensor\. Pass",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name):
    call, error, match = TEXTS[name]
    with pytest.raises(error, match=match):
        call()
