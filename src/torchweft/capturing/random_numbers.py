"""Random numbers in a function whose results with padding are compared with those without.

Padding draws numbers too, so that a mask of dropout, say, differs.  A function that draws is
therefore compared in calls where each random number is the mean of its distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

__all__ = ["Means", "generator_states"]


def generator_states(device: torch.device) -> list[bytes]:
    """The states of torch's generators of the host and of a device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return [state.numpy().tobytes() for state in states]


class Means(TorchFunctionMode):
    """While it is active, random numbers are means, and dropout returns its argument."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of a function of torch."""
        given = {name: value for name, value in (kwargs or {}).items() if name != "generator"}
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func in _DRAWN:
            made, number = _DRAWN[func]
            return made(*args, **given).fill_(number)
        if func is Tensor.bernoulli_:
            return args[0].fill_(1)
        return func(*args, **(kwargs or {}))


_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
}

_DRAWN: dict[Callable[..., Any], tuple[Callable[..., Tensor], float]] = {
    torch.rand: (torch.empty, 0.5),
    torch.rand_like: (torch.empty_like, 0.5),
    torch.randn: (torch.empty, 0.0),
    torch.randn_like: (torch.empty_like, 0.0),
}
