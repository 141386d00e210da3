"""NumPy's arrays as tensors of the same memory, and tensors as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["arrays", "tensors"]


def tensors(x: Any) -> Any:
    """The tensor of an array, or of each array of a tuple or list; NumPy's numbers as Python's.

    Anything else is unchanged.  An array that is read-only, or runs backwards, is copied.
    """
    if isinstance(x, tuple | list):
        found = map(tensors, x)
        return tuple(found) if isinstance(x, tuple) else list(found)
    if isinstance(x, np.ndarray):
        ascending = all(stride >= 0 for stride in x.strides)
        return torch.from_numpy(x if ascending and x.flags.writeable else x.copy())
    if isinstance(x, np.floating | np.complexfloating | np.integer):
        return x.item()
    return x


def arrays(x: Any) -> Any:
    """The array of a tensor, or of each tensor of a tuple or list; anything else unchanged."""
    if isinstance(x, tuple | list):
        found = map(arrays, x)
        return tuple(found) if isinstance(x, tuple) else list(found)
    return x.numpy() if isinstance(x, Tensor) else x
