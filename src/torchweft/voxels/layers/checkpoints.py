"""State dictionaries of other projects, for a torchweft model with modules of the same names.

    model.load_state_dict(from_spconv(torch.load("model.pt"), model))

Only the order of weights differs: (K, C_in, C_out) here, K row-major, the last axis fastest.  With
j the position in a kernel of size k along one axis, and dil its dilation:

    project            weights             fastest axis   submanifold offset at j
    torchweft          (K, C_in, C_out)    last           j·dil − ⌊(k − 1)·dil / 2⌋
    spconv 2           (C_out, k…, C_in)   last           (j − ⌊k / 2⌋)·dil
    spconv 1           (k…, C_in, C_out)   last           j·dil − ⌊k / 2⌋
    torchsparse        (K, C_in, C_out)    first          (j − ⌊k / 2⌋)·dil
        of even K                          last           j, where k ≤ 2; else it depends
    MinkowskiEngine    (K, C_in, C_out)    first          (j − ⌊k / 2⌋)·dil
        of even k                          first          j·dil

Odd kernels differ only in their order.  spconv 2 reads the memory of a kernel of one position as
(C_in, C_out), unless the layer has a stride.  Its even submanifold kernels reach one voxel lower
than torch's: load them into a layer whose kernel is larger by one, where the other weights are 0.
MinkowskiEngine gives strided and transposed kernels the offsets of submanifold ones, and so does
torchsparse.

Which voxels a strided layer writes differs too.  torchweft, as torch, writes every voxel that the
kernel reaches from within the box; MinkowskiEngine, and torchsparse where each stride is 1 or the
kernel's size, write ⌊c / stride⌋ for every input voxel c.  Build the model's strided layers, pools
included, with outputs="floor": the loaders refuse others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.grid import Geometry
from torchweft.voxels.layers.convolution import SparseConvolution, SparseInverseConvolution
from torchweft.voxels.layers.pooling import SparseMaxPool

__all__ = ["from_minkowski", "from_spconv", "from_torchsparse"]

StateDict = dict[str, Tensor]
Convert = Callable[[str, Tensor, SparseConvolution], Tensor]

SPCONV_VERSIONS = (1, 2)


def from_spconv(
    state: Mapping[str, Tensor], model: nn.Module, *, version: int | None = None
) -> StateDict:
    """Converts the state of a spconv network for a model of the same layers.

    Args:
        state: spconv's state dict, with weights (C_out, k…, C_in) of spconv 2, or (k…, C_in, C_out)
            of spconv 1.
        model: torchweft's model, whose modules have the names of the state's.
        version: 1 or 2; None: the one that fits every weight.

    Returns:
        A state dict, which `model.load_state_dict` loads strictly.

    Raises:
        ShapeError: weights that do not fit their layer; weights of other modules, and none of the
            model's convolutions; weights that all fit both versions, such as (3, 3, 3) of one axis.

    Source: https://github.com/traveller59/spconv.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> model = voxels.SparseSequential(voxels.SubMConv3d(4, 16, 3, bias=False))
        >>> state = {"0.weight": torch.randn(16, 3, 3, 3, 4)}
        >>> model.load_state_dict(voxels.from_spconv(state, model))
        <All keys matched successfully>
    """
    _check_given(state, model)
    if version not in (None, *SPCONV_VERSIONS):
        raise ShapeError(
            f"version is {version!r}: weights are those of spconv 1 or 2. Pass version=2, or None "
            "for the one that fits."
        )
    found = _spconv_version(state, model) if version is None else version
    return _converted(state, model, "weight", functools.partial(_from_spconv, version=found))


def _spconv_version(state: Mapping[str, Tensor], model: nn.Module) -> int:
    """The version whose layout fits all weights; 2 where none does, which then says why."""
    fitting, both = list(SPCONV_VERSIONS), None
    for name, tensor, layer in _weights(state, model, "weight"):
        own = [v for v in fitting if _fits_spconv(name, tensor, layer, v)]
        if not own:
            return 2
        both = (name, tensor) if len(own) == 2 and tensor.numel() > 1 else both
        fitting = own
    if len(fitting) == 2 and both:
        raise ShapeError(
            f"{both[0]} is {tuple(both[1].shape)}, which may be spconv 2's (C_out, k…, C_in) as "
            "well as spconv 1's (k…, C_in, C_out), and so is every other weight: its version must "
            "be known. Pass version=2, or version=1."
        )
    return fitting[-1]


def _fits_spconv(name: str, tensor: Tensor, layer: SparseConvolution, version: int) -> bool:
    try:
        _from_spconv(name, tensor, layer, version)
    except ShapeError:
        return False
    return True


def from_torchsparse(state: Mapping[str, Tensor], model: nn.Module) -> StateDict:
    """Converts the state of a torchsparse network for a model of the same layers.

    torchsparse's transposed layers are SparseInverseConv here, its strided ones have
    outputs="floor".  With `downsample_mode="spconv"`, its default, layers of a stride that is
    neither 1 nor the kernel's size are SparseConv without it.

    Args:
        state: torchsparse's state dict, with `kernel` (K, C_in, C_out), or (C_in, C_out) of one
            position.
        model: torchweft's model, whose modules have the names of the state's.

    Returns:
        A state dict, which `model.load_state_dict` loads strictly.

    Raises:
        ShapeError: weights that do not fit their layer; weights of other modules, and none of the
            model's convolutions; a layer that writes other voxels here.

    Source: https://github.com/mit-han-lab/torchsparse.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> model = voxels.SparseSequential(voxels.SubMConv3d(4, 16, 3, bias=False))
        >>> state = {"0.kernel": torch.randn(27, 4, 16)}
        >>> model.load_state_dict(voxels.from_torchsparse(state, model))
        <All keys matched successfully>
    """
    _check_given(state, model)
    _require_rows(model, "torchsparse", reaches=True)
    return _converted(state, model, "kernel", _from_torchsparse)


def from_minkowski(state: Mapping[str, Tensor], model: nn.Module) -> StateDict:
    """Converts the state of a MinkowskiEngine network for a model of the same layers.

    Batch norms and linear layers lose their inner name: `norm.bn.weight` is `norm.weight`.
    Strided layers and pools have outputs="floor"; a transposed layer is a SparseInverseConv, or has
    outputs="floor" and is called with the coordinates of the level that it returns to.

    Args:
        state: MinkowskiEngine's state dict, with `kernel` (K, C_in, C_out) of hypercubes and biases
            (1, C_out).
        model: torchweft's model, whose modules have the names of the state's.

    Returns:
        A state dict, which `model.load_state_dict` loads strictly.

    Raises:
        ShapeError: weights that do not fit their layer; weights of other modules, and none of the
            model's convolutions; a layer that writes other voxels here.

    Source: https://github.com/NVIDIA/MinkowskiEngine.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> model = voxels.SparseSequential(voxels.SubMConv3d(4, 16, 3, bias=False))
        >>> state = {"0.kernel": torch.randn(27, 4, 16)}
        >>> model.load_state_dict(voxels.from_minkowski(state, model))
        <All keys matched successfully>
    """
    _check_given(state, model)
    _require_rows(model, "MinkowskiEngine", reaches=False)
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
    _check_names(state, model, leaf)
    out = dict(state)
    for name, tensor, layer in _weights(state, model, leaf):
        del out[name]
        out[f"{name.rpartition('.')[0]}.weight".lstrip(".")] = convert(name, tensor, layer)
    return out


def _check_given(state: object, model: object) -> None:
    if not isinstance(state, Mapping) or not isinstance(model, nn.Module):
        raise DTypeError(
            f"a {type(state).__name__} and a {type(model).__name__} were given: a loader takes a "
            "state dictionary and the model that it is for. Pass torch.load(path), model."
        )


def _check_names(state: Mapping[str, Tensor], model: nn.Module, leaf: str) -> None:
    """Raise where weights of other modules were given, and none of the model's convolutions."""
    modules = dict(model.named_modules())
    layers = [name for name, module in modules.items() if isinstance(module, SparseConvolution)]
    owners = [name.rpartition(".")[0] for name in state if name.rpartition(".")[2] == leaf]
    others = [name for name in owners if name not in modules]
    if layers and others and not {*layers} & {*owners}:
        raise ShapeError(
            f"the state has {others[0]}.{leaf} and the model no module {others[0]}: its "
            f"convolutions are {', '.join(layers[:3])}, and the state has the weight of none. Give "
            "the state's keys the names of the model's modules, for example without a prefix."
        )


def _weights(
    state: Mapping[str, Tensor], model: nn.Module, leaf: str
) -> Iterator[tuple[str, Tensor, SparseConvolution]]:
    """(name, weight, layer) of the convolutions of a model."""
    modules = dict(model.named_modules())
    for name, tensor in state.items():
        owner, _, last = name.rpartition(".")
        module = modules.get(owner)
        if last == leaf and isinstance(module, SparseConvolution):
            yield name, tensor, module


def _require_rows(model: nn.Module, project: str, reaches: bool) -> None:
    """Raise where a resampling layer writes other voxels than in its project.

    Args:
        model: whose layers are examined.
        project: that the weights come from.
        reaches: whether layers of a stride that is neither 1 nor the kernel's size may write all
            voxels that the kernel reaches.
    """
    for name, module in model.named_modules():
        if isinstance(module, SparseMaxPool):
            same = module.outputs == "floor"
        elif isinstance(module, SparseConvolution) and _resamples(module):
            shape = module.geometry
            same = shape.outputs == "floor" or (shape.transposed and _is_partition(shape))
            same |= reaches and shape.mode == "strided" and not _has_floors(shape)
        else:
            continue
        if not same:
            raise ShapeError(
                f"{name or type(module).__name__} is a {module}: {project} writes the voxels "
                "floor(c / stride) of all inputs c, this layer all that the kernel reaches. Build "
                'it with outputs="floor" and without padding, or as SubMConv where every stride is '
                "1."
            )


def _resamples(layer: SparseConvolution) -> bool:
    """Whether a layer has outputs of its own: neither its inputs nor those of an earlier layer."""
    return layer.mode != "submanifold" and not isinstance(layer, SparseInverseConvolution)


def _has_floors(shape: Geometry) -> bool:
    """Whether torchsparse always writes the floors of the inputs."""
    return all(s in (1, k) for k, s in zip(shape.kernel_size, shape.stride, strict=True))


def _is_partition(shape: Geometry) -> bool:
    """Whether every voxel is written once, by its ⌊o / stride⌋."""
    dilated = any(k > 1 and d > 1 for k, d in zip(shape.kernel_size, shape.dilation, strict=True))
    return shape.kernel_size == shape.stride and not any(shape.padding) and not dilated


def _outer_name(name: str, modules: Mapping[str, nn.Module]) -> str:
    owner, _, leaf = name.rpartition(".")
    outer, _, inner = owner.rpartition(".")
    if inner in ("bn", "linear") and owner not in modules and outer in modules:
        return f"{outer}.{leaf}".lstrip(".")
    return name


def _from_spconv(name: str, tensor: Tensor, layer: SparseConvolution, version: int) -> Tensor:
    if tensor.dim() != layer.dim + 2:
        raise ShapeError(
            f"{name} is {tuple(tensor.shape)}: spconv's weight of {layer.dim} axes is (C_out, k…, "
            "C_in), of spconv 1 (k…, C_in, C_out). Build the layer with the saved number of axes."
        )
    own = tensor if version == 1 else tensor.movedim(0, -1)
    sizes, shape = tuple(own.shape[:-2]), layer.geometry
    begin = shape.begin
    if shape.mode == "submanifold":
        dilation = shape.dilation if version == 2 else (1,) * layer.dim  # 1 does not dilate it
        begin = tuple(k // 2 * d for k, d in zip(sizes, dilation, strict=True))
    matrices = own.flatten(0, -3)
    if version == 2 and math.prod(sizes) == math.prod(shape.stride) == 1:
        matrices = tensor.reshape(matrices.shape)
    return _placed(name, matrices, layer, sizes, begin)


def _from_torchsparse(name: str, tensor: Tensor, layer: SparseConvolution) -> Tensor:
    sizes, shape = layer.kernel_size, layer.geometry
    weight = _offsets_first(name, tensor, sizes)
    if math.prod(sizes) % 2:
        weight = row_major(weight, sizes)
    elif shape.mode == "submanifold" and max(sizes) > 2:
        raise ShapeError(
            f"{name} is of an even submanifold kernel {sizes}: where it begins depends on the "
            "mode that torchsparse ran in. Only sizes 1 and 2 convert; retrain with an odd kernel."
        )
    begin = shape.begin
    if shape.mode == "floor":
        begin = tuple((k - 1) // 2 * d for k, d in zip(sizes, shape.dilation, strict=True))
    return _placed(name, weight, layer, sizes, begin)


def _from_minkowski(name: str, tensor: Tensor, layer: SparseConvolution) -> Tensor:
    sizes, shape = layer.kernel_size, layer.geometry
    weight = row_major(_offsets_first(name, tensor, sizes), sizes)
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


def row_major(weight: Tensor, sizes: Sequence[int]) -> Tensor:
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
