"""Sparse convolution on voxels: out[o] = bias + Σ_k x[in(o, k)] @ w[k], exact and repeatable.

See docs/families/voxels.md.
"""

from torchweft.voxels.convolution.functions import sparse_conv, sparse_conv3d, sparse_inverse_conv
from torchweft.voxels.exporting import onnx_translations
from torchweft.voxels.grid import hilbert_keys, hilbert_order, z_keys, z_order
from torchweft.voxels.layers import checkpoints, norm, pooling, sequential
from torchweft.voxels.layers import convolution as convolution_layers  # a folder has the name
from torchweft.voxels.layers.checkpoints import *  # noqa: F403
from torchweft.voxels.layers.convolution import *  # noqa: F403
from torchweft.voxels.layers.module import SparseModule
from torchweft.voxels.layers.norm import *  # noqa: F403
from torchweft.voxels.layers.pooling import *  # noqa: F403
from torchweft.voxels.layers.sequential import *  # noqa: F403
from torchweft.voxels.layers.voxelize import devoxelize, point_to_voxel, voxelize
from torchweft.voxels.leaves import padded_sizes  # registers the tree of a tensor too
from torchweft.voxels.maps.kernel_map import KernelMap
from torchweft.voxels.maps.metadata import (
    GemmGroups,
    Group,
    KernelMapMasks,
    build_masks,
    greedy_group,
)
from torchweft.voxels.maps.tensor import SparseTensor, cat, kernel_map, sparse_collate, union
from torchweft.voxels.preparing import prepare

__all__ = [
    "GemmGroups",
    "Group",
    "KernelMap",
    "KernelMapMasks",
    "SparseModule",
    "SparseTensor",
    "build_masks",
    "cat",
    "devoxelize",
    "greedy_group",
    "hilbert_keys",
    "hilbert_order",
    "kernel_map",
    "onnx_translations",
    "padded_sizes",
    "point_to_voxel",
    "prepare",
    "sparse_collate",
    "sparse_conv",
    "sparse_conv3d",
    "sparse_inverse_conv",
    "union",
    "voxelize",
    "z_keys",
    "z_order",
    *checkpoints.__all__,
    *convolution_layers.__all__,
    *norm.__all__,
    *pooling.__all__,
    *sequential.__all__,
]
