"""Checks and casts of operands: tensors of one dtype, on one device, in autocast's dtype.

Under autocast an operation does as torch's own of its kind: products and linear maps narrow their
operands, norms and transcendental functions take 16 bits as float32, all others take what comes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from torchweft.core.private import any_autocast, functorch, transforms_active
from torchweft.errors import DeviceError, DTypeError, ShapeError

__all__ = [
    "as_given",
    "check_tensors",
    "check_unmapped",
    "narrowed",
    "not_strided",
    "same_kind",
    "unwrapped",
    "widened",
    "without_autocast",
]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_tensors(**values: object) -> None:
    """Raise unless each is a strided tensor.

    Raises:
        DTypeError: one is not, such as an array, a list, a sparse or a nested tensor; the message
            has its keyword here.
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise DTypeError(
                f"{name} is a {type(value).__name__}: it must be a torch.Tensor. "
                f"Pass torch.as_tensor({name}), or correct the order of the arguments."
            )
        if value.layout is not torch.strided or value.is_nested:
            raise not_strided(name, value.layout)


def check_unmapped(remedy: str, **values: Tensor) -> None:
    """Raise if torch.vmap maps a tensor whose values the host reads.

    Raises:
        ShapeError: it maps one; the message has its keyword here, and ends with the remedy.
    """
    if not transforms_active():
        return
    for name, value in values.items():
        if unwrapped(value)[1]:
            raise ShapeError(
                f"{name} is mapped by torch.vmap: its values, which differ between the mapped "
                f"calls, decide how many steps there are. {remedy}"
            )


def unwrapped(tensor: Tensor) -> tuple[Tensor, bool]:
    """The tensor inside the wrappers of torch.func, and whether torch.vmap maps it."""
    mapped = False
    while functorch.is_functorch_wrapped_tensor(tensor):
        mapped = mapped or functorch.is_batchedtensor(tensor)
        tensor = functorch.get_unwrapped(tensor)
    return tensor, mapped


def not_strided(name: str, layout: torch.layout) -> DTypeError:
    """The error of a sparse or nested tensor; nested ones are strided or jagged."""
    if layout in (torch.strided, torch.jagged):
        given, needed, remedy = "a nested tensor", "one shape", "torch.nested.to_padded_tensor"
        return DTypeError(f"{name} is {given}: it must have {needed}. Pass {remedy}({name}, 0.0).")
    return DTypeError(
        f"{name} has the layout {layout}: it must be a strided tensor. Pass {name}.to_dense()."
    )


def narrowed(a: Tensor) -> Tensor:
    """The input in autocast's dtype if autocast is on for its device; float64 is kept."""
    if not isinstance(a, Tensor) or not torch.is_autocast_enabled(a.device.type):
        return a
    wide = a.dtype == torch.float64 or not a.is_floating_point()
    return a if wide else a.to(torch.get_autocast_dtype(a.device.type))


def as_given(a: Tensor) -> Tensor:
    """The input, whatever autocast says."""
    return a


def widened(a: Tensor) -> Tensor:
    """The input in float32 if it has 16 bits and autocast is on for its device."""
    if not isinstance(a, Tensor) or not torch.is_autocast_enabled(a.device.type):
        return a
    return a.float() if a.dtype in (torch.bfloat16, torch.float16) else a


def same_kind(
    cast: Callable[[Tensor], Tensor] = narrowed, /, **tensors: Tensor | None
) -> list[Tensor]:
    """The tensors, of one floating dtype on one device; `cast` if autocast is on."""
    values = [t for t in tensors.values() if t is not None]
    if not any_autocast() and _are_alike(values):
        return values
    given = {name: t for name, t in tensors.items() if t is not None}
    check_tensors(**given)
    if any_autocast():
        given = {name: cast(t) for name, t in given.items()}
    (first, reference), *rest = given.items()
    if reference.dtype not in _FLOATS:
        raise DTypeError(
            f"{first} is {reference.dtype}: it must be float64, float32, bfloat16 or float16. "
            f"Pass {first}.float()."
        )
    for name, tensor in rest:
        if tensor.dtype != reference.dtype:
            remedy = f"Pass {name}.to({first}.dtype), or use torch.autocast."
            if isinstance(tensor, torch.nn.Parameter):
                remedy = f"Use .to({reference.dtype}) of the module of {name}, or torch.autocast."
            raise DTypeError(
                f"{name} is {tensor.dtype} but {first} is {reference.dtype}: they must be the "
                f"same. {remedy}"
            )
        if tensor.device != reference.device:
            raise DeviceError(
                f"{name} is on {tensor.device} but {first} is on {reference.device}: they must be "
                f"on one device. Pass {name}.to({first}.device)."
            )
    return list(given.values())


def _are_alike(values: list[Tensor]) -> bool:
    """Whether values are strided tensors of one floating dtype on one device."""
    first = values[0]
    if not isinstance(first, Tensor) or first.dtype not in _FLOATS:
        return False
    dtype, device = first.dtype, first.device
    for value in values:
        if not isinstance(value, Tensor) or value.dtype != dtype or value.device != device:
            return False
        if value.layout is not torch.strided or value.is_nested:
            return False
    return True


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast does not narrow torch's own products on the device of x."""
    return torch.autocast(x.device.type, enabled=False) if any_autocast() else nullcontext()
