"""How a layer of another library is found, and another put in its place with its weights.

A layer of torchweft has the parameters and statistics of the layer that it replaces.  The rest of
that layer's state (tables of couplings, masks, radii) follows from how it was built.  It is kept on
the CPU: `to_e3nn` gives it back, and a state that is loaded must agree with it, but for tables that
follow from irreps, which layers of torchweft take no notice of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.errors import DTypeError, WeftError

__all__ = [
    "all_or_nothing",
    "check_parameters",
    "holding",
    "holds",
    "is_of",
    "naming",
    "replace_layers",
    "rest_of_state",
]

ROUNDED = 2.0**-12
"""Fraction by which constants of a state may be off that was saved in another precision."""


HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_is_full_backward_hook", "_backward_pre_hooks"),
)
"""Attributes of a module where torch keeps its hooks."""


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """A model that is changed meanwhile is as it was before, if what changes it raises."""
    attributes = [vars(module) for module in model.modules()]
    inner = [d for own in attributes for d in own.values() if isinstance(d, dict)]
    before = [(d, dict(d)) for d in (*attributes, *inner)]
    try:
        yield
    except BaseException:
        for changed, content in before:
            changed.clear()
            changed.update(content)
        raise


def replace_layers(module: nn.Module, make: Callable[[Any], nn.Module | None]) -> int:
    """Replace the modules for which `make` returns another; returns their number.

    Where `make` raises, nothing is replaced, and the error names the module.
    """
    layers = list(_made_layers(module, make, ""))
    for parent, name, layer in layers:
        setattr(parent, name, layer)
    return len(layers)


def _made_layers(
    module: nn.Module, make: Callable[[Any], nn.Module | None], path: str
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """(parent, its attribute, the layer that is made for it)."""
    for name, child in module.named_children():
        with naming(path + name):
            layer = make(child)
        if layer is None:
            yield from _made_layers(child, make, f"{path}{name}.")
        else:
            yield module, name, layer


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors of what is turned meanwhile name the module."""
    try:
        yield
    except WeftError as error:
        raise type(error)(f"{name or 'the model'} cannot be converted: {error}") from error


def is_of(package: str, name: str, module: object) -> bool:
    """Whether a class of another package is the module's class or a base of it."""
    return any(
        base.__module__.partition(".")[0] == package and base.__name__ == name
        for base in type(module).__mro__
    )


def holds(package: str, module: object) -> bool:
    """Whether a module is, or has within it, one of a package's classes or of a subclass."""
    modules = module.modules() if isinstance(module, nn.Module) else ()
    bases = (base for part in modules for base in type(part).__mro__)
    return any(base.__module__.partition(".")[0] == package for base in bases)


def holding(made: nn.Module, module: nn.Module) -> nn.Module:
    """`made` with the parameters, statistics, hooks, device and mode of another module.

    Raises:
        DTypeError: their parameters have other names, as where the module has a parametrization.
    """
    tensors = chain(module.parameters(), module.buffers())
    made.to(next((t.device for t in tensors), None))
    for name, parameter in module.named_parameters(recurse=False):
        made.register_parameter(name, parameter)
    check_parameters(made, module)
    for name in ("running_mean", "running_var"):
        if getattr(module, name, None) is not None:
            made.register_buffer(name, getattr(module, name))
    for name in HOOKS:  # the same dictionaries, so that handles remove hooks from `made`
        setattr(made, name, getattr(module, name))
    own = made.state_dict()
    rest = {name: t.cpu() for name, t in module.state_dict().items() if name not in own}
    if rest:
        made._rest_of_state = rest  # type: ignore[assignment]
        made.register_load_state_dict_pre_hook(_take_rest)  # type: ignore[no-untyped-call]
    return made.train(module.training)


def check_parameters(made: nn.Module, module: nn.Module) -> None:
    """Raise DTypeError unless two modules have parameters of the same names."""
    names = [name for name, _ in module.named_parameters()]
    if {name for name, _ in made.named_parameters()} != set(names):
        raise DTypeError(
            f"a {type(module).__name__} has the parameters {', '.join(names)}: it must have those "
            "of its class alone. Remove parametrizations, pruning and the like before the model is "
            "converted, and register them on the converted model."
        )


def rest_of_state(module: nn.Module) -> dict[str, Tensor]:
    """What the state of a layer lacks of that of the layer which it has replaced."""
    rest: dict[str, Tensor] = getattr(module, "_rest_of_state", {})
    return rest


def _take_rest(
    module: Any,
    state: dict[str, Tensor],
    prefix: str,
    local_metadata: object,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    errors: list[str],
) -> None:
    """Take what the layer does not hold out of a state, if it is what was kept."""
    for name, kept in module._rest_of_state.items():
        given = state.pop(prefix + name, None)
        if given is not None and not _agree(given, kept):
            errors.append(
                f"{prefix}{name} is another table than that of the model that was converted: its "
                "parameters would mean something else here. Load the state into a model of the "
                "original class, and convert that."
            )


def _agree(given: Tensor, kept: Tensor) -> bool:
    if given.shape != kept.shape:
        return False
    a, b = given.detach().cpu().double(), kept.double()
    size = torch.cat([a.flatten(), b.flatten()]).abs().max() if kept.numel() else 0.0
    return not bool(((a - b).abs() > ROUNDED * size).any())
