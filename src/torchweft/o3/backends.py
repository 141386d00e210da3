"""The modules that run a topic's calls on a backend, imported by name at their first call.

Tracing a call, or running it on another backend, therefore needs neither Triton nor numba.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NoReturn

from torchweft.core.backend import choose
from torchweft.core.operators.operator import constant_when_compiling
from torchweft.errors import BackendError

__all__ = ["EXECUTORS", "chosen_backend", "executor", "refuse_backend"]

EXECUTORS = {
    "channelwise": {
        "triton": "gpu.launch",
        "numba": "numba_path",
        "few": "numba_table",
        "torch": "torch_path",
    },
    "mixing": {"triton": "launch"},
    "radial_linear": {"triton": "launch"},
}
"""The module of each backend, in each topic's folder."""


@functools.cache
def executor(topic: str, backend: str) -> Any:
    """The module of a topic for a backend."""
    return importlib.import_module(f"torchweft.o3.{topic}.{EXECUTORS[topic][backend]}")


@constant_when_compiling
def chosen_backend(backend: str | None, device: str) -> str:
    """`torchweft.core.backend.choose`, constant when torch.compile traces it."""
    return choose(backend, device)


def refuse_backend(backend: str, device: str, what: str) -> NoReturn:
    """Raise BackendError: a backend was requested whose kernels cannot compute `what`."""
    choose(backend, device)  # raises, if it can serve nothing here
    raise BackendError(
        f"backend={backend!r} was asked for {what}, for which it has no kernels. "
        "Build the module with backend=None or 'torch'."
    )
