"""The backend of a call: the fastest available one, or the requested one, never another."""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings

from torchweft.errors import BackendError

__all__ = ["BACKENDS", "check_torch_only", "choose", "interpreted", "kernels_serve"]

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
    return f"there is no such backend, only {', '.join(BACKENDS)}: correct the name"


@functools.cache
def choose(backend: str | None, device: str) -> str:
    """The backend for tensors on a type of device ("cpu", "cuda", ...).

    A process warns once where the CPU has torch's operations alone, since numba is not installed.

    Raises:
        BackendError: the requested backend cannot serve here.
    """
    if backend is None:
        if device == "cpu" and not _installed("numba"):
            warnings.warn(
                "numba is not installed: torch's own operations compute CPU tensors, slower "
                "than the loops that numba compiles. Run pip install numba.",
                stacklevel=2,
            )
        order = BACKENDS if device == "cuda" else ("numba", "torch")
        return next(name for name in order if _why_not(name, device) is None)
    if reason := _why_not(backend, device):
        able = [name for name in BACKENDS if _why_not(name, device) is None]
        raise BackendError(
            f"backend={backend!r} was asked for on {device}: {reason}. "
            f"Or pass one of {able}, or backend=None to let torchweft choose."
        )
    return backend


@functools.cache
def kernels_serve(device: str) -> bool:
    """Whether Triton kernels serve tensors on a type of device; the torch code serves all."""
    return device == "cuda" and choose(None, device) == "triton"


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
