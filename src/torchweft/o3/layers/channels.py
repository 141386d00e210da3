"""Layers on features (N, irreps_dim, channels), built on products: functions, then modules.

tensor_dot_uu, TensorDot             z[n,i,c] = (2l_i+1)^(-1/2) Σ_{m ∈ irrep i} x[n,m,c] · y[n,m,c]
gating, Gating                       z[n,m,c] = x[n,m,c] · gates[n,i(m),c]
irrep_wise_linear, IrrepWiseLinear   z[n,m,d] = Σ_c x[n,m,c] · weight[i(m),c,d]

Here i(m) is the irrep of component m, as the tables of `irreps_info` say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchweft.core.operators.operands import check_tensors
from torchweft.core.table_copies import is_constant, mark_constant
from torchweft.core.tables import TensorCache
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike
from torchweft.products import SparseProductInfo, sparse_mul, sparse_vecmat
from torchweft.products.infos import Movable

__all__ = [
    "Gating",
    "IrrepWiseLinear",
    "IrrepsInfo",
    "TensorDot",
    "gating",
    "irrep_wise_linear",
    "irreps_info",
    "tensor_dot_uu",
]


class _Fields(NamedTuple):
    rsqrt_dims: Tensor
    rdims: Tensor
    irrep_index: Tensor
    irrep_seg: Tensor
    num_irreps: int


class IrrepsInfo(Movable, _Fields):
    """The tables of `irreps_info`; `.to`, `.cuda` and `.cpu` move them.

    Args:
        rsqrt_dims: (I,), 1/√(2l+1) of each irrep.
        rdims: (I,), 1/(2l+1) of each irrep.
        irrep_index: (D,), the irrep of each component.
        irrep_seg: (I+1,), where the components of each irrep begin.
        num_irreps: I.

    Example:
        >>> from torchweft import o3
        >>> o3.irreps_info("2x0e+1o").irrep_seg
        tensor([0, 1, 2, 5])
    """

    __slots__ = ()


def irreps_info(irreps: IrrepsLike) -> IrrepsInfo:
    """Index tables of irreps, with one entry for each copy: "2x0e+1o" has three irreps.

    Args:
        irreps: "2x0e+1o", or any other argument of `Irreps`.

    Returns:
        An `IrrepsInfo` on the CPU, with factors in float64, which a call casts.

    Raises:
        ShapeError: the argument does not read as irreps.

    Example:
        >>> from torchweft import o3
        >>> o3.irreps_info("2x0e+1o").irrep_index
        tensor([0, 1, 2, 2, 2])
    """
    dims = torch.tensor(
        [ir.dim for mul, ir in Irreps(irreps) for _ in range(mul)], dtype=torch.int64
    )
    index = torch.repeat_interleave(torch.arange(dims.numel()), dims)
    seg = torch.cat([dims.new_zeros(1), dims.cumsum(0)])
    made = IrrepsInfo(dims.double().rsqrt(), 1 / dims.double(), index, seg, dims.numel())
    mark_constant(*made[:4])
    return made


_scales: TensorCache[Tensor] = TensorCache()


def tensor_dot_uu(
    input1: Tensor,
    input2: Tensor,
    irreps_info: IrrepsInfo,
    scaled: bool = True,
    *,
    backend: str | None = None,
) -> Tensor:
    """z[n,i,c] = (2l_i+1)^(-1/2) Σ_{m ∈ irrep i} input1[n,m,c] · input2[n,m,c].

    Args:
        input1: (N, D, C), D the components of the irreps; without N it is shared over N.
        input2: (N, D, C); without N it is shared over N.
        irreps_info: from `irreps_info(irreps)`.
        scaled: False leaves out the factor.
        backend: see `torchweft.o3`.

    Returns:
        (N, num_irreps, C), invariant under O(3); differentiable to any order.

    Raises:
        ShapeError: an input that does not fit the irreps or the other input.
        DTypeError: irreps_info is no IrrepsInfo.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> x, info = torch.randn(10, 5, 16), o3.irreps_info("2x0e+1o")
        >>> o3.tensor_dot_uu(x, x, info).shape
        torch.Size([10, 3, 16])
    """
    _check(irreps_info, "components", "input1", input1, C=None)
    _check(irreps_info, "components", "input2", input2, C=input1.shape[-1])
    info = SparseProductInfo(
        scale=_component_scale(irreps_info) if scaled else None, seg_out=irreps_info.irrep_seg
    )
    return sparse_mul(input1, input2, info, backend=backend)


def gating(
    input: Tensor, gates: Tensor, irreps_info: IrrepsInfo, *, backend: str | None = None
) -> Tensor:
    """z[n,m,c] = input[n,m,c] · gates[n,i(m),c], i(m) the irrep of component m.

    Args:
        input: (N, D, C); without N it is shared over N.
        gates: (N, num_irreps, C), invariant; without N they are shared over N.
        irreps_info: from `irreps_info(irreps)`.
        backend: see `torchweft.o3`.

    Returns:
        (N, D, C), equivariant; differentiable to any order.

    Raises:
        ShapeError: an input that does not fit the irreps, or gates that do not fit the input.
        DTypeError: irreps_info is no IrrepsInfo.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> x, gates = torch.randn(10, 5, 16), torch.rand(10, 3, 16)
        >>> o3.gating(x, gates, o3.irreps_info("2x0e+1o")).shape
        torch.Size([10, 5, 16])
    """
    _check(irreps_info, "components", "input", input, C=None)
    _check(irreps_info, "irreps", "gates", gates, C=input.shape[-1])
    info = SparseProductInfo(index2=irreps_info.irrep_index)
    return sparse_mul(input, gates, info, backend=backend)


def irrep_wise_linear(
    input: Tensor, weight: Tensor, irreps_info: IrrepsInfo, *, backend: str | None = None
) -> Tensor:
    """z[n,m,d] = Σ_c input[n,m,c] · weight[i(m),c,d], i(m) the irrep of component m.

    Args:
        input: (N, D, Cin); without N it is shared over N.
        weight: (num_irreps, Cin, Cout), or (N, num_irreps, Cin, Cout) with matrices of its own
            for each n.
        irreps_info: from `irreps_info(irreps)`.
        backend: see `torchweft.o3`.

    Returns:
        (N, D, Cout), equivariant; differentiable to any order.

    Raises:
        ShapeError: an input that does not fit the irreps, or a weight that does not fit the input.
        DTypeError: irreps_info is no IrrepsInfo.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> x, weight = torch.randn(10, 5, 16), torch.randn(3, 16, 32)
        >>> o3.irrep_wise_linear(x, weight, o3.irreps_info("2x0e+1o")).shape
        torch.Size([10, 5, 32])
    """
    _check(irreps_info, "components", "input", input, Cin=None)
    _check(irreps_info, "irreps", "weight", weight, Cin=input.shape[-1], Cout=None)
    info = SparseProductInfo(index2=irreps_info.irrep_index)
    return sparse_vecmat(input, weight, info, backend=backend)


def _component_scale(info: IrrepsInfo) -> Tensor:
    """1/√(2l+1) of each component's irrep."""
    factors, index = info.rsqrt_dims, info.irrep_index
    if torch.compiler.is_compiling() or not is_constant(factors) or not is_constant(index):
        return factors[index]
    return _scales.get((factors, index), None, lambda: factors[index])


def _check(info: IrrepsInfo, rows: str, name: str, a: Tensor, **channels: int | None) -> None:
    """Raise unless `a` is (N, rows, *channels), N optional; None is any number of channels."""
    if not isinstance(info, IrrepsInfo):
        raise DTypeError(
            f"irreps_info is a {type(info).__name__}: it must be an IrrepsInfo. "
            "Build one with torchweft.o3.irreps_info('64x0e+32x1o')."
        )
    check_tensors(**{name: a})
    num_rows = info.num_irreps if rows == "irreps" else info.irrep_index.shape[0]
    needed = {rows: num_rows, **channels}
    found = dict(zip(needed, a.shape[-len(needed) :], strict=False))
    if a.dim() not in (len(needed), len(needed) + 1) or any(
        size is not None and size != found[key] for key, size in needed.items()
    ):
        layout = ", ".join(key if size is None else f"{size}" for key, size in needed.items())
        raise ShapeError(
            f"{name} is {tuple(a.shape)} but there are {num_rows} {rows}: it must be "
            f"(N, {layout}), or ({layout}). Pass matching irreps_info or a matching {name}."
        )


class _Tabled(nn.Module):
    """A layer whose tables move with it; they are not in the state and never rounded."""

    def __init__(self, irreps: IrrepsLike, backend: str | None) -> None:
        super().__init__()
        self.irreps, self.backend = Irreps(irreps), backend
        self.info = irreps_info(self.irreps)
        self._place: Tensor
        self.register_buffer("_place", torch.empty(0), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Tabled:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.info = irreps_info(self.irreps).to(self._place.device)
        return self


class Gating(_Tabled):
    """z[n,m,c] = x[n,m,c] · gates[n,i(m),c], i(m) the irrep of component m: a gate for each irrep.

    Args:
        irreps: irreps of x and z (N, D, C); every copy is an irrep with a gate of its own.
        backend: see `torchweft.o3`.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.Gating("2x0e+1o")(torch.randn(10, 5, 16), torch.rand(10, 3, 16)).shape
        torch.Size([10, 5, 16])
    """

    def __init__(self, irreps: IrrepsLike, *, backend: str | None = None) -> None:
        super().__init__(irreps, backend)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """The gated features.

        Args:
            x: (N, irreps_dim, C).
            gates: (N, num_irreps, C), invariant.

        Returns:
            (N, irreps_dim, C) in x's dtype.
        """
        return gating(x, gates, self.info, backend=self.backend)

    def extra_repr(self) -> str:
        """The irreps."""
        return str(self.irreps)


class IrrepWiseLinear(_Tabled):
    """z[n,m,d] = Cin^(-1/2) Σ_c x[n,m,c] · weight[i(m),c,d], i(m) the irrep of component m.

    Args:
        irreps: irreps of x and z; every copy is an irrep with a matrix of its own.
        channels_in: Cin, channels of x (N, D, Cin).
        channels_out: Cout, channels of z (N, D, Cout).
        backend: see `torchweft.o3`.

    Attributes:
        weight: the parameter (num_irreps, Cin, Cout), normal with variance 1; the factor keeps the
            variance of x.

    Raises:
        ShapeError: a negative number of channels.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.IrrepWiseLinear("2x0e+1o", 16, 32)(torch.randn(10, 5, 16)).shape
        torch.Size([10, 5, 32])
    """

    def __init__(
        self, irreps: IrrepsLike, channels_in: int, channels_out: int, *, backend: str | None = None
    ) -> None:
        super().__init__(irreps, backend)
        if channels_in < 0 or channels_out < 0:
            raise ShapeError(
                f"channels_in is {channels_in} and channels_out {channels_out}: they must be 0 or "
                "more. Pass the numbers of channels of x and of the result."
            )
        self.channels_in, self.channels_out = channels_in, channels_out
        self.weight = nn.Parameter(torch.randn(self.irreps.num_irreps, channels_in, channels_out))

    def forward(self, x: Tensor) -> Tensor:
        """The linear map of each irrep.

        Args:
            x: (N, irreps_dim, Cin).

        Returns:
            (N, irreps_dim, Cout) in x's dtype.
        """
        weight = self.weight / math.sqrt(max(self.channels_in, 1))
        return irrep_wise_linear(x, weight, self.info, backend=self.backend)

    def extra_repr(self) -> str:
        """The irreps and channels."""
        return f"{self.irreps}, {self.channels_in} -> {self.channels_out}"


class TensorDot(_Tabled):
    """z[n,i,c] = (2l_i+1)^(-1/2) Σ_{m ∈ irrep i} x[n,m,c] · y[n,m,c], invariant under O(3).

    Args:
        irreps: irreps of x and y (N, D, C).
        scaled: False leaves out the factor.
        backend: see `torchweft.o3`.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> x = torch.randn(10, 5, 16)
        >>> o3.TensorDot("2x0e+1o")(x, x).shape
        torch.Size([10, 3, 16])
    """

    def __init__(
        self, irreps: IrrepsLike, scaled: bool = True, *, backend: str | None = None
    ) -> None:
        super().__init__(irreps, backend)
        self.scaled = scaled

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The inner products of each irrep.

        Args:
            x: (N, irreps_dim, C).
            y: (N, irreps_dim, C).

        Returns:
            (N, num_irreps, C) in x's dtype.
        """
        return tensor_dot_uu(x, y, self.info, self.scaled, backend=self.backend)

    def extra_repr(self) -> str:
        """The irreps."""
        return f"{self.irreps}, scaled={self.scaled}"
