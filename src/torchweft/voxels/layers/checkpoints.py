"""State dictionaries of other projects, for a torchweft model with modules of the same names.

    model.load_state_dict(from_spconv(torch.load("model.pt"), model))

Only the order of weights differs: (K, C_in, C_out) here, K row-major, the last axis fastest.  With
j the position in a kernel of size k along one axis, and dil its dilation:

    project            weights             fastest axis   submanifold offset at j
    torchweft          (K, C_in, C_out)    last           j·dil − ⌊(k − 1)·dil / 2⌋
    spconv 2           (C_out, k…, C_in)   last           (j − ⌊k / 2⌋)·dil
    torchsparse        (K, C_in, C_out)    first          (j − ⌊k / 2⌋)·dil
        of even K                          last           j, where k ≤ 2; else it depends
    MinkowskiEngine    (K, C_in, C_out)    first          (j − ⌊k / 2⌋)·dil
        of even k                          first          j·dil

Odd kernels differ only in their order.  spconv reads the memory of a kernel of one position as
(C_in, C_out), unless the layer has a stride.  Its even submanifold kernels reach one voxel lower
than torch's: load them into a layer whose kernel is larger by one, where the other weights are 0.
MinkowskiEngine gives strided and transposed kernels the offsets of submanifold ones, so that the
padding of a torchweft layer must be ⌊k / 2⌋·dil for odd k, 0 for even k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchweft.errors import ShapeError
from torchweft.voxels.grid import Geometry
from torchweft.voxels.layers.convolution import SparseConvolution, SparseInverseConvolution

__all__ = ["from_minkowski", "from_spconv", "from_torchsparse"]

StateDict = dict[str, Tensor]
Convert = Callable[[str, Tensor, SparseConvolution], Tensor]


def from_spconv(state: Mapping[str, Tensor], model: nn.Module) -> StateDict:
    """spconv 2's state for a model of the same layers: weights (C_out, k…, C_in).

    Raises:
        ShapeError: weights that do not fit their layer.
    """
    return _converted(state, model, "weight", _from_spconv)


def from_torchsparse(state: Mapping[str, Tensor], model: nn.Module) -> StateDict:
    """torchsparse's state: `kernel` (K, C_in, C_out), or (C_in, C_out) of one position.

    Its transposed layers are SparseInverseConv here.

    Raises:
        ShapeError: weights that do not fit their layer.
    """
    return _converted(state, model, "kernel", _from_torchsparse)


def from_minkowski(state: Mapping[str, Tensor], model: nn.Module) -> StateDict:
    """MinkowskiEngine's state: `kernel` (K, C_in, C_out) of hypercubes, biases (1, C_out).

    Batch norms and linear layers lose their inner name: `norm.bn.weight` is `norm.weight`.

    Raises:
        ShapeError: weights, or a padding, that do not fit their layer.
    """
    modules = dict(model.named_modules())
    renamed = {_outer_name(name, modules): tensor for name, tensor in state.items()}
    flat = {
        name: t.flatten() if t.dim() == 2 and len(t) == 1 and name.endswith("bias") else t
        for name, t in renamed.items()
    }
    return _converted(flat, model, "kernel", _from_minkowski)


def _converted(
    state: Mapping[str, Tensor], model: nn.Module, leaf: str, convert: Convert
) -> StateDict:
    modules = dict(model.named_modules())
    out: StateDict = {}
    for name, tensor in state.items():
        owner, _, last = name.rpartition(".")
        module = modules.get(owner)
        if last == leaf and isinstance(module, SparseConvolution):
            name, tensor = f"{owner}.weight".lstrip("."), convert(name, tensor, module)
        out[name] = tensor
    return out


def _outer_name(name: str, modules: Mapping[str, nn.Module]) -> str:
    owner, _, leaf = name.rpartition(".")
    outer, _, inner = owner.rpartition(".")
    if inner in ("bn", "linear") and owner not in modules and outer in modules:
        return f"{outer}.{leaf}".lstrip(".")
    return name


def _from_spconv(name: str, tensor: Tensor, layer: SparseConvolution) -> Tensor:
    if tensor.dim() != layer.dim + 2:
        raise ShapeError(
            f"{name} is {tuple(tensor.shape)}: spconv's weight of {layer.dim} axes is (C_out, k…, "
            "C_in). Convert spconv 1 weights (k…, C_in, C_out) by movedim(-1, 0) first."
        )
    sizes, shape = tuple(tensor.shape[1:-1]), layer.geometry
    begin = shape.begin
    if shape.mode == "submanifold":
        begin = tuple(k // 2 * d for k, d in zip(sizes, shape.dilation, strict=True))
    matrices = tensor.movedim(0, -1).flatten(0, -3)
    if math.prod(sizes) == math.prod(shape.stride) == 1:
        matrices = tensor.reshape(matrices.shape)
    return _placed(name, matrices, layer, sizes, begin)


def _from_torchsparse(name: str, tensor: Tensor, layer: SparseConvolution) -> Tensor:
    sizes, shape = layer.kernel_size, layer.geometry
    weight = _offsets_first(name, tensor, sizes)
    if math.prod(sizes) % 2:
        weight = _row_major(weight, sizes)
    elif shape.mode == "submanifold" and max(sizes) > 2:
        raise ShapeError(
            f"{name} is of an even submanifold kernel {sizes}: where it begins depends on the "
            "mode that torchsparse ran in. Only sizes 1 and 2 convert; retrain with an odd kernel."
        )
    return _placed(name, weight, layer, sizes, shape.begin)


def _from_minkowski(name: str, tensor: Tensor, layer: SparseConvolution) -> Tensor:
    sizes, shape = layer.kernel_size, layer.geometry
    weight = _row_major(_offsets_first(name, tensor, sizes), sizes)
    begin = shape.begin
    if not isinstance(layer, SparseInverseConvolution):  # whose offsets are the named layer's
        begin = tuple(k // 2 * d * (k % 2) for k, d in zip(sizes, shape.dilation, strict=True))
    return _placed(name, weight, layer, sizes, begin)


def _offsets_first(name: str, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """(K, C_in, C_out), also of a kernel of one position, which is saved as a matrix."""
    weight = tensor.unsqueeze(0) if tensor.dim() == 2 else tensor
    if weight.dim() != 3 or len(weight) != math.prod(sizes):
        raise ShapeError(
            f"{name} is {tuple(tensor.shape)} but the layer's kernel is {tuple(sizes)}: it must "
            f"be ({math.prod(sizes)}, C_in, C_out). Build the layer with the saved kernel_size."
        )
    return weight


def _row_major(weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Offsets in row-major order, from an order whose first axis is fastest."""
    places = weight.reshape(*sizes[::-1], *weight.shape[1:])
    axes = range(len(sizes))
    return places.permute(*axes[::-1], len(sizes), len(sizes) + 1).flatten(0, -3)


def _placed(
    name: str,
    weight: Tensor,
    layer: SparseConvolution,
    sizes: tuple[int, ...],
    begin: tuple[int, ...],
) -> Tensor:
    """The weights at their offsets among those of the layer, 0 at all others."""
    shape = layer.geometry
    saved = Geometry("strided", sizes, shape.stride, begin, shape.dilation).offsets()
    ours = {offset: k for k, offset in enumerate(shape.offsets())}
    if any(offset not in ours for offset in saved) or (
        shape.mode != "submanifold" and len(saved) != len(ours)
    ):
        raise ShapeError(
            f"{name} has a kernel of {sizes} that begins {begin} below its voxel, the layer one of "
            f"{shape.kernel_size} that begins {shape.begin} below: it must hold all saved offsets. "
            "Build the layer with that kernel_size and padding; for an even submanifold kernel "
            "of spconv with a kernel_size larger by one."
        )
    if tuple(weight.shape[1:]) != tuple(layer.weight.shape[1:]):
        raise ShapeError(
            f"{name} maps {weight.shape[1]} to {weight.shape[2]} channels, the layer "
            f"{layer.weight.shape[1]} to {layer.weight.shape[2]}: they must agree. Build the layer "
            "with the saved channels."
        )
    places = torch.tensor([ours[offset] for offset in saved], device=weight.device)
    return weight.new_zeros(len(ours), *weight.shape[1:]).index_copy(0, places, weight)
