"""Private names of torch.  Those of Triton and numba stand in `core/private_compilers.py`.

`tests/contract/test_private.py` checks that each name does what it is used for.
"""

from __future__ import annotations

import ctypes
import functools
import sys
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
    "foreach_copy",
    "forward_level",
    "functorch",
    "get_device",
    "group_name",
    "group_of",
    "is_hooked",
    "parse_to",
    "process_group",
    "raw_stream",
    "register_pytree_node",
    "stash",
    "stashed",
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
foreach_copy = torch._foreach_copy_
"""Copies of tensors into others; on a GPU one kernel where all are of one dtype and dense."""
transforms_active = torch._C._are_functorch_transforms_active
will_execute = torch._C._will_engine_execute_node


def stash(name: str, value: Any) -> None:
    """Keep a value for this thread, and for autograd's threads that work for it.

    Torch counts a reference when it lets a value go, but before 2.13 not when it takes it.
    """
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(name, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def stashed(name: str) -> Any:
    """The value that `stash` has kept under a name; None if there is none."""
    return torch._C._get_obj_in_tls(name) if torch._C._is_key_in_tls(name) else None


_any_global_hook: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether calls of a module do more than the forward method of its class.

    A hook waits for them or for their gradients, of this module or of all, or the module has a
    forward method of its own.
    """
    forward = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(forward or backward or _any_global_hook())


def group_name(group: Any = None) -> str:
    """The name by which a registered op finds a group of ranks; None: all ranks."""
    everyone: Any = torch.distributed.group.WORLD
    name: str = (group or everyone).group_name
    return name


def process_group(name: str) -> Any:
    """The group of ranks with a name."""
    groups: Any = torch.distributed.distributed_c10d
    return groups._resolve_process_group(name)


_GROUP_ARGUMENTS = "process_group", "group_name", "group"
"""Arguments of torch's collectives, functional ones, and our operators that name a group."""


def group_of(name: str, value: Any) -> Any:
    """The group of ranks that an argument of an operator is, or names; None: it is no group."""
    if name not in _GROUP_ARGUMENTS:
        return None
    if isinstance(value, str):
        return process_group(value)
    if isinstance(value, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(value)
    return None
