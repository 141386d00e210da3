"""MinkowskiEngine.utils: quantization, collation and initial values."""

from torchweft.compat.lacking import lacking
from torchweft.compat.MinkowskiEngine.utils.collation import (
    SparseCollation,
    batch_sparse_collate,
    batched_coordinates,
    sparse_collate,
)
from torchweft.compat.MinkowskiEngine.utils.init import kaiming_normal_
from torchweft.compat.MinkowskiEngine.utils.quantization import (
    sparse_quantize,
    unique_coordinate_map,
)

__all__ = [
    "SparseCollation",
    "batch_sparse_collate",
    "batched_coordinates",
    "kaiming_normal_",
    "sparse_collate",
    "sparse_quantize",
    "unique_coordinate_map",
]

_UNIQUE = "Use numpy.unique(rows, axis=0), or utils.unique_coordinate_map, which never collide."

__getattr__ = lacking(
    __name__,
    {
        "fnv_hash_vec": _UNIQUE,
        "ravel_hash_vec": _UNIQUE,
        "summary": "Use print(model).",
        "get_coords_map": "Use coordinate_manager.stride_map(fine_key, coarse_key).",
        "gradcheck": "Use torch.autograd.gradcheck on a function of features.",
    },
)
