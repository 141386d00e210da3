"""A small sparse U-Net that predicts the kind of each voxel, in torchweft and in plain torch.

    y[o] = Σ_k x[in(o, k)] w[k]          at each level, on the way down, and on the way up

Three levels of submanifold convolutions.  Strided ones lead down, their inverses up again, onto the
same voxels; what was computed there before is put beside what comes up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
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
    SparseSequential,
    SparseTensor,
    SubMConv3d,
    cat,
)
from torchweft.voxels.layers.module import SparseModule

__all__ = ["Segmenter", "confusion", "fit", "gathered", "plain", "predicted", "step_of"]

WIDTHS = (16, 24, 32)  # channels of each level
KINDS = 3
STEPS = 200
RATE = 1e-2


def block(layer: SparseConvolution) -> SparseSequential:
    """A convolution, a batch norm and ReLU, which run as one."""
    return SparseSequential(layer, SparseBatchNorm(layer.out_channels), nn.ReLU())


class Segmenter(nn.Module):
    """(N, 3) scores of the kinds, from (N, 2) features on voxels."""

    def __init__(self) -> None:
        super().__init__()
        a, b, c = WIDTHS  # block: a convolution, a batch norm and ReLU
        self.fine = block(SubMConv3d(2, a, 3, bias=False))
        self.down = block(SparseConv3d(a, b, 2, stride=2, bias=False, indice_key="1"))
        self.middle = block(SubMConv3d(b, b, 3, bias=False))
        self.down2 = block(SparseConv3d(b, c, 2, stride=2, bias=False, indice_key="2"))
        self.coarse = block(SubMConv3d(c, c, 3, bias=False))
        self.up2 = block(SparseInverseConv3d(c, b, 2, bias=False, indice_key="2"))
        self.middle2 = block(SubMConv3d(2 * b, b, 3, bias=False))
        self.up = block(SparseInverseConv3d(b, a, 2, bias=False, indice_key="1"))
        self.fine2 = block(SubMConv3d(2 * a, a, 3, bias=False))
        self.scores = nn.Linear(a, KINDS)

    def forward(self, tensor: SparseTensor) -> Tensor:
        """The scores of each voxel."""
        fine = self.fine(tensor)
        middle = self.middle(self.down(fine))
        coarse = self.coarse(self.down2(middle))
        middle = self.middle2(cat([self.up2(coarse), middle]))
        fine = self.fine2(cat([self.up(middle), fine]))
        scores: Tensor = self.scores(fine.feats)
        return scores


class PlainConvolution(SparseModule):
    """A convolution offset by offset; the kernel maps are torchweft's, and cost it nothing."""

    def __init__(self, layer: SparseConvolution) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tensor: SparseTensor) -> SparseTensor:
        """y[o] = Σ_k x[in(o, k)] w[k]."""
        layer = self.layer
        if isinstance(layer, SparseInverseConvolution):
            found = tensor.maps.named(str(layer.indice_key)).transpose()
        else:
            found = tensor.maps.get(tensor.coordinates, layer.geometry, layer.indice_key)
        feats = gathered(tensor.feats, layer.weight, found)
        return SparseTensor.on(feats, found.outputs, tensor.maps)


def plain(model: Segmenter) -> Segmenter:
    """A copy of a network whose convolutions are plain torch."""
    copy = deepcopy(model)
    for child in copy.children():
        if isinstance(child, SparseSequential):
            child[0] = PlainConvolution(cast(SparseConvolution, child[0]))
    return copy


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


def step_of(model: nn.Module, tile: Part) -> Callable[[], Tensor]:
    """One forward and backward pass, which leaves its gradients in the model."""

    def loss() -> Tensor:
        model.train()
        return nn.functional.cross_entropy(model(tile.tensor), tile.label)

    return gradient_step(model, loss)


def predicted(model: nn.Module, tensor: SparseTensor) -> Tensor:
    """The scores of each voxel, (N, 3), with the statistics that were learned."""
    model.eval()
    with torch.no_grad():
        scores: Tensor = model(tensor)
    return scores


def confusion(found: Tensor, truth: Tensor) -> Tensor:
    """(3, 3) numbers of voxels by true class (row) and predicted class (column)."""
    pairs = KINDS * truth + found
    return torch.bincount(pairs, minlength=KINDS**2).view(KINDS, KINDS).cpu()


def _pairs_of(found: KernelMap) -> Pairs:
    return [found.pairs(k) for k in range(found.sources.shape[0])]
