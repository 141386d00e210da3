"""torchsparse's two networks, with its parameters' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from torchweft.compat.torchsparse import nn as spnn
from torchweft.compat.torchsparse.operators import cat
from torchweft.compat.torchsparse.tensor import SparseTensor

__all__ = [
    "SparseConvBlock",
    "SparseConvTransposeBlock",
    "SparseResBlock",
    "SparseResNet",
    "SparseResNet21D",
    "SparseResUNet",
    "SparseResUNet42",
]


class SparseConvBlock(nn.Sequential):
    """Convolution, batch norm and ReLU.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each.
        stride: as kernel_size.
        dilation: must be 1.
    """

    transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        dilation: int = 1,
    ) -> None:
        options = {"stride": stride, "dilation": dilation, "transposed": self.transposed}
        convolution = spnn.Conv3d(in_channels, out_channels, kernel_size, **options)
        super().__init__(convolution, spnn.BatchNorm(out_channels), spnn.ReLU(True))


class SparseConvTransposeBlock(SparseConvBlock):
    """Transposed convolution, batch norm and ReLU; the arguments of SparseConvBlock."""

    transposed = True


class SparseResBlock(nn.Module):
    """relu(main(x) + shortcut(x)), main of two convolutions; the arguments of SparseConvBlock."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        dilation: int = 1,
    ) -> None:
        super().__init__()
        self.main = nn.Sequential(
            *SparseConvBlock(in_channels, out_channels, kernel_size, stride, dilation),
            spnn.Conv3d(out_channels, out_channels, kernel_size, dilation=dilation),
            spnn.BatchNorm(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or np.prod(stride) != 1:
            pointwise = spnn.Conv3d(in_channels, out_channels, 1, stride=stride)
            self.shortcut = nn.Sequential(pointwise, spnn.BatchNorm(out_channels))
        self.relu = spnn.ReLU(True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """The tensor on the same voxels, or on those of the stride."""
        found: SparseTensor = self.relu(self.main(x) + self.shortcut(x))
        return found


class SparseResNet(nn.ModuleList):
    """Levels of a strided block and residual blocks; returns the tensor of each.

    Args:
        blocks: (number of blocks, channels, kernel_size, stride) of each level.
        in_channels: C_in.
        width_multiplier: of all channels.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int, Any, Any]],
        *,
        in_channels: int = 4,
        width_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.blocks, self.in_channels = blocks, in_channels
        self.width_multiplier = width_multiplier
        for number, channels, kernel_size, stride in blocks:
            width = int(channels * width_multiplier)
            first = SparseConvBlock(in_channels, width, kernel_size, stride)
            rest = [SparseResBlock(width, width, kernel_size) for _ in range(number - 1)]
            self.append(nn.Sequential(first, *rest))
            in_channels = width

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        """The tensors of all levels, the finest first."""
        outputs = []
        for level in self:
            x = level(x)
            outputs.append(x)
        return outputs


class SparseResNet21D(SparseResNet):
    """The encoder of detectors: five levels; see SparseResNet for the arguments."""

    def __init__(self, **kwargs: Any) -> None:
        levels = [(3, 16, 3, 1), (3, 32, 3, 2), (3, 64, 3, 2), (3, 128, 3, 2)]
        super().__init__([*levels, (1, 128, (1, 3, 1), (1, 2, 1))], **kwargs)


class SparseResUNet(nn.Module):
    """Four levels down and up with skip connections; returns the tensors of all nine stages.

    Args:
        stem_channels: of the first two layers.
        encoder_channels: of the four levels down.
        decoder_channels: of the four levels up.
        in_channels: C_in.
        width_multiplier: of all channels.
    """

    def __init__(
        self,
        stem_channels: int,
        encoder_channels: Sequence[int],
        decoder_channels: Sequence[int],
        *,
        in_channels: int = 4,
        width_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.stem_channels, self.encoder_channels = stem_channels, encoder_channels
        self.decoder_channels, self.in_channels = decoder_channels, in_channels
        self.width_multiplier = width_multiplier
        widths = [stem_channels, *encoder_channels, *decoder_channels]
        n = [int(width_multiplier * width) for width in widths]
        stem = *SparseConvBlock(in_channels, n[0], 3), *SparseConvBlock(n[0], n[0], 3)
        self.stem = nn.Sequential(*stem)
        self.encoders = nn.ModuleList(
            nn.Sequential(
                SparseConvBlock(n[k], n[k], 2, stride=2),
                SparseResBlock(n[k], n[k + 1], 3),
                SparseResBlock(n[k + 1], n[k + 1], 3),
            )
            for k in range(4)
        )
        self.decoders = nn.ModuleList(
            nn.ModuleDict(
                {
                    "upsample": SparseConvTransposeBlock(n[k + 4], n[k + 5], 2, stride=2),
                    "fuse": nn.Sequential(
                        SparseResBlock(n[k + 5] + n[3 - k], n[k + 5], 3),
                        SparseResBlock(n[k + 5], n[k + 5], 3),
                    ),
                }
            )
            for k in range(4)
        )

    def forward(self, x: SparseTensor) -> list[SparseTensor]:
        """The tensors of the stem, of the levels down and of the levels up."""
        outputs = [self.stem(x)]
        for encoder in self.encoders:
            outputs.append(encoder(outputs[-1]))
        skips = outputs[-2::-1]
        for decoder, skip in zip(self.decoders, skips, strict=True):
            y = decoder["upsample"](outputs[-1])  # type: ignore[index]
            outputs.append(decoder["fuse"](cat([y, skip])))  # type: ignore[index]
        return outputs


class SparseResUNet42(SparseResUNet):
    """The U-Net of segmentation; see SparseResUNet for in_channels and width_multiplier."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(32, [32, 64, 128, 256], [256, 128, 96, 96], **kwargs)
