"""Private names of torch and Triton that are looked up by import; each has a test.

Those of torch are bound here.  Those of Triton are imported when they are first used: Triton need
not be installed.  `tests/contract/test_private.py` checks that each does what it is used for.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

__all__ = [
    "any_autocast",
    "dispatch_modes",
    "eval_frame",
    "functorch",
    "temporarily_clear_interpreter_stack",
    "transforms_active",
    "will_execute",
]

any_autocast = torch._C._is_any_autocast_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack
transforms_active = torch._C._are_functorch_transforms_active
will_execute = torch._C._will_engine_execute_node

TRITON_NAMES = {
    "ASTSource": "triton.compiler.compiler",
    "GPUTarget": "triton.backends.compiler",
    "GluonASTSource": "triton.experimental.gluon._runtime",
    "create_function_from_signature": "triton.runtime.jit",
    "ir": "triton._C.libtriton",
    "make_backend": "triton.compiler.compiler",
}
"""The module of each name of Triton: `from torchweft.core.private import ASTSource`."""


def __getattr__(name: str) -> Any:
    """A name of Triton, imported now."""
    if name not in TRITON_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(TRITON_NAMES[name]), name)
