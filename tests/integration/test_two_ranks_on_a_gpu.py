"""Two ranks that share a GPU have the numbers of two on CPUs: gloo with tensors of the device.

NCCL refuses two ranks on one GPU.
"""

import pytest
import torch

from tests.distributed.test_halo import of_both, parts, rows
from tests.distributed.test_scenes import score, whole_scene
from tests.ranks import run
from torchweft.distributed import Halo, all_pairs, shard_voxels
from torchweft.reductions import Vi, Vj
from torchweft.voxels import SparseBatchNorm, SparseConv3d, SparseSequential, SubMConv3d

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SIZE = 2


def halo(rank, size, group, device):
    own, needed = parts(size)[rank]
    found = Halo(own.to(device), needed.to(device), group)
    x = rows()[own].to(device).requires_grad_()
    weight = rows().cos()[of_both(own, needed)].to(device)
    y = found.finish(found.begin(x))
    (grad,) = torch.autograd.grad((y.sin() * weight).sum(), x)
    return y.detach().cpu(), grad.cpu()


def pairs(rank, size, group, device):
    torch.manual_seed(rank)
    x, y, b = (
        torch.randn(n, d, dtype=torch.float64) for n, d in ((9, 3), (7 + rank, 3), (7 + rank, 2))
    )
    x, y, b = (t.to(device).requires_grad_() for t in (x, y, b))
    with all_pairs(group):
        kernel = (-((Vi(x) - Vj(y)) ** 2).sum(-1)).exp()
        z = kernel @ b
        grads = torch.autograd.grad(z.sin().sum(), (x, y, b))
    return z.detach().cpu(), *(g.cpu() for g in grads)


def scene(rank, size, group, device):
    torch.manual_seed(0)
    net = SparseSequential(SubMConv3d(3, 4, 3), SparseBatchNorm(4), SparseConv3d(4, 2, 3, 2, 1))
    net = net.double().to(device)
    part = shard_voxels(whole_scene("two").to(device), rank, size, group=group)
    score(net(part).cpu()).backward()
    return [p.grad.cpu() for p in net.parameters()]


@pytest.mark.parametrize("function", [halo, pairs, scene])
def test_two_ranks_on_one_gpu(function):
    found, exact = run(function, SIZE, "cuda"), run(function, SIZE, "cpu")
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours, theirs)
