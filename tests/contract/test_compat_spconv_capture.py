"""Networks written for spconv in a record with room for clouds of other voxels.

Replays are those of tests/recorders.py.  Losses, gradients and running statistics are held against
eager calls in float64.
"""

import copy

import pytest
import torch
from torch import nn

import torchweft
import torchweft.compat.spconv.pytorch as spconv
from tests.recorders import captured
from torchweft import voxels
from torchweft.testing import assert_as_accurate, plain_error

COUNTS = (90, 100, 80, 104, 95)
SHAPE = (9, 9, 9)


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
        self.up = spconv.SparseInverseConv3d(8, 6, 2, indice_key="down")
        self.norm = spconv.SparseBatchNorm(14)
        self.head = spconv.SubMConv3d(14, 3, 1)

    def forward(self, x):
        x = self.stem(x)
        y = self.up(self.block(self.down(x)))
        y = y.replace_feature(torch.cat([y.features, x.features], 1))
        return self.head(self.norm(y))


def cloud(seed, dtype=torch.float32, device="cpu"):
    made = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 18, (COUNTS[seed], 4), generator=made) % torch.tensor([2, *SHAPE])
    indices = torch.unique(drawn, dim=0).int()
    indices = indices[torch.randperm(len(indices), generator=made)]
    feats = torch.randn(len(indices), 4, generator=made).to(dtype)
    return spconv.SparseConvTensor(feats.to(device), indices.to(device), list(SHAPE), 2)


def network():
    torch.manual_seed(0)
    return Network()


def training(net):
    """A step without its update."""

    def step(tensor, labels):
        net.zero_grad()
        loss = nn.functional.cross_entropy(net(tensor).features, labels, ignore_index=-100)
        loss.backward()
        return loss

    return step


def state(net, loss):
    gradients = [p.grad for p in net.parameters()]
    return [t.detach().clone() for t in (loss, *gradients, *net.buffers())]


def assert_as_plain(found, exact, plain):
    noise = [plain_error(a, b, torch.float32).flatten() for a, b in zip(plain, exact, strict=True)]
    own, right = (torch.cat([t.flatten() for t in each]) for each in (found, exact))
    assert_as_accurate(own, right, torch.cat(noise))


def labels_of(tensor):
    return torch.arange(len(tensor.features)) % 3


def test_training():
    """Seen red with: norms on features that count padding."""
    net = network()
    plain, wide = copy.deepcopy(net), copy.deepcopy(net).double()
    first = voxels.prepare(net, cloud(0))
    sizes = voxels.padded_sizes(first, 1.3, labels=-100)
    run, recorder = captured(training(net), first, labels_of(first), sizes=sizes)
    found, exact, noisy = [], [], []
    for seed in range(len(COUNTS)):
        labels = labels_of(cloud(seed))
        found.append(state(net, run(voxels.prepare(net, cloud(seed)), labels)))
        noisy.append(state(plain, training(plain)(cloud(seed), labels)))
        exact.append(state(wide, training(wide)(cloud(seed, torch.float64), labels)))
    assert (recorder.records, recorder.replays) == (1, len(COUNTS) - 2)
    by_result = (zip(*calls, strict=True) for calls in (found, exact, noisy))
    for own, right, other in zip(*by_result, strict=True):
        if right[0].is_floating_point():
            assert_as_plain(own, right, other)
        else:
            assert [int(n) for n in own] == [int(n) for n in right]  # batches seen


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
    with pytest.raises(torchweft.CaptureError, match="indices are read in a function"):
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
