"""Residual blocks: y = act(f(x) + downsample(x)), with the original's names of modules."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchweft.compat.MinkowskiEngine.MinkowskiConvolution import MinkowskiConvolution
from torchweft.compat.MinkowskiEngine.MinkowskiNonlinearity import LAYERS
from torchweft.compat.MinkowskiEngine.MinkowskiNormalization import MinkowskiBatchNorm

__all__ = ["BasicBlock", "Bottleneck"]


class _Block(nn.Module):
    """Convolutions conv1, conv2 …, each with a norm, and an activation between them.

    Args:
        inplanes: channels of the input.
        planes: channels inside; the output has expansion times as many.
        stride: of the first 3 × … convolution.
        dilation: of the 3 × … convolutions.
        downsample: brings the input to the output's channels and voxels; None: it has them.
        bn_momentum: of the norms.
        dimension: number of axes.
    """

    expansion = 1
    sizes: tuple[int, ...] = (3, 3)

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        bn_momentum: float = 0.1,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        widths = [inplanes, *[planes] * (len(self.sizes) - 1), planes * self.expansion]
        strided = self.sizes.index(3)
        for i, size in enumerate(self.sizes):
            wide = size > 1
            convolution = MinkowskiConvolution(
                widths[i],
                widths[i + 1],
                kernel_size=size,
                stride=stride if i == strided else 1,
                dilation=dilation if wide else 1,
                dimension=dimension,
            )
            self.add_module(f"conv{i + 1}", convolution)
            norm = MinkowskiBatchNorm(widths[i + 1], momentum=bn_momentum)
            self.add_module(f"norm{i + 1}", norm)
        self.relu = LAYERS["MinkowskiReLU"](inplace=True)
        self.downsample = downsample

    def forward(self, x: Any) -> Any:
        """The block's output."""
        out, last = x, len(self.sizes)
        for i in range(1, last + 1):
            out = self.get_submodule(f"norm{i}")(self.get_submodule(f"conv{i}")(out))
            out = self.relu(out) if i < last else self.weighted(out)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)

    def weighted(self, out: Any) -> Any:
        """The last norm's output, before the input is added."""
        return out


class BasicBlock(_Block):
    """Two convolutions of kernel size 3; arguments: inplanes, planes, stride, dilation, …"""


class Bottleneck(_Block):
    """Convolutions of kernel size 1, 3 and 1; the output has 4 times the channels."""

    expansion = 4
    sizes = (1, 3, 1)
