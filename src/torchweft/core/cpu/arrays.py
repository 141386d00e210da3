"""Operands as NumPy arrays."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

__all__ = ["as_array"]

Array: TypeAlias = np.ndarray[Any, Any]
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
    torch.int64: np.int64,
    torch.int32: np.int32,
}
_Memory = ctypes.c_char * sys.maxsize  # one type for every size: ctypes keeps each that it makes


def as_array(t: Tensor) -> Array:
    """The array of a contiguous tensor whose memory it shares and keeps.

    `Tensor.numpy` forbids for good to resize the tensor's storage.  FSDP frees gathered parameters
    by that, so what a caller may have given is seen through this function.
    """
    memory: Any = _Memory.from_address(t.data_ptr())
    memory.owner = t  # as long as an array shows it
    return np.frombuffer(memory, _DTYPES[t.dtype], t.numel()).reshape(t.shape)
