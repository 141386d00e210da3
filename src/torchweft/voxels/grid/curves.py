"""Space-filling curves: orders in which voxels that follow each other lie close together.

    z       the bits of the axes interleaved, highest first:  x₂ y₂ z₂ x₁ y₁ z₁ x₀ y₀ z₀
    Hilbert the same after reflections that make each step of a full cube go to a neighbour

Coordinates may have any sign and any range of int32: keys of more than 62 bits take several words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import DTypeError, ShapeError

__all__ = ["hilbert_keys", "hilbert_order", "z_keys", "z_order"]

WORD = 62
"""Bits of a key that one int64 holds."""


def z_order(coords: Tensor) -> Tensor:
    """The permutation (N,) int64 that sorts voxels (N, d) along the z curve, d = 1 to 4."""
    return _ascending(z_keys(coords))


def hilbert_order(coords: Tensor) -> Tensor:
    """The permutation (N,) int64 that sorts voxels (N, d) along the Hilbert curve, d = 1 to 4."""
    return _ascending(hilbert_keys(coords))


def z_keys(coords: Tensor) -> Tensor:
    """(words, N) int64 keys of voxels (N, d), the highest word first; distinct as the voxels are.

    The cube starts at each axis's lowest coordinate and is as wide as the widest axis.
    """
    axes, bits = _cube(coords)
    return _interleave(axes, bits)


def hilbert_keys(coords: Tensor) -> Tensor:
    """The same along the Hilbert curve.

    From the coarsest bit to the finest, an axis whose bit is set turns the finer bits of the first
    axis round, one whose bit is not set exchanges its finer bits with them; what is left is a Gray
    code (Skilling 2004).
    """
    axes, bits = _cube(coords)
    for bit in reversed(range(1, bits)):
        finer = (1 << bit) - 1
        for i, axis in enumerate(axes):
            turned = axis >> bit & 1 == 1
            swap = torch.where(turned, finer, (axes[0] ^ axis) & finer)
            axes[0] = axes[0] ^ swap
            if i:
                axes[i] = torch.where(turned, axis, axis ^ swap)
            # the first axis exchanged with itself stays as it is
    for i in range(1, len(axes)):
        axes[i] = axes[i] ^ axes[i - 1]
    flips = torch.zeros_like(axes[-1])
    for bit in range(1, bits):
        flips ^= torch.where(axes[-1] >> bit & 1 == 1, (1 << bit) - 1, 0)
    return _interleave([axis ^ flips for axis in axes], bits)


def _cube(coords: Tensor) -> tuple[list[Tensor], int]:
    """The axes from 0 on, and how many bits the widest needs."""
    check_tensors(coords=coords)
    if coords.is_floating_point() or coords.is_complex() or coords.dtype == torch.bool:
        raise DTypeError(
            f"coords are {coords.dtype}: a curve runs through integers. Pass coords.int(), or "
            "voxelize(points, size) first."
        )
    if coords.dim() != 2 or not 1 <= coords.shape[1] <= 4:
        raise ShapeError(
            f"coords are {tuple(coords.shape)}: they must be (N, d), d = 1 to 4 axes. Leave the "
            "batch column out: coords[:, 1:]."
        )
    if not coords.shape[0]:
        return list(coords.long().T), 1
    cells = coords.long() - coords.long().amin(0)
    return list(cells.T), max(int(cells.max()).bit_length(), 1)


def _interleave(axes: list[Tensor], bits: int) -> Tensor:
    places = [(axis, bit) for bit in reversed(range(bits)) for axis in axes]
    words = []
    for start in range(0, len(places), WORD):
        word = torch.zeros_like(axes[0])
        for axis, bit in places[start : start + WORD]:
            word = word << 1 | (axis >> bit & 1)
        words.append(word)
    return torch.stack(words)


def _ascending(keys: Tensor) -> Tensor:
    """Stable sorts from the lowest word to the highest."""
    order = torch.arange(keys.shape[1], device=keys.device)
    for word in reversed(keys):
        order = order.index_select(0, torch.argsort(word.index_select(0, order), stable=True))
    return order
