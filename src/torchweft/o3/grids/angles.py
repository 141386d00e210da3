"""Spherical harmonics as functions of angles: Y(α, β), and their factors.

Y_l^m(α, β) = S^m(α) P_l^|m|(cos β, sin β)  of the point R(α, β, ·) e_y,
S^m(α) = √2 sin(|m| α), 1, √2 cos(mα)  for m < 0, m = 0, m > 0
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from torchweft.core.backend import check_torch_only
from torchweft.core.operators.operands import check_tensors
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.irreps.rotation import angles_to_xyz, broadcast_named
from torchweft.o3.irreps.wigner import check_degrees
from torchweft.o3.layers.harmonics_and_radial import Degrees, spherical_harmonics

__all__ = [
    "Legendre",
    "SphericalHarmonicsAlphaBeta",
    "spherical_harmonics_alpha",
    "spherical_harmonics_alpha_beta",
]


def spherical_harmonics_alpha(l: int, alpha: Tensor) -> Tensor:  # noqa: E741 - e3nn's name
    """The factors of spherical harmonics that depend on α, of degree l.

        √2 sin(lα) … √2 sin α, 1, √2 cos α … √2 cos(lα)

    Args:
        l: the degree, 0 or more.
        alpha: (...), in radians.

    Returns:
        (..., 2l+1) in alpha's dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.spherical_harmonics_alpha(1, torch.tensor(0.0))
        tensor([0.0000, 1.0000, 1.4142])
    """
    check_degrees(l=l)
    check_tensors(alpha=alpha)
    turns = alpha[..., None] * torch.arange(1, l + 1, dtype=alpha.dtype, device=alpha.device)
    sines, cosines = math.sqrt(2) * turns.sin().flip(-1), math.sqrt(2) * turns.cos()
    return torch.cat([sines, torch.ones_like(alpha[..., None]), cosines], -1)


def spherical_harmonics_alpha_beta(
    l: Degrees,  # noqa: E741
    alpha: Tensor,
    beta: Tensor,
    *,
    normalization: str = "integral",
    backend: str | None = None,
) -> Tensor:
    """Y_l at the points (sin β sin α, cos β, sin β cos α) of the unit sphere.

    Args:
        l: a degree, degrees in any order, or irreps, whose parities do not matter.
        alpha: (...), with beta broadcast.
        beta: (...).
        normalization: see `spherical_harmonics`.
        backend: see `torchweft.o3`.

    Returns:
        (..., Σ 2l+1) in the angles' dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> north = torch.zeros(())
        >>> o3.spherical_harmonics_alpha_beta(1, north, north, normalization="component")
        tensor([0.0000, 1.7321, 0.0000])
    """
    if not isinstance(l, int | range):
        given = list(l) if isinstance(l, Iterable) and not isinstance(l, str) else l
        plain = isinstance(given, list) and all(isinstance(degree, int) for degree in given)
        l = given if plain else Irreps(l).ls  # type: ignore[arg-type,assignment]  # noqa: E741
    return spherical_harmonics(l, angles_to_xyz(alpha, beta), False, normalization, backend=backend)


class SphericalHarmonicsAlphaBeta(nn.Module):
    """`spherical_harmonics_alpha_beta` as a module, of angles (alpha, beta) in radians.

    Args:
        l: a degree, degrees in any order, or irreps, see `spherical_harmonics_alpha_beta`.
        normalization: "integral", "component" or "norm", see `spherical_harmonics`.
        backend: see `torchweft.o3`.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> harmonics = o3.SphericalHarmonicsAlphaBeta([0, 1], normalization="component")
        >>> harmonics(torch.tensor(0.0), torch.tensor(0.0))
        tensor([1.0000, 0.0000, 1.7321, 0.0000])
    """

    def __init__(
        self,
        l: Degrees,  # noqa: E741
        normalization: str = "integral",
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.l, self.normalization, self.backend = l, normalization, backend

    def forward(self, alpha: Tensor, beta: Tensor) -> Tensor:
        """The harmonics of the angles.

        Args:
            alpha: (...), in radians.
            beta: (...), in radians.

        Returns:
            (..., Σ 2l+1) in the angles' dtype.
        """
        return spherical_harmonics_alpha_beta(
            self.l, alpha, beta, normalization=self.normalization, backend=self.backend
        )


class Legendre(nn.Module):
    """P_l^|m|(z, y) for m = -l … l, z = cos β and y = sin β, as e3nn scales them.

        P_l^m(z, y) = √((2l+1)/4π (l-m)!/(l+m)!) y^m dᵐ/dzᵐ P_l(z),  P_l the Legendre polynomial

    Args:
        ls: the degrees.
        backend: see `torchweft.o3`.

    Example:
        >>> import math, torch
        >>> from torchweft import o3
        >>> z = torch.tensor([0.0, 1.0])
        >>> (o3.Legendre([1])(z, (1 - z * z).sqrt()) * (4 * math.pi / 3) ** 0.5).round(decimals=4)
        tensor([[0.7071, 0.0000, 0.7071],
                [0.0000, 1.0000, 0.0000]])
    """

    def __init__(self, ls: Iterable[int], *, backend: str | None = None) -> None:
        super().__init__()
        check_torch_only(self, backend)
        self.ls = list(ls)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """The functions at z and y.

        Args:
            z: (...), cos β.
            y: (...), sin β.

        Returns:
            (..., Σ 2l+1) in z's dtype, the harmonics at α = 0.
        """
        z, y = broadcast_named(z=z, y=y)
        points = torch.stack([torch.zeros_like(z), z, y], -1)
        harmonics = spherical_harmonics(self.ls, points, False)
        found = []
        for block in harmonics.split([2 * l + 1 for l in self.ls], -1):  # type: ignore[no-untyped-call]  # noqa: E741
            middle = block.shape[-1] // 2
            right = block[..., middle + 1 :] / math.sqrt(2)
            found += [right.flip(-1), block[..., middle : middle + 1], right]
        return torch.cat(found, -1)
