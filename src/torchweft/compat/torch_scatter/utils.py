"""torch_scatter.utils."""

from torch import Tensor

from torchweft.compat.torch_scatter import layout

__all__ = ["broadcast"]


def broadcast(src: Tensor, other: Tensor, dim: int) -> Tensor:
    """The index `src` as a view in the shape of `other`; one dimension is that of `dim`."""
    return layout.broadcast(src, tuple(other.shape), dim % max(other.dim(), 1))
