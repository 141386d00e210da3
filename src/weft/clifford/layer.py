"""The layer, z = norm(gelu(x) ∘ gelu(y)) with y = linear(x): no pass of its own for anything else.

Fused, the gradient of x comes from the product's backward, and the linear's is added to it in the
accumulator of its matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.clifford.linear import add_input_gradient, bias_gradient, linear, outputs, weight_gradient
from weft.clifford.operators import run
from weft.core.fused_op import FusedOperator, Gradients

__all__ = ["layer"]


def layer(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    signature: str,
    chain: str,
    backend: str,
) -> Tensor:
    """(B, rows, F) by matrices (n+1, F, F), bias (F,), weight (P, F) and a chain's program key."""
    return _fused(x, linear_weight, linear_bias, weight, signature, chain, backend)


def _forward(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    signature: str,
    chain: str,
    backend: str,
) -> list[Tensor]:
    y = outputs(x, linear_weight, linear_bias, signature)
    return [*run.forward(chain, backend, x, y, weight), y]


def _backward(
    args: Sequence[Any], saved: Sequence[Any], grad: Tensor, needed: Sequence[bool]
) -> Gradients:
    x, linear_weight, _, weight, signature, chain, backend = args
    (y,) = saved
    wanted = f"{needed[0]:d}{any(needed[:3]):d}{needed[3]:d}"
    found = iter(run.forward(f"{chain} | vjp {wanted} 1", backend, x, y, weight, grad))
    gx, gy, gw = (next(found) if flag == "1" else None for flag in wanted)
    if gx is not None and gy is not None:
        add_input_gradient(gx, gy, linear_weight, signature)
    return (
        gx,
        weight_gradient(x, gy, signature) if gy is not None and needed[1] else None,
        bias_gradient(gy) if gy is not None and needed[2] else None,
        gw,
    )


def _composition(
    x: Tensor,
    linear_weight: Tensor,
    linear_bias: Tensor,
    weight: Tensor,
    signature: str,
    chain: str,
    backend: str,
) -> Tensor:
    y = linear(x, linear_weight, linear_bias, signature)
    return run(chain, backend, x, y, weight)[0]


def _fake(x: Tensor, *_: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]


_fused = FusedOperator(
    "clifford_layer",
    "Tensor x, Tensor linear_weight, Tensor linear_bias, Tensor weight, str signature, "
    "str chain, str backend",
    4,
    _forward,
    _backward,
    _fake,
    _composition,
)
