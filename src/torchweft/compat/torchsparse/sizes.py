"""Sizes as tuples and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.errors import ShapeError

__all__ = ["make_divisible", "make_ntuple", "make_tensor"]


def make_ntuple(x: Any, ndim: int) -> tuple[int, ...]:
    """One integer per axis, from one or from as many, of Python, NumPy or torch.

    >>> make_ntuple(3, ndim=3)
    (3, 3, 3)

    Raises:
        ShapeError: another number of them.
    """
    values: Any = x.flatten().tolist() if isinstance(x, Tensor) else x
    numbers = tuple(int(n) for n in values) if hasattr(values, "__len__") else (int(values),) * ndim
    if len(numbers) != ndim:
        raise ShapeError(
            f"{x!r} has {len(numbers)} numbers for {ndim} axes: one, or {ndim}, are needed. "
            "Correct it."
        )
    return numbers


def make_tensor(
    x: Sequence[int], dtype: torch.dtype = torch.int32, device: torch.device | str = "cpu"
) -> Tensor:
    """A tensor of the numbers."""
    return torch.tensor(x, dtype=dtype, device=device)


def make_divisible(x: int, divisor: int) -> int:
    """The next multiple of the divisor, x itself if it is one."""
    return -(-x // divisor) * divisor
