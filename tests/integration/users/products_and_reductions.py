"""A user's file: every public name of products and reductions, and of the README's examples.

`test_user_types` checks it with `mypy --strict`, and runs it.  Each `assert_type` is what editors
and type checkers show for the call.
"""

from typing import Any, assert_type

import numpy as np
import torch
from torch import Tensor

import torchweft.compat.spconv.pytorch as spconv
from torchweft import clifford, o3, products, reductions, voxels
from torchweft.core.explain import Explanation
from torchweft.products import SparseProductInfo, SparseScaleInfo
from torchweft.reductions import cluster
from torchweft.reductions import numpy as arrays
from torchweft.reductions.formula.node import node, var

Array = np.ndarray[Any, Any]

# The README's examples

tp = o3.FullyConnectedTensorProduct("8x0e + 8x1o", "1x0e + 1x1o", "16x0e + 8x1o")
assert_type(tp.irreps_in1.randn(100, -1), Tensor)
assert_type(o3.from_mace.__name__, str)
assert_type([o3.from_nequip, o3.from_sevennet, o3.from_allegro][0].__name__, str)
assert_type([clifford.from_gatr.__name__, clifford.from_lgatr.__name__], list[str])
assert_type(clifford.from_cegnn.__name__, str)
places = torch.tensor([[0, 3, 1, 2], [0, 3, 1, 3], [0, 5, 0, 7]], dtype=torch.int32)
sparse = spconv.SparseConvTensor(torch.randn(3, 4), places, [8, 8, 8], batch_size=1)
assert_type(sparse, spconv.SparseConvTensor)
spconv.SubMConv3d(4, 16, 3, indice_key="a")(sparse)
scan = voxels.SparseTensor(torch.randn(3, 4), places)
assert_type(scan, voxels.SparseTensor)
assert_type(voxels.sparse_conv3d(scan, torch.randn(27, 4, 8), 3), voxels.SparseTensor)

p, q = torch.rand(10, 3), torch.rand(20, 3)
lazy_p, lazy_q = reductions.LazyTensor(p[:, None]), reductions.LazyTensor(q[None])
K = (-((lazy_p - lazy_q) ** 2).sum(-1) / 0.02).exp()
assert_type(K, reductions.LazyTensor)
assert_type(K @ torch.ones(20, 1), Tensor)
assert_type(reductions.SamplesLoss("sinkhorn", blur=0.05)(p, q), Tensor)

nodes = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
w = torch.tensor([0.5, 1.0, 2.0, 1.0], requires_grad=True)
edges = products.sparse_product_info(index1=[0, 2, 1, 0], index=[0, 2, 2, 0])
assert_type(edges, SparseProductInfo)
assert_type(products.sparse_vecsca(nodes, w, edges), Tensor)
assert_type(products.sparse_vecsca.explain(nodes, w, edges), Explanation)
assert_type(products.sparse_vecsca.__name__, str)

# products

index = torch.tensor([0, 2, 1])
seg = torch.tensor([0, 1, 3])
info = products.sparse_product_info(index, index, index)
infos = products.sparse_product_infos([0, 2, 1], range(3), np.arange(3), scale=[1.0, 2.0, 3.0])
assert_type(infos, tuple[SparseProductInfo, SparseProductInfo, SparseProductInfo])

x, y = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
assert_type(products.indexed_mul_scale_gather(x, y, index1=index, seg=seg), Tensor)
assert_type(products.indexed_mul(x, y, index, index), Tensor)
assert_type(products.indexed_mul_scale_segment(x, y, torch.ones(3), seg=seg), Tensor)
assert_type(products.mul_segment(x, y, seg, accumulated=True), Tensor)
assert_type(products.indexed_mul_segment(x, y, index, index, seg), Tensor)
assert_type(products.accumulated_indexed_mul_segment(x, y, index, index, seg), Tensor)
assert_type(products.sparse_mul(x, y, info, backend="torch"), Tensor)

x, y = torch.randn(4, 3, 2), torch.randn(4, 3, 5)
assert_type(products.indexed_outer_scale_gather(x, y, index1=index, seg=seg), Tensor)
assert_type(products.indexed_outer(x, y, index, index), Tensor)
assert_type(products.indexed_outer_scale_segment(x, y, torch.ones(3), seg=seg), Tensor)
assert_type(products.outer_segment(x, y, seg, accumulated=True), Tensor)
assert_type(products.indexed_outer_segment(x, y, index, index, seg), Tensor)
assert_type(products.accumulated_indexed_outer_segment(x, y, index, index, seg), Tensor)
assert_type(products.sparse_outer(x, y, info, backend="torch"), Tensor)

x, y = torch.randn(4, 3, 2), torch.randn(4, 3, 2)
assert_type(products.indexed_inner_scale_gather(x, y, index1=index, seg=seg), Tensor)
assert_type(products.indexed_inner(x, y, index, index), Tensor)
assert_type(products.indexed_inner_scale_segment(x, y, torch.ones(3), seg=seg), Tensor)
assert_type(products.inner_segment(x, y, seg, accumulated=True), Tensor)
assert_type(products.indexed_inner_segment(x, y, index, index, seg), Tensor)
assert_type(products.accumulated_indexed_inner_segment(x, y, index, index, seg), Tensor)
assert_type(products.sparse_inner(x, y, info, backend="torch"), Tensor)

x, y = torch.randn(4, 3, 2), torch.randn(4, 3, 2, 5)
assert_type(products.indexed_vecmat_scale_gather(x, y, index1=index, seg=seg), Tensor)
assert_type(products.indexed_vecmat(x, y, index, index), Tensor)
assert_type(products.indexed_vecmat_scale_segment(x, y, torch.ones(3), seg=seg), Tensor)
assert_type(products.vecmat_segment(x, y, seg, accumulated=True), Tensor)
assert_type(products.indexed_vecmat_segment(x, y, index, index, seg), Tensor)
assert_type(products.accumulated_indexed_vecmat_segment(x, y, index, index, seg), Tensor)
assert_type(products.sparse_vecmat(x, y, info, backend="torch"), Tensor)

x, y = torch.randn(4, 3, 2), torch.randn(4, 3)
assert_type(products.indexed_vecsca_scale_gather(x, y, index1=index, seg=seg), Tensor)
assert_type(products.indexed_vecsca(x, y, index, index), Tensor)
assert_type(products.indexed_vecsca_scale_segment(x, y, torch.ones(3), seg=seg), Tensor)
assert_type(products.vecsca_segment(x, y, seg, accumulated=True), Tensor)
assert_type(products.indexed_vecsca_segment(x, y, index, index, seg), Tensor)
assert_type(products.accumulated_indexed_vecsca_segment(x, y, index, index, seg), Tensor)
assert_type(products.sparse_vecsca(x, y, info, backend="torch"), Tensor)

x, y = torch.randn(4, 3), torch.randn(4, 3, 2)
assert_type(products.indexed_scavec_scale_gather(x, y, index1=index, seg=seg), Tensor)
assert_type(products.indexed_scavec(x, y, index, index), Tensor)
assert_type(products.indexed_scavec_scale_segment(x, y, torch.ones(3), seg=seg), Tensor)
assert_type(products.scavec_segment(x, y, seg, accumulated=True), Tensor)
assert_type(products.indexed_scavec_segment(x, y, index, index, seg), Tensor)
assert_type(products.accumulated_indexed_scavec_segment(x, y, index, index, seg), Tensor)
assert_type(products.sparse_scavec(x, y, info, backend="torch"), Tensor)

x, y = torch.randn(4, 3, 2, 5), torch.randn(4, 3, 2)
assert_type(products.indexed_mat_t_vec_scale_gather(x, y, index1=index, seg=seg), Tensor)
assert_type(products.indexed_mat_t_vec(x, y, index, index), Tensor)
assert_type(products.indexed_mat_t_vec_scale_segment(x, y, torch.ones(3), seg=seg), Tensor)
assert_type(products.mat_t_vec_segment(x, y, seg, accumulated=True), Tensor)
assert_type(products.indexed_mat_t_vec_segment(x, y, index, index, seg), Tensor)
assert_type(products.accumulated_indexed_mat_t_vec_segment(x, y, index, index, seg), Tensor)
assert_type(products.sparse_mat_t_vec(x, y, info, backend="torch"), Tensor)

assert_type(info.to(torch.float64), SparseProductInfo)
assert_type(SparseScaleInfo(index=index, out_size=3).cpu(), SparseScaleInfo)
forward, backward = products.sparse_scale_infos(index, index)
assert_type(products.sparse_scale(nodes, forward, backward), Tensor)
assert_type(products.segment_sum(nodes, index, num_segments=3), Tensor)
assert_type(products.segment_mean(nodes, index), Tensor)
assert_type(products.segment_max(nodes, indptr=seg), Tensor)
assert_type(products.segment_min(nodes, indptr=seg), Tensor)
assert_type(products.segment_softmax(nodes, index), Tensor)
assert_type(products.segment_logsumexp(nodes, index), Tensor)
assert_type(products.knn_graph(nodes, 2), tuple[Tensor, Tensor])
assert_type(products.radius_graph(nodes, 2.0, max_neighbors=1), tuple[Tensor, Tensor])
products.forget(index, seg)

# Lazy tensors

assert_type(reductions.Vi(p) - reductions.Vj(q) + reductions.Pm(0.5), reductions.LazyTensor)
assert_type(reductions.Var(p, cat=0), reductions.LazyTensor)
assert_type(1 - K, reductions.LazyTensor)
assert_type(K**2 * K, reductions.LazyTensor)
assert_type(K < 0.5, reductions.LazyTensor)
assert_type(lazy_p[0], reductions.LazyTensor)
assert_type(reductions.LazyTensor.cat((lazy_p, lazy_q)), reductions.LazyTensor)
assert_type(lazy_p.concat(lazy_q).sqnorm2().sqrt(), reductions.LazyTensor)
assert_type(K.shape, tuple[int, ...])
assert_type(K.T, reductions.LazyTensor)
assert_type(K.sum(-1), reductions.LazyTensor)
assert_type(K.sum(dim=-1), reductions.LazyTensor)
assert_type(K.sum(1), Tensor)
assert_type(K.sum(dim=0), Tensor)
assert_type(K.sum(2), Any)  # the components without a batch, over j with one
assert_type(K.min(0), Tensor)
assert_type(K.argmax(dim=1, backend="torch"), Tensor)
assert_type(K.logsumexp(1, weight=lazy_q, precision="ieee"), Tensor)
assert_type(K.sumsoftmaxweight(lazy_q, dim=1), Tensor)
assert_type(K.argKmin(3, dim=1), Tensor)
assert_type(K.Kmin_argKmin(3, dim=1), tuple[Tensor, Tensor])
assert_type(K.min_argmin(1), tuple[Tensor, Tensor])
assert_type(K.max_reduction(1), Tensor)
assert_type(K.matvec(torch.ones(20)), Tensor)

symbolic = reductions.Vi(0, 3) * reductions.Vj(1, 3)
assert_type(symbolic.sum(1, call=False)(p, q), Tensor)
assert_type(symbolic.min_argmin(1, call=False)(p, q), tuple[Tensor, Tensor])

square = (-reductions.Vi(p).sqdist(reductions.Vj(p))).exp()
assert_type(square.solve(torch.ones(10, 1), alpha=0.1), Tensor)

wave = K.exp1j()
assert_type(wave, reductions.ComplexLazyTensor)
assert_type(2 * wave, reductions.ComplexLazyTensor)
assert_type(wave.abs(), reductions.LazyTensor)
assert_type(wave.real, reductions.LazyTensor)
assert_type(wave.conj(), reductions.ComplexLazyTensor)
assert_type(wave.sum(1), Tensor)

# Formulas, systems, clouds

aliases = ["x = Vi(3)", "y = Vj(3)", "a = Vj(1)"]
gaussian_sum = reductions.Genred("Exp(-SqDist(x, y)) * a", aliases, axis=1)
assert_type(gaussian_sum(p, q, torch.ones(20, 1)), Tensor)
system = reductions.KernelSolve("Exp(-SqDist(x, y)) * a", aliases, "a", axis=1)
assert_type(system(p, p, torch.ones(10, 1), alpha=0.1), Tensor)
for generic in (
    reductions.generic_sum,
    reductions.generic_logsumexp,
    reductions.generic_argmin,
    reductions.generic_argkmin,
):
    assert_type(generic("SqDist(x, y)", "a = Vi(1)", *aliases[:2])(p, q), Tensor)
assert_type(reductions.conjugate_gradient(lambda v: 2 * v, torch.ones(4)), Tensor)
assert_type(reductions.nearest(p, q, 3), Tensor)
masses = torch.full((10,), 0.1)
assert_type(reductions.sinkhorn_divergence(masses, p, masses, p + 1), Tensor)
f, g = reductions.SamplesLoss(potentials=True)(p, q)

labels = cluster.grid_cluster(p, 0.5)
points, ascending = cluster.sort_clusters(p, labels)
assert_type(points, Tensor)
assert_type(cluster.sort_clusters([p, p], labels), tuple[list[Tensor], Tensor])
ranges, centroids, weights = cluster.cluster_ranges_centroids(points, ascending)
assert_type(cluster.cluster_ranges(ascending), Tensor)
assert_type(cluster.cluster_centroids(points, ascending), Tensor)
keep = torch.ones(len(ranges), len(ranges)) > 0
mask: cluster.Ranges = cluster.from_matrix(ranges, ranges, keep)
assert_type(cluster.swap_axes(mask), cluster.Ranges | None)
square.ranges = reductions.BlockSparsity(mask)
assert_type(reductions.BlockSparsity.bands(4, 4, width=1).t(), reductions.BlockSparsity)

# NumPy's arrays

a, b = np.ones((4, 3)), np.ones((5, 3))
of_arrays = arrays.Vi(a) - arrays.Vj(b) * arrays.Pm(0.5)
assert_type(of_arrays, arrays.LazyTensor)
assert_type(arrays.LazyTensor(a[:, None]).sum(0), Array)
assert_type(arrays.Var(a, cat=0).sqnorm2().min_argmin(0), tuple[Array, Array])
assert_type(of_arrays.sqnorm2() @ np.ones((5, 1)), Array)
assert_type(of_arrays.exp1j().abs().sum(1), Array)
assert_type(arrays.ComplexLazyTensor(a[:, None] * 1j).real.sum(0), Array)
assert_type(arrays.Genred("SqDist(x, y)", aliases[:2], axis=1)(a, b), Array)
solved = arrays.KernelSolve("Exp(-SqDist(x, y)) * a", aliases, "a", axis=1)
assert_type(solved(a, a, np.ones((4, 1)), alpha=0.1), Array)
for of_array in (
    arrays.generic_sum,
    arrays.generic_logsumexp,
    arrays.generic_argmin,
    arrays.generic_argkmin,
):
    assert_type(of_array("SqDist(x, y)", "a = Vi(1)", *aliases[:2])(a, b), Array)
lab = arrays.cluster.grid_cluster(a, 0.5)
assert_type(arrays.cluster.sort_clusters(a, lab)[1], Array)
assert_type(arrays.cluster.cluster_ranges(lab), Array)
assert_type(arrays.cluster.cluster_centroids(a, lab), Array)
bounds, middles, sums = arrays.cluster.cluster_ranges_centroids(a, lab)
blocks = arrays.cluster.from_matrix(bounds, bounds, np.ones((1, 1)) > 0)
assert_type(arrays.cluster.swap_axes(blocks) is None, bool)

# The source of a kernel

assert_type(reductions.source("sums", node("sqdist", var(0, 3, 0), var(1, 3, 1))), str)
