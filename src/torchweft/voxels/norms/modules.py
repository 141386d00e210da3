"""Which modules of torch may join the layer before them."""

from __future__ import annotations

from torch import nn

__all__ = ["activation_name", "is_batch_norm"]

_ACTIVATIONS: dict[type[nn.Module], str] = {nn.ReLU: "relu", nn.SiLU: "silu", nn.GELU: "gelu"}


def activation_name(module: nn.Module) -> str | None:
    """Its name among ACTIVATIONS; None for another module, or one with hooks."""
    name = _ACTIVATIONS.get(type(module))
    if name is None or _hooked(module) or getattr(module, "approximate", "none") != "none":
        return None
    return name


def is_batch_norm(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether it is a torch.nn.BatchNorm1d, or of these types, and has no hooks."""
    return type(module) in (nn.BatchNorm1d, *types) and not _hooked(module)


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
