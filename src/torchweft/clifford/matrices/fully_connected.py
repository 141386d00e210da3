"""The fully connected product: pairs of blades, then a matrix for each path.

    z_j[m] = Σ_(p,n) W[p,n,m] · pair_(p,j)[n],   pair_(p,j) = Σ sign · x_i y_k over path p

On the GPU pairs, one matrix product an out grade, and the norm around them are fused (fc.py);
elsewhere, and for gradients of gradients, they are programs around torch's own products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.programs.operator import run
from torchweft.clifford.programs.programs import pairs
from torchweft.core.operators.fused import FusedOperator, Gradients
from torchweft.core.operators.operator import constant_when_compiling

__all__ = ["fully_connected"]


def fully_connected(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    algebra: Algebra,
    backend: str,
    *,
    gated: bool = False,
    ending: str = "",
) -> Tensor:
    """The product of (B, rows, F_in) and (P, F_in, F_out).

    Args:
        x: left factors.
        y: right factors.
        weight: matrices, by path.
        algebra: whose product.
        backend: where the programs run.
        gated: whether x and y are gated first.
        ending: the words of the norm that follows, "euclidean 0x…"; "" for none.
    """
    args = (x, y, weight, algebra.signature, gated, ending, backend)
    if backend != "triton":
        return _composition(*args)
    return _normalised(*args) if ending else _plain(*args)


def _composition(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, ending: str, backend: str
) -> Tensor:
    (found,) = run(f"pairs {signature}{' gated' * gated}", backend, x, y)
    blocks, start = [], 0
    for paths, blades in _blocks(signature):
        stop = start + len(paths) * blades
        part = found[start:stop].view(len(paths), blades, *found.shape[1:])
        matrices = torch.stack([weight[p] for p in paths])
        blocks.append(torch.einsum("pjrn,pnm->jrm", part, matrices))
        start = stop
    z = torch.cat(blocks)
    return run(f"rms_norm {signature} {ending}", backend, z)[0] if ending else z


@constant_when_compiling
def _blocks(signature: str) -> list[tuple[list[int], int]]:
    """The paths and the number of blades of each out grade."""
    algebra = Algebra.from_signature(signature)
    return list(zip(pairs(algebra)[1], algebra.sizes, strict=True))


def _plain_forward(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, ending: str, backend: str
) -> list[Tensor]:
    from torchweft.clifford.matrices.fc import forward

    return [forward(x, y, weight, Algebra.from_signature(signature), gated)]


def _plain_backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    from torchweft.clifford.matrices.fc import backward

    x, y, weight, signature, gated, *_ = args
    return backward(x, y, weight, grad, Algebra.from_signature(signature), gated, needed)


def _plain_fake(x: Tensor, y: Tensor, weight: Tensor, *_: Any) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[-1]))]


def _normalised_forward(
    x: Tensor, y: Tensor, weight: Tensor, signature: str, gated: bool, ending: str, backend: str
) -> list[Tensor]:
    from torchweft.clifford.matrices.fc import Norm, forward_normalised

    algebra = Algebra.from_signature(signature)
    return forward_normalised(x, y, weight, algebra, gated, Norm.of_words(ending))


def _normalised_backward(
    args: Sequence[Any], saved: Sequence[Tensor], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    from torchweft.clifford.matrices.fc import Norm, backward_normalised

    x, y, _, signature, gated, ending, _ = args
    algebra, norm = Algebra.from_signature(signature), Norm.of_words(ending)
    return backward_normalised(x, y, saved, grad, algebra, gated, norm, needed)


def _normalised_fake(x: Tensor, y: Tensor, weight: Tensor, signature: str, *_: Any) -> list[Tensor]:
    from torchweft.clifford.matrices.fc import saved_shapes

    grades = Algebra.from_signature(signature).n + 1
    kept = (x.new_empty(shape, dtype=dtype) for shape, dtype in saved_shapes(x, weight, grades))
    return [*_plain_fake(x, y, weight), *kept]


_SCHEMA = "Tensor x, Tensor y, Tensor weight, str signature, bool gated, str ending, str backend"

_plain = FusedOperator(
    "clifford_fully_connected",
    _SCHEMA,
    3,
    _plain_forward,
    _plain_backward,
    _plain_fake,
    _composition,
)

_normalised = FusedOperator(
    "clifford_fully_connected_norm",
    _SCHEMA,
    3,
    _normalised_forward,
    _normalised_backward,
    _normalised_fake,
    _composition,
    keeps_result=True,
)
