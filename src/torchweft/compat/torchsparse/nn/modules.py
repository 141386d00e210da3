"""Convolution, norms, activations and pools with torchsparse's names, arguments and parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchweft import voxels
from torchweft.compat.torchsparse.nn import functional
from torchweft.compat.torchsparse.nn.utils import fapply
from torchweft.compat.torchsparse.sizes import make_ntuple
from torchweft.compat.torchsparse.tensor import SparseTensor

__all__ = [
    "BatchNorm",
    "Conv3d",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "InstanceNorm",
    "LeakyReLU",
    "ReLU",
    "SiLU",
]


class Conv3d(nn.Module):
    """out[o] = bias + Σ_k x[in(o, k)] @ kernel[k]; see `nn.functional.conv3d`.

    kernel is (K, C_in, C_out), and (C_in, C_out) for one position without a stride; bias (C_out,).
    Both are drawn from U(−1/√f, 1/√f), f = K C_in, or K C_out in a transposed layer.

    >>> layer = Conv3d(4, 16, kernel_size=3)
    >>> layer.kernel.shape, layer.padding
    (torch.Size([27, 4, 16]), (1, 1, 1))

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each.
        stride: as kernel_size; where every stride is 1 the layer is submanifold.
        padding: as kernel_size; (k − 1) / 2 on axes with an odd kernel and stride 1.
        dilation: must be 1.
        bias: whether there is a bias.
        transposed: whether it undoes the strided layer with these sizes that wrote its voxels.
        generative: must be False.
        config: of `nn.functional.conv_config`; None is the global one.

    Raises:
        NotImplementedError: dilation or generative.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        config: functional.conv_config.ConvConfig | None = None,
    ) -> None:
        super().__init__()
        functional.check_served(dilation, generative)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size, self.stride = make_ntuple(kernel_size, 3), make_ntuple(stride, 3)
        self.padding = tuple(
            (k - 1) // 2 if k % 2 and s == 1 else p
            for k, s, p in zip(self.kernel_size, self.stride, make_ntuple(padding, 3), strict=True)
        )
        self.dilation, self.transposed, self.generative = dilation, transposed, generative
        self._config = config
        self.kernel_volume = math.prod(self.kernel_size)
        matrix = self.kernel_volume == math.prod(self.stride) == 1
        shape = (
            (in_channels, out_channels)
            if matrix
            else (self.kernel_volume, in_channels, out_channels)
        )
        self.kernel = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw kernel and bias anew."""
        fan = self.kernel_volume * (self.out_channels if self.transposed else self.in_channels)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(fan), 1 / math.sqrt(fan))

    def forward(self, input: SparseTensor) -> SparseTensor:
        """The output's voxels with C_out channels."""
        return functional.conv3d(
            input,
            self.kernel,
            self.kernel_size,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self._config,
            self.transposed,
            self.generative,
            self.training,
        )

    def extra_repr(self) -> str:
        """Channels, and what is not a default."""
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        parts += [f"stride={self.stride}"] * (math.prod(self.stride) != 1)
        parts += ["bias=False"] * (self.bias is None) + ["transposed=True"] * self.transposed
        return ", ".join(parts)


class InstanceNorm(nn.InstanceNorm1d):
    """torch's InstanceNorm1d of the features (N, C): each voxel over its channels, as there."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """The normalised tensor."""
        return fapply(input, super().forward)


class BatchNorm(nn.BatchNorm1d):
    """torch's BatchNorm1d over all voxels."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """The normalised tensor."""
        return fapply(input, super().forward)


class GroupNorm(voxels.SparseGroupNorm):
    """torch's GroupNorm over the voxels of each sample."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """The normalised tensor."""
        return input.derived(super().forward(input.sparse()).F)


class ReLU(nn.ReLU):
    """torch's ReLU of the features."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """The tensor, at least 0."""
        return fapply(input, super().forward)


class LeakyReLU(nn.LeakyReLU):
    """torch's LeakyReLU of the features."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """The tensor, negative values times a slope."""
        return fapply(input, super().forward)


class SiLU(nn.SiLU):
    """torch's SiLU of the features."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """x / (1 + exp(−x))."""
        return fapply(input, super().forward)


class GlobalAvgPool(nn.Module):
    """(batch, C): means over each sample's voxels."""

    def forward(self, input: SparseTensor) -> Tensor:
        """A dense tensor."""
        return functional.global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """(batch, C): maxima over each sample's voxels."""

    def forward(self, input: SparseTensor) -> Tensor:
        """A dense tensor."""
        return functional.global_max_pool(input)
