"""SpUNet in spconv's layers, or in those of a package with its names, as users of spconv write it.

A stem of 5³, four levels down by strided convolutions with 2, 3, 4 and 6 residual blocks, and four
up by their inverses with 2 each, beside the encoder's features (Pointcept's SpUNet-v1m1).  Norms
and activations act on `features`, outside of the layers.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

__all__ = ["spunet"]

CHANNELS = (32, 32, 64, 128, 256, 256, 128, 96, 96)
DOWN, UP = (2, 3, 4, 6), (2, 2, 2, 2)


def spunet(package: str, in_channels: int, classes: int, width: float = 1.0) -> nn.Module:
    """The network in the layers of a package; all channels but the first and last times width."""
    layers = importlib.import_module(f"{package}.pytorch")
    network: nn.Module = _modules(layers)["network"](in_channels, classes, width)
    return network


@functools.cache
def _modules(layers: Any) -> dict[str, Any]:
    def norm(channels: int) -> nn.BatchNorm1d:
        return nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)

    def normalised(convolution: nn.Module) -> nn.Module:
        made: nn.Module = layers.SparseSequential(
            convolution, norm(convolution.out_channels), nn.ReLU()
        )
        return made

    class Block(layers.SparseModule):  # type: ignore[misc]
        """relu(f(x) + shortcut(x)): two convolutions, and a linear one or the identity."""

        def __init__(self, c_in: int, c_out: int, key: str) -> None:
            super().__init__()
            options = {"padding": 1, "bias": False, "indice_key": key}
            self.first = layers.SubMConv3d(c_in, c_out, 3, **options)
            self.norm1 = norm(c_out)
            self.second = layers.SubMConv3d(c_out, c_out, 3, **options)
            self.norm2 = norm(c_out)
            self.relu = nn.ReLU()
            self.shortcut = None
            if c_in != c_out:
                linear = layers.SubMConv3d(c_in, c_out, 1, bias=False)
                self.shortcut = layers.SparseSequential(linear, norm(c_out))

        def forward(self, x: Any) -> Any:
            y = self.first(x)
            y = y.replace_feature(self.relu(self.norm1(y.features)))
            y = self.second(y)
            skip = x if self.shortcut is None else self.shortcut(x)
            total = self.norm2(y.features) + skip.features
            return y.replace_feature(self.relu(total))

    def blocks(c_in: int, c_out: int, count: int, key: str) -> nn.Module:
        made: nn.Module = layers.SparseSequential(
            Block(c_in, c_out, key), *(Block(c_out, c_out, key) for _ in range(count - 1))
        )
        return made

    class Network(layers.SparseModule):  # type: ignore[misc]
        """The encoder, and the decoder beside its features."""

        def __init__(self, c_in: int, classes: int, width: float) -> None:
            super().__init__()
            channels = [int(width * c) for c in CHANNELS]
            stem, down, up = channels[0], channels[:5], channels[4:]
            conv = layers.SubMConv3d(c_in, stem, 5, padding=2, bias=False, indice_key="stem")
            self.stem = normalised(conv)
            self.shrink, self.encode = nn.ModuleList(), nn.ModuleList()
            self.grow, self.decode = nn.ModuleList(), nn.ModuleList()
            for level in range(4):
                fine, coarse = down[level], down[level + 1]
                options = {"stride": 2, "bias": False, "indice_key": f"down{level}"}
                self.shrink.append(normalised(layers.SparseConv3d(fine, coarse, 2, **options)))
                self.encode.append(blocks(coarse, coarse, DOWN[level], f"level{level + 1}"))
            for level in range(4):
                coarse, fine, skip = up[level], up[level + 1], down[3 - level]
                options = {"bias": False, "indice_key": f"down{3 - level}"}
                self.grow.append(normalised(layers.SparseInverseConv3d(coarse, fine, 2, **options)))
                self.decode.append(blocks(fine + skip, fine, UP[level], f"level{3 - level}"))
            self.head = layers.SubMConv3d(up[-1], classes, 1, bias=True)

        def forward(self, x: Any) -> Any:
            x, skips = self.stem(x), []
            for shrink, encode in zip(self.shrink, self.encode, strict=True):
                skips.append(x)
                x = encode(shrink(x))
            for grow, decode in zip(self.grow, self.decode, strict=True):
                x, skip = grow(x), skips.pop()
                x = decode(x.replace_feature(torch.cat([x.features, skip.features], 1)))
            return self.head(x)

    return {"network": Network}
