"""The demo's networks by the layers of other libraries, where these are installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.demo.models.potential import Layer, Potential, Settings
from torchweft.demo.models.segmenter import Segmenter
from torchweft.o3 import Graph, Irreps
from torchweft.voxels import SparseInverseConvolution, SparseTensor

__all__ = ["E3nnPotential", "SpconvSegmenter", "installed"]


def installed(name: str) -> bool:
    """Whether a library is there."""
    return importlib.util.find_spec(name) is not None


class E3nnLayer(Layer):
    """A layer whose convolution is e3nn's tensor product, and index_add; in e3nn's layout."""

    layout = "mul_ir"

    def __init__(self, inward: Irreps, outward: Irreps, y: Irreps, settings: Settings) -> None:
        from e3nn.o3 import TensorProduct

        super().__init__(inward, outward, y, settings)
        conv = self.conv
        self.product = TensorProduct(
            str(conv.irreps_in1),
            str(conv.irreps_in2),
            str(conv.irreps_out),
            [tuple(path[:5]) for path in conv.instructions],
            internal_weights=False,
            shared_weights=False,
        )

    def convolved(self, x: Tensor, y: Tensor, radial: Tensor, graph: Graph) -> Tensor:
        """Σ_j tp(x_j, y_ij, radial_ij W), with a stored message for each edge."""
        messages = self.product(x.index_select(0, graph.src), y, self.weights(radial))
        zeros = x.new_zeros(graph.num_nodes, messages.shape[1])
        return zeros.index_add(0, graph.dst, messages)


class E3nnPotential(Potential):
    """A potential of such layers; parameters are those of `Potential`."""

    layer = E3nnLayer


class SpconvSegmenter(nn.Module):
    """A trained `Segmenter` in spconv's layers; on the CPU these have no backward."""

    def __init__(self, model: Segmenter) -> None:
        import spconv.pytorch as spconv

        super().__init__()
        self.readout = model.scores
        for level, names in enumerate((("fine", "fine2"), ("middle", "middle2"), ("coarse",))):
            for name in names:
                self.add_module(name, _in_spconv(spconv, getattr(model, name), f"level {level}"))
        for name in ("down", "down2", "up2", "up"):
            self.add_module(name, _in_spconv(spconv, getattr(model, name), None))

    def forward(self, tensor: SparseTensor) -> Tensor:
        """The scores of each voxel, from voxels whose neighbours are not known yet."""
        from spconv.pytorch import SparseConvTensor

        net: Any = self._modules  # by name
        shape, size = tensor.spatial_shape, tensor.batch_size
        fine = net["fine"](SparseConvTensor(tensor.feats, tensor.C.int(), shape, size))
        middle = net["middle"](net["down"](fine))
        coarse = net["coarse"](net["down2"](middle))
        middle = net["middle2"](_beside(net["up2"](coarse), middle))
        fine = net["fine2"](_beside(net["up"](middle), fine))
        scores: Tensor = self.readout(fine.features)
        return scores


def _beside(one: Any, other: Any) -> Any:
    return one.replace_feature(torch.cat([one.features, other.features], 1))


def _in_spconv(spconv: Any, block: Any, level: str | None) -> nn.Module:
    """A convolution, its norm and ReLU; `level` names the pairs of submanifold layers."""
    layer, norm, relu = block
    sizes = layer.in_channels, layer.out_channels, layer.kernel_size
    options = {"bias": False, "indice_key": level or layer.indice_key}
    if isinstance(layer, SparseInverseConvolution):
        made = spconv.SparseInverseConv3d(*sizes, **options)
    elif level is None:
        made = spconv.SparseConv3d(*sizes, 2, **options)
    else:
        made = spconv.SubMConv3d(*sizes, **options)
    made = made.to(layer.weight)
    with torch.no_grad():
        made.weight.copy_(layer.weight.permute(2, 0, 1).reshape(made.weight.shape))
    theirs = nn.BatchNorm1d(norm.num_features, norm.eps, norm.momentum).to(layer.weight)
    theirs.load_state_dict(norm.state_dict())
    found: nn.Module = spconv.SparseSequential(made, theirs, relu)
    return found
