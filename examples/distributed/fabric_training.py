"""Train with Lightning Fabric
===========================

``pip install lightning torchweft``, then ``python fabric_training.py --devices 2``

Fabric starts the ranks, wraps the model in DDP and distributes the scenes. The scenes of the ranks
have different numbers of voxels; `SparseBatchNorm` counts the voxels of all ranks.

.. image:: /images/examples/fabric_training.svg
   :alt: scenes on two ranks, whose gradients are averaged
"""

# sphinx_gallery_thumbnail_path = 'images/examples/fabric_training.svg'
import argparse

import torch
from lightning.fabric import Fabric
from torch import nn

from torchweft.voxels import GlobalPool, SparseBatchNorm, SparseSequential, SparseTensor, SubMConv3d


def scenes(number):
    """(coords, feats, class) of random clouds: those of class 1 are denser."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for n in range(number):
        occupied = torch.rand(1, 6, 6, 6, generator=generator) < 0.3 + 0.3 * (n % 2)
        coords = occupied.nonzero().int()
        found.append((coords, torch.ones(len(coords), 1), torch.tensor([n % 2])))
    return found


def network():
    """Class scores of a scene."""
    layers = SubMConv3d(1, 8, 3), SparseBatchNorm(8), nn.ReLU(), SubMConv3d(8, 2, 3), GlobalPool()
    return SparseSequential(*layers)


def main():
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    fabric = Fabric(accelerator="auto", devices=options.devices, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 1e-2))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(scenes(8), batch_size=None))
    for epoch in range(options.epochs):
        for coords, feats, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(SparseTensor(feats, coords)), label)
            fabric.backward(loss)
            optimizer.step()
        mean = fabric.all_reduce(loss.detach())
        fabric.print(f"epoch {epoch}: loss {mean:.4f} on {fabric.world_size} ranks")


if __name__ == "__main__":
    main()
