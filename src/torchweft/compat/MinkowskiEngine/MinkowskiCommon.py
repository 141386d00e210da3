"""Enumerations, sizes by axis, and the base class of layers, with MinkowskiEngine's names."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import nn

from torchweft.errors import DTypeError, ShapeError

__all__ = [
    "BroadcastMode",
    "ConvolutionMode",
    "CoordinateMapType",
    "GPUMemoryAllocatorType",
    "MinkowskiAlgorithm",
    "MinkowskiModuleBase",
    "PoolingMode",
    "RegionType",
    "convert_to_int_list",
    "convert_to_int_tensor",
]

RegionType = enum.IntEnum("RegionType", "HYPER_CUBE HYPER_CROSS CUSTOM", start=0)
"""The offsets of a kernel: a box, its axes only, or a list."""


class PoolingMode(enum.IntEnum):
    """What a pool computes; which of the original's paths computes it has no effect."""

    LOCAL_SUM_POOLING = 0
    LOCAL_AVG_POOLING = 1
    LOCAL_MAX_POOLING = 2
    GLOBAL_SUM_POOLING_DEFAULT = 3
    GLOBAL_AVG_POOLING_DEFAULT = 4
    GLOBAL_MAX_POOLING_DEFAULT = 5
    GLOBAL_SUM_POOLING_KERNEL = 6
    GLOBAL_AVG_POOLING_KERNEL = 7
    GLOBAL_MAX_POOLING_KERNEL = 8
    GLOBAL_SUM_POOLING_PYTORCH_INDEX = 9
    GLOBAL_AVG_POOLING_PYTORCH_INDEX = 10
    GLOBAL_MAX_POOLING_PYTORCH_INDEX = 11


BroadcastMode = enum.IntEnum(
    "BroadcastMode", "ELEMENTWISE_ADDITON ELEMENTWISE_MULTIPLICATION", start=0
)
ConvolutionMode = enum.IntEnum("ConvolutionMode", "DEFAULT DIRECT_GEMM COPY_GEMM", start=0)
CoordinateMapType = enum.IntEnum("CoordinateMapType", "CPU CUDA", start=0)
GPUMemoryAllocatorType = enum.IntEnum("GPUMemoryAllocatorType", "PYTORCH CUDA", start=0)
MinkowskiAlgorithm = enum.IntEnum(
    "MinkowskiAlgorithm", "DEFAULT MEMORY_EFFICIENT SPEED_OPTIMIZED", start=0
)


class MinkowskiModuleBase(nn.Module):
    """The base class of layers."""


def convert_to_int_list(arg: Any, dimension: int) -> list[int]:
    """One integer per axis, from one or from as many; NumPy's and torch's integers too.

    Raises:
        ShapeError: another number of them.
        DTypeError: no number at all.
    """
    try:
        found = [int(n) for n in arg] if hasattr(arg, "__len__") else [int(arg)] * dimension
    except (TypeError, ValueError):
        raise DTypeError(
            f"{arg!r} was given: one integer, or {dimension} of them, are needed. Pass 2, say."
        ) from None
    if len(found) != dimension:
        raise ShapeError(
            f"{arg!r} has {len(found)} numbers for {dimension} axes: one, or {dimension}, are "
            "needed. Correct it, or dimension."
        )
    return found


def convert_to_int_tensor(arg: Any, dimension: int) -> torch.Tensor:
    """(dimension,) int32; see `convert_to_int_list`."""
    return torch.tensor(convert_to_int_list(arg, dimension), dtype=torch.int32)
