"""Convolutions in 1 to 4 dimensions with spconv's names, arguments and parameters.

    out[o] = bias + Σ_k x[in(o, k)] @ weight[:, k, :]ᵀ

weight is (C_out, k…, C_in), bias (C_out,), as spconv 2 stores them, drawn from U(−1/√f, 1/√f) with
f = K C_in.  A kernel of one position without a stride reads the memory of its weight as
(C_in, C_out), as spconv 2 does: checkpoints hold it so.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchweft import voxels
from torchweft.compat.spconv import constants
from torchweft.compat.spconv.core import ConvAlgo
from torchweft.compat.spconv.pytorch.core import IndiceData, SparseConvTensor, expand_nd, written
from torchweft.compat.spconv.pytorch.windows import WindowModule
from torchweft.compat.voxels import are_rows_of
from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue
from torchweft.voxels.convolution.functions import conv_of_geometry, conv_undone
from torchweft.voxels.maps.kernel_map import Maps
from torchweft.voxels.norms.functions import epilogue_of

__all__ = [
    "DEFAULT_SPARSE_CONV_TYPES",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseConvolutionBase",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
]


class SparseConvolution(WindowModule):
    """The base class of convolutions; see the formula above.

    Args:
        ndim: number of axes, 1 to 4.
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each; odd in a submanifold layer.
        stride: of outputs over inputs; a submanifold layer ignores it.
        padding: as in torch; a submanifold kernel is centred whatever it is.
        dilation: distance of neighbouring kernel positions.
        groups: must be 1, as in spconv.
        bias: whether there is a bias.
        subm: whether the outputs are the inputs.
        output_padding: must be 0.
        transposed: whether it is torch's transposed convolution.
        inverse: whether it undoes the layer with the same indice_key.
        indice_key: names the pairs, for submanifold layers of one geometry, and for an inverse.
        algo: kept; it has no effect.
        fp32_accum: has no effect: sums are in float32 or wider.
        record_voxel_count: keeps the most outputs in `max_num_voxels_during_training`.
        large_kernel_fast_algo: has no effect.
        name: of the module.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ShapeError: sizes that do not define a layer.
        NotImplementedError: groups, output_padding, dilation in a transposed layer.
    """

    convolves = True

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: Any = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        mode = "submanifold" if subm else "transposed" if transposed else "strided"
        sizes = kernel_size, stride, padding, dilation
        super().__init__(ndim, sizes, mode, indice_key, algo, record_voxel_count, name, inverse)
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.output_padding = expand_nd(ndim, output_padding)
        self._check_sizes()
        self.conv1x1 = self.geometry.num_offsets == 1 and set(self.geometry.stride) == {1}
        if self.conv1x1 and not subm and any(self.padding):
            raise ShapeError(
                f"padding is {self.padding} in a layer of one position without a stride: it must "
                "be 0, as in spconv. Leave padding out."
            )
        shape = (out_channels, *self.kernel_size, in_channels)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        empty = torch.empty(out_channels, device=device, dtype=dtype) if bias else None
        self.bias = None if empty is None else nn.Parameter(empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Kaiming's uniform with a = √5, as in spconv."""
        bound = 1 / math.sqrt(self.geometry.num_offsets * self.in_channels)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def is_inverseable(self) -> bool:
        """Whether an inverse layer can name it."""
        return self.indice_key is not None and not self.subm

    def forward(
        self, input: SparseConvTensor, add_input: SparseConvTensor | None = None
    ) -> SparseConvTensor:
        """The output's voxels with C_out channels, plus the features of add_input."""
        outputs = self._result(input, NO_EPILOGUE)
        return outputs if add_input is None else outputs + add_input

    def takes_norm(self) -> bool:
        """Whether `forward` is this class's own: that of a derived class may compute more."""
        return type(self).forward is SparseConvolution.forward

    def followed(
        self, input: SparseConvTensor, norm: nn.Module | None = None, activation: str | None = None
    ) -> SparseConvTensor:
        """See SparseModule; in inference the convolution computes all in its own pass."""
        after = None
        if not self.conv1x1:
            operands = input.features, self.weight, self.bias
            after = epilogue_of(norm, operands, activation=activation)
        if after is None:
            return super().followed(input, norm, activation)
        return self._result(input, after)

    def check(self, input: object) -> None:
        """As for other layers; checks the channels too."""
        super().check(input)
        assert isinstance(input, SparseConvTensor)  # super().check raises for others
        if input.features.shape[1] != self.in_channels:
            raise ShapeError(
                f"features are {tuple(input.features.shape)} but {type(self).__name__} was built "
                f"for {self.in_channels} channels: they must be (N, {self.in_channels}). Correct "
                "the layer before it."
            )

    def extra_repr(self) -> str:
        """As spconv prints it."""
        bias = ", bias=False" if self.bias is None else ""
        return f"{self.in_channels}, {self.out_channels}, {super().extra_repr()}{bias}"

    def _result(self, input: SparseConvTensor, after: Epilogue) -> SparseConvTensor:
        self.check(input)
        if self.conv1x1:
            outputs = self._pointwise(input)
        elif self.inverse:
            outputs = self._undone(input, after)
        else:
            outputs = self._convolved(input, after)
        self.count(outputs)
        return outputs

    def _pointwise(self, input: SparseConvTensor) -> SparseConvTensor:
        weight = self.weight.view(self.in_channels, self.out_channels)  # the memory, see above
        return input.replace_feature(
            nn.functional.linear(input.features, weight.transpose(0, 1), self.bias)
        )

    def _convolved(self, input: SparseConvTensor, after: Epilogue) -> SparseConvTensor:
        self._check_key(input)
        tensor = input.sparse()
        operands = tensor.feats, self._matrices(), self.bias, after
        requested = 1, _precision(), None
        found = conv_of_geometry(tensor, operands, self.geometry, requested, None, None, self)
        pairs = tensor.maps.get(tensor.coordinates, self.geometry)  # kept since the call
        return written(self, input, found, pairs)

    def _undone(self, input: SparseConvTensor, after: Epilogue) -> SparseConvTensor:
        data = self._named(input)
        key, maps = str(self.indice_key), Maps()
        maps.get(data.pairs.inputs, data.pairs.geometry, key)
        tensor = voxels.SparseTensor.on(input.features, data.pairs.outputs, maps)
        operands = tensor.feats, self._matrices(), self.bias, after
        found = conv_undone(tensor, operands, (1, _precision(), None), key)
        outputs = input.replace_feature(found.feats)
        outputs.indices, outputs.spatial_shape = data.indices, list(data.spatial_shape)
        outputs.kept = data.pairs.inputs
        outputs.indice_dict = input.indice_dict.copy()
        return outputs

    def _matrices(self) -> Tensor:
        """(K, C_in, C_out), torchweft's layout."""
        return self.weight.flatten(1, -2).permute(1, 2, 0)

    def _check_sizes(self) -> None:
        if self.subm and any(k % 2 == 0 for k in self.kernel_size):
            raise ShapeError(
                f"kernel_size is {self.kernel_size} in a submanifold layer: it must be odd, as in "
                "spconv. Pass an odd kernel_size, or use torchweft.voxels.SubMConv3d."
            )
        dilated = zip(self.dilation, self.kernel_size, strict=True)
        lacks = {
            f"groups={self.groups}": self.groups != 1,
            f"output_padding={self.output_padding}": any(self.output_padding),
            f"dilation={self.dilation} in a transposed layer": self.transposed
            and any(d != 1 and k != 1 for d, k in dilated),
        }
        for what in [what for what, given in lacks.items() if given]:
            raise NotImplementedError(
                f"{what} was given: torchweft's stand-in for spconv does not have it. Leave it "
                "out, or use torchweft.voxels.SparseConv3d and SparseConvTranspose3d, which have "
                "groups and dilation."
            )

    def _check_key(self, input: SparseConvTensor) -> None:
        """Raise unless the key is new, or that of a submanifold layer on as many voxels."""
        data = input.find_indice_pair(self.indice_key)
        if data is None:
            return
        if not self.subm:
            self.check_new_key(input)
        own = self.kernel_size, self.dilation, input.spatial_shape, len(input.indices)
        named = data.ksize, data.dilation, data.spatial_shape, len(data.pairs.inputs)
        if not data.is_subm or own != named:
            kind = "a submanifold" if data.is_subm else "another"
            raise ShapeError(
                f"indice_key={self.indice_key!r} names {kind} layer with (kernel_size, dilation, "
                f"spatial_shape, voxels) = {named}, this one has {own}: layers that share a key "
                "are submanifold ones that agree in all four. Give this layer another key."
            )

    def _named(self, input: SparseConvTensor) -> IndiceData:
        """What the layer to undo left; raises unless this layer fits it."""
        data, key = input.find_indice_pair(self.indice_key), self.indice_key
        if data is None or data.is_subm:
            raise ShapeError(
                f"indice_key={key!r} of an inverse layer names "
                f"{'no layer' if data is None else 'a submanifold layer'}; the tensor has the keys "
                f"{sorted(input.indice_dict)}: it must be the key of a strided layer or pool that "
                f"ran before. Give that layer indice_key={key!r}."
            )
        if self.kernel_size != data.ksize:
            raise ShapeError(
                f"kernel_size is {self.kernel_size} but the layer of indice_key={key!r} has "
                f"{data.ksize}: an inverse layer has the kernel of the layer it undoes. Pass "
                f"kernel_size={data.ksize}."
            )
        pairs = data.pairs
        if input.spatial_shape != data.out_spatial_shape or not (
            are_rows_of(pairs.outputs, input.indices) and are_rows_of(pairs.inputs, data.indices)
        ):
            raise ShapeError(
                f"indice_key={key!r} names a layer that wrote {len(pairs.outputs)} voxels in the "
                f"box {data.out_spatial_shape}, the tensor has {len(input.indices)} in "
                f"{input.spatial_shape}, or indices were written to since: an inverse layer reads "
                "the voxels that the named layer wrote. Give it a tensor of that level, and write "
                "to a copy of indices."
            )
        return data


class _SubMConv(SparseConvolution):
    axes: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self.axes,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            subm=True,
            indice_key=indice_key,
            algo=algo,
            name=name,
        )


class _StridedConv(SparseConvolution):
    axes: int
    turned = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self.axes,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            transposed=self.turned,
            indice_key=indice_key,
            algo=algo,
            record_voxel_count=record_voxel_count,
            name=name,
        )


class _InverseConv(SparseConvolution):
    axes: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        indice_key: str | None = None,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        if indice_key is None:
            raise DTypeError(
                f"{type(self).__name__} was built without indice_key: it must be the key of the "
                'layer that it undoes. Pass indice_key="down" to both layers, for example.'
            )
        super().__init__(
            self.axes,
            in_channels,
            out_channels,
            kernel_size,
            bias=bias,
            inverse=True,
            indice_key=indice_key,
            algo=algo,
            name=name,
        )


def _precision() -> str:
    return "tf32" if constants.SPCONV_ALLOW_TF32 else "ieee"


class SubMConv1d(_SubMConv):
    """Submanifold convolution in 1 dimension; see SparseConvolution."""

    axes = 1


class SubMConv2d(_SubMConv):
    """Submanifold convolution in 2 dimensions; see SparseConvolution."""

    axes = 2


class SubMConv3d(_SubMConv):
    """Submanifold convolution in 3 dimensions; see SparseConvolution."""

    axes = 3


class SubMConv4d(_SubMConv):
    """Submanifold convolution in 4 dimensions; see SparseConvolution."""

    axes = 4


class SparseConv1d(_StridedConv):
    """Strided convolution in 1 dimension; see SparseConvolution."""

    axes = 1


class SparseConv2d(_StridedConv):
    """Strided convolution in 2 dimensions; see SparseConvolution."""

    axes = 2


class SparseConv3d(_StridedConv):
    """Strided convolution in 3 dimensions; see SparseConvolution."""

    axes = 3


class SparseConv4d(_StridedConv):
    """Strided convolution in 4 dimensions; see SparseConvolution."""

    axes = 4


class SparseConvTranspose1d(_StridedConv):
    """Transposed convolution in 1 dimension; see SparseConvolution."""

    axes = 1
    turned = True


class SparseConvTranspose2d(_StridedConv):
    """Transposed convolution in 2 dimensions; see SparseConvolution."""

    axes = 2
    turned = True


class SparseConvTranspose3d(_StridedConv):
    """Transposed convolution in 3 dimensions; see SparseConvolution."""

    axes = 3
    turned = True


class SparseConvTranspose4d(_StridedConv):
    """Transposed convolution in 4 dimensions; see SparseConvolution."""

    axes = 4
    turned = True


class SparseInverseConv1d(_InverseConv):
    """Inverse of the layer with the same indice_key in 1 dimension; see SparseConvolution."""

    axes = 1


class SparseInverseConv2d(_InverseConv):
    """Inverse of the layer with the same indice_key in 2 dimensions; see SparseConvolution."""

    axes = 2


class SparseInverseConv3d(_InverseConv):
    """Inverse of the layer with the same indice_key in 3 dimensions; see SparseConvolution."""

    axes = 3


class SparseInverseConv4d(_InverseConv):
    """Inverse of the layer with the same indice_key in 4 dimensions; see SparseConvolution."""

    axes = 4


SparseConvolutionBase = SparseConvolution

DEFAULT_SPARSE_CONV_TYPES = {
    *_SubMConv.__subclasses__(),
    *_StridedConv.__subclasses__(),
    *_InverseConv.__subclasses__(),
}
