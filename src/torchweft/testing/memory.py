"""Memory that shows what nobody wrote: torch.empty and its kin come filled with NaN."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["poisoned_memory"]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill new uninitialised tensors with NaN (integers: their largest value).

    An output element, or an element of a workspace, that no program writes becomes NaN in the
    result instead of a zero that happened to be there.
    """
    memory: Any = torch.utils.deterministic  # its attribute is set up where mypy does not look
    was_on = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    was_filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # only the filling is wanted: oracles may use operations that are not deterministic
            warnings.filterwarnings("ignore", message=".*deterministic.*")
            yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warn_only)
        memory.fill_uninitialized_memory = was_filled
