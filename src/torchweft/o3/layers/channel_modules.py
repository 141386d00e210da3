"""The layers of `channel_functions` as modules, on features (N, irreps_dim, channels).

IrrepWiseLinear   z[n,m,d] = Cin^(-1/2) Σ_c x[n,m,c] · weight[i(m),c,d]
TensorDot         z[n,i,c] = (2l_i+1)^(-1/2) Σ_{m ∈ irrep i} x[n,m,c] · y[n,m,c]
Gating            z[n,m,c] = x[n,m,c] · gates[n,i(m),c]
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchweft.errors import ShapeError
from torchweft.o3.irreps.irreps import Irreps, IrrepsLike
from torchweft.o3.irreps.tables import irreps_info
from torchweft.o3.layers.channel_functions import gating, irrep_wise_linear, tensor_dot_uu

__all__ = ["Gating", "IrrepWiseLinear", "TensorDot"]


class _Tabled(nn.Module):
    """A layer whose tables follow its device; they are no part of the state and never rounded."""

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
        irreps: of x and z; every copy is an irrep with a gate of its own.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.
    """

    def __init__(self, irreps: IrrepsLike, *, backend: str | None = None) -> None:
        super().__init__(irreps, backend)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        """(N, irreps_dim, C) of x and invariant gates (N, num_irreps, C)."""
        return gating(x, gates, self.info, backend=self.backend)

    def extra_repr(self) -> str:
        """The irreps."""
        return str(self.irreps)


class IrrepWiseLinear(_Tabled):
    """z[n,m,d] = Cin^(-1/2) Σ_c x[n,m,c] · weight[i(m),c,d], i(m) the irrep of component m.

    Args:
        irreps: of x and z; every copy is an irrep with a matrix of its own.
        channels_in: Cin.
        channels_out: of z.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Raises:
        ShapeError: a negative number of channels.

    The parameter `weight` is (num_irreps, Cin, Cout), normal with variance 1; the factor keeps the
    variance of x.
    """

    def __init__(
        self,
        irreps: IrrepsLike,
        channels_in: int,
        channels_out: int,
        *,
        backend: str | None = None,
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
        """(N, irreps_dim, Cout) of x (N, irreps_dim, Cin)."""
        weight = self.weight / math.sqrt(max(self.channels_in, 1))
        return irrep_wise_linear(x, weight, self.info, backend=self.backend)

    def extra_repr(self) -> str:
        """The irreps and channels."""
        return f"{self.irreps}, {self.channels_in} -> {self.channels_out}"


class TensorDot(_Tabled):
    """z[n,i,c] = (2l_i+1)^(-1/2) Σ_{m ∈ irrep i} x[n,m,c] · y[n,m,c], invariant.

    Args:
        irreps: of x and y.
        scaled: False leaves out the factor.
        backend: "triton", "numba", "torch", or None for the fastest that can serve.
    """

    def __init__(
        self, irreps: IrrepsLike, scaled: bool = True, *, backend: str | None = None
    ) -> None:
        super().__init__(irreps, backend)
        self.scaled = scaled

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """(N, num_irreps, C) of x and y (N, irreps_dim, C)."""
        return tensor_dot_uu(x, y, self.info, self.scaled, backend=self.backend)

    def extra_repr(self) -> str:
        """The irreps."""
        return f"{self.irreps}, scaled={self.scaled}"
