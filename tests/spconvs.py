"""Networks as programs write them for spconv, and what they compute, with dense tensors.

`unet(spconv)` and the others take the module to build from: the stand-in, or the original.
"""

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own habit

SHAPE = (11, 6, 9)


def sample(spconv, channels=3, seed=0, dtype=torch.float64, batch=2, device="cpu", shape=SHAPE):
    """A tensor on random voxels, in random order."""
    generator = torch.Generator().manual_seed(seed)
    indices = (torch.rand(batch, *shape, generator=generator) < 0.3).nonzero().int()
    indices = indices[torch.randperm(len(indices), generator=generator)].to(device)
    features = torch.randn(len(indices), channels, generator=generator, dtype=torch.float64)
    features = features.to(device, dtype).requires_grad_()
    return spconv.SparseConvTensor(features, indices, list(shape), batch)


def unet(spconv, channels=3, width=4, classes=5):
    """Two levels: residual blocks, a strided layer, its inverse, a skip connection."""
    norm = partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)

    class Block(spconv.SparseModule):
        def __init__(self, inner, outer, indice_key):
            super().__init__()
            if inner == outer:
                self.proj = spconv.SparseSequential(spconv.Identity())
            else:
                pointwise = spconv.SubMConv3d(inner, outer, kernel_size=1, bias=False)
                self.proj = spconv.SparseSequential(pointwise, norm(outer))
            same = {"kernel_size": 3, "stride": 1, "padding": 1, "indice_key": indice_key}
            self.conv1 = spconv.SubMConv3d(inner, outer, **same, bias=False)
            self.bn1, self.relu = norm(outer), nn.ReLU()
            self.conv2 = spconv.SubMConv3d(outer, outer, **same, bias=True)
            self.bn2 = norm(outer)

        def forward(self, x):
            out = self.conv1(x)
            out = out.replace_feature(self.relu(self.bn1(out.features)))
            out = self.conv2(out)
            out = out.replace_feature(self.bn2(out.features))
            out = out.replace_feature(out.features + self.proj(x).features)
            return out.replace_feature(self.relu(out.features))

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            stem = spconv.SubMConv3d(channels, width, 5, padding=1, bias=False, indice_key="stem")
            self.conv_input = spconv.SparseSequential(stem, norm(width), nn.ReLU())
            down = spconv.SparseConv3d(width, 2 * width, 2, stride=2, bias=False, indice_key="sp1")
            self.down = spconv.SparseSequential(down, norm(2 * width), nn.ReLU())
            self.enc = spconv.SparseSequential(
                OrderedDict([("block0", Block(2 * width, 2 * width, "subm1"))])
            )
            up = spconv.SparseInverseConv3d(2 * width, width, 2, bias=False, indice_key="sp1")
            self.up = spconv.SparseSequential(up, norm(width), nn.ReLU())
            self.dec = spconv.SparseSequential(block0=Block(2 * width, width, "subm0"))
            self.final = spconv.SubMConv3d(width, classes, kernel_size=1, bias=True)

        def forward(self, x):
            x = self.conv_input(x)
            y = self.up(self.enc(self.down(x)))
            y = y.replace_feature(torch.cat((y.features, x.features), dim=1))
            return self.final(self.dec(y))

    return UNet()


def detector(spconv, channels=3):
    """Strided layers with paddings and uneven kernels to a dense map, as detectors have them."""
    norm = partial(nn.BatchNorm1d, eps=1e-3, momentum=0.01)
    relu = nn.ReLU
    return spconv.SparseSequential(
        spconv.SubMConv3d(channels, 4, 3, padding=1, bias=False, indice_key="subm1"),
        norm(4),
        relu(),
        spconv.SparseConv3d(4, 6, 3, stride=2, padding=1, bias=False, indice_key="spconv2"),
        norm(6),
        relu(),
        spconv.SubMConv3d(6, 6, 3, indice_key="subm2"),
        spconv.SparseConv3d(6, 5, 3, stride=2, padding=(0, 1, 1), indice_key="spconv3"),
        relu(),
        spconv.SparseConv3d(5, 7, (2, 1, 1), stride=(2, 1, 1), bias=True),
        spconv.ToDense(),
    )


def dense_unet(net, x, mask):
    """`unet` in training mode on (batch, C, *shape), zero where the mask is."""

    def normed(layer, x, mask):
        rows = x.movedim(1, -1)[mask[:, 0]]
        rows = F.batch_norm(rows, None, None, layer.weight, layer.bias, True, eps=layer.eps)
        out = x.new_zeros(x.shape).movedim(1, -1)
        return out.index_put(mask[:, 0].nonzero(as_tuple=True), rows).movedim(-1, 1)

    def same(layer, x, mask):
        return F.conv3d(x, dense_weight(layer), layer.bias, padding="same") * mask

    def block(layer, x, mask):
        out = normed(layer.bn1, same(layer.conv1, x, mask), mask).relu()
        out = normed(layer.bn2, same(layer.conv2, out, mask), mask)
        skip, *rest = layer.proj
        if rest:
            x = normed(rest[0], same(skip, x, mask), mask)
        return (out + x).relu()

    stem, norm, _ = net.conv_input
    x = normed(norm, same(stem, x, mask), mask).relu()
    down, norm, _ = net.down
    window = torch.ones(1, 1, 2, 2, 2, dtype=x.dtype, device=x.device)
    coarse = F.conv3d(mask.to(x.dtype), window, stride=2) > 0
    y = normed(norm, F.conv3d(x, dense_weight(down), stride=2) * coarse, coarse).relu()
    y = block(net.enc[0], y, coarse)
    up, norm, _ = net.up
    missing = [n % 2 for n in mask.shape[2:]]  # planes that the strided layer did not reach
    y = F.conv_transpose3d(y, dense_weight(up).transpose(0, 1), stride=2, output_padding=missing)
    y = normed(norm, y * mask, mask).relu()
    y = block(net.dec[0], torch.cat([y, x], 1), mask)
    return same(net.final, y, mask)


def dense_weight(layer):
    """torch's (C_out, C_in, k…) of spconv's (C_out, k…, C_in), see conv.py for one position."""
    weight = layer.weight
    if layer.conv1x1:
        inner, outer = layer.in_channels, layer.out_channels
        return weight.view(inner, outer).T.reshape(outer, inner, *layer.kernel_size)
    return weight.movedim(-1, 1)
