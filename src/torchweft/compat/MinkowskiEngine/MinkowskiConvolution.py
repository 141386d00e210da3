"""Convolutions in 1 to 4 dimensions with MinkowskiEngine's names, arguments and parameters.

    out[u] = bias + Σ_k x[u + offset_k · dilation · t] @ kernel[k]        t: the input's stride
    out[u + offset_k · dilation · t] += x[u] @ kernel[k], then + bias     transposed; the output's t

kernel is (K, C_in, C_out), its first axis of offsets fastest, or (C_in, C_out) of one offset with
stride 1; bias is (1, C_out).  Both are drawn from U(−1/√f, 1/√f), f = K C_in, of a transposed layer
K C_out.  A strided layer writes the voxels ⌊u / (t s)⌋ t s of all inputs u; a transposed one those
of the level that it returns to, or, where there is none and in a generative layer, all that the
kernel reaches.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchweft import voxels
from torchweft.compat.MinkowskiEngine.coordinate_maps import Region
from torchweft.compat.MinkowskiEngine.MinkowskiCommon import ConvolutionMode, MinkowskiModuleBase
from torchweft.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateMapKey
from torchweft.compat.MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator
from torchweft.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, out_key_of
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE
from torchweft.voxels.convolution.functions import conv_of_geometry
from torchweft.voxels.maps.kernel_map import Maps

__all__ = [
    "MinkowskiChannelwiseConvolution",
    "MinkowskiConvolution",
    "MinkowskiConvolutionBase",
    "MinkowskiConvolutionTranspose",
    "MinkowskiGenerativeConvolutionTranspose",
    "WindowLayer",
]


class WindowLayer(MinkowskiModuleBase):
    """A layer with a kernel generator: from its input's voxels to those of a key.

    Args:
        sizes: kernel_size, stride and dilation, one number for all axes or one for each.
        kernel_generator: in place of sizes.
        is_transpose: whether it reads the coarser voxels.
        dimension: number of axes, 1 to 4.
    """

    def __init__(
        self,
        sizes: tuple[Any, Any, Any],
        kernel_generator: KernelGenerator | None,
        is_transpose: bool,
        dimension: int | None,
    ) -> None:
        super().__init__()
        if kernel_generator is None:
            kernel_generator = KernelGenerator(*sizes, dimension=dimension)
        self.kernel_generator, self.is_transpose = kernel_generator, is_transpose
        self.dimension = kernel_generator.dimension

    def check(self, input: object, channels: int | None = None) -> None:
        """Raise unless it is a SparseTensor with as many axes, and these channels if given.

        Raises:
            DTypeError: it is something else.
            ShapeError: it has other axes or channels.
        """
        name = type(self).__name__
        if not isinstance(input, SparseTensor):
            raise DTypeError(
                f"{name} was given a {type(input).__name__}: it takes a SparseTensor. Call "
                ".sparse() on a TensorField, or build SparseTensor(features, coordinates)."
            )
        if self.dimension != input.D:
            raise ShapeError(
                f"{name} has dimension={self.dimension} but the tensor has {input.D} axes: both "
                f"must agree. Pass dimension={input.D}."
            )
        if channels is not None and input.shape[1] != channels:
            raise ShapeError(
                f"features are {tuple(input.shape)} but {name} was built for {channels} channels: "
                f"they must be (N, {channels}). Correct the layer before it."
            )

    def out_key(self, input: SparseTensor, coordinates: Any) -> CoordinateMapKey:
        """The key of the output: of given coordinates, unless the layer makes voxels."""
        generator = self.kernel_generator
        if coordinates is None or generator.expand_coordinates:
            manager, key = input.coordinate_manager, input.coordinate_map_key
            return manager.output_of(key, generator, self.is_transpose)
        steps = zip(input.tensor_stride, generator.kernel_stride, strict=True)
        new = [max(t // s, 1) if self.is_transpose else t * s for t, s in steps]
        return out_key_of(input, coordinates, new)

    def initialise(self, channels: int) -> None:
        """U(−1/√f, 1/√f), f = K · channels."""
        bound = 1 / math.sqrt(channels * self.kernel_generator.kernel_volume)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def written(self, input: SparseTensor, features: Tensor, key: CoordinateMapKey) -> SparseTensor:
        """The layer's output."""
        manager = input.coordinate_manager
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def extra_repr(self) -> str:
        """The sizes, as the original prints them."""
        sizes, stride, dilation = self.kernel_generator.window
        return f"kernel_size={sizes}, stride={stride}, dilation={dilation}"


class MinkowskiConvolutionBase(WindowLayer):
    """The base class of convolutions; see the formulas above.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each; any sizes, also even ones.
        stride: of outputs over inputs; transposed: of inputs over outputs.
        dilation: distance of neighbouring offsets.
        bias: whether there is a bias.
        kernel_generator: in place of the sizes.
        is_transpose: whether the layer is transposed.
        expand_coordinates: whether it writes all voxels that the kernel reaches.
        convolution_mode: has no effect.
        dimension: number of axes, 1 to 4.

    Raises:
        ShapeError: sizes that do not define a layer.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        expand_coordinates: bool = False,
        convolution_mode: int = ConvolutionMode.DEFAULT,
        dimension: int | None = -1,
    ) -> None:
        sizes = kernel_size, stride, dilation
        super().__init__(sizes, kernel_generator, is_transpose, dimension)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.convolution_mode = convolution_mode
        generator = self.kernel_generator
        generator.expand_coordinates = expand_coordinates
        self.use_mm = generator.kernel_volume == 1 and generator.requires_strided_coordinates
        volume = () if self.use_mm else (generator.kernel_volume,)
        self.kernel = nn.Parameter(torch.empty(*volume, in_channels, out_channels))
        self.bias = nn.Parameter(torch.empty(1, out_channels)) if bias else None
        self.reset_parameters(is_transpose)

    def reset_parameters(self, is_transpose: bool = False) -> None:
        """The original's initial values; see the module."""
        self.initialise(self.out_channels if is_transpose else self.in_channels)

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        """C_out channels on the output's voxels.

        Args:
            input: (N, C_in).
            coordinates: the output's voxels: rows (N_out, 1 + D) of the layer's output stride, a
                CoordinateMapKey, or a SparseTensor of any stride; a layer of one offset with stride
                1 ignores them, as in the original.
        """
        self.check(input, self.in_channels)
        if self.use_mm:
            weight = self.kernel.transpose(0, 1)
            bias = None if self.bias is None else self.bias.squeeze(0)
            return input.with_features(nn.functional.linear(input.F, weight, bias))
        key = self.out_key(input, coordinates)
        features = convolved(self, input, key, self.kernel)
        return self.written(input, features, key)

    def extra_repr(self) -> str:
        """As the original prints it."""
        return f"in={self.in_channels}, out={self.out_channels}, {super().extra_repr()}"


def convolved(
    layer: MinkowskiConvolutionBase | MinkowskiChannelwiseConvolution,
    input: SparseTensor,
    key: CoordinateMapKey,
    kernel: Tensor,
    groups: int = 1,
) -> Tensor:
    """The features of a convolution's output: (N_out, C_out).

    Args:
        layer: with a kernel generator and a bias.
        input: the tensor that is read.
        key: of the output's voxels.
        kernel: (K, C_in / groups, C_out).
        groups: see `torchweft.voxels.sparse_conv`.
    """
    generator, own = layer.kernel_generator, input.coordinate_map_key
    fine, coarse = (key, own) if layer.is_transpose else (own, key)
    found = input.coordinate_manager.region(fine, coarse, generator.window)
    weight = generator.of_box(kernel)
    bias = None if layer.bias is None else layer.bias.squeeze(0)
    if layer.is_transpose:
        return _transposed(input, found, weight, bias, groups)
    tensor, requested = input.on(found.fine), (groups, "ieee", None)
    operands = tensor.feats, weight, bias, NO_EPILOGUE
    return conv_of_geometry(tensor, operands, found.shape, requested, None, found.coarse).feats


def _transposed(
    input: SparseTensor, found: Region, weight: Tensor, bias: Tensor | None, groups: int
) -> Tensor:
    """By the pairs of the strided layer, swapped, which both layers share."""
    maps = Maps()
    pairs = maps.get(found.fine, found.shape, "pairs", found.coarse)
    tensor = input.on(pairs.outputs, maps)
    return voxels.sparse_inverse_conv(tensor, weight, "pairs", bias, groups=groups).feats


class _Convolution(MinkowskiConvolutionBase):
    """The arguments of the two layers below, in the original's order."""

    _transposed: bool

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: int = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
    ) -> None:
        sizes = kernel_size, stride, dilation
        super().__init__(
            in_channels,
            out_channels,
            *sizes,
            bias=bias,
            kernel_generator=kernel_generator,
            is_transpose=self._transposed,
            expand_coordinates=expand_coordinates,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )


class MinkowskiConvolution(_Convolution):
    """out[u] = bias + Σ_k x[u + offset_k · dilation · t] @ kernel[k]."""

    _transposed = False


class MinkowskiConvolutionTranspose(_Convolution):
    """Onto the finer level that it returns to; all voxels that the kernel reaches if none is known.

    A level is known by its tensor stride, as in the original.
    """

    _transposed = True


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionBase):
    """Onto all voxels that the kernel reaches."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        convolution_mode: int = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
    ) -> None:
        sizes = kernel_size, stride, dilation
        super().__init__(
            in_channels,
            out_channels,
            *sizes,
            bias=bias,
            kernel_generator=kernel_generator,
            is_transpose=True,
            expand_coordinates=True,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )


class MinkowskiChannelwiseConvolution(WindowLayer):
    """out[u, c] = bias[c] + Σ_k x[u + offset_k · dilation · t, c] kernel[k, c].

    kernel is (K, C), bias (1, C); arguments as of MinkowskiConvolutionBase.
    """

    def __init__(
        self,
        in_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        dimension: int = -1,
    ) -> None:
        sizes = kernel_size, stride, dilation
        super().__init__(sizes, kernel_generator, False, dimension)
        self.in_channels = in_channels
        self.kernel = nn.Parameter(torch.empty(self.kernel_generator.kernel_volume, in_channels))
        self.bias = nn.Parameter(torch.empty(1, in_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The original's initial values; see the module."""
        self.initialise(self.in_channels)

    def forward(self, input: SparseTensor, coords: Any = None) -> SparseTensor:
        """C channels on the output's voxels; coords as MinkowskiConvolution's coordinates."""
        self.check(input, self.in_channels)
        key = self.out_key(input, coords)
        kernel = self.kernel.unsqueeze(1)
        return self.written(input, convolved(self, input, key, kernel, self.in_channels), key)

    def extra_repr(self) -> str:
        """As the original prints it."""
        region = self.kernel_generator.region_type.name
        return f"in={self.in_channels}, region_type={region}, {super().extra_repr()}"
