"""Rows of irreps as blocks (…, mul, 2l+1), in either order of memory.

mul_ir   component a of copy u of a block is at  offset + u · (2l+1) + a    (e3nn's)
ir_mul                                           offset + a · mul + u       (channels fastest)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import Irreps, MulIr

__all__ = [
    "LAYOUTS",
    "as_block",
    "broadcast_leads",
    "check_layout",
    "check_rows",
    "join",
    "parts_of",
    "side_by_side",
    "split",
    "split_weight",
    "steps",
]

LAYOUTS = ("mul_ir", "ir_mul")


def parts_of(x: Tensor, sizes: Sequence[int], dim: int = -1) -> Sequence[Tensor]:
    """Views of x side by side along a dimension, whose gradients are one tensor."""
    return (x,) if len(sizes) == 1 else x.split_with_sizes(list(sizes), dim)


def split_weight(
    weight: Tensor | None, shapes: Sequence[tuple[int, ...] | None]
) -> list[Tensor | None]:
    """Views (…, *shape) of a flat weight, None without a shape; their gradients are one tensor."""
    if weight is None:
        return [None] * len(shapes)
    flats = iter(parts_of(weight, [math.prod(shape) for shape in shapes if shape is not None]))
    views: list[Tensor | None] = []
    for shape in shapes:
        if shape is None:
            views.append(None)
        else:
            flat = next(flats)
            views.append(flat.reshape(*flat.shape[:-1], *shape))
    return views


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Tensors along a dimension, one or more; a single one is returned itself."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def split(x: Tensor, irreps: Irreps, layout: str) -> list[Tensor]:
    """Views (…, mul, 2l+1), one for each item of the irreps of x (…, D)."""
    parts = parts_of(x, [item.dim for item in irreps])
    return [as_block(part, item, layout) for part, item in zip(parts, irreps, strict=True)]


def as_block(part: Tensor, item: MulIr, layout: str) -> Tensor:
    """A view (…, mul, 2l+1) of the components (…, mul · (2l+1)) of an item."""
    lead, (mul, ir) = part.shape[:-1], item
    if layout == "mul_ir":
        return part.reshape(*lead, mul, ir.dim)
    return part.reshape(*lead, ir.dim, mul).transpose(-1, -2)


def join(blocks: Sequence[Tensor], layout: str) -> Tensor:
    """Blocks (…, mul, 2l+1), at least one, as rows (…, D)."""
    turned = [block if layout == "mul_ir" else block.transpose(-1, -2) for block in blocks]
    return side_by_side([block.flatten(-2) for block in turned], -1)


def broadcast_leads(leads: Sequence[torch.Size]) -> torch.Size:
    """The common leading dimensions."""
    first, *others = leads
    if all(lead == first for lead in others):
        return first
    try:
        found: torch.Size = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(str(tuple(lead)) for lead in leads)
        raise ShapeError(
            f"the leading dimensions of the inputs are {shapes}: they must broadcast. "
            "Pass one row of each for every row of the output, or dimensions of size 1."
        ) from None
    return found


def steps(item: MulIr, layout: str) -> tuple[int, int]:
    """From one component to the next, and from one copy to the next."""
    return (1, item.ir.dim) if layout == "mul_ir" else (item.mul, 1)


def check_layout(layout: str) -> None:
    """It is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ShapeError(
            f"layout is {layout!r}: it must be 'mul_ir', the components of a copy side by side, or "
            "'ir_mul', the copies of a component side by side. Choose the order of your tensors."
        )


def check_rows(name: str, x: Tensor, irreps: Irreps, module: object) -> None:
    """X is a tensor (…, D)."""
    check_tensors(**{name: x})
    if x.dim() == 0 or x.shape[-1] != irreps.dim:
        raise ShapeError(
            f"{name} is {tuple(x.shape)} but {type(module).__name__} takes {irreps}: it must be "
            f"(…, {irreps.dim}). Pass features of these irreps, or build it for yours."
        )
