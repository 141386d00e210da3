"""Signatures: what decides how a call runs, beside the numbers in its tensors.

Whatever follows from a signature is kept, so that a call is settled once for each combination of
shapes, dtypes and devices, and asks again by one look into a table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, watched

__all__ = ["KEPT", "Kind", "Signature", "kept", "signature"]

F = TypeVar("F", bound=Callable[..., Any])

KEPT = 4096
"""Answers that each function keeps."""

Kind = tuple[torch.Size, torch.dtype, torch.device]
"""Of a tensor."""

Signature = tuple[Kind, ...]


def signature(tensors: Sequence[Tensor]) -> Signature:
    """The kind of each tensor."""
    return tuple([(t.shape, t.dtype, t.device) for t in tensors])


def kept(function: F) -> F:
    """Keep what a function says of signatures.

    Not where sizes may be symbols: while torch traces, and under its dispatch modes.
    """
    answers = functools.lru_cache(KEPT)(function)

    @functools.wraps(function)
    def ask(*given: Any) -> Any:
        return function(*given) if compiling() or watched() else answers(*given)

    return ask  # type: ignore[return-value]
