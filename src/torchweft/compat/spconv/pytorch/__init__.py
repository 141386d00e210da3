"""spconv.pytorch: the tensor, convolutions, pools, tables and containers."""

from torchweft.compat.lacking import lacking
from torchweft.compat.spconv.core import ConvAlgo
from torchweft.compat.spconv.pytorch import (
    constants,
    conv,
    core,
    functional,
    identity,
    modules,
    ops,
    pool,
    tables,
    utils,
)
from torchweft.compat.spconv.pytorch.conv import *  # noqa: F403
from torchweft.compat.spconv.pytorch.core import SparseConvTensor
from torchweft.compat.spconv.pytorch.identity import Identity
from torchweft.compat.spconv.pytorch.modules import *  # noqa: F403
from torchweft.compat.spconv.pytorch.pool import *  # noqa: F403
from torchweft.compat.spconv.pytorch.tables import *  # noqa: F403

__all__ = [
    "ConvAlgo",
    "Identity",
    "SparseConvTensor",
    "constants",
    "conv",
    "core",
    "functional",
    "identity",
    "modules",
    "ops",
    "pool",
    "tables",
    "utils",
    *conv.__all__,
    *modules.__all__,
    *pool.__all__,
    *tables.__all__,
]

__getattr__ = lacking(
    __name__,
    {
        "cppcore": "There is no compiled module: use the layers of spconv.pytorch.",
        "hash": "Use torchweft.voxels.SparseTensor(…).coordinates.find(rows) to look voxels up.",
        "quantization": "Use float16 or bfloat16: module.half(), or torch.autocast.",
        "spatial": "Use torchweft.voxels.voxelize, which merges points of one voxel.",
    },
)
