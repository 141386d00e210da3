"""Sparse convolution on voxels: out[o] = bias + Σ_k x[in(o, k)] @ w[k], exact and repeatable.

See docs/families/voxels.md.
"""

from weft.voxels.kernel_map import KernelMap, kernel_map
from weft.voxels.metadata import GemmGroups, Group, KernelMapMasks, build_masks, greedy_group
from weft.voxels.ops import sparse_conv, sparse_conv3d, sparse_inverse_conv
from weft.voxels.tensor import SparseTensor, cat, sparse_collate, union

__all__ = [
    "GemmGroups",
    "Group",
    "KernelMap",
    "KernelMapMasks",
    "SparseTensor",
    "build_masks",
    "cat",
    "greedy_group",
    "kernel_map",
    "sparse_collate",
    "sparse_conv",
    "sparse_conv3d",
    "sparse_inverse_conv",
    "union",
]
