"""Private names of Triton and numba, imported when first used: neither need be installed.

This module imports no torch, as processes that only compile need none.
`tests/contract/test_private.py` checks that each name does what it is used for.  Triton's
interpreter is used by `torchweft.testing.interpreter` alone.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["NAMES", "pack_args"]

NAMES = {
    "ASTSource": "triton.compiler.compiler",
    "GPUTarget": "triton.backends.compiler",
    "GluonASTSource": "triton.experimental.gluon._runtime",
    "create_function_from_signature": "triton.runtime.jit",
    "driver": "triton.runtime",
    "ir": "triton._C.libtriton",
    "make_array": "numba.np.arrayobj",
    "make_backend": "triton.compiler.compiler",
}
"""The module of each name: `from torchweft.core.private_compilers import ASTSource`."""


def pack_args(
    kernel: Any, backend: Any, options: dict[str, Any], bound: dict[str, Any], specialization: Any
) -> tuple[Any, ...]:
    """Options, signature, constants and attributes of a call of a Triton kernel."""
    packed: tuple[Any, ...] = kernel._pack_args(backend, options, bound, specialization, None)
    return packed


def __getattr__(name: str) -> Any:
    """A name of Triton or numba, imported now."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)
