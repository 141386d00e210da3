"""A whole network of sparse convolutions: the example's MinkUNet on a cloud.

    z = scores of 19 classes at every voxel;   forward+backward: ∂⟨z, g⟩ by all three inputs

Inputs are the features and two vectors, of all weights and of all parameters of norms: noise of
half precision is compared over all of them, where the worst of 165 small gradients says little.
Features and weights are in half precision or float32, norms in float32 with the statistics of the
batch.  The oracle is the same network, whose convolutions gather, multiply and add for each offset.

In inference the network is in evaluation: norms take the running statistics.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import torchweft
from benchmarks.harness.case import Case, Workload
from benchmarks.workloads.clouds import CLOUDS
from benchmarks.workloads.recipes import NAMES, Random
from benchmarks.workloads.ways import AtFirst, Function, captured
from examples.voxels.plot_minkunet import MinkUNet
from torchweft.voxels import (
    SparseBatchNorm,
    SparseModule,
    SparseTensor,
    padded_sizes,
    prepare,
)
from torchweft.voxels.convolution.epilogue import ACTIVATIONS
from torchweft.voxels.layers.convolution import SparseConvolution, SparseInverseConvolution
from torchweft.voxels.maps.kernel_map import KernelMap

__all__ = [
    "CLASSES",
    "FEATURES",
    "NETWORK",
    "flat",
    "for_all_clouds",
    "given_to",
    "groups",
    "lowered",
    "parts",
    "unet_case",
]

NETWORK = "MinkUNet"
FEATURES, CLASSES = 4, 19
CHECKED = 1 << 13
"""Voxels of the check, where plain torch takes a kernel for each offset of each layer."""


def unet_case(
    cloud: str,
    layers: int,
    fresh: bool = False,
    inference: bool = False,
    dtype: torch.dtype = torch.float16,
) -> Case:
    """fresh: every call makes the maps of all levels, as a training step on a new cloud does.

    inference: on a GPU also by a CUDA graph, on fresh clouds by one that serves all.
    """
    kind = "_fresh" * fresh + "_inference" * inference
    name = f"minkunet{layers}_{cloud}{kind}_{NAMES[dtype]}"
    phases = ("forward",) if inference else ("forward", "forward+backward")
    build = functools.partial(_network, cloud, layers, fresh, inference, dtype)
    return Case(name, "network", build, phases, dtype, matrix=True, check_batch=CHECKED)


def groups(model: nn.Module) -> list[dict[str, Tensor]]:
    """Weights by name, and norms' parameters where there are norms."""
    norms = {
        f"{path}.{name}": parameter
        for path, module in model.named_modules()
        if isinstance(module, _NormBase)
        for name, parameter in module.named_parameters()
    }
    weights = {n: p for n, p in model.named_parameters() if n not in norms}
    return [weights, norms] if norms else [weights]


def flat(parameters: Iterable[Tensor]) -> Tensor:
    """One vector."""
    return torch.cat([p.flatten() for p in parameters])


def parts(vector: Tensor, like: Iterable[Tensor]) -> list[Tensor]:
    """Undoes `flat`: pieces of the shapes of `like`; their gradient is one copy."""
    shapes = [p.shape for p in like]
    pieces = vector.split([shape.numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def given_to(model: nn.Module, tensor: Any, *vectors: Tensor) -> Any:
    """What a network gives with other weights and norms."""
    given: dict[str, Tensor] = {}
    for group, vector in zip(groups(model), vectors, strict=True):
        given |= zip(group, parts(vector, group.values()), strict=True)
    return torch.func.functional_call(model, given, (tensor,))


class _Plain(SparseModule):
    """A convolution by torch: gather, multiply, add for each offset."""

    def __init__(self, layer: SparseConvolution) -> None:
        super().__init__()
        self.layer = [layer]  # in a list it is no module of ours
        self.weight, self.bias = layer.weight, layer.bias

    def forward(
        self,
        tensor: SparseTensor,
        norm: nn.Module | None = None,
        residual: SparseTensor | None = None,
        activation: str | None = None,
    ) -> SparseTensor:
        y = self._convolved(tensor)
        y = y if norm is None else norm(y)
        feats = y.feats if residual is None else y.feats + residual.feats
        return y.replace(feats if activation is None else ACTIVATIONS[activation](feats))

    def _convolved(self, tensor: SparseTensor) -> SparseTensor:
        found = _map_of(self.layer[0], tensor)
        result = tensor.feats.new_zeros(len(found.outputs), self.weight.shape[2])
        result = result if self.bias is None else result + self.bias
        for k, matrix in enumerate(self.weight.unbind(0)):
            in_rows, out_rows = found.pairs(k)
            result = result.index_add(0, out_rows, tensor.feats[in_rows] @ matrix)
        return SparseTensor.on(result, found.outputs, tensor.maps)


def _map_of(layer: SparseConvolution, tensor: SparseTensor) -> KernelMap:
    if isinstance(layer, SparseInverseConvolution):
        return tensor.maps.named(str(layer.indice_key)).transpose()
    return tensor.maps.get(tensor.coordinates, layer.geometry, layer.indice_key)


def _network(
    cloud: str,
    layers: int,
    fresh: bool,
    inference: bool,
    dtype: torch.dtype,
    device: torch.device,
    batch: int | None,
) -> Workload:
    voxels, shape = CLOUDS[cloud]()
    voxels = voxels[:batch].to(device)
    coords = torch.cat([torch.zeros_like(voxels[:, :1]), voxels], 1)
    feats = Random(device).normal(len(coords), FEATURES).to(dtype)
    torch.manual_seed(0)
    model = lowered(MinkUNet(FEATURES, CLASSES, layers), dtype).to(device)
    tensor = SparseTensor(feats, coords, shape, 1)
    flops = sum(_flops(model, tensor))
    model.train(not inference)

    def cloud(feats: Tensor) -> SparseTensor:
        return SparseTensor(feats, coords, shape, 1) if fresh else tensor.replace(feats)

    def function(feats: Tensor, *vectors: Tensor, backend: str | None = None) -> Tensor:
        rows = cloud(feats)
        scores: SparseTensor = given_to(model, rows, *vectors)
        return scores.feats

    def oracle(feats: Tensor, *vectors: Tensor, scale: None = None) -> Tensor:
        plain = _by_torch(copy.deepcopy(model))
        if feats.dtype == torch.float64:
            plain = plain.double()  # its running statistics
        scores: SparseTensor = given_to(plain, tensor.replace(feats), *vectors)
        return scores.feats

    tables = {"model": model, "coords": coords, "shape": shape, "size": 1, "fresh": fresh}
    inputs = feats, *(flat(p.detach() for p in group.values()) for group in groups(model))
    output_bytes = dtype.itemsize * len(coords) * CLASSES
    shown = f"N={len(coords)} parameters={sum(len(vector) for vector in inputs[1:])}"
    recorded = for_all_clouds(model, cloud) if fresh else captured(function)
    ways = {"captured": recorded} if inference and device.type == "cuda" else {}
    return Workload(
        NETWORK, inputs, tables, function, oracle, flops, output_bytes, shown,
        polynomial=False, gradients=2, ways=ways,
    )  # fmt: skip


def for_all_clouds(model: nn.Module, cloud: Callable[[Tensor], SparseTensor]) -> Function:
    """A network with given weights, as one CUDA graph; maps of each cloud are built before."""

    def scores(tensor: SparseTensor, *vectors: Tensor) -> Tensor:
        found: SparseTensor = given_to(model, tensor, *vectors)
        return found.feats

    def made(feats: Tensor, *vectors: Tensor) -> Function:
        example = prepare(model, cloud(feats))
        run = torchweft.capture(scores, example, *vectors, sizes=padded_sizes(example))

        def function(feats: Tensor, *vectors: Tensor) -> Tensor:
            return run(prepare(model, cloud(feats), tables_only=True), *vectors)

        return function

    return AtFirst(made)


def lowered(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A network in half precision, or another, whose norms stay in float32."""
    model.to(dtype)
    for module in model.modules():
        if isinstance(module, (SparseBatchNorm, nn.BatchNorm1d)):
            module.float()
            module.momentum = 1.0  # running statistics are those of the last pass
    return model


def _by_torch(model: nn.Module) -> nn.Module:
    for name, child in model.named_children():
        if isinstance(child, SparseConvolution):
            setattr(model, name, _Plain(child))
        else:
            _by_torch(child)
    return model


def _flops(model: nn.Module, tensor: SparseTensor) -> Iterator[int]:
    """Of each convolution, in one pass through the network."""
    found: list[int] = []

    def count(layer: SparseConvolution, given: tuple[SparseTensor]) -> None:
        pairs = int(_map_of(layer, given[0]).counts.sum())
        found.append(2 * pairs * layer.in_channels * layer.out_channels)

    hooks = [
        module.register_forward_pre_hook(count)
        for module in model.modules()
        if isinstance(module, SparseConvolution)
    ]
    with torch.no_grad():
        model(tensor)
    for hook in hooks:
        hook.remove()
    yield from found
