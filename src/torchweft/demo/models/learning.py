"""How the demo's networks learn: Adam, one cycle of the rate, one batch a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchweft.progress import track

__all__ = ["gradient_step", "learned"]

T = TypeVar("T")


def learned(
    model: nn.Module,
    batches: Sequence[T],
    step: Callable[[T], Tensor],
    rate: float,
    rising: float = 0.3,
) -> list[float]:
    """The loss of each step.

    Args:
        model: what learns.
        batches: what `step` is given, one after the other.
        step: leaves gradients in the model and returns the loss.
        rate: of Adam, where it is highest.
        rising: part of the steps in which the rate rises to it.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=len(batches), pct_start=rising
    )
    losses = []
    for batch in track(batches, "learning"):
        losses.append(step(batch))
        optimizer.step()
        schedule.step()
    return [float(loss) for loss in losses]  # read when all is done: nothing waits for a GPU


def gradient_step(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """One forward and backward pass, which leaves its gradients in the model."""

    def step() -> Tensor:
        model.zero_grad()
        loss = loss_of()
        torch.autograd.backward(loss)
        return loss.detach()

    return step
