"""Kernel ridge regression over several GPUs
=========================================

``torchrun --nproc-per-node 8 examples/distributed/ridge_over_ranks.py 12500000``

With eight ranks, 10⁸ points in all. (σ² + K) a = y is solved by conjugate gradients: a gives the
mean of gpytorch's ExactGP with RBFKernel(lengthscale) and GaussianLikelihood(σ²). Each rank has its
rows of x and y; blocks of rows travel round a ring, and K is never stored. Nyström's preconditioner
takes points of all ranks.

.. image:: /images/examples/ridge_over_ranks.svg
   :alt: blocks of points travel round a ring of four ranks
"""

# sphinx_gallery_thumbnail_path = 'images/examples/ridge_over_ranks.svg'
import sys

import torch
from torch import distributed

from torchweft.distributed import all_pairs
from torchweft.reductions import Vi, Vj

LENGTHSCALE, NOISE = 0.3, 0.1


def added(x):
    """Σ over the ranks."""
    distributed.all_reduce(x)
    return x


def main(points=1000, rank=100):
    """Solve with `points` rows on each rank, and print the error at other points."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank())
    torch.manual_seed(distributed.get_rank())
    x, tests = (torch.rand(n, 3, device=device) / LENGTHSCALE for n in (points, 1000))
    y, truth = ((6 * LENGTHSCALE * t).sin().sum(1, keepdim=True) for t in (x, tests))
    y = y + NOISE * torch.randn_like(y)
    k, k_tests = ((-Vi(t).sqdist(Vj(x)) / 2).exp() for t in (x, tests))
    with all_pairs():
        a = k.solve(y, alpha=NOISE**2, eps=1e-3, preconditioner="nystrom", rank=rank)
        predicted = k_tests @ a
    square = added((predicted - truth).square().mean()) / distributed.get_world_size()
    if distributed.get_rank() == 0:
        print(f"root mean square error {float(square.sqrt()):.4f}, noise {NOISE}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
