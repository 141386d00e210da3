"""Tests that were written for the CPU, on a device: the same numbers, made there.

    with OnDevice(device):
        torch.randn(3, generator=generator)     # in a test: the CPU's numbers, on the device
        nn.Linear(3, 2)                         # parameters and buffers alike

What the library, or torch, makes without a device stays on the host, as for their users.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

__all__ = ["OnDevice"]

TESTS = str(Path(__file__).parent)
DRAWS = {
    Tensor.bernoulli_,
    Tensor.exponential_,
    Tensor.normal_,
    Tensor.random_,
    Tensor.uniform_,
}


class OnDevice(TorchFunctionMode):
    """Puts what a test makes, and the parameters and buffers of modules, on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __enter__(self) -> OnDevice:
        self.hooks = [
            modules.register_module_parameter_registration_hook(self._parameter),
            modules.register_module_buffer_registration_hook(self._buffer),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in DRAWS or getattr(func, "__module__", None) == "torch.nn.init":
            tensor, *rest = args or (kwargs.pop("tensor"),)
            drawn = torch.empty_like(tensor, device="cpu")
            func(drawn, *rest, **kwargs)
            with torch.no_grad():
                return tensor.copy_(drawn)
        if func not in _device_constructors() or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        if isinstance(next(iter(args), None), Tensor) or not _called_by_a_test():
            return func(*args, **kwargs)
        differentiable = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(self.device).requires_grad_(differentiable)

    def _parameter(self, module: nn.Module, name: str, value: Any) -> Any:
        if value is None or value.device == self.device:
            return None
        return nn.Parameter(value.detach().to(self.device), value.requires_grad)

    def _buffer(self, module: nn.Module, name: str, value: Any) -> Any:
        return None if value is None else value.to(self.device)


def _called_by_a_test() -> bool:
    """Whether the function that called torch is in the folder of the tests."""
    return sys._getframe(2).f_code.co_filename.startswith(TESTS)
