"""torchsparse's tuner, which has nothing to choose here."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["tune"]


def tune(model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Leaves the model as it is: torchweft chooses its kernels by itself, results do not change.

    Args:
        model: a network.
        args: those of torchsparse's `tune`; they have no effect.
        kwargs: as args; nothing is saved.
    """
