"""Functions of torch that are replaced by others for a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

__all__ = ["Replaced"]

Function = Callable[..., Any]


class Replaced(TorchFunctionMode):
    """While it is active, this thread's calls of some functions of torch are calls of others.

    Args:
        functions: what is called, by what it takes the place of; both take the same arguments.
    """

    def __init__(self, functions: Mapping[Function, Function]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The result of a call."""
        return self._functions.get(func, func)(*args, **(kwargs or {}))
