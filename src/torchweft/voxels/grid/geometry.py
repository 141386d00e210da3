"""Which input voxel meets which output voxel: torch's convolution geometry, axis by axis.

    submanifold   q = o + j·dil − (k − 1)·dil // 2      outputs are the inputs
    strided       q = o·s − p + j·dil                   o in 0 … ⌊(S + 2p − dil (k − 1) − 1) / s⌋
    transposed    o = q·s − p + j·dil                   o in 0 … (S − 1) s − 2p + dil (k − 1)

q is an input voxel, o an output voxel, j = 0 … k − 1 the place in the kernel.  Offset number
K(j0, j1, …) counts the places row-major, as torch stores its weights.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torchweft.core.operators.operator import compiling
from torchweft.errors import DTypeError, ShapeError

__all__ = ["MODES", "Geometry", "Size", "axes_of", "geometry"]

MODES = ("submanifold", "strided", "transposed")

Size = int | Sequence[int]
"""One number for all axes, or one for each."""


class Geometry(NamedTuple):
    """The geometry of one layer, one number an axis; see the formulas above."""

    mode: str
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def num_offsets(self) -> int:
        """K, the places of the kernel."""
        return math.prod(self.kernel_size)

    @property
    def symmetric(self) -> bool:
        """Whether offset K − 1 − k of a submanifold kernel is the opposite of offset k."""
        return all(k % 2 == 1 for k in self.kernel_size)

    @property
    def begin(self) -> tuple[int, ...]:
        """What is taken off j·dil: the padding, of a submanifold kernel that of torch's "same"."""
        if self.mode != "submanifold":
            return self.padding
        return tuple((k - 1) * d // 2 for k, d in zip(self.kernel_size, self.dilation, strict=True))

    def offsets(self) -> list[tuple[int, ...]]:
        """(K, d): j·dil − begin, row-major."""
        axes = [
            [j * d - b for j in range(k)]
            for k, d, b in zip(self.kernel_size, self.dilation, self.begin, strict=True)
        ]
        return list(itertools.product(*axes))

    def output_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The spatial shape of the output; an axis shorter than the kernel has no output."""
        if self.mode == "submanifold":
            return tuple(shape)
        axes = zip(shape, *self[1:], strict=True)
        if self.mode == "transposed":
            return tuple(
                max(0, (n - 1) * s - 2 * p + d * (k - 1) + 1) if n else 0 for n, k, s, p, d in axes
            )
        return tuple(max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1) for n, k, s, p, d in axes)


def geometry(
    dim: int,
    kernel_size: Size,
    stride: Size = 1,
    padding: Size = 0,
    dilation: Size = 1,
    *,
    mode: str = "submanifold",
) -> Geometry:
    """The geometry of a layer over `dim` axes, checked.

    Raises:
        ShapeError: a number of axes that is not `dim`, a size or a step below 1, a negative
            padding, or a submanifold layer with a stride.
    """
    numbers = type(kernel_size) is type(stride) is type(padding) is type(dilation) is int
    if numbers and not compiling():  # dynamo warns of look-ups
        return _of_numbers(dim, kernel_size, stride, padding, dilation, mode)
    return _checked(dim, kernel_size, stride, padding, dilation, mode)


def _checked(
    dim: int, kernel_size: Size, stride: Size, padding: Size, dilation: Size, mode: str
) -> Geometry:
    if mode not in MODES:
        raise ShapeError(
            f"mode is {mode!r}: it must be one of {', '.join(MODES)}. Pass one of them."
        )
    sizes = {
        "kernel_size": axes_of("kernel_size", kernel_size, dim, least=1),
        "stride": axes_of("stride", stride, dim, least=1),
        "padding": axes_of("padding", padding, dim, least=0),
        "dilation": axes_of("dilation", dilation, dim, least=1),
    }
    if mode == "submanifold":
        if any(s != 1 for s in sizes["stride"]):
            raise ShapeError(
                f"stride is {sizes['stride']} in a submanifold layer, whose outputs are its "
                "inputs: it must be 1. Use SparseConv, or pass submanifold=False, to stride."
            )
        sizes["padding"] = (0,) * dim  # the kernel is centred, whatever was given
    return Geometry(mode, **sizes)


_of_numbers = functools.lru_cache(maxsize=1024)(_checked)
"""The same geometries come with every call; only numbers can be looked up, and True is not 1."""


def axes_of(name: str, value: Size, dim: int, least: int) -> tuple[int, ...]:
    """One number for each axis, checked."""
    numbers = tuple(value) if isinstance(value, Sequence) else (value,) * dim
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise DTypeError(
                f"{name} holds {number!r}: it must be an integer, or {dim} of them. "
                f"Pass {name}=(…) with integers."
            )
    if len(numbers) != dim:
        raise ShapeError(
            f"{name} has {len(numbers)} numbers but the coordinates have {dim} axes: "
            f"one number for all axes or {dim} are needed. Pass {name}={numbers[:1] * dim}, say."
        )
    if any(n < least for n in numbers):
        raise ShapeError(
            f"{name} is {numbers}: every number must be at least {least}. Correct {name}."
        )
    return numbers
