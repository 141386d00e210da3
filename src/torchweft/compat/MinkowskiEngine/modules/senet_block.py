"""Residual blocks whose channels are weighted by a function of their means over each sample."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchweft.compat.MinkowskiEngine.MinkowskiBroadcast import MinkowskiBroadcastMultiplication
from torchweft.compat.MinkowskiEngine.MinkowskiNonlinearity import LAYERS
from torchweft.compat.MinkowskiEngine.MinkowskiOps import MinkowskiLinear
from torchweft.compat.MinkowskiEngine.MinkowskiPooling import MinkowskiGlobalPooling
from torchweft.compat.MinkowskiEngine.modules.resnet_block import BasicBlock, Bottleneck

__all__ = ["SEBasicBlock", "SEBottleneck", "SELayer"]


class SELayer(nn.Module):
    """y[n] = x[n] · σ(W₂ relu(W₁ mean of n's sample)).

    Args:
        channel: C.
        reduction: C over the channels between the two maps.
        D: has no effect.
    """

    def __init__(self, channel: int, reduction: int = 16, D: int = -1) -> None:  # noqa: N803
        super().__init__()
        self.fc = nn.Sequential(
            MinkowskiLinear(channel, channel // reduction),
            LAYERS["MinkowskiReLU"](inplace=True),
            MinkowskiLinear(channel // reduction, channel),
            LAYERS["MinkowskiSigmoid"](),
        )
        self.pooling = MinkowskiGlobalPooling()
        self.broadcast_mul = MinkowskiBroadcastMultiplication()

    def forward(self, x: Any) -> Any:
        """On the same voxels."""
        return self.broadcast_mul(x, self.fc(self.pooling(x)))


class SEBasicBlock(BasicBlock):
    """BasicBlock with an SELayer `se` before the sum; D is the number of axes."""

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        reduction: int = 16,
        D: int = -1,  # noqa: N803 - the original's name
    ) -> None:
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes, reduction)

    def weighted(self, out: Any) -> Any:
        """With channels weighted by the sample's means."""
        return self.se(out)


class SEBottleneck(Bottleneck):
    """Bottleneck with an SELayer `se` before the sum; D is the number of axes."""

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        D: int = 3,  # noqa: N803 - the original's name
        reduction: int = 16,
    ) -> None:
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes * self.expansion, reduction)

    def weighted(self, out: Any) -> Any:
        """With channels weighted by the sample's means."""
        return self.se(out)
