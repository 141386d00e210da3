"""What programs build layers of their own with."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchweft.compat.torchsparse.sizes import make_ntuple
from torchweft.compat.torchsparse.tensor import SparseTensor

__all__ = ["fapply", "get_kernel_offsets"]


def fapply(
    input: SparseTensor, fn: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> SparseTensor:
    """A function of the features, on the same voxels.

    Args:
        input: the tensor.
        fn: of the features (N, C), args and kwargs.
        args: for fn.
        kwargs: for fn.
    """
    return input.derived(fn(input.feats, *args, **kwargs))


def get_kernel_offsets(
    size: Any, stride: Any = 1, dilation: Any = 1, device: torch.device | str = "cpu"
) -> Tensor:
    """(K, 3) int32: from −(k − 1) // 2 to k // 2 on each axis, times stride and dilation.

    The first axis is fastest if K is odd, the last if it is even, as in the weights of layers.

    Args:
        size: of the kernel, one number or three.
        stride: of the tensor.
        dilation: of the kernel.
        device: of the offsets.
    """
    sizes, steps = make_ntuple(size, ndim=3), make_ntuple(stride, ndim=3)
    spread = make_ntuple(dilation, ndim=3)
    axes = [
        [(j - (k - 1) // 2) * s * d for j in range(k)]
        for k, s, d in zip(sizes, steps, spread, strict=True)
    ]
    odd = math.prod(sizes) % 2
    places = itertools.product(*(axes[::-1] if odd else axes))
    offsets = [place[::-1] if odd else place for place in places]
    return torch.tensor(offsets, dtype=torch.int32, device=device)
