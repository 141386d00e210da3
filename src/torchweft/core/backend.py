"""The backend of a call: the fastest available one, or the requested one, never another."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from torchweft.errors import BackendError, DeviceError

__all__ = ["BACKENDS", "check_torch_only", "choose", "device_of", "interpreted"]

BACKENDS = ("triton", "numba", "torch")
"""In the order in which backend=None tries them; `torch` serves every call."""


@functools.cache
def interpreted() -> bool:
    """Whether Triton kernels of this process run on the CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _why_not(backend: str, device: str) -> str | None:
    """The reason why a backend cannot serve tensors on a type of device; None if it can."""
    if backend == "torch":
        return None
    if backend == "triton":
        if not _installed("triton"):
            return "triton is not installed: pip install triton"
        if device != "cuda" and not interpreted():
            return f"triton serves GPU tensors, these are on {device}: move them with .cuda()"
        return None
    if backend == "numba":
        if not _installed("numba"):
            return "numba is not installed: pip install numba"
        if device != "cpu":
            return f"numba serves CPU tensors, these are on {device}: move them with .cpu()"
        return None
    return f"there is no such backend; the backends are {', '.join(BACKENDS)}"


@functools.cache
def choose(backend: str | None, device: str) -> str:
    """The backend for tensors on a type of device ("cpu", "cuda", ...).

    Raises:
        BackendError: the requested backend cannot serve here.
    """
    if backend is None:
        order = BACKENDS if device == "cuda" else ("numba", "torch")
        return next(name for name in order if _why_not(name, device) is None)
    if reason := _why_not(backend, device):
        able = [name for name in BACKENDS if _why_not(name, device) is None]
        raise BackendError(
            f"backend={backend!r} was asked for on {device}: {reason}. "
            f"Or pass one of {able}, or backend=None to let torchweft choose."
        )
    return backend


def check_torch_only(module: object, backend: str | None) -> None:
    """Raise BackendError where another backend than torch is requested for a layer of torch's own.

    Args:
        module: the layer, or its name.
        backend: the requested backend.
    """
    if backend in (None, "torch"):
        return
    name = module if isinstance(module, str) else type(module).__name__
    known = "has no kernels" if backend in BACKENDS else f"is none of {', '.join(BACKENDS)}"
    raise BackendError(
        f"backend={backend!r} was asked for {name}, for which it {known}: torch's own operations "
        "compute it on every device. Leave backend out, or pass 'torch'."
    )


def device_of(name: str | None) -> torch.device:
    """The device of a name; None is cuda where there is one, else cpu.

    Raises:
        DeviceError: no such device is here.
    """
    here = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    if name is None:
        return torch.device(here[-1])
    count = torch.cuda.device_count()
    if name in here or name in [f"cuda:{number}" for number in range(count)]:
        return torch.device(name)
    raise DeviceError(
        f"--device is {name}: it must be one that torch finds here, {' or '.join(here)}. "
        "Pass one of these; `torchweft doctor` says what this machine has."
    )
