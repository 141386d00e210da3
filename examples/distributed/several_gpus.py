"""Train over several GPUs
=======================

``torchrun --standalone --nproc-per-node 2 examples/distributed/several_gpus.py``

Each rank has molecules of its own and either the whole model (DDP) or its part of the parameters
(FSDP2). Then a chain of atoms is distributed over the ranks, where a halo brings rows of other
ranks, and so are the rows of a kernel sum. Without a GPU the ranks are processes on the CPU.

.. image:: /images/examples/several_gpus.svg
   :alt: two ranks with molecules and the model, which exchange gradients and rows
"""

# sphinx_gallery_thumbnail_path = 'images/examples/several_gpus.svg'
import argparse
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchweft import o3
from torchweft.distributed import Halo, all_pairs, propagate_errors
from torchweft.reductions import Vi, Vj


class Energies(nn.Module):
    """Energies of atoms from their neighbours."""

    def __init__(self):
        super().__init__()
        self.harmonics = o3.SphericalHarmonics("1x0e+1x1o", True, "component")
        self.conv = o3.TensorProductConv(
            "4x0e", "1x0e+1x1o", "4x0e+4x1o", [(0, 0, 0, "uvu", True), (0, 1, 1, "uvu", True)]
        )
        self.radial = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 8))
        self.norm, self.last = o3.Norm("4x0e+4x1o"), nn.Linear(8, 1)

    def forward(self, across, graph):
        """(atoms,) energies; `across` (edges, 3) from the neighbours to the atoms."""
        weight = self.radial(across.norm(dim=1, keepdim=True))
        x = across.new_ones(graph.num_nodes, 4)
        return self.last(self.norm(self.conv(x, self.harmonics(across), weight, graph)))[:, 0]


def new_model(device):
    """The same on every rank."""
    torch.manual_seed(0)
    return Energies().to(device)


def molecules(rank, device, atoms=12):
    """Positions, a graph of near atoms and energies, others on each rank."""
    generator = torch.Generator().manual_seed(rank)
    positions = 3 * torch.rand(atoms, 3, generator=generator)
    dst, src = (torch.cdist(positions, positions) < 2).fill_diagonal_(False).nonzero().T.to(device)
    return positions.to(device), o3.Graph(src, dst, atoms), torch.ones(atoms, device=device)


# training
def train(model, batch, steps=3):
    """The loss of each step; its gradients are means over the ranks."""
    positions, graph, energies = batch
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        across = positions[graph.dst] - positions[graph.src]
        loss = (model(across, graph) - energies).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses), optimizer


def replicated(rank, device):
    """DDP: every rank has the whole model."""
    model = DistributedDataParallel(new_model(device))
    losses, _ = train(model, molecules(rank, device))
    return losses


def sharded(rank, device, folder=None):
    """FSDP2: every rank has a part of each parameter; they can write a checkpoint together."""
    model = new_model(device)
    fully_shard(model.radial)
    fully_shard(model)
    losses, optimizer = train(model, molecules(rank, device))
    if folder is not None:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        checkpoint.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    return losses


# halo
def chain(rank, size, device, length=5):
    """Σ (x_i − x_(i+1))² over a ring of atoms of which each rank has `length`, and its gradient."""
    own = torch.arange(rank * length, (rank + 1) * length, device=device)
    following = (own + 1) % (size * length)
    halo = Halo(own, following[~torch.isin(following, own)])
    x = own.double().sin().requires_grad_()
    rows = halo(x)  # this rank's rows, then those that it reads of others
    (rows[:-1] - rows[1:]).square().sum().backward()  # the gradient of a row arrives at its owner
    return x.grad


# pairs
def kernel_sums(rank, device, length=6):
    """Σ_j exp(−|x_i − x_j|²) over the rows of all ranks, and the gradient of this rank's rows."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(length, 3, generator=generator).to(device).requires_grad_()
    with all_pairs():  # a reduction over j runs over the rows of all ranks, passed round a ring
        sums = (-((Vi(x) - Vj(x)) ** 2).sum(-1)).exp().sum(1)
    sums.sum().backward()
    return sums.detach(), x.grad


# end
def main():
    """Start, compute, and stop."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="a folder for the checkpoint; without, none")
    options = parser.parse_args()
    # start
    on_gpus = torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cpu")
    if on_gpus:
        device = torch.device("cuda", distributed.get_node_local_rank())
        torch.cuda.set_device(device)
    with propagate_errors():  # an error of one rank ends all
        first, second = replicated(rank, device), sharded(rank, device, options.out)
        torch.testing.assert_close(first, second)  # the same numbers in another place
        grad = chain(rank, size, device)
        kernel_sums(rank, device)
    print(f"rank {rank} of {size}: loss {first[-1]:.4f}, gradient {grad.tolist()}")
    distributed.destroy_process_group()
    # stop


if __name__ == "__main__":
    main()
