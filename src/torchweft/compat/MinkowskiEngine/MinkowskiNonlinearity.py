"""Activations and dropout on features, with MinkowskiEngine's names; `module` is torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchweft.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from torchweft.compat.MinkowskiEngine.MinkowskiTensor import Tensor

NAMES = (
    *("ELU", "Hardshrink", "Hardsigmoid", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid"),
    *("PReLU", "ReLU", "ReLU6", "RReLU", "SELU", "CELU", "GELU", "Sigmoid", "SiLU", "Softplus"),
    *("Softshrink", "Softsign", "Tanh", "Tanhshrink", "Threshold", "Softmin", "Softmax"),
    *("LogSoftmax", "Dropout", "AlphaDropout"),
)
"""Modules of torch.nn; each is here as Minkowski + its name."""


class MinkowskiNonlinearityBase(MinkowskiModuleBase):
    """A module of torch on the features of a SparseTensor or TensorField.

    Args:
        *args: of MODULE.
        **kwargs: of MODULE.
    """

    MODULE: type[nn.Module]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.MODULE(*args, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """On the same rows."""
        return input.with_features(self.module(input.F))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module.extra_repr()})"


def _layer(name: str) -> type[MinkowskiNonlinearityBase]:
    members = {
        "MODULE": getattr(nn, name),
        "__doc__": f"torch's {name} on features.",
        "__module__": __name__,
    }
    return type(f"Minkowski{name}", (MinkowskiNonlinearityBase,), members)


LAYERS = {f"Minkowski{name}": _layer(name) for name in NAMES}
globals().update(LAYERS)


class MinkowskiSinusoidal(MinkowskiModuleBase):
    """coef · sin(x @ kernel + bias), kernel (C_in, C_out), bias and coef (1, C_out)."""

    def __init__(self, in_channel: int, out_channel: int) -> None:
        super().__init__()
        self.in_channel, self.out_channel = in_channel, out_channel
        self.kernel = nn.Parameter(torch.rand(in_channel, out_channel))
        self.bias = nn.Parameter(torch.rand(1, out_channel))
        self.coef = nn.Parameter(torch.rand(1, out_channel))

    def forward(self, input: Tensor) -> Tensor:
        """On the same rows."""
        return input.with_features(torch.sin(input.F.mm(self.kernel) + self.bias) * self.coef)


__all__ = ["MinkowskiNonlinearityBase", "MinkowskiSinusoidal", *LAYERS]
