"""e3nn's mul_ir layout: for each irrep the channels outside, its components inside, in a row."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.workloads.equivariant import blocks
from benchmarks.workloads.uuu import DEGREES, START
from torchweft.o3 import Irreps

__all__ = ["from_mul_ir", "to_mul_ir", "to_mul_ir_rows"]


def to_mul_ir(x: Tensor) -> Tensor:
    """(N, components, C) to (N, components * C)."""
    parts = [x[:, START[d] : (d + 1) ** 2].mT.flatten(1) for d in DEGREES]
    return torch.cat(parts, 1)


def from_mul_ir(x: Tensor) -> Tensor:
    """(N, components * C) to (N, components, C)."""
    channels = x.shape[1] // (len(DEGREES) ** 2)
    sizes = [channels * (2 * d + 1) for d in DEGREES]
    parts = [
        part.unflatten(1, (channels, 2 * d + 1)).mT
        for part, d in zip(x.split(sizes, 1), DEGREES, strict=True)
    ]
    return torch.cat(parts, 1)


def to_mul_ir_rows(irreps: Irreps, x: Tensor) -> Tensor:
    """(N, D) of ir_mul rows."""
    return torch.cat([block.mT.flatten(1) for block in blocks(irreps, x)], 1)
