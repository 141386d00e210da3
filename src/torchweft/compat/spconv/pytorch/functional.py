"""Sums of tensors on different voxels; layers are in `conv` and `pool`."""

from __future__ import annotations

from torchweft import voxels
from torchweft.compat.lacking import lacking
from torchweft.compat.spconv.pytorch.core import SparseConvTensor
from torchweft.compat.voxels import rows_of
from torchweft.errors import ShapeError

__all__ = ["sparse_add", "sparse_add_hash_based"]


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """z[v] = Σ of the features of v in all tensors, on every voxel that one of them has.

    Where one tensor has every voxel, the result has its rows and its indice_dict; else the voxels
    ascend and indice_dict is empty, as in spconv.

    Raises:
        ShapeError: tensors in different boxes or with different channels.
    """
    shapes = [(t.batch_size, *t.spatial_shape, t.features.shape[1]) for t in tens]
    if not tens or any(shape != shapes[0] for shape in shapes):
        raise ShapeError(
            f"sparse_add was given tensors of (batch, *spatial_shape, C) = {shapes}: one or more "
            "that agree are needed. Bring them to one box and one number of channels first."
        )
    boxes = [(t.features, t.indices, t.spatial_shape, t.batch_size) for t in tens]
    found = voxels.union([voxels.SparseTensor(*box) for box in boxes])  # of whatever level
    for tensor in tens:
        if len(tensor.indices) == len(found):
            rows = found.coordinates.find(tensor.indices)
            return tensor.replace_feature(found.feats.index_select(0, rows))
    indices = rows_of(found.coordinates)
    return SparseConvTensor(found.feats, indices, tens[0].spatial_shape, tens[0].batch_size)


sparse_add_hash_based = sparse_add

_LAYERS = "Call the layer of spconv.pytorch, or torchweft.voxels.sparse_conv."
_POOLS = "Call the pool of spconv.pytorch, or torchweft.voxels.sparse_max_pool."

__getattr__ = lacking(
    __name__,
    {
        **dict.fromkeys(
            (
                "SparseConvFunction",
                "SparseImplicitGemmFunction",
                "SparseInverseConvFunction",
                "SubMConvFunction",
                "implicit_gemm",
                "indice_conv",
                "indice_inverse_conv",
                "indice_subm_conv",
            ),
            _LAYERS,
        ),
        **dict.fromkeys(
            (
                "SparseAvgPoolImplicitGemmFunction",
                "SparseMaxPoolFunction",
                "SparseMaxPoolImplicitGemmFunction",
                "indice_avgpool_implicit_gemm",
                "indice_maxpool",
                "indice_maxpool_implicit_gemm",
            ),
            _POOLS,
        ),
        "identity_decorator": "Leave the decorator out.",
    },
)
