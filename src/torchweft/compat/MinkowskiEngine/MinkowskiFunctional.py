"""torch.nn.functional on the features of SparseTensors and TensorFields; losses are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from torchweft.compat.MinkowskiEngine.MinkowskiTensor import Tensor

NAMES = (
    *("threshold", "relu", "hardtanh", "hardswish", "relu6", "elu", "selu", "celu", "leaky_relu"),
    *("prelu", "rrelu", "glu", "gelu", "logsigmoid", "hardshrink", "tanhshrink", "softsign"),
    *("softplus", "softmin", "softmax", "softshrink", "gumbel_softmax", "log_softmax", "tanh"),
    *("sigmoid", "hardsigmoid", "silu", "batch_norm", "normalize", "linear", "dropout"),
    "alpha_dropout",
)
"""Functions whose result is a tensor on the same rows."""

LOSSES = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"),
    *("cross_entropy", "hinge_embedding_loss", "kl_div", "l1_loss", "mse_loss"),
    *("multilabel_margin_loss", "multilabel_soft_margin_loss", "multi_margin_loss", "nll_loss"),
    *("smooth_l1_loss", "soft_margin_loss"),
)
"""Functions whose result is torch's."""


def _on_rows(name: str) -> Callable[..., Tensor]:
    function = getattr(functional, name)

    def call(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.with_features(function(input.F, *args, **kwargs))

    call.__name__, call.__doc__ = name, f"torch's {name} of the features, on the same rows."
    return call


def _of_features(name: str) -> Callable[..., torch.Tensor]:
    function = getattr(functional, name)

    def call(input: Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found: torch.Tensor = function(input.F, target, *args, **kwargs)
        return found

    call.__name__, call.__doc__ = name, f"torch's {name} of the features."
    return call


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _on_rows(name) for name in NAMES},
    **{name: _of_features(name) for name in LOSSES},
}
globals().update(FUNCTIONS)

__all__ = [*FUNCTIONS]
