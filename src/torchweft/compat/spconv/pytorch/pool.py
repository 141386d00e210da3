"""Pools over the existing voxels of a window or of a sample, with spconv's names.

max      y[o] = max_k x[in(o, k)]          avg   y[o] = Σ_k x[in(o, k)] / (voxels in the window)
global   y[b] = max or mean over the voxels of sample b, 0 without any
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchweft import voxels
from torchweft.compat.spconv.core import ConvAlgo
from torchweft.compat.spconv.pytorch.core import SparseConvTensor, written
from torchweft.compat.spconv.pytorch.modules import SparseModule
from torchweft.compat.spconv.pytorch.windows import WindowModule

__all__ = [
    "ALL_POOL_LAYERS",
    "SparseAvgPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxOrAvgPool",
    "SparseGlobalMaxPool",
    "SparseMaxPool",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
]


class SparseMaxPool(WindowModule):
    """The maximum over the voxels of each window; outputs and arguments as SparseConvolution's.

    Raises:
        NotImplementedError: subm=True.
    """

    def __init__(
        self,
        ndim: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        if subm:
            raise NotImplementedError(
                f"subm=True was given to {type(self).__name__}: torchweft's stand-in pools onto "
                "strided voxels only. Leave it out, with stride=1 and padding=kernel_size // 2."
            )
        sizes = kernel_size, stride, padding, dilation
        super().__init__(ndim, sizes, "strided", indice_key, algo, record_voxel_count, name)

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        """The pooled tensor."""
        self.check(input)
        self.check_new_key(input)
        tensor = input.sparse()
        found = self._pooled(tensor)
        pairs = tensor.maps.get(tensor.coordinates, self.geometry)  # kept since the call
        outputs = written(self, input, found, pairs)
        self.count(outputs)
        return outputs

    def _pooled(self, tensor: voxels.SparseTensor) -> voxels.SparseTensor:
        return voxels.sparse_max_pool(tensor, *self.geometry[1:])


class SparseAvgPool(SparseMaxPool):
    """The mean over the voxels of each window; see SparseMaxPool."""

    def _pooled(self, tensor: voxels.SparseTensor) -> voxels.SparseTensor:
        return voxels.sparse_avg_pool(tensor, *self.geometry[1:])


class _OfAxes(SparseMaxPool):
    axes: int

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self.axes,
            kernel_size,
            stride,
            padding,
            dilation,
            indice_key,
            algo=algo,
            record_voxel_count=record_voxel_count,
            name=name,
        )


class SparseMaxPool1d(_OfAxes):
    """SparseMaxPool in 1 dimension; stride None is the kernel size."""

    axes = 1


class SparseMaxPool2d(_OfAxes):
    """SparseMaxPool in 2 dimensions; stride None is the kernel size."""

    axes = 2


class SparseMaxPool3d(_OfAxes):
    """SparseMaxPool in 3 dimensions; stride None is the kernel size."""

    axes = 3


class SparseMaxPool4d(_OfAxes):
    """SparseMaxPool in 4 dimensions; stride None is the kernel size."""

    axes = 4


class SparseAvgPool1d(_OfAxes, SparseAvgPool):
    """SparseAvgPool in 1 dimension; stride None is the kernel size."""

    axes = 1


class SparseAvgPool2d(_OfAxes, SparseAvgPool):
    """SparseAvgPool in 2 dimensions; stride None is the kernel size."""

    axes = 2


class SparseAvgPool3d(_OfAxes, SparseAvgPool):
    """SparseAvgPool in 3 dimensions; stride None is the kernel size."""

    axes = 3


class SparseGlobalMaxOrAvgPool(SparseModule):
    """(batch, C): the mean or the maximum over each sample's voxels, 0 without any."""

    def __init__(self, is_mean: bool, name: str | None = None) -> None:
        super().__init__(name=name)
        self.is_mean = is_mean

    def forward(self, input: SparseConvTensor) -> Tensor:
        """A dense tensor, one row per sample."""
        return voxels.global_pool(input.sparse(), "mean" if self.is_mean else "max")


class SparseGlobalMaxPool(SparseGlobalMaxOrAvgPool):
    """(batch, C): the maximum over each sample's voxels."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(is_mean=False, name=name)


class SparseGlobalAvgPool(SparseGlobalMaxOrAvgPool):
    """(batch, C): the mean over each sample's voxels."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(is_mean=True, name=name)


ALL_POOL_LAYERS = {SparseMaxPool, SparseAvgPool, *_OfAxes.__subclasses__()}
