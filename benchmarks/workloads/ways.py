"""Functions that are made, or recorded as a CUDA graph, in their first call."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import torchweft

__all__ = ["AtFirst", "Function", "captured"]

Function = Callable[..., Tensor]


class AtFirst:
    """A function that is made of the tensors of its first call."""

    def __init__(self, make: Callable[..., Function]) -> None:
        self._make = make
        self._function: Function | None = None

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Of inputs."""
        return self.made(*inputs)(*inputs)

    def made(self, *inputs: Tensor) -> Function:
        """The function of inputs, without a call."""
        if self._function is None:
            self._function = self._make(*inputs)
        return self._function


def captured(function: Function) -> Function:
    """The function, replayed as a CUDA graph."""
    return AtFirst(lambda *inputs: torchweft.capture(function, *inputs))
