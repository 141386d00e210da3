"""Steps of training whose weights stay."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["training"]


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
