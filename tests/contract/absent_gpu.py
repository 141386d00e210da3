"""A GPU that is not here: Triton compiles for sm_90, and a driver notes what it is given."""

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import torch

from torchweft.core import private
from torchweft.core.gpu import binaries, launcher
from torchweft.core.gpu import driver as machine

SHARED, THREADS = 232_448, 1024
"""What a program may use."""


class Driver:
    """The calls of libcuda that `core.machine` makes."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, bytes]] = []
        self.launched: list[str] = []
        self._binary = b""

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = 1
        return 0

    def cuDeviceGetAttribute(self, found: Any, attribute: int, device: Any) -> int:  # noqa: N802
        found._obj.value = SHARED
        return 0

    def cuModuleLoadData(self, module: Any, binary: bytes) -> int:  # noqa: N802
        self._binary = binary
        return 0

    def cuModuleGetFunction(self, function: Any, module: Any, name: bytes) -> int:  # noqa: N802
        self.loaded.append((name.decode(), self._binary))
        function._obj.value = len(self.loaded)
        return 0

    def cuFuncGetAttribute(self, found: Any, attribute: int, function: Any) -> int:  # noqa: N802
        found._obj.value = THREADS if attribute == machine.MOST_THREADS else 0
        return 0

    def cuFuncSetCacheConfig(self, function: Any, config: int) -> int:  # noqa: N802
        return 0

    def cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> int:  # noqa: N802
        return 0

    def cuLaunchKernelEx(self, config: Any, function: ctypes.c_void_p, *_: Any) -> int:  # noqa: N802
        self.launched.append(self.loaded[int(function.value or 0) - 1][0])
        return 0


def without_triton(replace: Any) -> Driver:
    """Kernels of tensors on the CPU are launched into nothing, if their code is on disk.

    Args:
        replace: monkeypatch.setattr, or setattr.
    """
    driver = Driver()
    replace(launcher, "_current_stream", lambda: 0)
    replace(launcher, "_made", set())
    replace(launcher, "_runs", {})  # handles of code are those of a driver
    replace(binaries, "device", lambda: "sm_90")
    replace(machine, "_begun", {})
    replace(machine, "_driver", lambda: driver)
    return driver


def stand_in(monkeypatch: Any) -> Driver:
    """The same, and what is not on disk is compiled."""
    import triton
    from triton.backends.compiler import GPUTarget

    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED})
    known = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        utils=utils,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", known)
    monkeypatch.setattr(private, "get_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return without_triton(monkeypatch.setattr)
