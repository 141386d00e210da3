"""Under torch.autocast an input takes autocast's dtype, as in torch's own products."""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core import private

__all__ = ["active", "narrowed"]

active = private.any_autocast


def narrowed(a: Tensor) -> Tensor:
    """The input in autocast's dtype, where that is on for its device; float64 stays."""
    if not isinstance(a, Tensor) or not torch.is_autocast_enabled(a.device.type):
        return a
    wide = a.dtype == torch.float64 or not a.is_floating_point()
    return a if wide else a.to(torch.get_autocast_dtype(a.device.type))
