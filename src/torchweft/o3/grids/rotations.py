"""Functions of rotations, f(R) = Σ √(2l+1) F_l · D_l(R) / √n, as coefficients and on a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.o3.grids.sphere import quadrature_weights, s2_grid
from torchweft.o3.irreps.rotation import check_last
from torchweft.o3.irreps.wigner import check_degrees, wigner_D
from torchweft.o3.layers.tables import TableLayer

__all__ = ["SO3Grid"]


class SO3Grid(TableLayer):
    """f(R_abc) = Σ_l √(2l+1) F_l · D_l(R_abc) / √n,  n = Σ (2l+1)²,  and back.

    Args:
        lmax: the highest degree L.
        resolution: 2 · resolution angles β, and 2 · aspect_ratio · resolution angles α and γ;
            at least L + 1.
        normalization: "component": normal F of variance 1 give f the variance 1.
        aspect_ratio: see resolution.
        backend: see `torchweft.o3`.

    Attributes:
        D: √(2l+1) D_l(R), (A, B, A, n), rows of D_l one after the other.
        alpha, beta, gamma: the angles.
        qw: quadrature weights, (B,).

    Raises:
        ShapeError: a resolution or a normalization that does not fit.

    The table takes A · B · A · n numbers, and a row as many multiplications.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> grid = o3.SO3Grid(2, 3)
        >>> grid.to_grid(torch.randn(5, 1 + 9 + 25)).shape
        torch.Size([5, 12, 6, 12])
    """

    D: Tensor
    qw: Tensor

    def __init__(
        self,
        lmax: int,
        resolution: int,
        *,
        normalization: str = "component",
        aspect_ratio: float = 2,
        backend: str | None = None,
    ) -> None:
        super().__init__(backend=backend)
        check_degrees(lmax=lmax, resolution=resolution)
        if normalization != "component":
            raise ShapeError(
                f"normalization is {normalization!r}: it must be 'component', as in e3nn. Scale "
                "the coefficients for another."
            )
        self.lmax = lmax
        self.res_beta = 2 * resolution
        self.res_alpha = self.res_gamma = round(2 * aspect_ratio * resolution)
        if not self.res_alpha:
            raise ShapeError(
                f"resolution is {resolution} and aspect_ratio {aspect_ratio}: there must be one "
                f"angle or more. Pass resolution={lmax + 1}."
            )
        self.register_tables()

    def tables(self) -> Mapping[str, Tensor]:
        """D, qw and the angles; made anew at each call, for they are large."""
        with torch.no_grad():
            beta, alpha = s2_grid(self.res_beta, self.res_alpha, torch.float64, "cpu")
            angles = alpha[:, None, None], beta[:, None], alpha
            blocks = [
                math.sqrt(2 * l + 1) * wigner_D(l, *angles).flatten(-2)
                for l in range(self.lmax + 1)  # noqa: E741
            ]
            weights = quadrature_weights(self.res_beta) * (self.res_beta / self.res_alpha) ** 2
        angles_by_name = {"alpha": alpha, "beta": beta, "gamma": alpha}
        return {"D": torch.cat(blocks, -1), "qw": weights, **angles_by_name}

    def __repr__(self) -> str:
        shape = f"{self.res_alpha}x{self.res_beta}x{self.res_gamma} (alpha x beta x gamma)"
        return f"{type(self).__name__}(lmax={self.lmax} res={shape})"

    def to_grid(self, features: Tensor) -> Tensor:
        """The values of signals on the grid.

        Args:
            features: (..., n), coefficients.

        Returns:
            (..., A, B, A).
        """
        size = self.D.shape[-1]
        check_last("features", features, size)
        wide = self.as_tables(features) / math.sqrt(size)
        values = wide @ self.D.flatten(0, 2).mT
        return self.as_input(values.reshape(*values.shape[:-1], *self.D.shape[:3]), features)

    def from_grid(self, features: Tensor) -> Tensor:
        """The coefficients of signals.

        Args:
            features: (..., A, B, A), values on the grid.

        Returns:
            (..., n).
        """
        if features.shape[-3:] != self.D.shape[:3]:
            raise ShapeError(
                f"features is {tuple(features.shape)} but the grid is {tuple(self.D.shape[:3])}: "
                "these must be the last dimensions. Pass numbers on this grid."
            )
        size = self.D.shape[-1]
        wide = self.as_tables(features) * (self.qw * math.sqrt(size))[:, None]
        return self.as_input(wide.flatten(-3) @ self.D.flatten(0, 2), features)
