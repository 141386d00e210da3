"""A small sparse U-Net that tells the kind of each voxel, in torchweft and in plain torch.

    y[o] = Σ_k x[in(o, k)] w[k]          at each level, on the way down, and on the way up

Three levels of submanifold convolutions.  Strided ones lead down, their inverses up again, onto the
very voxels that they came from; what was known there is put beside what comes up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from torchweft.core.tables import TensorCache
from torchweft.demo.data.surface import Part
from torchweft.demo.models.learning import gradient_step, learned
from torchweft.voxels import (
    KernelMap,
    SparseBatchNorm,
    SparseConv3d,
    SparseConvolution,
    SparseInverseConv3d,
    SparseInverseConvolution,
    SparseTensor,
    SubMConv3d,
    cat,
)

__all__ = ["PlainSegmenter", "Segmenter", "confusion", "fit", "gathered", "predicted", "step_of"]

WIDTHS = (16, 24, 32)  # channels of each level
KINDS = 3
STEPS = 200
RATE = 1e-2


class Segmenter(nn.Module):
    """(N, 3) scores of the kinds, from (N, 2) features on voxels."""

    def __init__(self) -> None:
        super().__init__()
        levels = list(enumerate(pairwise(WIDTHS)))
        self.inward = nn.ModuleList(
            _block(SubMConv3d(a, b, 3, bias=False))
            for a, b in zip((2, *WIDTHS[1:]), WIDTHS, strict=True)
        )
        self.down = nn.ModuleList(
            _block(SparseConv3d(a, b, 2, stride=2, bias=False, indice_key=f"down{n}"))
            for n, (a, b) in levels
        )
        self.up = nn.ModuleList(
            _block(SparseInverseConv3d(b, a, 2, bias=False, indice_key=f"down{n}"))
            for n, (a, b) in levels
        )
        self.outward = nn.ModuleList(
            _block(SubMConv3d(2 * a, a, 3, bias=False)) for a in WIDTHS[:-1]
        )
        self.readout = nn.Linear(WIDTHS[0], KINDS)

    def forward(self, tensor: SparseTensor) -> Tensor:
        """The scores of each voxel."""
        passed = []
        for inward, down in zip(self.inward, self.down, strict=False):
            passed.append(self._through(inward, tensor))
            tensor = self._through(down, passed[-1])
        tensor = self._through(self.inward[-1], tensor)
        for up, outward in zip(reversed(self.up), reversed(self.outward), strict=True):
            tensor = cat([self._through(up, tensor), passed.pop()])
            tensor = self._through(outward, tensor)
        scores: Tensor = self.readout(tensor.feats)
        return scores

    def _through(self, block: nn.Module, tensor: SparseTensor) -> SparseTensor:
        layer, norm = cast(nn.ModuleList, block)
        tensor = self.convolve(cast(SparseConvolution, layer), tensor)
        found: SparseTensor = cast(SparseBatchNorm, norm)(tensor, activation="relu")
        return found

    def convolve(self, layer: SparseConvolution, tensor: SparseTensor) -> SparseTensor:
        """y[o] = Σ_k x[in(o, k)] w[k].  No gathered copy of x is as large as its pairs."""
        found: SparseTensor = layer(tensor)
        return found


class PlainSegmenter(Segmenter):
    """The same network in plain torch; the kernel maps are torchweft's, and cost it nothing."""

    def convolve(self, layer: SparseConvolution, tensor: SparseTensor) -> SparseTensor:
        """The same sum, offset by offset."""
        if isinstance(layer, SparseInverseConvolution):
            found = tensor.maps.named(str(layer.indice_key)).transpose()
        else:
            found = tensor.maps.get(tensor.coordinates, layer.geometry, layer.indice_key)
        feats = gathered(tensor.feats, layer.weight, found)
        return SparseTensor.on(feats, found.outputs, tensor.maps)


Pairs = list[tuple[Tensor, Tensor]]
_pairs: TensorCache[Pairs] = TensorCache()


def gathered(x: Tensor, weight: Tensor, found: KernelMap) -> Tensor:
    """Σ_k x[in(o, k)] w[k] by index_select, mm and index_add for each offset."""
    pairs = _pairs.get((found.sources,), None, lambda: _pairs_of(found))
    total = x.new_zeros(len(found.outputs), weight.shape[2])
    for (inputs, outputs), matrix in zip(pairs, weight.unbind(), strict=True):
        total.index_add_(0, outputs, x.index_select(0, inputs) @ matrix)
    return total


def fit(model: Segmenter, tiles: Sequence[Part], seed: int) -> list[float]:
    """The cross entropy of each step: Adam, one tile a step, one cycle of the rate."""
    order = torch.randint(len(tiles), (STEPS,), generator=torch.Generator().manual_seed(seed))
    return learned(model, order.tolist(), lambda number: step_of(model, tiles[number])(), RATE)


def step_of(model: Segmenter, tile: Part) -> Callable[[], Tensor]:
    """One forward and backward pass, which leaves its gradients in the model."""

    def loss() -> Tensor:
        model.train()
        return nn.functional.cross_entropy(model(tile.tensor), tile.label)

    return gradient_step(model, loss)


def predicted(model: Segmenter, tensor: SparseTensor) -> Tensor:
    """The scores of each voxel, (N, 3), with the statistics that were learned."""
    model.eval()
    with torch.no_grad():
        scores: Tensor = model(tensor)
    return scores


def confusion(found: Tensor, truth: Tensor) -> Tensor:
    """(3, 3) numbers of voxels by true class (row) and predicted class (column)."""
    pairs = KINDS * truth + found
    return torch.bincount(pairs, minlength=KINDS**2).view(KINDS, KINDS).cpu()


def _block(layer: SparseConvolution) -> nn.ModuleList:
    return nn.ModuleList([layer, SparseBatchNorm(layer.out_channels)])


def _pairs_of(found: KernelMap) -> Pairs:
    return [found.pairs(k) for k in range(found.sources.shape[0])]
