"""How a layer of another library is found, and another put in its place with its weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from torch import nn

__all__ = ["Maker", "holding", "is_of", "replace_layers"]

Maker = Callable[[Any], nn.Module]
"""Makes torchweft's layer of one of another library."""


def replace_layers(module: nn.Module, make: Callable[[Any], nn.Module | None]) -> int:
    """Replace the modules for which `make` returns another; returns their number."""
    count = 0
    for name, child in list(module.named_children()):
        made = make(child)
        if made is not None:
            setattr(module, name, made)
        count += replace_layers(child, make) if made is None else 1
    return count


def is_of(package: str, name: str, module: object) -> bool:
    """Whether a class of another package is the module's class or a base of it."""
    return any(
        base.__module__.partition(".")[0] == package and base.__name__ == name
        for base in type(module).__mro__
    )


def holding(made: nn.Module, module: nn.Module) -> nn.Module:
    """`made` with the parameters, statistics, device and mode of another module."""
    tensors = chain(module.parameters(), module.buffers())
    made.to(next((t.device for t in tensors), None))
    for name, parameter in module.named_parameters(recurse=False):
        made.register_parameter(name, parameter)
    for name in ("running_mean", "running_var"):
        if getattr(module, name, None) is not None:
            made.register_buffer(name, getattr(module, name))
    return made.train(module.training)
