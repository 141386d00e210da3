"""Torch's default dtype, for a while: what other libraries build tables and weights in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["default_dtype"]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, it is `dtype`; afterwards that of before."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
