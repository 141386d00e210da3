"""The fully connected product: pairs of blades, then a matrix for each path.

    z_j[m] = Σ_(p,n) W[p,n,m] · pair_(p,j)[n],   pair_(p,j) = Σ sign · x_i y_k over path p

On the GPU one fused matrix product each way (kernels in fc.py); elsewhere, and for gradients of
gradients, the pairs by a program and a matrix product for each out grade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.clifford.algebra import Algebra
from weft.clifford.operators import run
from weft.clifford.programs import pairs
from weft.core.fused_op import FusedOperator, Gradients
from weft.core.op import constant_when_compiling

__all__ = ["fully_connected"]


def fully_connected(
    x: Tensor, y: Tensor, weight: Tensor, algebra: Algebra, gated: bool, backend: str
) -> Tensor:
    """The product of (B, rows, F_in) and (P, F_in, F_out), GELU-gated before it if `gated`."""
    args = (x, y, weight, algebra.signature, gated, backend)
    return _fused(*args) if backend == "triton" else _composition(*args)


def _composition(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, backend: str
) -> Tensor:
    (found,) = run(f"pairs {signature}{' gated' * gated}", backend, x, y)
    blocks, start = [], 0
    for paths, blades in _blocks(signature):
        stop = start + len(paths) * blades
        part = found[start:stop].view(len(paths), blades, *found.shape[1:])
        matrices = torch.stack([weight[p] for p in paths])
        blocks.append(torch.einsum("pjrn,pnm->jrm", part, matrices))
        start = stop
    return torch.cat(blocks)


@constant_when_compiling
def _blocks(signature: str) -> list[tuple[list[int], int]]:
    """The paths and the number of blades of each out grade."""
    algebra = Algebra.from_signature(signature)
    return list(zip(pairs(algebra)[1], map(len, algebra.of_grade), strict=True))


def _forward(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, backend: str
) -> list[Tensor]:
    from weft.clifford.fc import forward

    return [forward(x, y, weight, Algebra.from_signature(signature), gated)]


def _backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    from weft.clifford.fc import backward

    x, y, weight, signature, gated, _ = args
    return backward(x, y, weight, grad, Algebra.from_signature(signature), gated, needed)


def _fake(x: Tensor, y: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[-1]))]


_fused = FusedOperator(
    "clifford_fully_connected",
    "Tensor x, Tensor y, Tensor weight, str signature, bool gated, str backend",
    3,
    _forward,
    _backward,
    _fake,
    _composition,
)
