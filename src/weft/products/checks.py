"""What a call of a product may be given: shapes, dtypes and devices, checked on metadata only."""

from __future__ import annotations



import torch
from torch import Tensor

from weft.errors import DeviceError, DTypeError, ShapeError
from weft.products.autograd import accumulator
from weft.products.plan import Tables

__all__ = ["check_inputs", "check_length", "check_out", "check_scale", "check_tables", "rank"]

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32)

LAYOUTS = {
    "mul": ("(N, rows, C)", "(N, rows, C)"),
    "outer": ("(N, rows, C1)", "(N, rows, C2)"),
    "inner": ("(N, rows, C)", "(N, rows, C)"),
    "vecmat": ("(N, rows, Cin)", "(N, rows, Cin, Cout)"),
    "vecsca": ("(N, rows, C)", "(N, rows)"),
    "scavec": ("(N, rows)", "(N, rows, C)"),
    "mat_t_vec": ("(N, rows, Cin, Cout)", "(N, rows, Cin)"),
    "scale": ("(N, rows, C)", None),
}
"""What each input must look like; a leading N may be missing (shared over N)."""

CHANNELS = {"mul": (-1, -1), "inner": (-1, -1), "vecmat": (-1, -2), "mat_t_vec": (-2, -1)}
"""The dimensions of the two inputs that must be equal."""


def rank(layout: str) -> int:
    """Dimensions of a batched input of this layout."""
    return layout.count(",") + 1


def check_inputs(op: str, input1: Tensor, input2: Tensor | None) -> None:
    """Ranks, N, channels, dtypes and devices of the two inputs."""
    for name, a, layout in zip(("input1", "input2"), (input1, input2), LAYOUTS[op], strict=True):
        if layout is None:
            continue
        if not isinstance(a, Tensor):
            raise DTypeError(
                f"{name} is a {type(a).__name__}: {op} needs a torch.Tensor {layout}. "
                f"Pass torch.as_tensor({name})."
            )
        full = rank(layout)
        if a.dim() not in (full, full - 1):
            raise ShapeError(
                f"{name} is {tuple(a.shape)}: {op} needs {layout}, or the same without N to share "
                f"it over N. Reshape {name} to {full} or {full - 1} dimensions."
            )
        if a.dtype not in _FLOATS:
            raise DTypeError(
                f"{name} is {a.dtype}: products take float64, float32, bfloat16 and float16. "
                f"Convert it, e.g. {name}.float()."
            )
    if input2 is not None:
        _check_pair(op, input1, input2)


def _check_pair(op: str, input1: Tensor, input2: Tensor) -> None:
    if input1.dtype != input2.dtype:
        raise DTypeError(
            f"input1 is {input1.dtype} and input2 is {input2.dtype}: both must have one dtype. "
            f"Convert one of them, e.g. input2.to({input1.dtype})."
        )
    if input1.device != input2.device:
        raise DeviceError(
            f"input1 is on {input1.device} and input2 on {input2.device}: all tensors must be on "
            f"one device. Move one of them, e.g. input2.to({str(input1.device)!r})."
        )
    layout1, layout2 = LAYOUTS[op]
    both = layout2 is not None and (input1.dim(), input2.dim()) == (rank(layout1), rank(layout2))
    if both and input1.shape[0] != input2.shape[0]:
        raise ShapeError(
            f"input1 has N = {input1.shape[0]} and input2 has N = {input2.shape[0]}: both must "
            "have the same N. Drop the leading dimension of one to share it over N."
        )
    dim1, dim2 = CHANNELS.get(op, (None, None))
    if dim1 is not None and dim2 is not None and input1.shape[dim1] != input2.shape[dim2]:
        raise ShapeError(
            f"input1 is {tuple(input1.shape)} and input2 is {tuple(input2.shape)}: {op} needs "
            f"{layout1} and {layout2}, but {input1.shape[dim1]} and {input2.shape[dim2]} channels "
            "differ. Pass inputs with equal channels (nothing is broadcast)."
        )


def check_tables(input1: Tensor, tables: Tables) -> None:
    """Index tables are one-dimensional integer tensors on the inputs' device."""
    for name, index in zip(tables._fields, tables, strict=True):
        if index is None:
            continue
        if not isinstance(index, Tensor):
            raise DTypeError(
                f"{name} is a {type(index).__name__}: it must be an int32 or int64 tensor. "
                f"Pass torch.as_tensor({name})."
            )
        if index.dtype not in _INTEGERS:
            raise DTypeError(
                f"{name} is {index.dtype}: indices must be int32 or int64. "
                f"Convert it, e.g. {name}.long()."
            )
        if index.dim() != 1 or (name == "seg" and not index.numel()):
            raise ShapeError(
                f"{name} is {tuple(index.shape)}: it must have one dimension"
                f"{' and at least one bound' if name == 'seg' else ''}. Flatten it."
            )
        if index.device != input1.device:
            raise DeviceError(
                f"{name} is on {index.device} and input1 on {input1.device}: all tensors must be "
                f"on one device. Pass {name}.to({str(input1.device)!r})."
            )


def check_scale(input1: Tensor, scale: Tensor) -> None:
    """A scale is (T,), on the inputs' device, in their dtype or the one they are summed in."""
    if not isinstance(scale, Tensor):
        raise DTypeError(
            f"scale is a {type(scale).__name__}: it must be a tensor (T,). "
            "Pass torch.as_tensor(scale)."
        )
    if scale.dtype not in (input1.dtype, accumulator(input1.dtype)):
        raise DTypeError(
            f"scale is {scale.dtype} and input1 is {input1.dtype}: scale must be {input1.dtype} "
            f"or {accumulator(input1.dtype)}. Pass scale.to({input1.dtype})."
        )
    if scale.dim() != 1:
        raise ShapeError(f"scale is {tuple(scale.shape)}: it must be (T,). Flatten it.")
    if scale.device != input1.device:
        raise DeviceError(
            f"scale is on {scale.device} and input1 on {input1.device}: all tensors must be on one "
            f"device. Pass scale.to({str(input1.device)!r})."
        )


def check_length(name: str, length: int, needed: int, what: str, at_least: bool = False) -> None:
    """A table or an input that must have as many rows as there are terms."""
    if length == needed or (at_least and length > needed):
        return
    raise ShapeError(
        f"{name} has {length} rows but there are {needed} {what}: it must have "
        f"{'at least ' if at_least else ''}{needed}. Pass {name} with {needed} rows"
        f"{', or the index that picks them' if at_least else ''}."
    )


def check_out(out: Tensor, result: Tensor) -> None:
    """`out` must be what the call returns: shape, dtype, device, and no part of a graph."""
    if not isinstance(out, Tensor):
        raise DTypeError(
            f"out is a {type(out).__name__}: it must be a tensor {tuple(result.shape)}. "
            "Leave it out to have one made."
        )
    if out.shape != result.shape:
        raise ShapeError(
            f"out is {tuple(out.shape)}: this call returns {tuple(result.shape)}. "
            f"Pass torch.empty{tuple(result.shape)}, or leave out= away."
        )
    if out.dtype != result.dtype:
        raise DTypeError(
            f"out is {out.dtype}: this call returns {result.dtype}. Pass out in {result.dtype}."
        )
    if out.device != result.device:
        raise DeviceError(
            f"out is on {out.device}: this call returns a tensor on {result.device}. "
            f"Pass out on {result.device}."
        )
    if result.requires_grad or out.requires_grad:
        raise DTypeError(
            "out= was given to a call that records gradients: a result written in place has none. "
            "Leave out= away, or call under torch.no_grad()."
        )
