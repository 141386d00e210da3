"""Which modules of a sequence join the one before them: a batch norm, an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchweft.core.operators.operator import compiling
from torchweft.core.private import is_hooked

__all__ = ["taken"]

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}


def taken(
    rest: list[nn.Module],
    convolves: Callable[[nn.Module], bool],
    norms: tuple[type[nn.Module], ...],
    relus: tuple[type[nn.Module], ...] = (),
) -> tuple[nn.Module, dict[str, Any]]:
    """The last module of a list, and what it takes over of those before it; all are removed.

    A convolution takes a batch norm, `norm`, and both take an `activation`; a module with hooks
    takes nothing and is not taken.
    While torch compiles nothing is taken over: its compiler fuses by itself.

    Args:
        rest: modules in the reverse of the order in which they run.
        convolves: whether a module takes `norm` and `activation`.
        norms: types beside torch.nn.BatchNorm1d.
        relus: types beside torch.nn.ReLU.
    """
    module, norms = rest.pop(), (nn.BatchNorm1d, *norms)
    given: dict[str, Any] = {}
    if compiling():
        return module, given
    first = convolves(module) and not is_hooked(module)
    if first and rest and type(rest[-1]) in norms and not is_hooked(rest[-1]):
        given["norm"] = rest.pop()
    if rest and (first or (type(module) in norms and not is_hooked(module))):
        name = _activation_name(rest[-1], relus)
        if name is not None:
            given["activation"] = name
            rest.pop()
    return module, given


def _activation_name(module: nn.Module, relus: tuple[type[nn.Module], ...]) -> str | None:
    """Its name among ACTIVATIONS; None for another module, or one with hooks."""
    name = "relu" if type(module) in relus else _ACTIVATIONS.get(type(module))
    if name is None or is_hooked(module) or getattr(module, "approximate", "none") != "none":
        return None
    return name
