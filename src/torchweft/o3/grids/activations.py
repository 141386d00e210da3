"""Activations of whole irreps: a function of each number of a signal on a grid.

S2Activation   F → ∫ f(Σ F_l · Y_l(x)) Y_j(x) dx     SO3Activation   the same on rotations
"""

from __future__ import annotations

from torch import Tensor, nn

from torchweft.core.backend import check_torch_only
from torchweft.errors import ShapeError
from torchweft.o3.grids.rotations import SO3Grid
from torchweft.o3.grids.sphere import FromS2Grid, Resolution, ToS2Grid
from torchweft.o3.irreps.irreps import Irrep, Irreps, IrrepsLike, MulIr, check_rows
from torchweft.o3.irreps.rotation import rand_angles
from torchweft.o3.layers.gates_and_norms import irrep_of
from torchweft.o3.layers.networks import Function, normalize2mom

__all__ = ["S2Activation", "SO3Activation"]


class S2Activation(nn.Module):
    """A function of each value of a signal on the sphere: F_j → ∫ c f(Σ_l F_l · Y_l(x)) Y_j(x) dx.

    Args:
        irreps: irreps of F (…, D): one of each degree 0 … L, of the parities p_val · p_arg^l.
        act: f, scaled by c to second moment 1; even or odd where p_val is -1.
        res: of the grid, see ToS2Grid; the finer, the closer to equivariant.
        normalization: see ToS2Grid.
        lmax_out: the highest degree of the result; None: L.
        random_rot: whether the grid is rotated at random in each call.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: irreps of another form, or a function of 0o that is neither even nor odd.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> layer = o3.S2Activation("0e+1o+2e", torch.tanh, 20)
        >>> layer(torch.randn(10, 9)).shape
        torch.Size([10, 9])
    """

    def __init__(
        self,
        irreps: IrrepsLike,
        act: Function,
        res: Resolution,
        normalization: str = "component",
        lmax_out: int | None = None,
        random_rot: bool = False,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_torch_only(self, backend)
        self.irreps_in = Irreps(irreps).simplify()
        p_val, p_arg = _parities(self.irreps_in)
        lmax = self.irreps_in.lmax
        last = lmax if lmax_out is None else lmax_out
        p_out = irrep_of(MulIr(1, Irrep(0, p_val)), act).p
        self.irreps_out = Irreps([Irrep(l, p_out * p_arg**l) for l in range(last + 1)])  # noqa: E741
        self.to_s2 = ToS2Grid(lmax, res, normalization)
        self.from_s2 = FromS2Grid(res, last, normalization, lmax_in=lmax)
        self.act = normalize2mom(act)
        self.random_rot = random_rot

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.irreps_in} -> {self.irreps_out})"

    def forward(self, features: Tensor) -> Tensor:
        """The activated signals.

        Args:
            features: (…, irreps_in.dim).

        Returns:
            (…, irreps_out.dim).
        """
        check_rows("features", features, self.irreps_in, self)
        if not self.random_rot:
            return self._activated(features)
        angles = rand_angles(dtype=features.dtype, device=features.device)
        turned = features @ self.irreps_in.D_from_angles(*angles).mT
        return self._activated(turned) @ self.irreps_out.D_from_angles(*angles)

    def _activated(self, features: Tensor) -> Tensor:
        found: Tensor = self.from_s2(self.act(self.to_s2(features)))
        return found


def _parities(irreps: Irreps) -> tuple[int, int]:
    """p_val and p_arg of irreps 1x(l, p_val · p_arg^l), l = 0 … L."""
    if irreps and irreps.ls == list(range(len(irreps))):
        p_val = irreps[0].ir.p
        for p_arg in (1, -1):
            if all(ir.p == p_val * p_arg**ir.l for _, ir in irreps):
                return p_val, p_arg
    raise ShapeError(
        f"irreps is {irreps or 'empty'}: a signal on the sphere has each degree 0 … L once, of one "
        "parity or of parities that alternate. Pass, for example, '0e+1o+2e'."
    )


class SO3Activation(nn.Module):
    """A function of each value of a signal on the rotations, see SO3Grid.

    Args:
        lmax_in: the highest degree of the features, (…, Σ (2l+1)²).
        lmax_out: the highest degree of the result.
        act: the function, scaled to second moment 1.
        resolution: see SO3Grid; the finer, the closer to equivariant.
        normalization: see SO3Grid.
        aspect_ratio: see SO3Grid.
        backend: see `torchweft.o3`.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.SO3Activation(1, 2, torch.tanh, 4)(torch.randn(3, 1 + 9)).shape
        torch.Size([3, 35])
    """

    def __init__(
        self,
        lmax_in: int,
        lmax_out: int,
        act: Function,
        resolution: int,
        *,
        normalization: str = "component",
        aspect_ratio: float = 2,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_torch_only(self, backend)
        options = {"normalization": normalization, "aspect_ratio": aspect_ratio}
        self.grid_in = SO3Grid(lmax_in, resolution, **options)  # type: ignore[arg-type]
        self.grid_out = SO3Grid(lmax_out, resolution, **options)  # type: ignore[arg-type]
        self.act = normalize2mom(act)
        self.lmax_in, self.lmax_out = lmax_in, lmax_out

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self.lmax_in} -> {self.lmax_out})"

    def forward(self, features: Tensor) -> Tensor:
        """The activated signals.

        Args:
            features: (…, Σ (2l+1)²), l to lmax_in.

        Returns:
            (…, Σ (2l+1)²), l to lmax_out.
        """
        return self.grid_out.from_grid(self.act(self.grid_in.to_grid(features)))
