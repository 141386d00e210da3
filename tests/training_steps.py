"""Steps of training whose weights stay, and what they leave."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["assert_near", "labels_of", "state", "training"]


def training(net: nn.Module, scores: Callable[[Any], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The loss of a cloud's labels, where −100 is none, and gradients of the weights.

    Args:
        net: of sparse tensors.
        scores: the features of its result.
    """

    def step(tensor: Any, labels: Tensor) -> Tensor:
        net.zero_grad()
        loss = nn.functional.cross_entropy(scores(net(tensor)), labels, ignore_index=-100)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step


def labels_of(feats: Tensor) -> Tensor:
    """Labels of three classes, by row."""
    return torch.arange(len(feats), device=feats.device) % 3


def state(net: nn.Module, loss: Tensor) -> list[Tensor]:
    """Copies of the loss, the gradients of all weights, and the buffers."""
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return [t.detach().clone() for t in (loss, *gradients, *net.buffers())]


def assert_near(found: Tensor, exact: Tensor, dtype: torch.dtype = torch.float64) -> None:
    """Nearer to the rounding of the results than to half of their digits."""
    u = torch.finfo(dtype).eps
    assert (found - exact).abs().max() <= exact.abs().max() * (u * u**0.5) ** 0.5
