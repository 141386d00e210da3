"""A user's file of mistakes: the comment of a line is the code of the error that mypy must report.

Lines without a comment have none.
"""

# ruff: noqa: B018

import torch

import torchweft
from torchweft import clifford, compat, distributed, o3, voxels

x, index = torch.ones(3, 2), torch.tensor([0, 2, 1])
algebra = clifford.Algebra((1, 1))
scene = voxels.SparseTensor(x, torch.tensor([[0, 1], [0, 2], [0, 4]]))
paths = [(0, 0, 0, "uvu", True)]

# Unknown names

torchweft.explane  # attr-defined
torchweft.voxel  # attr-defined
torchweft.o3.Irrep3  # attr-defined
torchweft.compat.spconvv  # attr-defined
o3.FullTensorProductv2  # attr-defined
clifford.geometric_produkt  # attr-defined
voxels.SubmConv3d  # attr-defined
compat.instal  # attr-defined
distributed.all_pair  # attr-defined
distributed.cost.predicts  # attr-defined
scene.feat  # attr-defined
o3.Graph(index, index).edges  # attr-defined

# Parameters of o3

o3.neighbour_list(x, "5 Å")  # arg-type
o3.spherical_harmonics(1, x)  # call-arg
o3.Irreps(1.5)  # arg-type
o3.Linear("0e", "0e", bias=True)  # call-arg
o3.TensorProduct("0e", "0e", "0e")  # call-arg
o3.TensorProductConv("0e", "0e", "0e")  # call-arg
o3.TensorProductConv("0e", "0e", "0e", paths, layout=1)  # arg-type
o3.TensorProductConv("0e", "0e", "0e", paths, lay_out="ir_mul")  # call-arg
o3.FullyConnectedTensorProduct("0e", "0e", "0e", shared="yes")  # call-arg
o3.TensorSquare("0e", internal_weights="yes")  # arg-type
o3.from_mace("my.model")  # arg-type

# Parameters of clifford

clifford.geometric_product(x, x)  # call-arg
clifford.geometric_product(x, x, algebra, x, -1)  # call-arg
clifford.Algebra.cl("3")  # arg-type
clifford.CliffordLayer(16, dim=3)  # call-arg
clifford.SelfAttention(4, 2, dropout="none")  # arg-type
clifford.LGATrAttention(4, 2, drop_out=0.1)  # call-arg
clifford.from_gatr("gatr.pt")  # arg-type

# Parameters of voxels, distributed and torchweft's own functions

voxels.SubMConv3d(4, 16)  # call-arg
voxels.SparseConv3d(4, 16, "3")  # arg-type
voxels.sparse_conv(x, x, 3)  # arg-type
voxels.SparseTensor(x)  # call-arg
voxels.voxelize(x, 0.5, reduce=max)  # arg-type
distributed.Halo(index)  # call-arg
distributed.shard(index, index, 3, rank="0", world_size=1)  # arg-type
compat.install(torch)  # arg-type
torchweft.capture(3, x)  # type-var
torchweft.constant([0, 1])  # arg-type
