"""All maps of a network on a cloud, before the network runs."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from torchweft.errors import DTypeError
from torchweft.voxels.maps.tensor import HasVoxels, SparseTensor, sparse_of
from torchweft.voxels.maps.together import ask

__all__ = ["prepare"]

T = TypeVar("T", bound=SparseTensor | HasVoxels)


def prepare(network: nn.Module, tensor: T, *, tables_only: bool = False) -> T:
    """The tensor with all kernel maps that a network will need, built at once.

    The first time, the network runs on the tensor, without gradients, to record the maps it needs.
    For every further tensor the maps are built at once: on a GPU with one wait for the voxels of
    all levels.  Buffers, such as the statistics of batch norm, torch's random state and the
    training mode stay as they are; hooks run.  Maps that depend on features, after `prune`, and
    those that the network did not need the first time, are built when it needs them.

    Layers do the same by themselves on a GPU: the first layer that meets new voxels builds the maps
    that were needed the last time.  Prepare a tensor to compile or to capture the network, or in
    the thread of a data loader.

    Args:
        network: takes the tensor as its only argument.
        tensor: a SparseTensor on the network's device, or the sparse tensor of
            `torchweft.compat.spconv`, `torchsparse` or `MinkowskiEngine`.
        tables_only: leave out what kernels derive from maps (sorted rows, lists of pairs): a record
            with room for other voxels (`padded_sizes`) makes it in each replay.

    Returns:
        The tensor.

    Raises:
        DTypeError: network is no module, or tensor no SparseTensor.

    Cost: once a forward pass; then that of the maps.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> network = voxels.SparseSequential(
        ...     voxels.SubMConv3d(1, 4, 3), voxels.SparseConv3d(4, 8, 2, 2)
        ... )
        >>> coords = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]])
        >>> x = voxels.SparseTensor(torch.ones(2, 1), coords, (4, 4, 4), 1)
        >>> len(network(voxels.prepare(network, x)))
        2
    """
    cloud = sparse_of(tensor)
    if not isinstance(network, nn.Module):
        raise DTypeError(
            f"network is a {type(network).__name__}: it must be a torch.nn.Module that takes a "
            "SparseTensor. Wrap a function in a SparseModule with a forward."
        )
    if not ask(network, cloud.coordinates, tables_only):
        _run(network, tensor, cloud.device)
    return tensor


def _run(network: nn.Module, tensor: SparseTensor | HasVoxels, device: torch.device) -> None:
    """Run a network without gradients, on copies of its buffers, and put random states back."""
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.func.functional_call(network, buffers, (tensor,))
