"""The example's MinkUNet in layers of spconv, or of a package with its names; weights are ours."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor, nn

from examples.voxels.plot_minkunet import MinkUNet, ResidualBlock
from torchweft.voxels import SparseBatchNorm, SparseSequential
from torchweft.voxels.layers.convolution import SparseConvolution, SparseInverseConvolution

__all__ = ["converted", "turned_back"]

LEVELS = 4


@functools.cache
def _layers(package: str) -> Any:
    return importlib.import_module(f"{package}.pytorch")


@functools.cache
def _modules(package: str) -> dict[type, type]:
    """The modules that hold layers, by those of ours."""
    spconv = _layers(package)

    class Block(spconv.SparseModule):  # type: ignore[misc]
        """y = relu(x' + f(x))"""

        def __init__(self) -> None:
            super().__init__()
            self.activation = nn.ReLU()

        def forward(self, x: Any) -> Any:
            y = self.second(self.first(x))
            total = self.shortcut(x).features + self.norm(y.features)
            return x.replace_feature(self.activation(total))

    class Network(spconv.SparseModule):  # type: ignore[misc]
        """The encoder, and the decoder beside its features."""

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            skips = []
            for shrink, encode in zip(self.shrink, self.encode, strict=True):
                skips.append(x)
                x = encode(shrink(x))
            for grow, decode in zip(self.grow, self.decode, strict=True):
                x, skip = grow(x), skips.pop()
                x = decode(x.replace_feature(torch.cat([x.features, skip.features], 1)))
            return x.replace_feature(self.head(x.features))

    return {MinkUNet: Network, ResidualBlock: Block, SparseSequential: spconv.SparseSequential}


def converted(package: str, module: nn.Module, path: tuple[str, ...] = ()) -> nn.Module:
    """The module and what is in it; of other layers than those of sparse tensors, the same."""
    if isinstance(module, SparseConvolution):
        return _layer(_layers(package), module, path)
    if isinstance(module, SparseBatchNorm):
        norm = nn.BatchNorm1d(module.num_features, module.eps, module.momentum)
        norm.load_state_dict(module.state_dict())
        return norm.to(module.weight)
    kind = _modules(package).get(type(module), nn.ModuleList)
    if not list(module.children()) and kind is nn.ModuleList:
        return module
    result: nn.Module = kind()
    for name, child in module.named_children():
        result.add_module(name, converted(package, child, (*path, name)))
    return result


def _layer(spconv: Any, layer: SparseConvolution, path: tuple[str, ...]) -> nn.Module:
    sizes = layer.in_channels, layer.out_channels, layer.kernel_size
    options = {"bias": False, "fp32_accum": True, "indice_key": layer.indice_key}
    if isinstance(layer, SparseInverseConvolution):
        made = spconv.SparseInverseConv3d(*sizes, **options)
    elif layer.mode == "strided":
        made = spconv.SparseConv3d(*sizes, layer.geometry.stride, **options)
    else:  # layers of a level share their pairs by name
        options["indice_key"] = f"{_level(path)} {layer.kernel_size}"
        made = spconv.SubMConv3d(*sizes, **options)
    made = made.to(layer.weight)
    with torch.no_grad():
        made.weight.copy_(turned(layer.weight).view(made.weight.shape))
    return made  # type: ignore[no-any-return]


def turned(weight: Tensor) -> Tensor:
    """(K, C_in, C_out) → (C_out, K, C_in); one offset is (C_in, C_out) in spconv's memory."""
    return weight if len(weight) == 1 else weight.permute(2, 0, 1).contiguous()


def turned_back(weight: Tensor, like: Tensor) -> Tensor:
    """To the order of ours."""
    if len(like) == 1:
        return weight.reshape(like.shape)
    return weight.flatten(1, 3).permute(1, 2, 0)


def _level(path: tuple[str, ...]) -> int:
    """How many times the grid was halved where a layer is."""
    part, number = path[0], path[1]
    return {"stem": 0, "encode": int(number) + 1, "decode": LEVELS - 1 - int(number)}[part]
