"""Layers, and the functions below them."""

from torchweft.compat.lacking import lacking
from torchweft.compat.torchsparse.nn import functional, modules, utils
from torchweft.compat.torchsparse.nn.modules import *  # noqa: F403

__all__ = ["functional", "modules", "utils", *modules.__all__]

_BEV = (
    "torchsparse 2.1's takes the batch column for x. Use y = x.dense(), (batch, x, y, z, C), and "
    "y.permute(0, 4, 3, 1, 2).flatten(1, 2)."
)

__getattr__ = lacking(
    __name__,
    {
        "SparseCrop": "torchsparse 2.1's compares (batch, x, y). Use "
        "SparseTensor(x.F[mask], x.C[mask], x.s).",
        "ToBEVConvolution": _BEV,
        "ToBEVHeightCompression": _BEV,
        "ToBEVReduction": _BEV,
        "ToDenseBEVConvolution": _BEV,
    },
)
