"""The layer, z = norm(gelu(x) ∘ gelu(y)) with y = linear(x): no pass of its own for anything else.

Fused, the gradient of x comes from the product's backward, and the linear's is added to it in the
accumulator of its matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.clifford.matrices.linear import add_input_gradient, linear, outputs, weight_gradient
from torchweft.clifford.programs.operator import forward, run
from torchweft.core.expressions.program import mask
from torchweft.core.operators.fused import FusedOperator, Gradients

__all__ = ["layer"]


def layer(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    signature: str,
    ending: str,
    backend: str,
) -> Tensor:
    """(B, rows, F) by matrices (n+1, F, F), bias (F,) and weight (P, F).

    `ending` are the words of the norm, "euclidean 0x…", or "" for none.
    """
    program = f"layer {signature} {ending}".rstrip()
    bias = linear_bias.view(1, -1)
    return _fused(x, linear_weight, bias, weight, signature, program, backend)


def _forward(
    x: Tensor,
    linear_weight: Tensor,
    bias: Tensor,
    weight: Tensor,
    signature: str,
    program: str,
    backend: str,
) -> list[Tensor]:
    y = outputs(x, linear_weight, None, signature)
    return [*forward(program, backend, x, y, bias, weight), y]


def _backward(
    args: Sequence[Any], saved: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, linear_weight, bias, weight, signature, program, backend = args
    (y,) = saved
    wanted = mask([needed[0], needed[0] or needed[1], needed[2], needed[3]])
    found = iter(forward(f"{program} | vjp {wanted} 1", backend, x, y, bias, weight, grad))
    gx, gy, g_bias, gw = (next(found) if flag == "1" else None for flag in wanted)
    if gx is not None and gy is not None:
        add_input_gradient(gx, gy, linear_weight, signature)
    g_linear = None if gy is None or not needed[1] else weight_gradient(x, gy, signature)
    return gx, g_linear, g_bias, gw


def _composition(
    x: Tensor,
    linear_weight: Tensor,
    bias: Tensor,
    weight: Tensor,
    signature: str,
    program: str,
    backend: str,
) -> Tensor:
    y = linear(x, linear_weight, None, signature)
    return run(program, backend, x, y, bias, weight)[0]


def _fake(x: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]


_fused = FusedOperator(
    "clifford_layer",
    "Tensor x, Tensor linear_weight, Tensor bias, Tensor weight, str signature, "
    "str program, str backend",
    4,
    _forward,
    _backward,
    _fake,
    _composition,
)
