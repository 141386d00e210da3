"""A user's file that uses every public name of the families of modules, for `mypy --strict`.

`assert_type` says what type checkers must find; the file runs too.
"""

from collections.abc import Callable
from typing import assert_type

import torch
from torch import Tensor, nn

import torchweft
from torchweft import clifford, compat, distributed, o3, voxels
from torchweft.distributed import cost

Angles = tuple[Tensor, Tensor, Tensor]

# Names of torchweft


def energy(x: Tensor) -> Tensor:
    return x.square().sum()


run = torchweft.capture(energy, torch.ones(3))
assert_type(run(torch.ones(3)), Tensor)
assert_type(torchweft.constant(torch.tensor([0, 1])), Tensor)
report = torchweft.explain(energy, torch.ones(3))
assert_type(report.bytes_min, int)
errors: list[type[torchweft.WeftError]] = [
    torchweft.BackendError,
    torchweft.CaptureError,
    torchweft.DTypeError,
    torchweft.DeviceError,
    torchweft.IndexRangeError,
    torchweft.RankError,
    torchweft.ShapeError,
]
families = [
    torchweft.clifford,
    torchweft.compat,
    torchweft.distributed,
    torchweft.o3,
    torchweft.products,
    torchweft.reductions,
    torchweft.testing,
    torchweft.voxels,
]

# Irreps and rotations

irreps = o3.Irreps("4x0e+4x1o")
assert_type(irreps.dim, int)
assert_type(list(o3.Irrep("1o") * "1o"), list[o3.Irrep])
assert_type(irreps.D_from_matrix(o3.rand_matrix()), Tensor)
alpha, beta, gamma = o3.rand_angles(3)
axis, angle = o3.rand_axis_angle(3)
q, R = o3.rand_quaternion(3), o3.rand_matrix(3)
assert_type(o3.identity_angles(3), Angles)
assert_type(o3.identity_quaternion(3), Tensor)
assert_type(o3.angles_to_axis_angle(alpha, beta, gamma), tuple[Tensor, Tensor])
assert_type(o3.angles_to_matrix(alpha, beta, gamma), Tensor)
assert_type(o3.angles_to_quaternion(alpha, beta, gamma), Tensor)
assert_type(o3.angles_to_xyz(alpha, beta), Tensor)
assert_type(o3.axis_angle_to_angles(axis, angle), Angles)
assert_type(o3.axis_angle_to_matrix(axis, angle), Tensor)
assert_type(o3.axis_angle_to_quaternion(axis, angle), Tensor)
assert_type(o3.compose_angles(alpha, beta, gamma, alpha, beta, gamma), Angles)
assert_type(o3.compose_axis_angle(axis, angle, axis, angle), tuple[Tensor, Tensor])
assert_type(o3.compose_quaternion(q, q), Tensor)
assert_type(o3.inverse_angles(alpha, beta, gamma), Angles)
assert_type(o3.inverse_quaternion(q), Tensor)
assert_type(o3.matrix_to_angles(R), Angles)
assert_type(o3.matrix_to_axis_angle(R), tuple[Tensor, Tensor])
assert_type(o3.matrix_to_quaternion(R), Tensor)
assert_type([o3.matrix_x(angle), o3.matrix_y(angle), o3.matrix_z(angle)], list[Tensor])
assert_type(o3.quaternion_to_angles(q), Angles)
assert_type(o3.quaternion_to_axis_angle(q), tuple[Tensor, Tensor])
assert_type(o3.quaternion_to_matrix(q), Tensor)
assert_type(o3.xyz_to_angles(axis), tuple[Tensor, Tensor])
assert_type(o3.wigner_3j(1, 1, 1), Tensor)
assert_type(o3.wigner_D(1, alpha, beta, gamma), Tensor)
assert_type([o3.so3_generators(1), o3.su2_generators(0.5)], list[Tensor])
assert_type(o3.change_basis_real_to_complex(1), Tensor)

# Functions of o3

directions = torch.randn(5, 3)
assert_type(o3.spherical_harmonics([0, 1], directions, True, "component"), Tensor)
assert_type(o3.spherical_harmonics_alpha(1, alpha), Tensor)
assert_type(o3.spherical_harmonics_alpha_beta([0, 1], alpha, beta), Tensor)
assert_type(o3.spherical_harmonics_s2_grid(1, 4, 5), tuple[Tensor, Tensor, Tensor, Tensor])
assert_type(o3.s2_grid(4, 5), tuple[Tensor, Tensor])
assert_type(o3.soft_one_hot_linspace(alpha, 0.0, 1.0, 3, "gaussian", True), Tensor)
assert_type(o3.soft_unit_step(alpha), Tensor)
assert_type(o3.moment(torch.tanh, 2), Tensor)
assert_type(o3.edge_rotation(directions), Tensor)
info: o3.IrrepsInfo = o3.irreps_info("2x0e+1o")
features = torch.randn(3, 5, 2)
assert_type(o3.tensor_dot_uu(features, features, info), Tensor)
assert_type(o3.gating(features, torch.rand(3, 3, 2), info), Tensor)
assert_type(o3.irrep_wise_linear(features, torch.randn(3, 2, 4), info), Tensor)

# Graphs and potentials of o3

src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
graph = o3.Graph(src, dst, num_nodes=3)
assert_type(graph.num_edges, int)
edges = o3.neighbour_list(torch.randn(3, 3), 2.0)
assert_type(edges, tuple[Tensor, Tensor, Tensor])
assert_type(o3.NeighbourList(2.0)(torch.randn(3, 3)), tuple[Tensor, Tensor, Tensor])


def springs(numbers: Tensor, vectors: Tensor, graph: o3.Graph) -> Tensor:
    lengths: Tensor = vectors.norm(dim=1)
    return (lengths - 1).square().sum()


calculator = o3.calculator(springs, cutoff=2.0)
check = o3.check
converters: list[Callable[[nn.Module], nn.Module]] = [
    o3.from_allegro,
    o3.from_e3nn,
    o3.from_mace,
    o3.from_nequip,
    o3.from_sevennet,
]

# Modules of o3

paths = [(0, 0, 0, "uvu", True), (1, 0, 1, "uvu", True)]
conv = o3.TensorProductConv(irreps, "0e", irreps, paths, precision="tf32", layout="ir_mul")
found: Tensor = conv(torch.randn(3, 16), torch.randn(3, 1), torch.randn(3, 8), graph)
product = o3.TensorProduct(irreps, "0e", irreps, paths, internal_weights=True)
first: o3.Instruction = product.instructions[0]
assert_type(product.right(torch.randn(3, 1)), Tensor)
linear = o3.Linear(irreps, irreps, biases=True)
assert_type(o3.to_e3nn(linear), dict[str, Tensor])
layers: list[nn.Module] = [
    o3.Activation("4x0e", [torch.tanh]),
    o3.BatchNorm(irreps),
    o3.BesselBasis(5.0),
    o3.Dropout(irreps, 0.1),
    o3.ElementwiseTensorProduct(irreps, irreps, ["0e"], backend="torch"),
    o3.Extract("0e+1o", ["0e"], [(0,)]),
    o3.ExtractIr("0e+1o", "0e"),
    o3.FromS2Grid((4, 5), 1),
    o3.FullTensorProduct(irreps, "1o", path_normalization="element"),
    o3.FullyConnectedNet([2, 4, 1], torch.tanh),
    o3.FullyConnectedTensorProduct(irreps, "0e+1o", irreps, shared_weights=True),
    o3.Gate("4x0e", [torch.tanh], "4x0e", [torch.sigmoid], "4x1o"),
    o3.Gating("2x0e+1o"),
    o3.Identity(irreps, irreps),
    o3.IrrepWiseLinear("2x0e+1o", 2, 4),
    o3.LayerNorm(irreps),
    o3.Legendre([0, 1]),
    o3.Norm(irreps),
    o3.NormActivation(irreps, torch.sigmoid),
    o3.PolynomialCutoff(5.0),
    o3.RadialBasis(5.0),
    o3.ReducedTensorProducts("ij=ji", i="1o"),
    o3.S2Activation("0e+1o", torch.tanh, 4),
    o3.SO2Linear(irreps, irreps),
    o3.SO3Activation(1, 1, torch.tanh, 2),
    o3.SO3Grid(1, 2),
    o3.SphericalHarmonics("0e+1o", normalize=True),
    o3.SphericalHarmonicsAlphaBeta([0, 1]),
    o3.SymmetricContraction(irreps, "4x0e", correlation=2, num_elements=3),
    o3.TensorDot("2x0e+1o"),
    o3.TensorSquare(irreps),
    o3.ToS2Grid(1, (4, 5)),
    o3.normalize2mom(torch.tanh),
]
tensors: list[o3.Irreps] = [o3.CartesianTensor("ij=ji"), o3.SphericalTensor(1, 1, -1)]

# Functions of clifford

algebra = clifford.Algebra((1, 1, 1))
x, y = torch.randn(8, 3, 2), torch.randn(8, 3, 2)
weight, matrices = torch.randn(2, 20), torch.randn(20, 2, 4)
assert_type(algebra.paths, tuple[tuple[int, int, int], ...])
assert_type([clifford.PGA, clifford.SPACETIME], list[clifford.Algebra])
products: list[Callable[[Tensor, Tensor, clifford.Algebra], Tensor]] = [
    clifford.anticommutator,
    clifford.commutator,
    clifford.geometric_product,
    clifford.inner,
    clifford.left_contraction,
    clifford.meet,
    clifford.project,
    clifford.regressive,
    clifford.reject,
    clifford.right_contraction,
    clifford.sandwich,
    clifford.wedge,
]
assert_type([f(x, y, algebra) for f in products], list[Tensor])
maps: list[Callable[[Tensor, clifford.Algebra], Tensor]] = [
    clifford.conjugate,
    clifford.dual,
    clifford.exp,
    clifford.gelu,
    clifford.grade_involution,
    clifford.inverse,
    clifford.log,
    clifford.norm,
    clifford.reverse,
    clifford.rms_norm,
]
assert_type([f(x, algebra) for f in maps], list[Tensor])
assert_type(clifford.geometric_product(x, y, algebra, weight, blade_dim=0), Tensor)
assert_type(clifford.fully_connected_geometric_product(x, y, matrices, algebra), Tensor)
assert_type(clifford.gelu_geometric_product_norm(x, y, weight, algebra, norm="metric"), Tensor)
assert_type(clifford.grade_linear(x, torch.randn(4, 2, 4), None, algebra), Tensor)
assert_type(clifford.grade_project(x, (0, 2), algebra), Tensor)
assert_type(clifford.silu(x, torch.ones(4, 2), torch.ones(4, 2), algebra), Tensor)
layer = clifford.clifford_layer(x, torch.randn(4, 2, 2), torch.zeros(2), weight, algebra)
assert_type(layer, Tensor)
plane, flat = clifford.Algebra((1, 1)), torch.randn(4, 3, 2)
assert_type(clifford.fused_gelu_sgp_norm_2d(flat, flat, torch.randn(2, 10)), Tensor)
assert_type(clifford.fused_gelu_fcgp_norm_2d(flat, flat, torch.randn(10, 2, 4)), Tensor)
assert_type(clifford.fused_gelu_sgp_norm_3d(x, y, weight), Tensor)
assert_type(clifford.fused_gelu_fcgp_norm_3d(x, y, matrices, normalize=False), Tensor)
image, kernel = torch.randn(1, 2, 8, 8, 4), torch.randn(4, 3, 2, 3, 3)
assert_type(clifford.clifford_conv(image, kernel, None, plane, padding=1), Tensor)

# Geometry of clifford

vectors = torch.randn(3, 1, 3)
point, mirror = clifford.embed_point(vectors), clifford.embed_reflection(vectors, vectors)
assert_type(clifford.extract_point(point), Tensor)
assert_type(clifford.extract_reflection(mirror), Tensor)
assert_type(clifford.extract_plane(clifford.embed_plane(vectors, vectors)), Tensor)
assert_type(clifford.extract_rotation(clifford.embed_rotation(torch.randn(3, 1, 4))), Tensor)
assert_type(clifford.extract_translation(clifford.embed_translation(vectors)), Tensor)
assert_type(clifford.extract_vector(clifford.embed_vector(vectors, algebra), algebra), Tensor)
numbers = torch.randn(3, 1, 1)
assert_type(clifford.extract_scalar(clifford.embed_scalar(numbers, algebra), algebra), Tensor)
last = clifford.embed_pseudoscalar(numbers, algebra)
assert_type(clifford.extract_pseudoscalar(last, algebra), Tensor)
assert_type(clifford.join(point, point), Tensor)
assert_type(clifford.equivariant_join(point, point, point), Tensor)
s, heads = torch.randn(2, 5, 3), torch.randn(16, 2, 5, 4)
assert_type(clifford.geometric_attention(heads, heads, heads, s, s, s), tuple[Tensor, Tensor])

# Modules of clifford

plan: clifford.MessagePlan = clifford.message_plan(src, dst, num_nodes=3)
options: clifford.LGATrOptions = clifford.LGATR_2._replace(dropout=0.1)
assert options != clifford.LGATR_1
multivector_layers: list[clifford.MultivectorModule] = [
    clifford.CliffordLayer(2, dims=3),
    clifford.EquiLinear(2, 4),
    clifford.FullyConnectedGeometricProduct(2, 4, algebra),
    clifford.GeometricProduct(2, algebra),
    clifford.MVLayerNorm(2, algebra),
    clifford.MVSiLU(2, algebra),
    clifford.MultivectorLinear(2, 4, algebra),
    clifford.MultivectorRMSNorm(algebra),
]
networks: list[nn.Module] = [
    clifford.AxialGATr(1, 1, 4, 0, 1, 2, blocks=2, heads=2),
    clifford.CEMLP(2, 4, algebra),
    clifford.CGLayer(2, 4, clifford.SPACETIME),
    clifford.CliffordConv1d(plane, 2, 3, 3),
    clifford.CliffordConv2d(plane, 2, 3, (3, 3), padding="same"),
    clifford.CliffordConv3d(plane, 2, 3, 3),
    clifford.ConditionalLGATr(1, 1, 4, 0, 1, 2, 2, 0, blocks=1, heads=(2, 2)),
    clifford.ConditionalLGATrBlock(4, 2, 2, 1, heads=(2, 2)),
    clifford.ConditionalLGATrSlim(1, 0, 4, 2, 1, 2, 1, 2, blocks=1, heads=2, dropout=0.1),
    clifford.ConvexHullCGMLP(hidden_features=2),
    clifford.CrossAttention(4, 2, 3, 1, heads=2, pseudoscalar=True),
    clifford.EGCL(2, algebra),
    clifford.EquiLayerNorm(),
    clifford.FullyConnectedSteerableGeometricProduct(2, 4, algebra),
    clifford.GATr(1, 1, 4, 0, 1, 2, blocks=1, heads=2),
    clifford.GATrBlock(4, 2, heads=2),
    clifford.GeometricBilinear(4, 4, 2, 2),
    clifford.GeometricMLP(4, 2),
    clifford.GradeDropout(0.1),
    clifford.GradeNormalization(2, algebra),
    clifford.LGATr(1, 1, 4, 0, 1, 2, blocks=1, heads=2, options=options),
    clifford.LGATrAttention(4, 2, heads=2, dropout=0.1),
    clifford.LGATrBlock(4, 2, heads=2),
    clifford.LGATrCrossAttention(4, 2, 3, 1, heads=2, bias=False),
    clifford.LGATrMLP(4, 2),
    clifford.LGATrSlim(1, 0, 4, 2, 1, 2, blocks=1, heads=2),
    clifford.LorentzCGGNN(hidden_features_h=4, hidden_features_x=2, n_layers=1),
    clifford.MixedLinear(2, 4, 1, 2),
    clifford.MultivectorGELU(),
    clifford.O3CGMLP(hidden_features=2, num_layers=1),
    clifford.O5CGMLP(),
    clifford.RotaryEncoding(4),
    clifford.ScalarGatedNonlinearity("relu"),
    clifford.SelfAttention(4, 2, heads=2, head_scale=True),
    clifford.SteerableGeometricProduct(2, algebra),
]
state = {"weight": torch.randn(4, 2, 4), "bias": torch.zeros(1, 4, 1)}
assert_type(clifford.from_cegnn(state, algebra), dict[str, Tensor])
assert_type(clifford.from_gatr({"weight": torch.randn(4, 2, 9)}), dict[str, Tensor])
assert_type(clifford.from_lgatr({"weight": torch.randn(4, 2, 5)}), dict[str, Tensor])
assert_type(clifford.from_cliffordlayers({}, configuration={}), dict[str, Tensor])

# Tensors and functions of voxels

coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
scene = voxels.SparseTensor(torch.randn(2, 4), coords, spatial_shape=(8, 8, 8))
assert_type(scene.F, Tensor)
assert_type(scene.dense(), Tensor)
assert_type(voxels.sparse_conv(scene, torch.randn(27, 4, 4), 3), voxels.SparseTensor)
assert_type(voxels.sparse_conv3d(scene, torch.randn(27, 4, 4), 3), voxels.SparseTensor)
w = torch.randn(8, 4, 4)
down = voxels.sparse_conv(scene, w, 2, stride=2, submanifold=False, indice_key="down")
assert_type(voxels.sparse_inverse_conv(down, w, "down"), voxels.SparseTensor)
assert_type(voxels.cat([scene, scene]), voxels.SparseTensor)
assert_type(voxels.union([scene, scene]), voxels.SparseTensor)
assert_type(voxels.sparse_collate([scene, scene]), voxels.SparseTensor)
assert_type(voxels.sparse_max_pool(scene, 2), voxels.SparseTensor)
assert_type(voxels.sparse_avg_pool(scene, 2), voxels.SparseTensor)
assert_type(voxels.sparse_upsample(scene, 2), voxels.SparseTensor)
assert_type(voxels.global_pool(scene, "max"), Tensor)
points = torch.rand(10, 3)
grid, row = voxels.voxelize(points, 0.5)
assert_type(grid, voxels.SparseTensor)
assert_type(voxels.devoxelize(grid, points, 0.5, mode="trilinear"), Tensor)
box = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
hard = voxels.point_to_voxel(points, 0.5, box, max_points=4, max_voxels=8)
assert_type(hard, tuple[Tensor, Tensor, Tensor])
assert_type([voxels.z_keys(coords), voxels.hilbert_keys(coords)], list[Tensor])
assert_type([voxels.z_order(coords), voxels.hilbert_order(coords)], list[Tensor])
pairs = voxels.kernel_map(scene, 3)
assert_type(pairs, voxels.KernelMap)
assert_type(pairs.pairs(0), tuple[Tensor, Tensor])
masks = voxels.build_masks(pairs, num_offsets=27, num_points=2)
assert_type(masks, voxels.KernelMapMasks)
groups: voxels.GemmGroups = voxels.greedy_group([5, 3, 2])
assert_type(groups.groups, list[voxels.Group])
translations = voxels.onnx_translations

# Modules of voxels

convolutions: list[voxels.SparseConvolution] = [
    voxels.SparseConv1d(4, 4, 2, stride=2),
    voxels.SparseConv2d(4, 4, 2, stride=2),
    voxels.SparseConv3d(4, 4, (2, 2, 2), stride=2, outputs="floor"),
    voxels.SparseConv3D(4, 4, 2),
    voxels.SparseConv4d(4, 4, 2),
    voxels.SparseConvTranspose1d(4, 4, 2),
    voxels.SparseConvTranspose2d(4, 4, 2),
    voxels.SparseConvTranspose3D(4, 4, 2),
    voxels.SparseConvTranspose3d(4, 4, 2),
    voxels.SparseConvTranspose4d(4, 4, 2),
    voxels.SparseConvTransposed3D(4, 4, 2),
    voxels.SubMConv1d(4, 4, 3),
    voxels.SubMConv2d(4, 4, 3),
    voxels.SubMConv3D(4, 4, 3),
    voxels.SubMConv3d(4, 4, 3, bias=False),
    voxels.SubMConv4d(4, 4, 3),
]
inverses: list[voxels.SparseInverseConvolution] = [
    voxels.SparseInverseConv1d(4, 4, 2, indice_key="down"),
    voxels.SparseInverseConv2d(4, 4, 2, indice_key="down"),
    voxels.SparseInverseConv3D(4, 4, 2, indice_key="down"),
    voxels.SparseInverseConv3d(4, 4, 2, indice_key="down"),
    voxels.SparseInverseConv4d(4, 4, 2, indice_key="down"),
]
others: list[voxels.SparseModule] = [
    voxels.GlobalPool("max"),
    voxels.SparseAvgPool(2),
    voxels.SparseBatchNorm(4),
    voxels.SparseGroupNorm(2, 4),
    voxels.SparseInstanceNorm(4),
    voxels.SparseLayerNorm(4),
    voxels.SparseMaxPool(2),
    voxels.SparseUpsample(2),
]
network = voxels.SparseSequential(voxels.SubMConv3d(4, 4, 3, bias=False), nn.ReLU())
assert_type(voxels.prepare(network, scene), voxels.SparseTensor)
boxed = voxels.prepare(network, voxels.SparseTensor(scene.F, scene.C, (8, 8, 8), 2))
recorded = torchweft.capture(network, boxed, sizes=voxels.padded_sizes(boxed, 1.5))
assert_type(recorded, voxels.SparseSequential)
assert_type(convolutions[2].kernel_size, tuple[int, ...])
spconvs = voxels.from_spconv({"0.weight": torch.randn(4, 3, 3, 3, 4)}, network)
kernels = {"0.kernel": torch.randn(27, 4, 4)}
assert_type(spconvs["0.weight"], Tensor)
assert_type(voxels.from_minkowski(kernels, network)["0.weight"], Tensor)
assert_type(voxels.from_torchsparse(kernels, network)["0.weight"], Tensor)

# Names of compat

compat.install("torch_scatter")
compat.uninstall("torch_scatter")
assert_type(compat.names(), list[str])

# Names of distributed

ring_of_rows = torch.arange(4)
part: distributed.Shard = distributed.shard(ring_of_rows, ring_of_rows.roll(1), 4, 0, 1)
size: distributed.ShardSize = part.size(channels=4)
halo: distributed.Halo = part.halo()
assert_type(halo(torch.randn(4, 2)), Tensor)
assert_type(halo.add(torch.randn(4, 2)), Tensor)
assert_type(distributed.by_position(torch.randn(4, 3), 2), Tensor)
assert_type(distributed.round_robin(4, 2), Tensor)
assert_type(distributed.total(torch.ones(2)), Tensor)
assert_type(distributed.shard_voxels(scene, 0, 1), voxels.SparseTensor)
owners, potential = distributed.by_metis, distributed.potential
with distributed.all_pairs(), distributed.propagate_errors():
    pass


def spring(numbers: Tensor, vectors: Tensor, neighbours: distributed.Neighbours) -> Tensor:
    lengths: Tensor = vectors.norm(dim=1)
    return (lengths - 1).square().sum() / 4


line = torch.arange(2.0)[:, None] * torch.tensor([1.0, 0.0, 0.0])
atoms = distributed.Atoms(torch.arange(2), torch.ones(2), line, 0 * line, torch.ones(2))
neighbours = distributed.DistributedNeighbourList(2.0)(atoms.ids, line)
assert_type(distributed.forces_of(spring)(atoms, neighbours), tuple[Tensor, Tensor])
assert_type(distributed.Domains(line).owner(line), Tensor)
dynamics = distributed.VelocityVerlet(distributed.forces_of(spring), atoms, 0.1, cutoff=2.0)
assert_type(dynamics.atoms, distributed.Atoms)

step = cost.Step(1e-6, (512.0,))
prediction = cost.predict([cost.boxes(1000, 1.0, 1.0)], step, cost.INFINIBAND)
assert_type(prediction, cost.Prediction)
assert_type(cost.explain(halo, step, [cost.NVLINK]), cost.Cost)
assert_type(cost.ring(1000, 4), cost.Traffic)
assert_type(cost.traffic(ring_of_rows % 2, ring_of_rows, ring_of_rows, 2), list[cost.Traffic])
slow: cost.Network = cost.Network("slow", 1e9, 1e-5)
assert_type(distributed.cost.NVLINK, cost.Network)
