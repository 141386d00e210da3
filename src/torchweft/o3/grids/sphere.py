"""Functions on the sphere, f(x) = Σ F_l · Y_l(x), as coefficients F and as numbers on a grid.

x_ij = (sin β_i sin α_j, cos β_i, sin β_i cos α_j),  β_i = π (i + ½) / N,  α_j = 2π j / M

f(x_ij) = Σ_m S^m(α_j) Σ_l P_l^|m|(β_i) F_lm: two products of matrices, and two back.  Quadrature
over β is exact to the degree N - 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.o3.grids.angles import Legendre, spherical_harmonics_alpha
from torchweft.o3.irreps.rotation import angles_to_xyz, check_last
from torchweft.o3.irreps.wigner import check_degrees
from torchweft.o3.layers.tables import TableLayer
from torchweft.o3.tensor_product.instructions import checked_choice

__all__ = [
    "FromS2Grid",
    "ToS2Grid",
    "quadrature_weights",
    "s2_grid",
    "spherical_harmonics_s2_grid",
]

Dtype = torch.dtype | None
Device = torch.device | str | None
Resolution = int | tuple[int | None, int | None] | None
"""N, or (N, M); None: the least that loses nothing."""

NORMALIZATIONS = ("component", "norm", "integral")


def s2_grid(
    res_beta: int, res_alpha: int, dtype: Dtype = None, device: Device = None
) -> tuple[Tensor, Tensor]:
    """The angles of a grid on the sphere: β_i = π (i + ½) / N and α_j = 2π j / M.

    Args:
        res_beta: N.
        res_alpha: M.
        dtype: of the results; None: torch's default dtype.
        device: of the results; None: torch's default device.

    Returns:
        β (N,) and α (M,), in radians.

    Example:
        >>> import math
        >>> from torchweft import o3
        >>> betas, alphas = o3.s2_grid(2, 4)
        >>> (betas / math.pi, alphas / math.pi)
        (tensor([0.2500, 0.7500]), tensor([0.0000, 0.5000, 1.0000, 1.5000]))
    """
    check_degrees(res_beta=res_beta, res_alpha=res_alpha)
    betas = (torch.arange(res_beta, dtype=torch.float64, device="cpu") + 0.5) * math.pi / res_beta
    alphas = torch.arange(res_alpha, dtype=torch.float64, device="cpu") * 2 * math.pi / res_alpha
    like = torch.empty(0, dtype=dtype, device=device)
    return betas.to(like), alphas.to(like)


def spherical_harmonics_s2_grid(
    lmax: int, res_beta: int, res_alpha: int, dtype: Dtype = None, device: Device = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The grid, and the factors of spherical harmonics on it: Y_l^m = shb[i, (l, m)] sha[j, m].

    Args:
        lmax: the highest degree L.
        res_beta: N.
        res_alpha: M.
        dtype: of the results; torch's default dtype if None.
        device: of the results; torch's default device if None.

    Returns:
        betas (N,), alphas (M,), shb (N, (L+1)²) and sha (M, 2L+1).

    Source: e3nn's function of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> from torchweft import o3
        >>> betas, alphas, shb, sha = o3.spherical_harmonics_s2_grid(2, 6, 5)
        >>> shb.shape, sha.shape
        (torch.Size([6, 9]), torch.Size([5, 5]))
    """
    betas, alphas = s2_grid(res_beta, res_alpha, torch.float64, "cpu")
    shb = Legendre(range(lmax + 1))(betas.cos(), betas.sin())
    sha = spherical_harmonics_alpha(lmax, alphas)
    like = torch.empty(0, dtype=dtype, device=device)
    return betas.to(like), alphas.to(like), shb.to(like), sha.to(like)


def quadrature_weights(res_beta: int) -> Tensor:
    """(N,) in float64: w_i with Σ_i w_i f(β_i) = ∫ f sin β dβ / 2N² for polynomials of cos β.

    Kostelec and Rockmore, FFTs on the rotation group, 2008.
    """
    half = res_beta // 2
    odd = 2 * torch.arange(res_beta, dtype=torch.float64, device="cpu") + 1
    waves = torch.sin(torch.outer(odd, odd[:half]) * math.pi / (4 * half)) / odd[:half]
    return 2 / half * torch.sin(odd * math.pi / (4 * half)) * waves.sum(1) / (2 * res_beta**2)


class _SphereGrid(TableLayer):
    """The grid and the tables of a transform."""

    alphas: Tensor
    betas: Tensor
    sha: Tensor
    shb: Tensor

    def __init__(
        self,
        lmax: int,
        resolution: tuple[int, int],
        factors: Sequence[float],
        quadrature: bool,
        dtype: Dtype,
        device: Device,
        backend: str | None,
    ) -> None:
        super().__init__(backend=backend)
        if len(factors) != lmax + 1:
            raise ShapeError(
                f"normalization has {len(factors)} factors but lmax is {lmax}: each degree from 0 "
                f"to {lmax} has its own. Pass {lmax + 1}, or 'component'."
            )
        self.lmax, (self.res_beta, self.res_alpha) = lmax, resolution
        self._given = lmax, *resolution, tuple(factors), quadrature
        self.register_tables(dtype, device)

    def tables(self) -> Mapping[str, Tensor]:
        """Angles (alphas, betas), and the factors of harmonics: sha (M, 2L+1), shb (2L+1, N, …)."""
        return _tables(*self._given)

    def __repr__(self) -> str:
        resolution = f"{self.res_beta}x{self.res_alpha} (beta x alpha)"
        return f"{type(self).__name__}(lmax={self.lmax} res={resolution})"

    @property
    def grid(self) -> Tensor:
        """(N, M, 3): the points."""
        return angles_to_xyz(self.alphas, self.betas[:, None])


@functools.lru_cache(maxsize=64)
def _tables(
    lmax: int, res_beta: int, res_alpha: int, factors: tuple[float, ...], quadrature: bool
) -> Mapping[str, Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        betas, alphas, flat, sha = spherical_harmonics_s2_grid(
            lmax, res_beta, res_alpha, torch.float64, "cpu"
        )
        if quadrature:
            flat = flat * (quadrature_weights(res_beta) * res_beta**2 / res_alpha)[:, None]
        shb = torch.zeros(2 * lmax + 1, res_beta, flat.shape[1], dtype=torch.float64, device="cpu")
        for l, factor in enumerate(factors):  # noqa: E741
            for m in range(-l, l + 1):
                place = l * (l + 1) + m
                shb[lmax + m, :, place] = factor * flat[:, place]
    return {"alphas": alphas, "betas": betas, "sha": sha, "shb": shb}


class ToS2Grid(_SphereGrid):
    """Values of signals on a grid of the sphere: f(x_ij) = Σ_l n_l F_l · Y_l(x_ij).

    Args:
        lmax: the highest degree L of F (…, (L+1)²); None: the highest that the grid determines.
        res: N, even and at least 2L+2, or (N, M) points in β and α; None: the smallest grid that
            determines F.
        normalization: "component", n_l = √(4π / ((2l+1) (L+1))), "norm", √(4π / (L+1)), or
            "integral", 1, so that normal F of variance 1, 1/(2l+1) or any gives each degree the
            same variance; or a tensor (L+1,) of n.
        dtype: of the tables; None: torch's default dtype.
        device: of the tables; None: torch's default device.
        backend: see `torchweft.o3`.

    Attributes:
        grid: x, (N, M, 3).
        alphas, betas, sha, shb: tables, as e3nn's.

    Raises:
        ShapeError: a resolution or a normalization that does not fit.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> to_grid = o3.ToS2Grid(6, (100, 101))
        >>> to_grid(torch.randn(3, 49)).shape
        torch.Size([3, 100, 101])
    """

    def __init__(
        self,
        lmax: int | None = None,
        res: Resolution = None,
        normalization: str | Tensor = "component",
        dtype: Dtype = None,
        device: Device = None,
        *,
        backend: str | None = None,
    ) -> None:
        lmax, resolution = _resolution(lmax, res)
        if isinstance(normalization, Tensor):
            factors = normalization.tolist()
        else:
            factors = _factors(normalization, lmax, lmax)
        super().__init__(lmax, resolution, factors, False, dtype, device, backend)

    def forward(self, x: Tensor) -> Tensor:
        """The values of signals on the grid.

        Args:
            x: (..., (L+1)²), coefficients.

        Returns:
            (..., N, M) in x's dtype.
        """
        check_last("x", x, (self.lmax + 1) ** 2)
        rows = torch.einsum("mbi,...i->...bm", self.shb, self.as_tables(x))
        return self.as_input(torch.einsum("am,...bm->...ba", self.sha, rows), x)


class FromS2Grid(_SphereGrid):
    """F_l = ∫ f(x) Y_l(x) dx / n_l: coefficients from values on a grid, the inverse of ToS2Grid.

    Args:
        res: N, even and at least 2L+2, or (N, M) points in β and α; None: the smallest grid that
            determines F.
        lmax: the highest degree L; None: the highest that the grid determines.
        normalization: of the ToS2Grid that it inverts; or a tensor (L+1,) of 4π / n.
        lmax_in: lmax of that ToS2Grid; None: lmax.
        dtype: of the tables; None: torch's default dtype.
        device: of the tables; None: torch's default device.
        backend: see `torchweft.o3`.

    Attributes:
        grid: x, (N, M, 3).
        alphas, betas, sha, shb: tables, as e3nn's.

    Raises:
        ShapeError: a resolution or a normalization that does not fit.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> x = torch.randn(3, 49, dtype=torch.float64)
        >>> to_grid = o3.ToS2Grid(6, (100, 101), dtype=torch.float64)
        >>> back = o3.FromS2Grid((100, 101), 6, dtype=torch.float64)
        >>> bool((back(to_grid(x)) - x).abs().max() < 1e-12)
        True
    """

    def __init__(
        self,
        res: Resolution = None,
        lmax: int | None = None,
        normalization: str | Tensor = "component",
        lmax_in: int | None = None,
        dtype: Dtype = None,
        device: Device = None,
        *,
        backend: str | None = None,
    ) -> None:
        lmax, resolution = _resolution(lmax, res)
        if isinstance(normalization, Tensor):
            factors = normalization.tolist()
        else:
            scales = _factors(normalization, lmax, lmax if lmax_in is None else lmax_in)
            factors = [4 * math.pi / n for n in scales]
        super().__init__(lmax, resolution, factors, True, dtype, device, backend)

    def forward(self, x: Tensor) -> Tensor:
        """The coefficients of signals.

        Args:
            x: (..., N, M), values on the grid.

        Returns:
            (..., (L+1)²) in x's dtype.
        """
        check_last("x", x, self.res_alpha)
        if x.shape[-2:-1] != (self.res_beta,):
            raise ShapeError(
                f"x is {tuple(x.shape)} but the grid is {self.res_beta} by {self.res_alpha}: it "
                f"must be (..., {self.res_beta}, {self.res_alpha}). Pass numbers on this grid."
            )
        rows = torch.einsum("am,...ba->...bm", self.sha, self.as_tables(x))
        return self.as_input(torch.einsum("mbi,...bm->...i", self.shb, rows), x)


def _resolution(lmax: int | None, res: Resolution) -> tuple[int, tuple[int, int]]:
    """L, (N, M): those that are given, or the least or the highest that lose nothing."""
    beta, alpha = (res, None) if isinstance(res, int) or res is None else res
    if lmax is None and beta is None and alpha is None:
        raise ShapeError(
            "lmax and res are both None: one of them must be given. Pass lmax=6, or res=100."
        )
    if beta is None:
        beta = 2 * (lmax + 1) if lmax is not None else 2 * ((alpha + 1) // 2)  # type: ignore[operator]
    if alpha is None:
        alpha = beta - 1 if lmax is None else max(2 * lmax + 1, beta - 1)
    if lmax is None:
        lmax = min(beta // 2 - 1, (alpha - 1) // 2)
    check_degrees(lmax=lmax)
    if beta % 2 or beta < 2 * (lmax + 1):
        raise ShapeError(
            f"the resolution in beta is {beta} and lmax {lmax}: it must be even, and at least "
            f"2 (lmax + 1). Pass res={2 * (lmax + 1)}, or a larger even number."
        )
    return lmax, (beta, alpha)


def _factors(normalization: str, lmax: int, lmax_in: int) -> list[float]:
    """n_l of a ToS2Grid to degree lmax_in, for the degrees to lmax."""
    kind = checked_choice("normalization", normalization, NORMALIZATIONS)
    if kind == "integral":
        return [1.0] * (lmax + 1)
    sizes = [2 * l + 1 if kind == "component" else 1 for l in range(lmax + 1)]  # noqa: E741
    return [math.sqrt(4 * math.pi / (size * (lmax_in + 1))) for size in sizes]
