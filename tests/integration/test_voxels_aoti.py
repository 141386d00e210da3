"""Packages of AOTInductor in a process that has torchweft, but not the network's source.

One builds its maps from the voxels, the other takes a tensor with its maps; both take any number of
voxels.
"""

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.contract.test_voxels_graphs import SHAPE, cloud, rows_and_feats
from torchweft import voxels
from torchweft.testing import assert_within_bound

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning"),  # of torch's own code
]

SEEDS = range(3)

PROCESS = """
import sys
import torch
from torchweft import voxels

folder, kind = sys.argv[1:]
run = torch._inductor.aoti_load_package(f"{folder}/{kind}.pt2")
results = []
for rows, feats in torch.load(f"{folder}/clouds.pt"):
    if kind == "mapped":
        tensor = voxels.SparseTensor(feats, rows, (20, 20, 20), 2)
        voxels.kernel_map(tensor, 3)
        any_weight = feats.new_zeros(8, 4, 1)
        coarse = voxels.sparse_conv(tensor, any_weight, 2, stride=2, submanifold=False)
        voxels.kernel_map(coarse, 3)
        results.append(run(tensor))
    else:
        results.append(run(feats, rows))
torch.save(results, f"{folder}/{kind}.results.pt")
"""


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = voxels.SparseSequential(
            voxels.SubMConv3d(4, 8, 3),
            voxels.SparseBatchNorm(8),
            nn.ReLU(),
            voxels.SparseConv3d(8, 8, 2, stride=2, indice_key="down"),
            voxels.SubMConv3d(8, 8, 3),
            voxels.SparseInverseConv3d(8, 4, 2, indice_key="down"),
        )

    def forward(self, tensor):
        return self.layers(tensor).F


class Whole(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, feats, rows):
        return self.network(voxels.SparseTensor(feats, rows, SHAPE, 2))


def package(kind, folder, network):
    rows, feats = rows_and_feats(300, 0)
    if kind == "mapped":
        tensors = [cloud(300 + 100 * seed, seed) for seed in SEEDS]
        shapes = torch.export.AdditionalInputs()
        for tensor in tensors:
            network(tensor)
            shapes.add((tensor,))
        program = torch.export.export(network, (tensors[0],), dynamic_shapes=shapes)
    else:
        count = torch.export.Dim("count", min=2)
        shapes = {"feats": {0: count}, "rows": {0: count}}
        program = torch.export.export(Whole(network), (feats, rows), dynamic_shapes=shapes)
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / f"{kind}.pt2"))


@pytest.mark.parametrize("kind", ["mapped", "whole"])
def test_a_package_without_the_source(kind, tmp_path):
    network = Network().double().eval().requires_grad_(False)
    package(kind, tmp_path, network)
    given = [rows_and_feats(300 + 100 * seed, seed) for seed in SEEDS]
    torch.save(given, tmp_path / "clouds.pt")
    subprocess.run([sys.executable, "-c", PROCESS, str(tmp_path), kind], check=True)
    for seed, found in enumerate(torch.load(tmp_path / f"{kind}.results.pt")):
        exact = network(cloud(300 + 100 * seed, seed))
        assert_within_bound(found, exact, exact.abs().max().expand_as(exact), terms=27 * 8)
