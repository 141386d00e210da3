"""Clifford convolutions: the sum in a convolution multiplies multivectors.

    y[o](s) = Σ_(c,t) x[c](s + t) · w[o, c](t) + bias[o]

They are torch's convolutions on B·C channels, with a weight of blocks from the Cayley table:
block (j, i) is ± w_k for the blade k with e_i e_k = ± e_j, or 0.  Layout and conventions are those
of cliffordlayers: (N, C, spatial…, B), the weight on the right.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.clifford.algebra import Algebra
from torchweft.clifford.calls import check_algebra
from torchweft.errors import BackendError, ShapeError

__all__ = ["CliffordConv1d", "CliffordConv2d", "CliffordConv3d", "clifford_conv"]

Sizes = int | tuple[int, ...]

_CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}


def clifford_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    algebra: Algebra,
    *,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor:
    """y[o](s) = Σ_(c,t) x[c](stride·s + dilation·t) · weight[o, c](t) + bias[o].

    A convolution of multivectors: products are those of the algebra.

    Args:
        x: (N, C_in, spatial…, B), one to three spatial dimensions; blades are last.
        weight: (B, C_out, C_in/groups, kernel…).
        bias: (B, C_out), or None.
        algebra: the algebra of the multivectors.
        stride: as in torch.nn.functional.conv1d, conv2d or conv3d.
        padding: as in torch.
        dilation: as in torch.
        groups: as in torch: channels are grouped, blades are not.

    Returns:
        (N, C_out, spatial…, B) in x's dtype.

    Raises:
        DTypeError: an algebra that is no Algebra.
        ShapeError: a weight or x that does not fit the algebra, the groups or each other.

    Error and cost: those of torch's convolution of B·C channels.

    Source: Brandstetter et al.: Clifford neural layers for PDE modeling, ICLR 2023.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> x, weight = torch.randn(1, 2, 16, 16, 4), torch.randn(4, 3, 2, 3, 3)
        >>> clifford.clifford_conv(x, weight, None, clifford.Algebra((1, 1)), padding=1).shape
        torch.Size([1, 3, 16, 16, 4])
    """
    check_algebra(algebra)
    table = algebra.cayley(weight.dtype).to(weight.device)
    return _convolve(x, weight, bias, table, stride, padding, dilation, groups)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    table: Tensor,
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
) -> Tensor:
    blades = len(table)
    _check(x, weight, blades, groups)
    # channels (group, blade, channel of the group)
    channels = torch.unflatten(x.movedim(-1, 1), 2, (groups, -1)).transpose(1, 2).flatten(1, 3)
    # [out blade, in blade] of matrices: one term each, so no rounding
    blocks = torch.tensordot(table.movedim(1, 0), torch.unflatten(weight, 1, (groups, -1)), 1)
    # (j, i, group, o, c, kernel…) to ((group, j, o), (i, c), kernel…)
    blocks = blocks.permute(2, 0, 3, 1, 4, *range(5, blocks.dim())).flatten(0, 2).flatten(1, 2)
    if bias is not None:
        bias = torch.unflatten(bias, 1, (groups, -1)).transpose(0, 1).flatten()
    out: Tensor = _CONVOLUTIONS[weight.dim() - 3](
        channels, blocks, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    split = torch.unflatten(out, 1, (groups, blades, -1))
    return split.transpose(1, 2).flatten(2, 3).movedim(1, -1)


class _CliffordConv(nn.Module):
    """A convolution of multivectors in `dims` spatial dimensions; see `clifford_conv`.

    Args:
        algebra: the algebra of the multivectors.
        in_channels: number of input multivectors.
        out_channels: number of output multivectors.
        kernel_size: one number, or one for each spatial dimension.
        stride: as in torch.
        padding: as in torch.
        dilation: as in torch.
        groups: as in torch: channels are grouped, blades are not.
        bias: whether there is a bias, a multivector for each output channel.
        backend: None or "torch", whose own convolution it is.
    """

    dims: int
    table: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        algebra: Algebra,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes | str = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_algebra(algebra)
        self.backend = backend
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ShapeError(
                f"in_channels is {in_channels}, out_channels {out_channels}, groups {groups}: "
                "groups must divide both. Change the channels or the groups."
            )
        kernel = (kernel_size,) * self.dims if isinstance(kernel_size, int) else kernel_size
        if len(kernel) != self.dims:
            raise ShapeError(
                f"kernel_size is {kernel}: {type(self).__name__} needs {self.dims} sizes. "
                "Give one number, or one for each spatial dimension."
            )
        self.algebra = algebra
        self.stride, self.padding, self.dilation, self.groups = stride, padding, dilation, groups
        shape = (algebra.num_blades, out_channels, in_channels // groups, *kernel)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(algebra.num_blades, out_channels)) if bias else None
        # on the weight's device, so that no call copies it there
        self.register_buffer("table", algebra.cayley(self.weight.dtype), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within ±1/√(inputs that meet in an output): torch's rule for convolutions."""
        inputs = self.algebra.num_blades * self.weight[0, 0].numel()
        for parameter in self.parameters(recurse=False):
            nn.init.uniform_(parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (N, C_in, spatial…, B) to (N, C_out, spatial…, B)."""
        if self.backend not in (None, "torch"):
            raise BackendError(
                f"backend={self.backend!r} was asked for: a Clifford convolution is torch's own "
                "convolution. Pass backend=None or 'torch'."
            )
        return _convolve(
            x,
            self.weight,
            self.bias,
            self.table,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )

    def extra_repr(self) -> str:
        """The algebra and the weight's shape."""
        return f"{self.algebra}, weight={tuple(self.weight.shape)}, stride={self.stride}"


class CliffordConv1d(_CliffordConv):
    """A convolution of multivectors (N, C, s, B): `clifford_conv` as a module.

    Args:
        algebra: the algebra of the multivectors.
        in_channels: number of input multivectors.
        out_channels: number of output multivectors.
        kernel_size: one number, or one for each spatial dimension.
        stride: as in torch.nn.Conv1d.
        padding: as in torch.
        dilation: as in torch.
        groups: as in torch: channels are grouped, blades are not.
        bias: whether there is a bias, a multivector for each output channel.
        backend: None or "torch", whose own convolution it is.

    Attributes:
        weight: the parameter (B, C_out, C_in/groups, kernel…).
        bias: the parameter (B, C_out), or None.

    Raises:
        DTypeError: an algebra that is no Algebra.
        ShapeError: groups that do not divide the channels, or another number of kernel sizes.
        BackendError: from a call, another backend was requested.

    Source: Brandstetter et al.: Clifford neural layers for PDE modeling, ICLR 2023;
    `from_cliffordlayers` converts checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))
        >>> layer = clifford.CliffordConv1d(plane, 2, 3, kernel_size=3, padding=1)
        >>> layer(torch.randn(1, 2, 16, 4)).shape
        torch.Size([1, 3, 16, 4])
    """

    dims = 1


class CliffordConv2d(_CliffordConv):
    """A convolution of multivectors (N, C, s, t, B): `clifford_conv` as a module.

    Args:
        algebra: the algebra of the multivectors.
        in_channels: number of input multivectors.
        out_channels: number of output multivectors.
        kernel_size: one number, or one for each spatial dimension.
        stride: as in torch.nn.Conv2d.
        padding: as in torch.
        dilation: as in torch.
        groups: as in torch: channels are grouped, blades are not.
        bias: whether there is a bias, a multivector for each output channel.
        backend: None or "torch", whose own convolution it is.

    Attributes:
        weight: the parameter (B, C_out, C_in/groups, kernel…).
        bias: the parameter (B, C_out), or None.

    Raises:
        DTypeError: an algebra that is no Algebra.
        ShapeError: groups that do not divide the channels, or another number of kernel sizes.
        BackendError: from a call, another backend was requested.

    Source: Brandstetter et al.: Clifford neural layers for PDE modeling, ICLR 2023;
    `from_cliffordlayers` converts checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))
        >>> layer = clifford.CliffordConv2d(plane, 2, 3, kernel_size=3, padding=1)
        >>> layer(torch.randn(1, 2, 16, 16, 4)).shape
        torch.Size([1, 3, 16, 16, 4])
    """

    dims = 2


class CliffordConv3d(_CliffordConv):
    """A convolution of multivectors (N, C, s, t, u, B): `clifford_conv` as a module.

    Args:
        algebra: the algebra of the multivectors.
        in_channels: number of input multivectors.
        out_channels: number of output multivectors.
        kernel_size: one number, or one for each spatial dimension.
        stride: as in torch.nn.Conv3d.
        padding: as in torch.
        dilation: as in torch.
        groups: as in torch: channels are grouped, blades are not.
        bias: whether there is a bias, a multivector for each output channel.
        backend: None or "torch", whose own convolution it is.

    Attributes:
        weight: the parameter (B, C_out, C_in/groups, kernel…).
        bias: the parameter (B, C_out), or None.

    Raises:
        DTypeError: an algebra that is no Algebra.
        ShapeError: groups that do not divide the channels, or another number of kernel sizes.
        BackendError: from a call, another backend was requested.

    Source: Brandstetter et al.: Clifford neural layers for PDE modeling, ICLR 2023;
    `from_cliffordlayers` converts checkpoints.

    Example:
        >>> import torch
        >>> from torchweft import clifford
        >>> plane = clifford.Algebra((1, 1))
        >>> layer = clifford.CliffordConv3d(plane, 2, 3, kernel_size=3, padding=1)
        >>> layer(torch.randn(1, 2, 8, 8, 8, 4)).shape
        torch.Size([1, 3, 8, 8, 8, 4])
    """

    dims = 3


def _check(x: Tensor, weight: Tensor, blades: int, groups: int) -> None:
    dims = weight.dim() - 3
    if dims not in _CONVOLUTIONS or weight.shape[0] != blades:
        raise ShapeError(
            f"weight is {tuple(weight.shape)}: it must be ({blades}, C_out, C_in/groups, "
            "kernel…) with 1 to 3 kernel sizes. Stack one matrix of kernels for each blade."
        )
    channels = weight.shape[2] * groups
    if x.dim() != dims + 3 or x.shape[-1] != blades or x.shape[1] != channels:
        raise ShapeError(
            f"x is {tuple(x.shape)}: it must be (N, {channels}, {dims} spatial sizes, {blades}). "
            "Move the blades last and the channels second."
        )
