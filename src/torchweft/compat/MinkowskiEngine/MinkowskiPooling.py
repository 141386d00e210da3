"""Pools over the voxels of a window or of a sample, with MinkowskiEngine's names.

    local      y[u] = sum, mean or maximum of x over the voxels at u + offset · dilation · t
    transpose  y[u + offset · dilation · t] += x[u]
    global     y[b] = sum, mean or maximum over the voxels of sample b, at the origin

Only existing voxels count; a window without any is 0.  Where the window is as large as the stride,
each input belongs to ⌊u / (t s)⌋ t s, whatever the window's centre, as in the original.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchweft.compat.MinkowskiEngine.coordinate_maps import Window
from torchweft.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase, PoolingMode
from torchweft.compat.MinkowskiEngine.MinkowskiConvolution import WindowLayer
from torchweft.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateMapKey, Segments
from torchweft.compat.MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator
from torchweft.compat.MinkowskiEngine.MinkowskiSparseTensor import (
    SparseTensor,
    TensorField,
    out_key_of,
)
from torchweft.voxels.layers.pooling import (
    apart,
    largest,
    lengths,
    max_over,
    sum_over,
    together,
    wide,
)

__all__ = [
    "MinkowskiAvgPooling",
    "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling",
    "MinkowskiGlobalPooling",
    "MinkowskiGlobalSumPooling",
    "MinkowskiMaxPooling",
    "MinkowskiPoolingBase",
    "MinkowskiPoolingTranspose",
    "MinkowskiSumPooling",
]


class MinkowskiPoolingBase(WindowLayer):
    """The base class of local pools; see the formulas above.

    Args:
        kernel_size: one number for all axes, or one for each.
        stride: of outputs over inputs; transposed: of inputs over outputs.
        dilation: distance of neighbouring offsets.
        kernel_generator: in place of the sizes.
        is_transpose: whether the pool is transposed.
        pooling_mode: LOCAL_SUM_POOLING, LOCAL_AVG_POOLING or LOCAL_MAX_POOLING.
        dimension: number of axes, 1 to 4.
    """

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        pooling_mode: int = PoolingMode.LOCAL_AVG_POOLING,
        dimension: int | None = -1,
    ) -> None:
        sizes = kernel_size, stride, dilation
        super().__init__(sizes, kernel_generator, is_transpose, dimension)
        self.pooling_mode = PoolingMode(pooling_mode)

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        """The pooled tensor; coordinates give its voxels, see MinkowskiConvolutionBase."""
        self.check(input)
        key = self.out_key(input, coordinates)
        window = self._window(input, key)
        if window is None:
            features = self._by_cell(input, key)
        else:
            features = self._by_window(input, key, window)
        return self.written(input, features, key)

    def _window(self, input: SparseTensor, key: CoordinateMapKey) -> Window | None:
        """The window whose pairs are read; None for cells that are no windows of a map."""
        window, own = self.kernel_generator.window, input.coordinate_map_key
        if window.kernel_size != window.stride:
            return window
        fine, coarse = (key, own) if self.is_transpose else (own, key)
        cells = window._replace(dilation=[1] * input.D)
        begin_at_0 = all(k == 1 or k % 2 == 0 for k in cells.kernel_size)
        found = begin_at_0 and input.coordinate_manager.region(fine, coarse, cells).coarse is None
        return cells if found else None

    def _by_cell(self, input: SparseTensor, key: CoordinateMapKey) -> Tensor:
        own, manager = input.coordinate_map_key, input.coordinate_manager
        if self.is_transpose:
            cells = manager.strided(key, own)
            return apart(input.F, cells.owner, cells.order)
        return reduced(input.F, manager.strided(own, key), self.pooling_mode)

    def _by_window(self, input: SparseTensor, key: CoordinateMapKey, window: Window) -> Tensor:
        generator, own = self.kernel_generator, input.coordinate_map_key
        manager = input.coordinate_manager
        pairs = manager.pairs(own, key, window, self.is_transpose)
        tables, places = [pairs.sources, pairs.targets], generator.places()
        if places is not None:
            tables = [torch.stack([table[k] for k in places.tolist()]) for table in tables]
        if self.pooling_mode == PoolingMode.LOCAL_MAX_POOLING:
            return max_over(input.F, *tables)
        total = sum_over(wide(input.F), *tables)
        if self.pooling_mode == PoolingMode.LOCAL_AVG_POOLING:
            total = total / (tables[0] >= 0).sum(0).clamp(min=1).unsqueeze(1)
        return total.to(input.dtype)


def reduced(features: Tensor, cells: Segments, mode: PoolingMode) -> Tensor:
    """(count, C) the sum, mean or maximum of the rows of each cell; 0 of a cell without rows."""
    if "MAX" in mode.name:
        return largest(features, *cells)
    total = together(wide(features), *cells)
    if "AVG" in mode.name:
        total = total / lengths(*cells).clamp(min=1).unsqueeze(1)
    return total.to(features.dtype)


class _LocalPooling(MinkowskiPoolingBase):
    mode: PoolingMode

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: int | None = None,
    ) -> None:
        sizes = kernel_size, stride, dilation
        super().__init__(*sizes, kernel_generator, False, self.mode, dimension)


class MinkowskiSumPooling(_LocalPooling):
    """The sum over the voxels of each window; see MinkowskiPoolingBase."""

    mode = PoolingMode.LOCAL_SUM_POOLING


class MinkowskiAvgPooling(_LocalPooling):
    """The mean over the voxels of each window; see MinkowskiPoolingBase."""

    mode = PoolingMode.LOCAL_AVG_POOLING


class MinkowskiMaxPooling(_LocalPooling):
    """The maximum over the voxels of each window; see MinkowskiPoolingBase."""

    mode = PoolingMode.LOCAL_MAX_POOLING


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """y[u + offset · dilation · t] += x[u] on the finer level, as MinkowskiConvolutionTranspose."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        dimension: int | None = None,
    ) -> None:
        sizes, mode = (kernel_size, stride, dilation), PoolingMode.LOCAL_SUM_POOLING
        super().__init__(*sizes, kernel_generator, True, mode, dimension)
        if kernel_generator is None:
            self.kernel_generator.expand_coordinates = expand_coordinates


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """One row per sample, at the origin: the mean, or what mode says, over its voxels or points.

    Args:
        mode: a PoolingMode of GLOBAL_….
    """

    def __init__(self, mode: int = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX) -> None:
        super().__init__()
        self.pooling_mode = PoolingMode(mode)

    def forward(self, input: SparseTensor | TensorField, coordinates: Any = None) -> SparseTensor:
        """On the origin of all samples, or on given coordinates, which must have them."""
        manager = input.coordinate_manager
        if coordinates is None:
            key = manager.origin()
        else:
            key = out_key_of(input, coordinates, [0] * input.D)  # type: ignore[arg-type]
        if isinstance(input, TensorField):
            samples = manager.field_samples(input.coordinate_field_map_key, key)
        else:
            samples = manager.strided(input.coordinate_map_key, key)
        features = reduced(input.F, samples, self.pooling_mode)
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(mode={self.pooling_mode.name})"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    """The sum over each sample."""

    def __init__(self, mode: int = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    """The mean over each sample."""


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    """The maximum over each sample."""

    def __init__(self, mode: int = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)
