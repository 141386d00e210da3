"""Convolutions on voxels with torchsparse's maps.

    out[o] = bias + Σ_k x[in(o, k)] @ weight[k]

    stride 1        in = o + j − (k − 1) // 2      the outputs are the inputs
      even K        in = o + j                     by default
    strided         in = o·s − p + j               o in 0 … ⌊(max + 2p − k + 1) / s⌋
      "hashmap"     in = o·s + j − (k − 1) // 2    o = ⌊c / s⌋ where s is 1 or k on every axis, or
                                                   with "minkowski"; else as above
    transposed      the pairs of the strided layer, swapped

j = 0 … k − 1 is a position in the kernel; the number k of an offset counts them with x fastest if K
is odd, and with z fastest if K is even.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft import voxels
from torchweft.compat.torchsparse import backends
from torchweft.compat.torchsparse.nn.functional import conv_config
from torchweft.compat.torchsparse.sizes import make_ntuple
from torchweft.compat.torchsparse.tensor import SparseTensor
from torchweft.compat.voxels import are_rows_of, rows_of
from torchweft.core.operators.operands import check_tensors
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE
from torchweft.voxels.convolution.functions import conv_of_geometry
from torchweft.voxels.grid import Geometry, geometry
from torchweft.voxels.layers.checkpoints import row_major
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import KernelMap, Maps

__all__ = ["check_served", "conv3d", "spdownsample"]

Axes = tuple[int, ...]


class Level(NamedTuple):
    """What a layer keeps: its pairs, the voxels and coords it wrote, and what it read."""

    pairs: KernelMap
    onto: Coordinates | None  # outputs that the geometry does not say
    outputs: Coordinates
    coords: Tensor
    spatial_range: Axes | None
    input_coords: Tensor
    input_range: Axes | None

    def unwritten(self, coords: Tensor) -> bool:
        """Whether coords are the outputs, and those read still the inputs; waits if unknown."""
        read = are_rows_of(self.pairs.inputs, self.input_coords)
        return read and are_rows_of(self.outputs, coords)


def conv3d(
    input: SparseTensor,
    weight: Tensor,
    kernel_size: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    config: conv_config.ConvConfig | None = None,
    transposed: bool = False,
    generative: bool = False,
    training: bool = False,
) -> SparseTensor:
    """out[o] = bias + Σ_k x[in(o, k)] @ weight[k]; see the module for in(o, k).

    Args:
        input: (N, C_in) features on voxels.
        weight: (K, C_in, C_out), or (C_in, C_out) of one position.
        kernel_size: one number for all axes, or one for each.
        bias: (C_out,).
        stride: as kernel_size.
        padding: of a strided layer, as kernel_size.
        dilation: must be 1.
        config: None is the global configuration.
        transposed: undo the strided layer of these sizes that wrote the input's voxels.
        generative: must be False.
        training: has no effect.

    Returns:
        A tensor at the input's stride times `stride`, divided by it if transposed; rows of new
        voxels ascend.  float16 if features or weight are.

    Raises:
        ShapeError, DTypeError: arguments that do not fit each other; a transposed layer without the
            layer that it undoes.
        IndexRangeError: voxels outside of the range; negative ones in a strided layer.
        NotImplementedError: dilation or generative.
    """
    check_served(dilation, generative)
    if not isinstance(input, SparseTensor):
        raise DTypeError(
            f"input is a {type(input).__name__}: it must be a torchsparse.SparseTensor. Pass "
            "SparseTensor(feats, coords)."
        )
    kernel, step = make_ntuple(kernel_size, 3), make_ntuple(stride, 3)
    feats, weight, bias = _operands(input.feats, weight, bias)
    if math.prod(kernel) == math.prod(step) == 1:
        matrix = weight.flatten(0, -2)
        return input.derived(torch.nn.functional.linear(feats, matrix.transpose(0, 1), bias))
    if math.prod(kernel) % 2:
        weight = row_major(weight, kernel)
    key = kernel, step, make_ntuple(dilation, 3)
    if transposed:
        return _undone(input, (feats, weight, bias), key)
    return _convolved(input, (feats, weight, bias), key, make_ntuple(padding, 3), config)


def check_served(dilation: Any, generative: bool) -> None:
    """Raise for what torchsparse 2.1 takes and does not compute.

    Raises:
        NotImplementedError: a dilation, or a generative layer.
    """
    if set(make_ntuple(dilation, 3)) != {1}:
        raise NotImplementedError(
            f"dilation is {dilation}: torchsparse 2.1 ignores it, so this stand-in does not guess. "
            "Pass dilation=1 for its numbers, or use torchweft.voxels.SubMConv3d with a dilation."
        )
    if generative:
        raise NotImplementedError(
            "generative=True was given: torchsparse 2.1 clamps these outputs to the box of a "
            "strided layer, so this stand-in lacks it. Use torchweft.voxels.SparseConvTranspose3d, "
            "which writes all voxels that the kernel reaches."
        )


def spdownsample(
    _coords: Tensor,
    stride: Any = 2,
    kernel_size: Any = 2,
    padding: Any = 0,
    spatial_range: Axes | None = None,
    downsample_mode: str = "spconv",
) -> Tensor:
    """(M, 4) int32: the voxels that a strided layer with `kmap_mode="hashmap"` writes, ascending.

    Args:
        _coords: (N, 4) distinct integers (batch, x, y, z).
        stride: one number for all axes, or one for each.
        kernel_size: as stride.
        padding: as stride.
        spatial_range: (batch, x, y, z) of the input; None is that of the voxels.
        downsample_mode: "spconv" or "minkowski".
    """
    coords = SparseTensor(_coords.new_zeros(len(_coords), 1).float(), _coords, 1, spatial_range)
    conv_config.checked_mode("downsample_mode", downsample_mode, conv_config.DOWNSAMPLE_MODES)
    sizes = make_ntuple(kernel_size, 3), make_ntuple(stride, 3), make_ntuple(padding, 3)
    return rows_of(_outputs(coords.sparse().coordinates, *sizes, downsample_mode))


def _operands(
    feats: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """In float16 if features or weight are, as torchsparse multiplies them."""
    check_tensors(weight=weight, **({} if bias is None else {"bias": bias}))
    if torch.float16 not in (feats.dtype, weight.dtype):
        return feats, weight, bias
    return feats.half(), weight.half(), None if bias is None else bias.half()


def _convolved(
    input: SparseTensor,
    operands: tuple[Tensor, Tensor, Tensor | None],
    key: tuple[Axes, Axes, Axes],
    padding: Axes,
    config: conv_config.ConvConfig | None,
) -> SparseTensor:
    kernel, step, _ = key
    feats, weight, bias = operands
    tensor = input.sparse()
    config = config or conv_config.get_global_conv_config() or conv_config.get_default_conv_config()
    shape, onto = _target(tensor.coordinates, kernel, step, padding, config)
    level = _level(input, tensor, shape, onto, key)
    requested = 1, "tf32" if backends.allow_tf32 else "ieee", None
    found = conv_of_geometry(
        tensor.replace(feats), (feats, weight, bias, NO_EPILOGUE), shape, requested, None, onto
    )
    stride = tuple(a * s for a, s in zip(input.stride, step, strict=True))
    return _written(input, found.feats, level.coords, stride, level.spatial_range)


def _target(
    inputs: Coordinates, kernel: Axes, step: Axes, padding: Axes, config: conv_config.ConvConfig
) -> tuple[Geometry, Coordinates | None]:
    """The geometry of a layer, and its outputs where that does not say them."""
    mode = conv_config.checked_mode("kmap_mode", config.kmap_mode, conv_config.KMAP_MODES)
    if set(step) == {1}:
        if mode == "hashmap" or math.prod(kernel) % 2 or max(kernel) == 2:
            return geometry(3, kernel), None  # begins (k − 1) // 2 below its voxel
        return geometry(3, kernel, mode="strided"), inputs
    if mode == "hashmap_on_the_fly":
        return geometry(3, kernel, step, padding, mode="strided"), None
    centred = tuple((k - 1) // 2 for k in kernel)
    outputs = _outputs(inputs, kernel, step, padding, config.downsample_mode)
    return geometry(3, kernel, step, centred, mode="strided"), outputs


def _outputs(
    inputs: Coordinates, kernel: Axes, step: Axes, padding: Axes, downsample_mode: str
) -> Coordinates:
    """The voxels of a strided layer in the mode "hashmap"."""
    partition = all(s in (1, k) for k, s in zip(kernel, step, strict=True))
    if partition or downsample_mode == "minkowski":
        return inputs.coarse(geometry(3, kernel, step, mode="floor"))
    return Maps().get(inputs, geometry(3, kernel, step, padding, mode="strided")).outputs


def _level(
    input: SparseTensor,
    tensor: voxels.SparseTensor,
    shape: Geometry,
    onto: Coordinates | None,
    key: tuple[Axes, Axes, Axes],
) -> Level:
    """What the layer keeps under its sizes; that of before if it is of these voxels."""
    maps: dict[Any, Level] = input._caches.kmaps
    name = input.stride, *key
    known, pairs = maps.get(name), tensor.maps.get(tensor.coordinates, shape, onto=onto)
    read = input.coords, None if input.spatial_range is None else input.spatial_range[:4]
    if pairs.outputs is pairs.inputs:
        level = Level(pairs, onto, pairs.outputs, *read, *read)
    elif known is not None and known.pairs.kept is pairs.kept and known.unwritten(known.coords):
        return known
    elif input.spatial_range is None:
        outputs = Coordinates(pairs.outputs.rows)  # whose box is that of its own voxels
        level = Level(pairs, onto, outputs, rows_of(outputs), None, *read)
    else:
        box = pairs.outputs.batch_size, *pairs.outputs.spatial_shape
        level = Level(pairs, onto, pairs.outputs, rows_of(pairs.outputs), box, *read)
    maps[name] = level
    return level


def _undone(
    input: SparseTensor,
    operands: tuple[Tensor, Tensor, Tensor | None],
    key: tuple[Axes, Axes, Axes],
) -> SparseTensor:
    feats, weight, bias = operands
    stride = tuple(a // s for a, s in zip(input.stride, key[1], strict=True))
    level: Level | None = input._caches.kmaps.get((stride, *key))
    if level is None or not level.unwritten(input.coords):
        what = "no such layer" if level is None else "one that wrote or read other voxels"
        raise ShapeError(
            f"a transposed layer of kernel_size {key[0]} and stride {key[1]} was given a tensor at "
            f"stride {input.stride}; of the layers from stride {stride} the tensor knows {what}: "
            "it undoes the layer with the same sizes that wrote its voxels. Give it a tensor "
            "derived from that layer's output, whose _caches it shares."
        )
    maps, pairs = Maps(), level.pairs
    maps.get(pairs.inputs, pairs.geometry, "undone", level.onto)
    precision = "tf32" if backends.allow_tf32 else "ieee"
    tensor = voxels.SparseTensor.on(feats, pairs.outputs, maps)
    found = voxels.sparse_inverse_conv(tensor, weight, "undone", bias, precision=precision)
    return _written(input, found.feats, level.input_coords, stride, level.input_range)


def _written(
    input: SparseTensor, feats: Tensor, coords: Tensor, stride: Axes, spatial_range: Axes | None
) -> SparseTensor:
    output = SparseTensor(feats, coords, stride, spatial_range)
    output._caches = input._caches
    output._caches.cmaps[stride] = coords, spatial_range
    return output
