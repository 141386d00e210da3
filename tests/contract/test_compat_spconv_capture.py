"""Networks written for spconv in a record with room for clouds of other voxels.

Replays are those of tests/recorders.py.  Losses, gradients and running statistics are held against
eager calls.
"""

import copy

import pytest
import torch
from torch import nn

import torchweft
import torchweft.compat.spconv.pytorch as spconv
from tests import training_steps as steps
from tests.conftest import INTERPRETED
from tests.recorders import captured
from torchweft import voxels
from torchweft.voxels.norms import functions, launch

pytestmark = pytest.mark.kernels

COUNTS = (90, 100, 80, 104, 95)
NORMS = 4
DTYPE = torch.float32 if INTERPRETED or torch.cuda.is_available() else torch.float64
"""Kernels of batch norms take no float64."""
SHAPE = (9, 9, 9)


@pytest.fixture(autouse=True)
def given_rows(monkeypatch):
    """In the interpreter kernels compute batch norms; whether each was told of its padding."""
    told = []
    if INTERPRETED:
        statistics = launch.statistics
        monkeypatch.setattr(functions, "_serving", lambda backend, device: "triton")

        def noted(x, running, valid):
            told.append(valid is not None)
            return statistics(x, running, valid)

        monkeypatch.setattr(launch, "statistics", noted)
    return told


class Block(spconv.SparseModule):
    """As OpenPCDet and Pointcept write it: norms and activations act on features."""

    def __init__(self, channels, key):
        super().__init__()
        self.conv = spconv.SubMConv3d(channels, channels, 3, bias=False, indice_key=key)
        self.bn = nn.BatchNorm1d(channels, momentum=0.01)

    def forward(self, x):
        y = self.conv(x)
        return y.replace_feature(torch.relu(self.bn(y.features) + x.features))


class Network(spconv.SparseModule):
    """Down and up again."""

    def __init__(self):
        super().__init__()
        conv = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="stem")
        self.stem = spconv.SparseSequential(conv, nn.BatchNorm1d(8), nn.ReLU())
        down = spconv.SparseConv3d(8, 8, 2, 2, bias=False, indice_key="down")
        self.down = spconv.SparseSequential(down, nn.BatchNorm1d(8))
        self.block = Block(8, "coarse")
        self.up = spconv.SparseInverseConv3d(8, 6, 2, bias=False, indice_key="down")
        self.norm = spconv.SparseBatchNorm(14)
        self.head = spconv.SubMConv3d(14, 3, 1)

    def forward(self, x):
        x = self.stem(x)
        y = self.up(self.block(self.down(x)))
        y = y.replace_feature(torch.cat([y.features, x.features], 1))
        return self.head(self.norm(y))


def cloud(seed, device="cpu"):
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 18, (COUNTS[seed], 4), generator=made) % torch.tensor([2, *SHAPE])
    indices = torch.unique(drawn, dim=0).int()
    indices = indices[torch.randperm(len(indices), generator=made)]
    feats = torch.randn(len(indices), 4, generator=made).to(DTYPE)
    return spconv.SparseConvTensor(feats.to(device), indices.to(device), list(SHAPE), 2)


def network():
    torch.manual_seed(0)
    return Network().to(DTYPE)


def training(net):
    return steps.training(net, lambda tensor: tensor.features)


def test_training(given_rows):
    """Seen red with: norms on features, and those of a sequence, that count padding."""
    net = network()
    plain = copy.deepcopy(net)
    first = voxels.prepare(net, cloud(0))
    sizes = voxels.padded_sizes(first, 1.3, labels=-100)
    run, recorder = captured(training(net), first, steps.labels_of(first.features), sizes=sizes)
    for seed in range(len(COUNTS)):
        labels = steps.labels_of(cloud(seed).features)
        given_rows.clear()
        found = steps.state(net, run(voxels.prepare(net, cloud(seed)), labels))
        assert all(given_rows)
        assert len(given_rows) == (NORMS if INTERPRETED and seed > 1 else len(given_rows))
        for own, right in zip(
            found, steps.state(plain, training(plain)(cloud(seed), labels)), strict=True
        ):
            steps.assert_near(own, right, DTYPE)
    assert (recorder.records, recorder.replays) == (1, len(COUNTS) - 2)


def test_inference():
    net = network().eval()
    first = voxels.prepare(net, cloud(0))

    def scores(tensor):
        with torch.no_grad():
            return net(tensor).features

    run, recorder = captured(scores, first, sizes=voxels.padded_sizes(first, 1.3))
    for seed in range(len(COUNTS)):
        found = run(voxels.prepare(net, cloud(seed), tables_only=True))
        torch.testing.assert_close(found, scores(cloud(seed)), rtol=0, atol=0)
    assert recorder.replays == len(COUNTS) - 2


def test_a_tensor_keeps_what_was_prepared():
    """Seen red with: maps of voxels that nobody keeps."""
    net, tensor = network(), cloud(0)
    assert voxels.prepare(net, tensor) is tensor
    known = tensor.kept
    assert known.tables
    net(tensor)
    assert tensor.sparse().coordinates is known


@pytest.mark.parametrize("read", [lambda i: i[:, 1:], lambda i: i.float(), lambda i: i.tolist()])
def test_indices_are_not_read(read):
    """Their last rows are padding."""
    net = network().eval()
    first = voxels.prepare(net, cloud(0))

    def read_indices(tensor):
        assert len(tensor.indices) == tensor.indices.shape[0] >= len(first.indices)
        read(tensor.indices)
        return net(tensor).features

    run, _ = captured(read_indices, first, sizes=voxels.padded_sizes(first, 1.3))
    with pytest.raises(torchweft.CaptureError, match="indices or coords are read"):
        run(first)
    maps_kept, _ = captured(read_indices, first)
    maps_kept(first)


def test_tensors_behind_layers():
    net = network().eval()
    tensor = net.stem(cloud(0))
    with pytest.raises(torchweft.ShapeError, match=r"with the pairs of 'stem' .*x\.features"):
        captured(net.down, tensor)
    run, _ = captured(net.stem, cloud(0))
    with pytest.raises(torchweft.ShapeError, match=r"is a result there.*Return x\.features"):
        run(cloud(0))


def test_a_tensor_of_torchweft():
    """It shares features, voxels and maps."""
    tensor = cloud(0).sparse()
    found = spconv.SparseConvTensor.from_sparse(tensor)
    assert found.features is tensor.feats
    assert found.sparse().coordinates is tensor.coordinates
    torch.testing.assert_close(found.indices, tensor.C, rtol=0, atol=0)
    assert (found.spatial_shape, found.batch_size) == (list(SHAPE), 2)
