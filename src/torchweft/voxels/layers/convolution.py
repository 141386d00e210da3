"""Modules of sparse convolutions in 1 to 4 dimensions.

    out[o] = bias + Σ_k x[in(o, k)] @ weight[k]

    SubMConv             the outputs are the inputs; stride is 1, padding is ignored
    SparseConv           torch's convolution at every voxel that it reaches
    SparseConvTranspose  torch's transposed convolution, likewise
    SparseInverseConv    undoes the layer of the same indice_key: its pairs, swapped

weight is (K, C_in / groups, C_out), K row-major over the kernel's axes, bias (C_out,).
"""

from __future__ import annotations

import math
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from torchweft.errors import DTypeError, ShapeError
from torchweft.voxels.convolution.epilogue import NO_EPILOGUE, Epilogue, check
from torchweft.voxels.convolution.functions import conv_of_geometry, conv_undone
from torchweft.voxels.grid import Geometry, Size, geometry, integer
from torchweft.voxels.layers.module import SparseModule, check_statistics, feats_of
from torchweft.voxels.maps.coordinates import Coordinates
from torchweft.voxels.maps.kernel_map import mode_of
from torchweft.voxels.maps.tensor import SparseTensor
from torchweft.voxels.norms.functions import batch_norm, epilogue_of

__all__ = [
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3D",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3D",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvTransposed3D",
    "SparseConvolution",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3D",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseInverseConvolution",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3D",
    "SubMConv3d",
    "SubMConv4d",
]


class SparseConvolution(SparseModule):
    """The base class of convolutions, z[o] = bias + Σ_k x[in(o, k)] @ weight[k].

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each; any sizes, also even ones.
        stride: of outputs over inputs; transposed: of inputs over outputs.
        padding: as in torch.
        dilation: the distance of neighbouring kernel positions.
        groups: number of groups of channels that do not mix.
        bias: whether there is a bias.
        indice_key: names the map, for layers of the same geometry and for an inverse layer.
        outputs: "floor" puts them at ⌊c / stride⌋ of every input voxel c; see `sparse_conv`.
        precision: of float32 products: "ieee", "tf32" or "tf32x3"; see `sparse_conv`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (K, C_in / groups, C_out), K row-major over the kernel's axes.
        bias: the parameter (C_out,), or None.

    Raises:
        ShapeError, DTypeError: arguments that do not define a layer.
        BackendError: at a call, a backend that is not available for it.

    Parameters are initialised as in torch: U(−1/√f, 1/√f), f = K C_in / groups.  Error, cost and
    source: see `sparse_conv`.  `SubMConv3d`, `SparseConv3d`, `SparseConvTranspose3d`,
    `SparseInverseConv3d` and those of 1, 2 and 4 dimensions derive from it.

    Example:
        >>> from torchweft import voxels
        >>> isinstance(voxels.SubMConv3d(4, 16, 3), voxels.SparseConvolution)
        True
    """

    dim: int
    mode: str
    bias: nn.Parameter | None
    _needs_key = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size = 1,
        padding: Size = 0,
        dilation: Size = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: str | None = None,
        *,
        outputs: str = "torch",
        precision: str = "ieee",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        mode = mode_of(self.mode == "submanifold", self.mode == "transposed", outputs)
        self.geometry = geometry(self.dim, kernel_size, stride, padding, dilation, mode=mode)
        in_channels, out_channels, groups = _channels(
            in_channels=in_channels, out_channels=out_channels, groups=groups
        )
        if indice_key is None and self._needs_key:
            raise ShapeError(
                f"{type(self).__name__} was given no indice_key: it undoes the layer that has the "
                'same one. Pass indice_key="down", for example, here and to that layer.'
            )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.indice_key, self.precision, self.backend = indice_key, precision, backend
        shape = (self.geometry.num_offsets, in_channels // groups, out_channels)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """One number per axis."""
        return self.geometry.kernel_size

    @property
    def stride(self) -> tuple[int, ...]:
        """One number per axis."""
        return self.geometry.stride

    @property
    def padding(self) -> tuple[int, ...]:
        """One number per axis; 0 where the kernel is centred."""
        return self.geometry.padding

    @property
    def dilation(self) -> tuple[int, ...]:
        """One number per axis."""
        return self.geometry.dilation

    def reset_parameters(self) -> None:
        """torch's default: Kaiming's uniform with a = √5."""
        fan_in = self.weight.shape[0] * self.weight.shape[1]
        bound = 1 / math.sqrt(fan_in)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self,
        tensor: SparseTensor,
        coordinates: Tensor | Coordinates | None = None,
        *,
        norm: nn.Module | None = None,
        residual: SparseTensor | None = None,
        activation: str | None = None,
    ) -> SparseTensor:
        """act(norm(z) + residual) on the output's voxels, with C_out channels.

        Without gradients, as in inference, all of it is part of the convolution's own pass: a norm
        in evaluation, and in a submanifold layer a residual.  Else the norm, residual and
        activation are one pass over the result.  Hooks of a norm inside the convolution's pass, and
        of a torch.nn.BatchNorm1d, are not called.

        Args:
            tensor: of C_in channels.
            coordinates: of the output's voxels, see `sparse_conv`.
            norm: a SparseBatchNorm or torch.nn.BatchNorm1d of C_out channels.
            residual: on the output's voxels, of C_out channels.
            activation: "relu", "silu" or "gelu".

        Returns:
            The output's voxels with (N_out, C_out) features in the tensor's dtype.

        Raises:
            DTypeError: an argument that is no SparseTensor, or another norm.
            ShapeError: other channels, axes or voxels.
        """
        if (
            type(tensor) is not SparseTensor
            or tensor.coordinates.dim != self.dim
            or tensor.feats.shape[1] != self.in_channels
        ):
            self.check(tensor, self.in_channels)  # raises, unless the type is a subclass
        if norm is None and residual is None and activation is None:
            return self._convolved(tensor, coordinates, NO_EPILOGUE)
        self._check_norm(norm)
        after = None
        if residual is None or self.geometry.mode == "submanifold":  # its voxels are the input's
            feats = None if residual is None else feats_of(residual, tensor)
            operands = tensor.feats, self.weight, self.bias
            after = epilogue_of(norm, operands, feats, activation)
        if after is not None:
            return self._convolved(tensor, coordinates, after)
        found = self._convolved(tensor, coordinates, NO_EPILOGUE)
        return _followed(found, norm, residual, activation)

    def _convolved(
        self,
        tensor: SparseTensor,
        coordinates: Tensor | Coordinates | None,
        after: Epilogue,
    ) -> SparseTensor:
        operands = tensor.feats, self.weight, self.bias, after
        requested = self.groups, self.precision, self.backend
        rest = self.indice_key, coordinates, self
        return conv_of_geometry(tensor, operands, self.geometry, requested, *rest)

    def _check_norm(self, norm: Any) -> None:
        if norm is None:
            return
        if not isinstance(norm, nn.BatchNorm1d | SparseModule) or not hasattr(norm, "running_mean"):
            raise DTypeError(
                f"norm is a {type(norm).__name__}: it must be a SparseBatchNorm or a "
                "torch.nn.BatchNorm1d. Apply any other to the result."
            )
        if norm.num_features != self.out_channels:
            raise ShapeError(
                f"norm was built for {norm.num_features} channels but {type(self).__name__} has "
                f"C_out = {self.out_channels}: they must be the same. Build the norm for "
                f"{self.out_channels}."
            )

    def check(self, tensor: SparseTensor, channels: int | None = None) -> None:
        """As for other modules; checks the number of axes too."""
        super().check(tensor, channels)
        if tensor.dim != self.dim:
            raise ShapeError(
                f"{type(self).__name__} was given coordinates of {tensor.dim} axes: it needs "
                f"{self.dim}. Use the layer for {tensor.dim}, or correct the columns of coords."
            )

    def extra_repr(self) -> str:
        """As in torch's convolutions: options that differ from the defaults."""
        parts = [f"{self.in_channels}, {self.out_channels}", f"kernel_size={self.kernel_size}"]
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1)):
            value = getattr(self.geometry, name)
            parts += [f"{name}={value}"] if any(n != default for n in value) else []
        parts += [f"outputs={o!r}"] if (o := self.geometry.outputs) != "torch" else []
        defaults = {"groups": 1, "indice_key": None, "precision": "ieee", "backend": None}
        options = {name: getattr(self, name) for name in defaults}
        parts += [f"{n}={v!r}" for n, v in options.items() if v != defaults[n]]
        return ", ".join(parts + (["bias=False"] if self.bias is None else []))


class SubMConv1d(SparseConvolution):
    """A submanifold convolution in 1 dimension: the output's voxels are the input's.

    Args: see `SubMConv3d`.

    Raises: see `SubMConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2], [0, 3], [1, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8,))
        >>> voxels.SubMConv1d(4, 16, kernel_size=3)(x)
        SparseTensor(3 voxels, 16 channels, d=1, torch.float32, on cpu)
    """

    dim, mode = 1, "submanifold"


class SubMConv2d(SparseConvolution):
    """A submanifold convolution in 2 dimensions: the output's voxels are the input's.

    Args: see `SubMConv3d`.

    Raises: see `SubMConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2, 2], [0, 2, 3], [1, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8))
        >>> voxels.SubMConv2d(4, 16, kernel_size=3)(x)
        SparseTensor(3 voxels, 16 channels, d=2, torch.float32, on cpu)
    """

    dim, mode = 2, "submanifold"


class SubMConv3d(SparseConvolution):
    """A submanifold convolution in 3 dimensions: the output's voxels are the input's.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each; any sizes, also even ones.
        stride: 1: a submanifold layer has no other.
        padding: without effect: the kernel is centred.
        dilation: the distance of neighbouring kernel positions.
        groups: number of groups of channels that do not mix.
        bias: whether there is a bias.
        indice_key: names the map, for layers of the same geometry and for an inverse layer.
        outputs: "torch": a submanifold layer has no other.
        precision: of float32 products: "ieee", "tf32" or "tf32x3"; see `sparse_conv`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (K, C_in / groups, C_out), K row-major over the kernel's axes.
        bias: the parameter (C_out,), or None.

    Raises:
        ShapeError, DTypeError: arguments that do not define a layer.
        BackendError: at a call, a backend that is not available for it.

    Error, cost and source: see `sparse_conv`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> voxels.SubMConv3d(4, 16, kernel_size=3)(x)
        SparseTensor(3 voxels, 16 channels, d=3, torch.float32, on cpu)
    """

    dim, mode = 3, "submanifold"


class SubMConv4d(SparseConvolution):
    """A submanifold convolution in 4 dimensions: the output's voxels are the input's.

    Args: see `SubMConv3d`.

    Raises: see `SubMConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 1, 2, 3], [1, 0, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8, 8))
        >>> voxels.SubMConv4d(4, 16, kernel_size=3)(x)
        SparseTensor(3 voxels, 16 channels, d=4, torch.float32, on cpu)
    """

    dim, mode = 4, "submanifold"


class SparseConv1d(SparseConvolution):
    """A convolution in 1 dimension that writes every voxel that it reaches.

    Args: see `SparseConv3d`.

    Raises: see `SparseConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2], [0, 3], [1, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8,))
        >>> voxels.SparseConv1d(4, 16, kernel_size=2, stride=2)(x)
        SparseTensor(2 voxels, 16 channels, d=1, torch.float32, on cpu)
    """

    dim, mode = 1, "strided"


class SparseConv2d(SparseConvolution):
    """A convolution in 2 dimensions that writes every voxel that it reaches.

    Args: see `SparseConv3d`.

    Raises: see `SparseConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2, 2], [0, 2, 3], [1, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8))
        >>> voxels.SparseConv2d(4, 16, kernel_size=2, stride=2)(x)
        SparseTensor(2 voxels, 16 channels, d=2, torch.float32, on cpu)
    """

    dim, mode = 2, "strided"


class SparseConv3d(SparseConvolution):
    """A convolution in 3 dimensions that writes every voxel that it reaches.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each; any sizes, also even ones.
        stride: of outputs over inputs.
        padding: as in torch.
        dilation: the distance of neighbouring kernel positions.
        groups: number of groups of channels that do not mix.
        bias: whether there is a bias.
        indice_key: names the map, for layers of the same geometry and for an inverse layer.
        outputs: "floor" puts outputs at ⌊c / stride⌋ of every input voxel c; see `sparse_conv`.
        precision: of float32 products: "ieee", "tf32" or "tf32x3"; see `sparse_conv`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (K, C_in / groups, C_out), K row-major over the kernel's axes.
        bias: the parameter (C_out,), or None.

    Raises:
        ShapeError, DTypeError: arguments that do not define a layer.
        BackendError: at a call, a backend that is not available for it.

    Error, cost and source: see `sparse_conv`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> voxels.SparseConv3d(4, 16, kernel_size=2, stride=2)(x)
        SparseTensor(2 voxels, 16 channels, d=3, torch.float32, on cpu)
    """

    dim, mode = 3, "strided"


class SparseConv4d(SparseConvolution):
    """A convolution in 4 dimensions that writes every voxel that it reaches.

    Args: see `SparseConv3d`.

    Raises: see `SparseConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 1, 2, 3], [1, 0, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8, 8))
        >>> voxels.SparseConv4d(4, 16, kernel_size=2, stride=2)(x)
        SparseTensor(2 voxels, 16 channels, d=4, torch.float32, on cpu)
    """

    dim, mode = 4, "strided"


class SparseConvTranspose1d(SparseConvolution):
    """A transposed convolution in 1 dimension that writes every voxel that it reaches.

    Args: see `SparseConvTranspose3d`.

    Raises: see `SparseConvTranspose3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2], [0, 3], [1, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8,))
        >>> len(voxels.SparseConvTranspose1d(4, 16, kernel_size=2, stride=2)(x))  # blocks of 2
        6
    """

    dim, mode = 1, "transposed"


class SparseConvTranspose2d(SparseConvolution):
    """A transposed convolution in 2 dimensions that writes every voxel that it reaches.

    Args: see `SparseConvTranspose3d`.

    Raises: see `SparseConvTranspose3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2, 2], [0, 2, 3], [1, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8))
        >>> len(voxels.SparseConvTranspose2d(4, 16, kernel_size=2, stride=2)(x))  # blocks of 2^2
        12
    """

    dim, mode = 2, "transposed"


class SparseConvTranspose3d(SparseConvolution):
    """A transposed convolution in 3 dimensions that writes every voxel that it reaches.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each; any sizes, also even ones.
        stride: of inputs over outputs.
        padding: as in torch's transposed convolution.
        dilation: the distance of neighbouring kernel positions.
        groups: number of groups of channels that do not mix.
        bias: whether there is a bias.
        indice_key: names the map, for layers of the same geometry and for an inverse layer.
        outputs: "floor" needs coordinates at the call; see `sparse_conv`.
        precision: of float32 products: "ieee", "tf32" or "tf32x3"; see `sparse_conv`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (K, C_in / groups, C_out), K row-major over the kernel's axes.
        bias: the parameter (C_out,), or None.

    Raises:
        ShapeError, DTypeError: arguments that do not define a layer.
        BackendError: at a call, a backend that is not available for it.

    Error, cost and source: see `sparse_conv`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> len(voxels.SparseConvTranspose3d(4, 16, kernel_size=2, stride=2)(x))  # blocks of 2^3
        24
    """

    dim, mode = 3, "transposed"


class SparseConvTranspose4d(SparseConvolution):
    """A transposed convolution in 4 dimensions that writes every voxel that it reaches.

    Args: see `SparseConvTranspose3d`.

    Raises: see `SparseConvTranspose3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 1, 2, 3], [1, 0, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8, 8))
        >>> len(voxels.SparseConvTranspose4d(4, 16, kernel_size=2, stride=2)(x))  # blocks of 2^4
        48
    """

    dim, mode = 4, "transposed"


class SparseInverseConvolution(SparseConvolution):
    """The base class of inverse layers, z[q] = bias + Σ_k x[o(q, k)] @ weight[k].

    The pairs are those of the layer named indice_key, swapped; the output has the voxels that this
    layer read.  The geometry is that layer's: arguments other than kernel_size may be omitted, or
    must be the same.

    Args: see `SparseConvolution`; indice_key is needed.

    Raises:
        ShapeError: no indice_key, or a geometry that is not the named layer's.

    Example:
        >>> from torchweft import voxels
        >>> layer = voxels.SparseInverseConv3d(16, 4, 2, indice_key="down")
        >>> isinstance(layer, voxels.SparseInverseConvolution)
        True
    """

    mode, _needs_key = "strided", True

    def _convolved(
        self,
        tensor: SparseTensor,
        coordinates: Tensor | Coordinates | None,
        after: Epilogue,
    ) -> SparseTensor:
        if coordinates is not None:
            raise ShapeError(
                f"coordinates were given to {type(self).__name__}: its outputs are the voxels that "
                "the layer of its indice_key read. Leave coordinates out."
            )
        key = str(self.indice_key)
        self._check_named(tensor.maps.named(key).geometry)
        operands = tensor.feats, self.weight, self.bias, after
        return conv_undone(tensor, operands, (self.groups, self.precision, self.backend), key)

    def _check_named(self, named: Geometry) -> None:
        default = geometry(self.dim, 1, mode=self.mode)
        for name in ("kernel_size", "stride", "padding", "dilation", "outputs"):
            given, theirs = getattr(self.geometry, name), getattr(named, name)
            if given != theirs and (name == "kernel_size" or given != getattr(default, name)):
                raise ShapeError(
                    f"{name} is {given!r} but the layer of indice_key={self.indice_key!r} has "
                    f"{theirs!r}: an inverse layer has the geometry of the layer it undoes. Pass "
                    f"{name}={theirs!r}."
                )


class SparseInverseConv1d(SparseInverseConvolution):
    """The inverse of an earlier layer in 1 dimension: writes the voxels that the layer read.

    Args: see `SparseInverseConv3d`.

    Raises: see `SparseInverseConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2], [0, 3], [1, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8,))
        >>> down = voxels.SparseConv1d(4, 16, kernel_size=2, stride=2, indice_key="down")
        >>> up = voxels.SparseInverseConv1d(16, 4, kernel_size=2, indice_key="down")
        >>> up(down(x))
        SparseTensor(3 voxels, 4 channels, d=1, torch.float32, on cpu)
    """

    dim = 1


class SparseInverseConv2d(SparseInverseConvolution):
    """The inverse of an earlier layer in 2 dimensions: writes the voxels that the layer read.

    Args: see `SparseInverseConv3d`.

    Raises: see `SparseInverseConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 2, 2], [0, 2, 3], [1, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8))
        >>> down = voxels.SparseConv2d(4, 16, kernel_size=2, stride=2, indice_key="down")
        >>> up = voxels.SparseInverseConv2d(16, 4, kernel_size=2, indice_key="down")
        >>> up(down(x))
        SparseTensor(3 voxels, 4 channels, d=2, torch.float32, on cpu)
    """

    dim = 2


class SparseInverseConv3d(SparseInverseConvolution):
    """The inverse of an earlier layer in 3 dimensions: writes the voxels that the layer read.

    Args:
        in_channels: C_in.
        out_channels: C_out.
        kernel_size: one number for all axes, or one for each; any sizes, also even ones.
        stride: that of the named layer, or omitted.
        padding: that of the named layer, or omitted.
        dilation: the distance of neighbouring kernel positions; that of the named layer, or
            omitted.
        groups: number of groups of channels that do not mix.
        bias: whether there is a bias.
        indice_key: the name of the layer to undo.
        outputs: that of the named layer, or omitted.
        precision: of float32 products: "ieee", "tf32" or "tf32x3"; see `sparse_conv`.
        backend: "triton", "numba" or "torch"; None: the fastest that can serve.

    Attributes:
        weight: the parameter (K, C_in / groups, C_out), K row-major over the kernel's axes.
        bias: the parameter (C_out,), or None.

    Raises:
        ShapeError, DTypeError: arguments that do not define a layer, no indice_key; at a call, no
            layer has the name.
        BackendError: at a call, a backend that is not available for it.

    Error, cost and source: see `sparse_conv`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 2, 2], [0, 1, 2, 3], [1, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8))
        >>> down = voxels.SparseConv3d(4, 16, kernel_size=2, stride=2, indice_key="down")
        >>> up = voxels.SparseInverseConv3d(16, 4, kernel_size=2, indice_key="down")
        >>> up(down(x))
        SparseTensor(3 voxels, 4 channels, d=3, torch.float32, on cpu)
    """

    dim = 3


class SparseInverseConv4d(SparseInverseConvolution):
    """The inverse of an earlier layer in 4 dimensions: writes the voxels that the layer read.

    Args: see `SparseInverseConv3d`.

    Raises: see `SparseInverseConv3d`.

    Example:
        >>> import torch
        >>> from torchweft import voxels
        >>> coords = torch.tensor([[0, 1, 1, 2, 2], [0, 1, 1, 2, 3], [1, 0, 0, 0, 0]])
        >>> x = voxels.SparseTensor(torch.randn(3, 4), coords, spatial_shape=(8, 8, 8, 8))
        >>> down = voxels.SparseConv4d(4, 16, kernel_size=2, stride=2, indice_key="down")
        >>> up = voxels.SparseInverseConv4d(16, 4, kernel_size=2, indice_key="down")
        >>> up(down(x))
        SparseTensor(3 voxels, 4 channels, d=4, torch.float32, on cpu)
    """

    dim = 4


SubMConv3D = SubMConv3d
SparseConv3D = SparseConv3d
SparseConvTranspose3D = SparseConvTransposed3D = SparseConvTranspose3d
SparseInverseConv3D = SparseInverseConv3d


def _channels(**given: SupportsIndex) -> tuple[int, ...]:
    """The numbers of channels and groups as Python's integers, checked."""
    numbers = {n: integer(f"{n} is", v, f". Pass {n}=16, for example.") for n, v in given.items()}
    found = tuple(numbers.values())
    for name, value in numbers.items():
        if value < 1:
            raise ShapeError(f"{name} is {value}: it must be at least 1. Correct {name}.")
    groups = numbers.pop("groups")
    for name, value in numbers.items():
        if value % groups:
            raise ShapeError(
                f"{name} is {value} but groups is {groups}: groups must divide it. Pass groups=1, "
                "or another number of channels."
            )
    return found


def _followed(
    tensor: SparseTensor, norm: Any, residual: SparseTensor | None, activation: str | None
) -> SparseTensor:
    """act(norm(tensor) + residual) as a pass of its own."""
    if isinstance(norm, SparseModule):
        found: SparseTensor = norm(tensor, residual, activation)
        return found
    if norm is not None:
        check_statistics(norm, tensor)
    feats = None if residual is None else feats_of(residual, tensor)
    if norm is None:
        after = Epilogue(residual=feats, activation=activation)
        check(after, *tensor.feats.shape)
        return tensor.replace(after(tensor.feats))
    valid = tensor.coordinates.num_unpadded
    return tensor.replace(batch_norm(norm, tensor.feats, feats, activation, valid=valid))
