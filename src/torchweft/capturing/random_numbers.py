"""Random numbers in a function whose results with padding are compared with those without.

Padding draws numbers too, so that a mask of dropout, say, differs.  A function that draws is
therefore compared in calls whose random numbers are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchweft.core.replaced import Replaced

__all__ = ["generator_states", "random_numbers_fixed"]


def generator_states(device: torch.device) -> list[bytes]:
    """The states of torch's generators of the host and of a device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


def random_numbers_fixed() -> Replaced:
    """Inside, dropout returns its argument, rand is ½, randn 0 and bernoulli_ 1."""
    return Replaced(_FIXED)


def _kept(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _filled(make: Callable[..., Tensor], number: float) -> Callable[..., Tensor]:
    """A function of the arguments of `make`, and of a generator."""

    def filled(*args: Any, generator: Any = None, **options: Any) -> Tensor:
        with torch.no_grad():  # so that a leaf can be filled
            return make(*args, **options).fill_(number)

    return filled


_FIXED: dict[Callable[..., Any], Callable[..., Any]] = {
    functional.dropout: _kept,
    functional.dropout1d: _kept,
    functional.dropout2d: _kept,
    functional.dropout3d: _kept,
    functional.alpha_dropout: _kept,
    functional.feature_alpha_dropout: _kept,
    torch.rand: _filled(torch.empty, 0.5),
    torch.rand_like: _filled(torch.empty_like, 0.5),
    torch.randn: _filled(torch.empty, 0.0),
    torch.randn_like: _filled(torch.empty_like, 0.0),
    Tensor.bernoulli_: lambda tensor, *_, **__: tensor.fill_(1),
}
