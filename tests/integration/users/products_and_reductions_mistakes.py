"""A user's file of mistakes: the comment of a line is the code of the error that mypy must report.

Lines without a comment have none.
"""

# ruff: noqa: B018

import numpy as np
import torch

from torchweft import products, reductions
from torchweft.reductions import cluster
from torchweft.reductions import numpy as arrays

x, index = torch.ones(3, 2), torch.tensor([0, 2, 1])
info = products.sparse_product_info(index)
K = reductions.LazyTensor(x[:, None]) - reductions.LazyTensor(x[None])

# Unknown names

products.indexed_mull  # attr-defined
products.segment_prod  # attr-defined
products.sparse_vecsca.explane  # attr-defined
reductions.LazyTensors  # attr-defined
reductions.numpy.nearest  # attr-defined
cluster.grid_clusters  # attr-defined
K.mean(1)  # attr-defined
K.exp().conj()  # attr-defined
info.index3  # attr-defined

# Parameters of products

products.indexed_mul(x)  # call-arg
products.indexed_mul(x, x, idx1=index)  # call-arg
products.indexed_mul(x, x, "index")  # arg-type
products.sparse_vecsca(x, x)  # call-arg
products.sparse_vecsca(x, x, index)  # arg-type
products.sparse_vecsca.explain(x, x)  # call-arg
products.mul_segment(x, x, index, accumulated=1.5)  # arg-type
products.segment_sum(x, num_segments="3")  # arg-type
products.knn_graph(x)  # call-arg
products.sparse_product_info("index")  # arg-type
info.to(3.5)  # arg-type

# Parameters of reductions

reductions.LazyTensor("x")  # arg-type
reductions.Vi(np.ones((3, 2)))  # arg-type
K + "x"  # operator
K @ 3  # operator
K.sum(1, precison="ieee")  # call-overload
K.sum("rows")  # call-overload
K.argKmin(dim=1)  # call-overload
K.concat(None)  # arg-type
K.solve(x, rank="10")  # call-overload
reductions.Genred("x", ["x = Vi(3)"], axes=1)  # call-arg
reductions.Genred("x", ["x = Vi(3)"])(np.ones((3, 2)))  # arg-type
reductions.KernelSolve("x", ["x = Vi(3)"])  # call-arg
reductions.generic_sum("x", "a = Vi(1)", kind="Sum")  # call-arg
reductions.SamplesLoss("sinkhorn", blurr=0.1)  # call-arg
reductions.SamplesLoss()(np.ones((3, 2)), x)  # arg-type
reductions.nearest(x, x, k="3")  # arg-type
cluster.cluster_ranges(np.ones(3))  # arg-type
arrays.LazyTensor(x)  # arg-type
arrays.Genred("x", ["x = Vi(3)"])(x)  # arg-type
arrays.cluster.cluster_ranges(index)  # arg-type

# Results

rows: int = products.segment_sum(x, index)  # assignment
pair: torch.Tensor = products.knn_graph(x, 2)  # assignment
total: reductions.LazyTensor = K.sum(1)  # assignment
squares: torch.Tensor = (K**2).sum(-1)  # assignment
