"""Private names of torch, Triton and numba, and the versions of them that are tested.

Names of torch are bound here.  Names of Triton and numba are imported when they are first used:
neither package need be installed.  `tests/contract/test_private.py` checks that each name does what
it is used for.  Triton's interpreter is used by `torchweft.testing.interpreter` alone.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch._C._dynamo import eval_frame
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode

__all__ = [
    "DispatchMode",
    "GetAttrKey",
    "any_autocast",
    "dispatch_modes",
    "eval_frame",
    "flatten",
    "flatten_with_path",
    "forward_level",
    "functorch",
    "get_device",
    "pack_args",
    "parse_to",
    "raw_stream",
    "register_pytree_node",
    "temporarily_clear_interpreter_stack",
    "transforms_active",
    "unflatten",
    "will_execute",
]


any_autocast = torch._C._is_any_autocast_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack
forward_level: Callable[[], int] = functools.partial(attrgetter("_current_level"), forward_ad)
"""The level of forward-mode AD, -1 outside; not a Python function, since it is called often."""
flatten = _pytree.tree_flatten
"""Nested tuples, lists and dicts -> (leaves, structure)."""
flatten_with_path = _pytree.tree_flatten_with_path
unflatten = _pytree.tree_unflatten
register_pytree_node = _pytree.register_pytree_node
GetAttrKey = _pytree.GetAttrKey
"""The key of a leaf that has a name."""
get_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current GPU, without a check that CUDA is initialized."""
raw_stream: Callable[[int], Any] = getattr(
    torch._C, "_cuda_getCurrentRawStream", torch.cuda.current_stream
)
"""The handle of the current stream of a GPU."""
parse_to = torch._C._nn._parse_to
"""Arguments of `Tensor.to` -> (device, dtype, …)."""
transforms_active = torch._C._are_functorch_transforms_active
will_execute = torch._C._will_engine_execute_node


def pack_args(
    kernel: Any, backend: Any, options: dict[str, Any], bound: dict[str, Any], specialization: Any
) -> tuple[Any, ...]:
    """Options, signature, constants and attributes of a call of a Triton kernel."""
    packed: tuple[Any, ...] = kernel._pack_args(backend, options, bound, specialization, None)
    return packed


NAMES = {
    "ASTSource": "triton.compiler.compiler",
    "GPUTarget": "triton.backends.compiler",
    "GluonASTSource": "triton.experimental.gluon._runtime",
    "create_function_from_signature": "triton.runtime.jit",
    "cgutils": "numba.core",
    "driver": "triton.runtime",
    "ir": "triton._C.libtriton",
    "make_array": "numba.np.arrayobj",
    "make_backend": "triton.compiler.compiler",
}
"""The module of each name of Triton or numba: `from torchweft.core.private import ASTSource`."""


def __getattr__(name: str) -> Any:
    """A name of Triton or numba, imported now."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(NAMES[name]), name)
