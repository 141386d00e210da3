"""The phases of an operation z = f(x, y, ...), each timed by itself.

    forward            z
    recorded           z, with what backward will need
    forward+backward   z, then d⟨z, g⟩ for every input
    second             d⟨dx, v_x⟩ + d⟨dy, v_y⟩ + ... for g and every input, the first order retained

The oracle runs the same phases in float64, so each phase has its own check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.case import Workload

__all__ = ["PHASES", "Cotangents", "cost", "cotangents", "prepare"]

PHASES = ("forward", "recorded", "forward+backward", "second")

Function = Callable[..., Tensor]


class Cotangents(NamedTuple):
    """g weighs the output, v the gradient of each input."""

    g: Tensor
    v: tuple[Tensor, ...]

    def map(self, change: Callable[[Tensor], Tensor]) -> Cotangents:
        """The same with every tensor changed."""
        return Cotangents(change(self.g), tuple(change(v) for v in self.v))


def cotangents(function: Function, inputs: Sequence[Tensor]) -> Cotangents:
    """Random weights of the shapes of the output and of the inputs, always the same."""
    with torch.no_grad():
        like = (function(*inputs), *inputs)
    generator = torch.Generator(inputs[0].device).manual_seed(1)
    g, *v = (
        torch.randn(t.shape, generator=generator, device=t.device, dtype=_real(t)) for t in like
    )
    return Cotangents(g, tuple(v))


def _real(t: Tensor) -> torch.dtype:
    """Its dtype; tables of integers are weighed, if at all, in float32."""
    return t.dtype if t.is_floating_point() else torch.float32


def prepare(
    phase: str, function: Function, inputs: Sequence[Tensor], weights: Cotangents
) -> Callable[[], tuple[Tensor, ...]]:
    """A call that does one phase and returns its results; the phases before it are done here."""
    if phase == "forward":
        frozen = [a.detach() for a in inputs]
        return lambda: (_without_grad(function, frozen),)
    leaves = [a.detach().requires_grad_() for a in inputs]
    if phase == "recorded":
        return lambda: (function(*leaves),)
    if phase == "forward+backward":

        def forward_backward() -> tuple[Tensor, ...]:
            z = function(*leaves)
            return (z.detach(), *torch.autograd.grad(z, leaves, weights.g))

        return forward_backward
    g = weights.g.detach().requires_grad_()
    first = torch.autograd.grad(function(*leaves), leaves, g, create_graph=True)
    return lambda: torch.autograd.grad(first, [g, *leaves], weights.v, retain_graph=True)


def cost(phase: str, workload: Workload) -> tuple[int, int]:
    """Least bytes and operations of a phase.

    With k inputs of I bytes, an output of Z bytes, tables of T bytes and F operations:
    forward I + Z + T and F; backward reads inputs and g, and writes the gradients: 2I + Z + T
    and kF, or as many F as the workload says; the second order reads inputs, g and v, and writes
    as many: 3I + 2Z + T and k²F.
    """
    i, k = sum(a.nbytes for a in workload.inputs), len(workload.inputs)
    z, t, f = workload.output_bytes, workload.table_bytes, workload.flops
    forward, backward = i + z + t, 2 * i + z + t
    return {
        "forward": (forward, f),
        "recorded": (forward, f),
        "forward+backward": (forward + backward, int((1 + (workload.gradients or k)) * f)),
        "second": (3 * i + 2 * z + t, k * k * f),
    }[phase]


def _without_grad(function: Function, inputs: Sequence[Tensor]) -> Tensor:
    with torch.no_grad():
        return function(*inputs)
