"""Sparse convolutions as functions, which check their arguments and find or build the map.

    out[o] = bias + Σ_k x[in(o, k)] @ weight[k]

Which input voxel in(o, k) meets output voxel o at offset k follows torch's geometry (grid.py), so
that values equal torch.nn.functional.conv{d}d, or conv_transpose{d}d, of `dense()` at the output's
voxels.  K is row-major over the kernel's axes; cross-correlation, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchweft.core.backend import choose
from torchweft.core.operators.call_cache import CallCache, signature
from torchweft.core.operators.operands import check_tensors, same_kind
from torchweft.core.operators.operator import compiling, constant_when_compiling
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue, check
from torchweft.voxels.convolution.operator import (
    ConvOperands,
    ConvOptions,
    compile_before,
    convolution,
)
from torchweft.voxels.grid import Geometry, Size, geometry, integer
from torchweft.voxels.maps.checks import check_same_device
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import KernelMap, given_outputs, mode_of
from torchweft.voxels.maps.recipes import note_reader
from torchweft.voxels.maps.tensor import SparseTensor, check_sparse
from torchweft.voxels.maps.together import foresee

__all__ = ["conv_of_geometry", "conv_undone", "sparse_conv", "sparse_conv3d", "sparse_inverse_conv"]

CONV_PRECISIONS = ("ieee", "tf32", "tf32x3")


def sparse_conv(
    tensor: SparseTensor,
    weight: Tensor,
    kernel_size: Size,
    bias: Tensor | None = None,
    stride: Size = 1,
    dilation: Size = 1,
    padding: Size = 0,
    transposed: bool = False,
    submanifold: bool = True,
    *,
    groups: int = 1,
    indice_key: str | None = None,
    outputs: str = "torch",
    coordinates: Tensor | Coordinates | None = None,
    precision: str = "ieee",
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    backend: str | None = None,
) -> SparseTensor:
    """z[o] = bias + Σ_k x[in(o, k)] @ weight[k]: a sparse convolution in 1 to 4 dimensions.

    Then act(z · scale + shift + residual): a folded norm, a skip connection and an activation.
    Without gradients, as in inference, they are part of the convolution's own pass and share its
    one rounding; where gradients are recorded each is a step of its own.

    Args:
        tensor: the voxels and their (N, C_in) features.
        weight: (K, C_in / groups, C_out), the K kernel positions row-major over the kernel's axes.
        kernel_size: one number for all axes, or one for each.
        bias: (C_out,), added at the output's voxels only.
        stride: 1 in a submanifold layer.
        dilation: the distance of neighbouring kernel positions.
        padding: as in torch; a submanifold kernel is centred whatever it is.
        transposed: torch's transposed convolution; outputs are all voxels that a pair reaches.
        submanifold: outputs are the input's voxels, in their order; else all that a pair reaches,
            ascending.
        groups: number of groups of channels that do not mix.
        indice_key: names the map, for layers of the same geometry and for an inverse layer.
        outputs: "floor" puts an output at ⌊c / stride⌋ of every input voxel c, whatever the kernel,
            as MinkowskiEngine and torchsparse do.  The kernel is centred: its offsets from
            stride · o are −(k // 2) … k // 2 for odd k, 0 … k − 1 for even k, times the dilation.
            Coordinates may be negative, and need no spatial_shape; where every stride is 1 the
            outputs are the inputs.  A transposed layer needs coordinates as well.
        coordinates: (N_out, 1 + d) distinct integers, the output's voxels, in their order: only
            their pairs are summed, and one without a pair is the bias.  The coordinates of another
            tensor keep the map; that to a tensor of integers is built at every call.
        precision: of float32 products on a GPU: "ieee", "tf32" (the first 11 significant
            bits of factors) or "tf32x3" (three products, as exact as float32).
        scale: (C_out,), float32 too where the features have 16 bits; so is shift.
        shift: (C_out,).
        residual: (N_out, C_out), features on the output's voxels.
        activation: "relu", "silu" or "gelu".
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        The output's voxels with (N_out, C_out) features in the input's dtype.

    Raises:
        ShapeError, DTypeError, DeviceError: arguments that do not fit each other; an indice_key
            that names another map; a voxel that occurs twice.
        IndexRangeError: negative coordinates without a spatial_shape in a strided layer, unless
            its outputs are "floor" or given.

    Error: |z − z*| ≤ u|z*| + 4√T·2⁻²⁴·Σ|x w|, T terms per number, u the unit round-off of the
    dtype; 2⁻⁵³ for float64; with precision="tf32" 2⁻⁹ of the sum more.  Differentiable to any
    order; the same bits at every call, and for every order of the rows.

    Cost: 2 L C_in C_out / groups operations for L pairs of voxels; the map is built once and
    cached with the voxels.

    Source: Graham, Engelcke, van der Maaten: 3D semantic segmentation with submanifold sparse
    convolutional networks, CVPR 2018.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> voxels.sparse_conv(x, torch.randn(27, 4, 16), kernel_size=3)
        SparseTensor(3 voxels, 16 channels, d=3, torch.float32, on cpu)
        >>> weight = torch.randn(8, 4, 16)
        >>> voxels.sparse_conv(x, weight, 2, stride=2, submanifold=False).spatial_shape
        (4, 4, 4)
    """
    check_sparse(tensor)
    steps = {"scale": scale, "shift": shift, "residual": residual}
    check_tensors(**{name: step for name, step in steps.items() if step is not None})
    mode = mode_of(submanifold, transposed, outputs)
    shape = geometry(tensor.dim, kernel_size, stride, padding, dilation, mode=mode)
    operands = tensor.feats, weight, bias, Epilogue(scale, shift, residual, activation=activation)
    requested = groups, precision, backend
    return conv_of_geometry(tensor, operands, shape, requested, indice_key, coordinates)


def conv_of_geometry(
    tensor: SparseTensor,
    operands: ConvOperands,
    shape: Geometry,
    requested: ConvRequest,
    indice_key: str | None,
    coordinates: Tensor | Coordinates | None = None,
    layer: nn.Module | None = None,
) -> SparseTensor:
    """`sparse_conv` for a geometry that was checked before, with as many axes as the tensor.

    With a layer, the first one on a cloud builds all maps that those after it asked for last time.
    """
    operands, options = _checked(operands, shape, requested)
    onto = given_outputs(tensor.coordinates, coordinates, shape)
    if onto is None and shape not in tensor.coordinates.tables:
        if layer is not None:
            foresee(layer, tensor.coordinates)
        alone = tensor.coordinates.shards is None
        if options[2] == "triton" and alone and shape not in tensor.coordinates.foreseen:
            compile_before(operands, tensor.coordinates, shape, options)
    found = tensor.maps.get(tensor.coordinates, shape, indice_key, onto)
    return _convolved(tensor, operands, found, options)


def sparse_inverse_conv(
    tensor: SparseTensor,
    weight: Tensor,
    indice_key: str,
    bias: Tensor | None = None,
    *,
    groups: int = 1,
    precision: str = "ieee",
    backend: str | None = None,
) -> SparseTensor:
    """z[q] = bias + Σ_k x[o(q, k)] @ weight[k] by the pairs of an earlier layer, swapped.

    The output has the voxels that the layer named `indice_key` read, in their order.

    Args:
        tensor: on the voxels that the named layer wrote.
        weight: (K, C_in / groups, C_out), K kernel positions of the named layer.
        indice_key: the name of the layer to undo.
        bias: (C_out,), or None.
        groups: see `sparse_conv`.
        precision: of float32 products, see `sparse_conv`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Returns:
        The voxels that the named layer read, with (N_in, C_out) features in the tensor's dtype.

    Raises:
        ShapeError: no layer has the name, or it wrote other voxels.

    Error and cost: see `sparse_conv`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> down = voxels.sparse_conv(
        ...     x, torch.randn(8, 4, 16), 2, stride=2, submanifold=False, indice_key="down"
        ... )
        >>> voxels.sparse_inverse_conv(down, torch.randn(8, 16, 4), "down")
        SparseTensor(3 voxels, 4 channels, d=3, torch.float32, on cpu)
    """
    check_sparse(tensor)
    operands, requested = (tensor.feats, weight, bias, NO_EPILOGUE), (groups, precision, backend)
    return conv_undone(tensor, operands, requested, indice_key)


def conv_undone(
    tensor: SparseTensor, operands: ConvOperands, requested: ConvRequest, indice_key: str
) -> SparseTensor:
    """`sparse_inverse_conv` with an epilogue."""
    named = tensor.maps.named(indice_key)
    if named.outputs is not tensor.coordinates:
        raise ShapeError(
            f"indice_key={indice_key!r} names a map onto {len(named.outputs)} voxels, the tensor "
            f"has {len(tensor)} others: an inverse layer reads what the named layer wrote. Give "
            "it a tensor of that level."
        )
    operands, options = _checked(operands, named.geometry, requested)
    return _convolved(tensor, operands, named.transpose(), options)


def sparse_conv3d(
    tensor: SparseTensor,
    weight: Tensor,
    kernel_size: Size,
    bias: Tensor | None = None,
    stride: Size = 1,
    dilation: Size = 1,
    padding: Size = 0,
    transposed: bool = False,
    submanifold: bool = True,
) -> SparseTensor:
    """A sparse convolution in three dimensions: `sparse_conv` with the positional arguments only.

    Args:
        tensor: voxels with three spatial axes, and their (N, C_in) features.
        weight: (K, C_in, C_out), the K kernel positions row-major over the kernel's axes.
        kernel_size: one number for all axes, or one for each.
        bias: (C_out,), or None.
        stride: 1 in a submanifold layer.
        dilation: the distance of neighbouring kernel positions.
        padding: as in torch; a submanifold kernel is centred whatever it is.
        transposed: whether it is torch's transposed convolution.
        submanifold: whether the outputs are the input's voxels.

    Returns:
        The output's voxels with (N_out, C_out) features in the input's dtype.

    Raises:
        ShapeError: the tensor does not have three axes, or see `sparse_conv`.

    Error, cost and source: see `sparse_conv`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> voxels.sparse_conv3d(x, torch.randn(27, 4, 16), kernel_size=3)
        SparseTensor(3 voxels, 16 channels, d=3, torch.float32, on cpu)
    """
    check_sparse(tensor)
    if tensor.dim != 3:
        raise ShapeError(
            f"sparse_conv3d was given coordinates of {tensor.dim} axes: it needs 3. "
            "Use sparse_conv, which takes 1 to 4."
        )
    return sparse_conv(
        tensor, weight, kernel_size, bias, stride, dilation, padding, transposed, submanifold
    )


ConvRequest = tuple[int, str, str | None]
"""Groups, precision, and the requested backend or None."""

_checked_calls: CallCache[ConvOptions] = CallCache()
"""The options of checked calls, by signature except the numbers of rows; a residual's rows and the
names of activations are checked with the output's voxels."""


def _checked(
    operands: ConvOperands, shape: Geometry, requested: ConvRequest
) -> tuple[ConvOperands, ConvOptions]:
    """The operands of a layer in one dtype, and its options; a signature is checked once."""
    feats, weight, bias, after = operands
    key, extra = None, None
    tensors: tuple[Tensor, ...] = (feats, weight) if bias is None else (feats, weight, bias)
    if after is not NO_EPILOGUE:
        tensors, extra = _with_epilogue(tensors, after)
    found = signature(tensors)
    if found is not None:
        rows, *kind = found
        key = (rows[1:], *kind, extra, shape, requested)
        options = _checked_calls.get(key)
        if options is not None:
            return operands, options
    groups, precision, backend = requested
    groups = integer("groups is", groups, ". Pass groups=1, for example.")
    if precision not in CONV_PRECISIONS:
        raise DTypeError(
            f"precision is {precision!r}: it must be one of {', '.join(CONV_PRECISIONS)}. "
            'Pass "ieee" for exact float32 products.'
        )
    _check_weight(feats, weight, bias, shape.num_offsets, groups)
    operands = _same_dtypes(feats, weight, bias, after)
    options = groups, precision, _serving(backend, feats.device.type)
    if key is not None:
        _checked_calls.keep(key, options)
    return operands, options


def _with_epilogue(
    tensors: tuple[Tensor, ...], after: Epilogue
) -> tuple[tuple[Tensor, ...], tuple[bool, ...]]:
    """The tensors whose signature a call with an epilogue has, and which of them it lacks.

    Of a residual one row: their number is checked with the output's voxels.
    """
    scale, shift, residual, mean, var = after[:5]
    row = residual if residual is None or not residual.dim() else residual[:1]
    steps = scale is None, shift is None, row is None, mean is None, var is None
    given = [t for t in (scale, shift, row, mean, var) if t is not None]
    return (*tensors, *given), (len(tensors) == 2, *steps)


def _same_dtypes(
    feats: Tensor, weight: Tensor, bias: Tensor | None, after: Epilogue
) -> ConvOperands:
    wide = torch.promote_types(feats.dtype, torch.float32)
    names = {"mean": after.mean, "var": after.var, "scale": after.scale, "shift": after.shift}
    given: dict[str, Any] = {"bias": bias, "residual": after.residual}
    for name, numbers in names.items():
        if numbers is not None and numbers.dtype == wide:
            called = f"the norm's {name}" if name in ("mean", "var") else name
            check_same_device(feats.device, called, numbers.device)
        else:
            given[name] = numbers
    given = {name: t for name, t in given.items() if t is not None}
    feats, weight, *rest = same_kind(feats=feats, weight=weight, **given)
    given = dict(zip(given, rest, strict=True))
    bias = given.pop("bias", None)
    return feats, weight, bias, after._replace(**given)


def _convolved(
    tensor: SparseTensor, operands: ConvOperands, kernel_map: KernelMap, options: ConvOptions
) -> SparseTensor:
    feats, weight, bias, after = operands
    if not compiling():
        inverse = kernel_map.inverse
        source = kernel_map.outputs if inverse else kernel_map.inputs
        note_reader(source, kernel_map.geometry, inverse, weight.requires_grad)
        if after is not NO_EPILOGUE:
            check(after, len(kernel_map.outputs), weight.shape[2])
    found = SparseTensor.__new__(SparseTensor)  # features of an operator need no check
    if kernel_map.around is not None:
        feats = kernel_map.rows(feats)
        operands = feats, weight, bias, after
    found.feats = convolution(operands, kernel_map, options)
    found.coordinates, found.maps = kernel_map.outputs, tensor.maps
    return found


@constant_when_compiling
def _serving(backend: str | None, device: str) -> str:
    return choose(backend, device)


def _check_weight(
    feats: Tensor, weight: Tensor, bias: Tensor | None, offsets: int, groups: int
) -> None:
    check_tensors(weight=weight, **({} if bias is None else {"bias": bias}))
    channels = feats.shape[1]
    if groups < 1 or channels % groups:
        raise ShapeError(
            f"groups is {groups} but feats has C_in = {channels}: it must divide C_in. "
            "Pass groups=1, or another number of channels."
        )
    if not channels:
        raise ShapeError(
            "feats has no channels: a convolution needs one or more. Pass feats (N, C_in)."
        )
    needed = f"({offsets}, {channels // groups}, C_out)"
    if weight.dim() != 3 or tuple(weight.shape[:2]) != (offsets, channels // groups):
        raise ShapeError(
            f"weight is {tuple(weight.shape)} but feats has C_in = {channels}, the kernel "
            f"{offsets} offsets and groups is {groups}: weight must be {needed}. Build it so; "
            "torch's (C_out, C_in, k…) becomes it by weight.flatten(2).permute(2, 1, 0)."
        )
    if weight.shape[2] % groups:
        raise ShapeError(
            f"weight has C_out = {weight.shape[2]} but groups is {groups}: groups must divide "
            "C_out. Pass groups=1, or another number of output channels."
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[2],):
        raise ShapeError(
            f"bias is {tuple(bias.shape)} but weight has C_out = {weight.shape[2]}: bias must be "
            f"({weight.shape[2]},). Pass one number a channel, or None."
        )
