"""Random sparse tensors for tests, and what their dense copies say."""

import torch

from torchweft.voxels.maps.tensor import SparseTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {1: (17,), 2: (7, 6), 3: (5, 6, 4), 4: (3, 4, 3, 2)}


def cloud(
    dim=3,
    channels=3,
    dtype=torch.float64,
    batch=2,
    density=0.4,
    seed=0,
    shape=None,
    device="cpu",
):
    """Random voxels in random order with N(0, 1) features that require grad."""
    torch.manual_seed(seed)
    shape = SHAPES[dim] if shape is None else shape
    coords = (torch.rand(batch, *shape) < density).nonzero()
    coords = coords[torch.randperm(len(coords))]
    feats = torch.randn(len(coords), channels, dtype=torch.float64).to(device, dtype)
    return SparseTensor(feats.requires_grad_(), coords.to(device), shape, batch)


def empty(dim=3, channels=3, batch=2, device="cpu"):
    """No voxel at all."""
    return cloud(dim, channels, torch.float32, batch, density=0.0, device=device)


def occupied(tensor):
    """(batch, 1, *shape), 1 where a voxel is."""
    return tensor.replace(torch.ones_like(tensor.feats[:, :1]).detach()).dense()


def at(dense, tensor):
    """(N, C): the values of a dense tensor at the voxels of a sparse one."""
    return dense.movedim(1, -1)[tuple(tensor.C.long().T)]


def permuted(tensor, seed=1):
    """The same voxels in another order, and that order."""
    torch.manual_seed(seed)
    order = torch.randperm(len(tensor)).to(tensor.device)
    feats = tensor.feats.detach()[order].requires_grad_()
    return SparseTensor(feats, tensor.C[order], tensor.spatial_shape, tensor.batch_size), order


def same(found, expected):
    """Every bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
