"""KernelGenerator: the offsets of a layer's kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchweft.compat.MinkowskiEngine.coordinate_maps import Window
from torchweft.compat.MinkowskiEngine.MinkowskiCommon import RegionType, convert_to_int_list
from torchweft.errors import ShapeError

__all__ = ["KernelGenerator"]


class KernelGenerator:
    """A window, one number per axis in lists, and which of its offsets have a weight.

        HYPER_CUBE    all of them, the first axis fastest; −⌊k/2⌋ … ⌊k/2⌋ of an odd size k,
                      0 … k − 1 of an even one
        HYPER_CROSS   those on an axis: 0, then by axis 1 … ⌊k/2⌋, −⌊k/2⌋ … −1

    Args:
        kernel_size: one number for all axes, or one for each.
        stride: of outputs over inputs; in a transposed layer of inputs over outputs.
        dilation: distance of neighbouring offsets.
        is_transpose: has no effect: the layer knows.
        region_type: HYPER_CUBE or HYPER_CROSS.
        region_offsets: must be None.
        expand_coordinates: whether the layer writes all voxels that its kernel reaches.
        axis_types: must be None.
        dimension: number of axes, 1 to 4.

    Raises:
        ShapeError: sizes that do not define a kernel.
        NotImplementedError: region_offsets or axis_types, which the original 0.5 refuses too.
    """

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        is_transpose: bool = False,
        region_type: int = RegionType.HYPER_CUBE,
        region_offsets: Tensor | None = None,
        expand_coordinates: bool = False,
        axis_types: Any = None,
        dimension: int | None = -1,
    ) -> None:
        if dimension is None or not 1 <= dimension <= 4:
            raise ShapeError(
                f"dimension is {dimension}: a kernel has 1 to 4 axes. Pass dimension=3, say."
            )
        self.region_type = RegionType(region_type)
        if self.region_type == RegionType.CUSTOM or axis_types is not None:
            raise NotImplementedError(
                f"region_type={self.region_type.name} and axis_types={axis_types} were given: "
                "torchweft's stand-in has boxes and crosses of offsets, as MinkowskiEngine 0.5. "
                "Pass RegionType.HYPER_CUBE, whose offsets without a use may get the weight 0."
            )
        if region_offsets is not None and len(region_offsets):
            raise NotImplementedError(
                "region_offsets were given: they follow from region_type, as in MinkowskiEngine "
                "0.5. Leave them out."
            )
        self.kernel_size = convert_to_int_list(kernel_size, dimension)
        self.kernel_stride = convert_to_int_list(stride, dimension)
        self.kernel_dilation = convert_to_int_list(dilation, dimension)
        self.dimension, self.axis_types = dimension, axis_types
        self.region_offsets = torch.empty(0, dtype=torch.int32)
        self.expand_coordinates = expand_coordinates
        self._check_sizes()
        self.kernel_volume = len(self.offsets())

    @property
    def requires_strided_coordinates(self) -> bool:
        """Whether every stride is 1; the name is the original's."""
        return set(self.kernel_stride) == {1}

    @property
    def window(self) -> Window:
        """The sizes alone."""
        return Window(self.kernel_size, self.kernel_stride, self.kernel_dilation)

    def offsets(self) -> Tensor:
        """(K, d) int64: the offsets that have a weight, in the order of the weights."""
        sizes = self.kernel_size
        if self.region_type == RegionType.HYPER_CUBE:
            axes = [torch.arange(k) - k // 2 * (k % 2) for k in sizes[::-1]]
            return torch.cartesian_prod(*axes).view(-1, len(sizes)).flip(1)
        rows = torch.zeros(1 + sum(k - 1 for k in sizes), len(sizes), dtype=torch.int64)
        row = 1
        for axis, k in enumerate(sizes):
            half = k // 2
            steps = [*range(1, half + 1), *range(-half, 0)]
            rows[row : row + k - 1, axis] = torch.tensor(steps, dtype=torch.int64)
            row += k - 1
        return rows

    def places(self) -> Tensor | None:
        """(K,) the numbers of a cross's offsets among those of its box; None of a box."""
        if self.region_type == RegionType.HYPER_CUBE:
            return None
        places = torch.zeros(self.kernel_volume, dtype=torch.int64)
        for k, column in zip(self.kernel_size[::-1], self.offsets().T.flip(0), strict=True):
            places = places * k + column + k // 2
        return places

    def of_box(self, kernel: Tensor) -> Tensor:
        """Weights (K, …) at their places in the box, 0 at all others."""
        places = self.places()
        if places is None:
            return kernel
        rows = [kernel.new_zeros(kernel.shape[1:])] * math.prod(self.kernel_size)
        for place, row in zip(places.tolist(), kernel, strict=True):
            rows[place] = row
        return torch.stack(rows)  # without a copy of places, for which the host would wait

    def __repr__(self) -> str:
        return (
            f"KernelGenerator(kernel_size={self.kernel_size}, kernel_stride={self.kernel_stride}, "
            f"kernel_dilation={self.kernel_dilation}, region_type={self.region_type.name}, "
            f"expand_coordinates={self.expand_coordinates}, dimension={self.dimension})"
        )

    def _check_sizes(self) -> None:
        sizes = zip(("kernel_size", "stride", "dilation"), self.window, strict=True)
        for name, numbers in sizes:
            if min(numbers) < 1:
                raise ShapeError(
                    f"{name} is {numbers}: every number must be at least 1. Pass {name}=2, say."
                )
        if self.region_type == RegionType.HYPER_CROSS and any(k % 2 == 0 for k in self.kernel_size):
            raise ShapeError(
                f"kernel_size is {self.kernel_size} of a HYPER_CROSS: it must be odd on every "
                "axis. Pass 3, say, or RegionType.HYPER_CUBE."
            )
