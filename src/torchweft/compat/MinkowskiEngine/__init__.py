"""A stand-in for MinkowskiEngine 0.5.4: its names and conventions over torchweft.voxels.

Tensors, layers and the coordinate manager have the original's names; parameters have its names,
shapes, order of offsets and initial values, so that checkpoints load strictly both ways.  Arguments
that choose among its kernels (convolution_mode=, minkowski_algorithm=, allocator_type=, the path of
a PoolingMode) are taken and have no effect: sums are always in float32 or wider.

It differs where the original would give a wrong or no number, or another one at each run:

- rows of a layer's output ascend, or follow their first appearance; their order has no meaning;
- rows with one voxel keep the first row's features with RANDOM_SUBSAMPLE;
- coordinates given to a layer as a tensor have the layer's output stride (the original's: 0 or 1),
  and each voxel once;
- tensors of two coordinate managers are refused, also as `coordinates` of a layer;
- `a += b` gives a new features, and other tensors keep theirs;
- one-dimensional layers of kernel size 1 have their stride; global sums and means take TensorFields
  too; MinkowskiStableInstanceNorm and the blocks of `modules.senet_block` run.

Lacking, with an error that says the nearest way: kernels with custom offsets (which the original
lacks too), `spmm` and the autograd functions below the layers, `utils.summary`, and
MinkowskiAdaptiveLogSoftmaxWithLoss.  MinkowskiEngine 0.4 (coords=, has_bias=) is not served.
"""

from typing import Any

import torch

from torchweft.compat.MinkowskiEngine import MinkowskiBroadcast as _broadcast
from torchweft.compat.MinkowskiEngine import MinkowskiCommon as _common
from torchweft.compat.MinkowskiEngine import MinkowskiConvolution as _convolution
from torchweft.compat.MinkowskiEngine import MinkowskiCoordinateManager as _manager
from torchweft.compat.MinkowskiEngine import MinkowskiFunctional, MinkowskiOps, modules, utils
from torchweft.compat.MinkowskiEngine import MinkowskiNonlinearity as _nonlinearity
from torchweft.compat.MinkowskiEngine import MinkowskiNormalization as _normalization
from torchweft.compat.MinkowskiEngine import MinkowskiPooling as _pooling
from torchweft.compat.MinkowskiEngine import MinkowskiTensor as _tensor
from torchweft.compat.MinkowskiEngine.MinkowskiBroadcast import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiCommon import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiConvolution import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiCoordinateManager import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator
from torchweft.compat.MinkowskiEngine.MinkowskiNonlinearity import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiNormalization import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiOps import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiPooling import *  # noqa: F403
from torchweft.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, TensorField
from torchweft.compat.MinkowskiEngine.MinkowskiTensor import *  # noqa: F403

__all__ = [
    "KernelGenerator",
    "MinkowskiFunctional",
    "MinkowskiOps",
    "SparseTensor",
    "TensorField",
    "__version__",
    "is_cuda_available",
    "modules",
    "utils",
    *_broadcast.__all__,
    *_common.__all__,
    *_convolution.__all__,
    *_manager.__all__,
    *_nonlinearity.__all__,
    *_normalization.__all__,
    *MinkowskiOps.__all__,
    *_pooling.__all__,
    *_tensor.__all__,
]

__version__ = "0.5.4"


def is_cuda_available() -> bool:
    """Whether torch has a GPU."""
    return torch.cuda.is_available()


class _Lacking:
    """A name of the original that programs import, and may not call.

    Raises:
        NotImplementedError: by a call, and by `apply` of an autograd function.
    """

    def __init__(self, name: str, way: str) -> None:
        self.name, self.way = name, way

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"MinkowskiEngine.{self.name} was called: torchweft's stand-in does not have it. "
            f"{self.way}"
        )

    apply = __call__


_SPMM = "Use torch.sparse.mm, or features.index_select and index_add."
_OFFSETS = "Use KernelGenerator(…).offsets(), or the layer itself."
_LAYERS = (
    *("Broadcast", "Convolution", "ConvolutionTranspose", "DirectMaxPooling", "GlobalPooling"),
    *("InstanceNorm", "Interpolation", "LocalPooling", "LocalPoolingTranspose", "Pruning", "Union"),
)
_WAYS = {
    **{
        f"Minkowski{name}Function": "Call the layer: it is differentiable to any order."
        for name in _LAYERS
    },
    **dict.fromkeys(("MinkowskiSPMMAverageFunction", "MinkowskiSPMMFunction", "spmm"), _SPMM),
    **dict.fromkeys(("KernelRegion", "convert_region_type", "get_kernel_volume"), _OFFSETS),
    "MinkowskiAdaptiveLogSoftmaxWithLoss": (
        "Use torch.nn.AdaptiveLogSoftmaxWithLoss on tensor.F and the targets."
    ),
    "CoordsManager": "It is of MinkowskiEngine 0.4: use CoordinateManager.",
    "set_coordinate_map_type": "Leave the call out: maps are where the coordinates are.",
    **dict.fromkeys(
        ("cuda_version", "cudart_version", "get_gpu_memory_info", "print_diagnostics"),
        "Use torch.version.cuda and torch.cuda.",
    ),
    "set_memory_manager_backend": "Leave the call out: torch allocates.",
}
globals().update({name: _Lacking(name, way) for name, way in _WAYS.items()})
