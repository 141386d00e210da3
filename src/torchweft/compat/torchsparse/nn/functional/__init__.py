"""Functions of tensors, and between points and voxels."""

from torchweft.compat.lacking import lacking
from torchweft.compat.torchsparse.nn.functional import (
    conv,
    conv_config,
    devoxelize,
    features,
    hash,
    voxelize,
)
from torchweft.compat.torchsparse.nn.functional.conv import *  # noqa: F403
from torchweft.compat.torchsparse.nn.functional.conv_config import *  # noqa: F403
from torchweft.compat.torchsparse.nn.functional.devoxelize import *  # noqa: F403
from torchweft.compat.torchsparse.nn.functional.features import *  # noqa: F403
from torchweft.compat.torchsparse.nn.functional.hash import *  # noqa: F403
from torchweft.compat.torchsparse.nn.functional.voxelize import *  # noqa: F403

__all__ = [
    "conv_config",
    "devoxelize",
    *conv.__all__,
    *conv_config.__all__,
    *devoxelize.__all__,
    *features.__all__,
    *hash.__all__,
    *voxelize.__all__,
]

_MAPS = "Call conv3d, or use torchweft.voxels.kernel_map."

__getattr__ = lacking(
    __name__,
    {
        "build_kernel_map": _MAPS,
        "convert_transposed_out_in_map": _MAPS,
        "spcrop": "torchsparse 2.1's compares (batch, x, y). Use "
        "SparseTensor(x.F[mask], x.C[mask], x.s).",
        "spupsample_generative": "Use torchweft.voxels.SparseConvTranspose3d.",
        "transpose_kernel_map": _MAPS,
    },
)
