"""Sparse convolution on voxels: out[o] = bias + Σ_k x[in(o, k)] @ w[k], exact and repeatable.

See docs/families/voxels.md.
"""

from torchweft.voxels.convolution.functions import sparse_conv, sparse_conv3d, sparse_inverse_conv
from torchweft.voxels.grid import curves
from torchweft.voxels.grid.curves import *  # noqa: F403
from torchweft.voxels.layers import checkpoints, module, norm, pooling
from torchweft.voxels.layers import convolution as convolution_layers  # a folder has the name
from torchweft.voxels.layers.checkpoints import *  # noqa: F403
from torchweft.voxels.layers.convolution import *  # noqa: F403
from torchweft.voxels.layers.module import *  # noqa: F403
from torchweft.voxels.layers.norm import *  # noqa: F403
from torchweft.voxels.layers.pooling import *  # noqa: F403
from torchweft.voxels.layers.voxelize import devoxelize, voxelize
from torchweft.voxels.maps import minuet
from torchweft.voxels.maps.kernel_map import KernelMap
from torchweft.voxels.maps.minuet import *  # noqa: F403
from torchweft.voxels.maps.tensor import SparseTensor, cat, kernel_map, sparse_collate, union

__all__ = [
    "KernelMap",
    "SparseTensor",
    "cat",
    "devoxelize",
    "kernel_map",
    "sparse_collate",
    "sparse_conv",
    "sparse_conv3d",
    "sparse_inverse_conv",
    "union",
    "voxelize",
    *checkpoints.__all__,
    *convolution_layers.__all__,
    *curves.__all__,
    *minuet.__all__,
    *module.__all__,
    *norm.__all__,
    *pooling.__all__,
]
