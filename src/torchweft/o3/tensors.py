"""Irreps of signals on the sphere and of Cartesian tensors, with what turns one into the other.

SphericalTensor   f(x) = Σ_l A_l · Y_l(x),  (P f)(x) = p_val f(p_arg x)
CartesianTensor   t_ij… = Σ_k Q_k,ij… z_k,  with the symmetries of a formula
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchweft.errors import ShapeError
from torchweft.o3.grids.sphere import FromS2Grid, Resolution, ToS2Grid
from torchweft.o3.irreps.irreps import Irrep, Irreps, check_rows, parts_of
from torchweft.o3.irreps.rotation import angles_to_matrix, check_last
from torchweft.o3.layers.harmonics_and_radial import spherical_harmonics
from torchweft.o3.layers.reduced_products import ReducedTensorProducts

__all__ = ["CartesianTensor", "SignalOnGrid", "SphericalTensor"]


class SignalOnGrid(NamedTuple):
    """Points (N, M, 3) of the sphere, and the values (…, N, M) of signals there."""

    grid: Tensor
    values: Tensor


class SphericalTensor(Irreps):
    """The irreps of a signal on the sphere: f(x) = Σ_l A_l · Y_l(x), (P f)(x) = p_val f(p_arg x).

    Harmonics have the normalization "integral".  Signals are rows A (…, (L+1)²).

    Args:
        lmax: the highest degree L.
        p_val: 1 or -1, the sign of f under inversion.
        p_arg: 1 or -1, the sign of x.

    Source: e3nn's class of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> from torchweft import o3
        >>> o3.SphericalTensor(3, 1, -1)
        1x0e+1x1o+1x2e+1x3o
    """

    __slots__ = ()

    def __init__(self, lmax: int, p_val: int, p_arg: int) -> None:
        super().__init__([Irrep(l, p_val * p_arg**l) for l in range(lmax + 1)])  # noqa: E741

    def _harmonics(self, x: Tensor) -> Tensor:
        return spherical_harmonics(range(self.lmax + 1), x, True)

    def with_peaks_at(self, vectors: Tensor, values: Tensor | None = None) -> Tensor:
        """The signal Σ_i s_i Y(r_i) · Y that is v_i at the directions of r_i.

        Args:
            vectors: r, (N, 3); those with v = 0 are left out.
            values: v, (N,); None: the lengths of r.

        Returns:
            (dim,).

        Raises:
            ShapeError: p_val is -1, or no signal of these degrees has such values.

        >>> signal = SphericalTensor(4, 1, -1)
        >>> at = torch.tensor([[1.0, 0.0, 0.0], [3.0, 4.0, 0.0]])
        >>> signal.signal_xyz(signal.with_peaks_at(at), at).round(decimals=4)
        tensor([1., 5.])
        """
        check_last("vectors", vectors, 3)
        if vectors.dim() != 2 or self[0].ir.p != 1:
            raise ShapeError(
                f"vectors is {tuple(vectors.shape)} and the irreps are {self}: vectors must be "
                "(N, 3), and p_val 1, since lengths are even. Flatten vectors, or change p_val."
            )
        v = (
            torch.linalg.vector_norm(vectors, dim=1)
            if values is None
            else values.expand(vectors.shape[0])
        )
        kept = v != 0
        if not kept.any():
            return vectors.new_zeros(self.dim)
        v, y = v[kept], self._harmonics(vectors[kept])
        gram = y @ y.mT
        solution = torch.linalg.lstsq(gram, v[:, None]).solution
        error = (gram @ solution)[:, 0] - v
        if bool((error.abs() > torch.finfo(v.dtype).eps ** 0.5 * v.abs().max()).any()):
            raise ShapeError(
                f"no signal of degrees to {self.lmax} has these {len(v)} values: peaks are too "
                "many, too near or contradict each other. Raise lmax, or leave some out."
            )
        found: Tensor = solution[:, 0] @ y
        return found

    def sum_of_diracs(self, positions: Tensor, values: Tensor) -> Tensor:
        """The signal 4π / (L+1)² Σ_i v_i Y(r_i) · Y: v_i at r_i, if there is one.

        Args:
            positions: r, (…, N, 3).
            values: v, (…, N).

        Returns:
            (…, dim).

        >>> signal = SphericalTensor(7, 1, -1)
        >>> x = signal.sum_of_diracs(torch.eye(3)[:2], torch.tensor([-1.0, 1.0]))
        >>> signal.signal_xyz(x, torch.eye(3)[:2]).round(decimals=1)
        tensor([-1.,  1.])
        """
        check_last("positions", positions, 3)
        y = self._harmonics(positions) * values[..., None]
        return y.sum(-2) * (4 * math.pi / (self.lmax + 1) ** 2)

    def from_samples_on_s2(
        self, positions: Tensor, values: Tensor, res: Resolution = 100
    ) -> Tensor:
        """The signal that has at each point of a grid the value of the nearest sample.

        Args:
            positions: (…, N, 3), taken at length 1.
            values: (…, N).
            res: of the grid, see FromS2Grid.

        Returns:
            (…, dim).
        """
        check_last("positions", positions, 3)
        lead = torch.broadcast_shapes(positions.shape[:-1], values.shape)  # type: ignore[no-untyped-call]
        if 0 in lead:
            return values.new_zeros(*lead[:-1], self.dim)
        units = torch.nn.functional.normalize(positions, dim=-1).expand(*lead, 3)
        back = FromS2Grid(res, self.lmax, "integral", dtype=values.dtype, device=values.device)
        nearest = torch.cdist(back.grid.flatten(0, 1), units).argmin(-1)
        found = values.expand(lead).gather(-1, nearest)
        projected: Tensor = back(found.reshape(*lead[:-1], back.res_beta, back.res_alpha))
        return projected

    def norms(self, signal: Tensor) -> Tensor:
        """|A_l|: (…, L+1) of signals (…, dim).

        >>> SphericalTensor(1, 1, -1).norms(torch.tensor([1.5, 0.0, 3.0, 4.0]))
        tensor([1.5000, 5.0000])
        """
        check_rows("signal", signal, self, self)
        parts = parts_of(signal, [item.dim for item in self])
        return torch.stack([torch.linalg.vector_norm(part, dim=-1) for part in parts], -1)

    def signal_xyz(self, signal: Tensor, r: Tensor) -> Tensor:
        """f(r/|r|): values of signals at points.

        Args:
            signal: (*A, dim), coefficients.
            r: (*B, 3), points; their lengths do not matter.

        Returns:
            (*A, *B).
        """
        check_rows("signal", signal, self, self)
        values: Tensor = torch.tensordot(signal, self._harmonics(r), ([-1], [-1]))
        return values

    def signal_on_grid(
        self, signal: Tensor, res: Resolution = 100, normalization: str = "integral"
    ) -> SignalOnGrid:
        """The points of a grid, and the values there, see ToS2Grid."""
        there = ToS2Grid(self.lmax, res, normalization, signal.dtype, signal.device)
        return SignalOnGrid(there.grid, there(signal))

    def plotly_surface(
        self,
        signals: Tensor,
        centers: Tensor | None = None,
        res: Resolution = 100,
        radius: bool = True,
        relu: bool = False,
        normalization: str = "integral",
    ) -> list[dict[str, Any]]:
        """Arguments of plotly's Surface, a dictionary for each of the signals (…, dim).

        Args: those of `plot`, for each signal; centers are (…, 3).
        """
        rows = signals.reshape(-1, self.dim)
        places = [None] * len(rows) if centers is None else centers.reshape(-1, 3)
        traces = []
        for row, center in zip(rows, places, strict=True):
            points, values = self.plot(row, center, res, radius, relu, normalization)
            x, y, z = (part.numpy(force=True) for part in points.unbind(-1))
            traces.append({"x": x, "y": y, "z": z, "surfacecolor": values.numpy(force=True)})
        return traces

    def plot(
        self,
        signal: Tensor,
        center: Tensor | None = None,
        res: Resolution = 100,
        radius: bool = True,
        relu: bool = False,
        normalization: str = "integral",
    ) -> tuple[Tensor, Tensor]:
        """A closed surface: the grid with its first and last row at the poles, and α = 2π added.

        Args:
            signal: (dim,).
            center: (3,), added to the points.
            res: of the grid, see ToS2Grid.
            radius: whether points are at the distance |f|, not 1.
            relu: negative values as 0.
            normalization: see ToS2Grid.

        Returns:
            Points (N, M+1, 3) and values (N, M+1).
        """
        points, values = self.signal_on_grid(signal, res, normalization)
        values = values.relu() if relu else values
        pole = points.new_tensor([0.0, 1.0, 0.0]).expand_as(points[:1])
        ends = (row.mean().expand_as(row) for row in (values[:1], values[-1:]))
        first, last = ends
        values = torch.cat([first, values[1:-1], last])
        points = torch.cat([pole, points[1:-1], -pole])
        values = torch.cat([values, values[:, :1]], 1)
        points = torch.cat([points, points[:, :1]], 1)
        if radius:
            points = points * values.abs()[..., None]
        return (points if center is None else points + center), values

    def find_peaks(self, signal: Tensor, res: int = 100) -> tuple[Tensor, Tensor]:
        """Maxima of a signal (dim,) among the points of two grids, one with its poles elsewhere.

        Args:
            signal: (dim,).
            res: of the grids in β, see ToS2Grid.

        Returns:
            Points (P, 3) and values (P,).
        """
        quarter = signal.new_full((), math.pi / 2)
        turn = angles_to_matrix(quarter, quarter, quarter)
        first = self._peaks_on_grid(signal, res)
        turned = self._peaks_on_grid(self.D_from_matrix(turn) @ signal, res)
        points = turned.grid @ turn
        alone = (torch.cdist(first.grid, points) >= 2 * math.pi / res).all(1)
        found = torch.cat([first.grid[alone], points])
        return found, torch.cat([first.values[alone], turned.values])

    def _peaks_on_grid(self, signal: Tensor, res: Resolution) -> SignalOnGrid:
        """Points above their neighbours in β and in α, and their values."""
        grid, f = self.signal_on_grid(signal, res)
        inner = f[1:-1, 1:-1]
        peak = (inner > f[:-2, 1:-1]) & (inner > f[2:, 1:-1])
        peak &= (inner > f[1:-1, :-2]) & (inner > f[1:-1, 2:])
        return SignalOnGrid(grid[1:-1, 1:-1][peak], inner[peak])


class CartesianTensor(Irreps):
    """The irreps of Cartesian tensors t_ij… with index symmetries, and the change of basis.

    Methods take `rtp`, a ReducedTensorProducts from `reduced_tensor_products`; None: one is made,
    whose table is computed once.

    Args:
        formula: indices and symmetries, see ReducedTensorProducts: "ij=ji", "ij=-ji", "ijk=jik".

    Attributes:
        formula: as given.
        indices: of the formula.

    Source: e3nn's class of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> tensor = o3.CartesianTensor("ij=ji")
        >>> tensor
        1x0e+1x2e
        >>> t = torch.arange(9.0).view(3, 3)
        >>> tensor.to_cartesian(tensor.from_cartesian(t)).round(decimals=4)  # (t + tᵀ) / 2
        tensor([[0., 2., 4.],
                [2., 4., 6.],
                [4., 6., 8.]])
    """

    __slots__ = ("formula", "indices")

    def __init__(self, formula: str) -> None:
        self.formula = formula
        self.indices = formula.split("=")[0].strip()
        super().__init__(self.reduced_tensor_products().irreps_out)

    def reduced_tensor_products(self, data: Tensor | None = None) -> ReducedTensorProducts:
        """The change of basis: a ReducedTensorProducts of one vector for each index.

        Args:
            data: a tensor of the device and dtype that it is for; None: torch's defaults.

        Returns:
            The module, for `rtp`.
        """
        made = ReducedTensorProducts(self.formula, **dict.fromkeys(self.indices, "1o"))  # type: ignore[arg-type]
        return made if data is None else made.to(data.device, data.dtype)

    def from_cartesian(self, data: Tensor, rtp: ReducedTensorProducts | None = None) -> Tensor:
        """z = Q t: the irreps of Cartesian tensors.

        Args:
            data: t, (…, 3, 3, …); a part without the symmetries is projected out.
            rtp: see the class.

        Returns:
            (…, dim).
        """
        count = len(self.indices)
        if data.shape[-count:] != (3,) * count:
            raise ShapeError(
                f"data is {tuple(data.shape)} but {self.formula!r} has {count} indices: its last "
                f"dimensions must be {(3,) * count}. Pass such tensors."
            )
        rtp = self.reduced_tensor_products(data) if rtp is None else rtp
        flat = rtp.as_tables(data).flatten(-count)
        return rtp.as_input(flat @ rtp.change_of_basis.flatten(1).mT, data)

    def from_vectors(self, *xs: Tensor, rtp: ReducedTensorProducts | None = None) -> Tensor:
        """The irreps of x_1 ⊗ x_2 ⊗ ….

        Args:
            *xs: vectors (…, 3), one for each index.
            rtp: see the class.

        Returns:
            (…, dim).
        """
        rtp = self.reduced_tensor_products(xs[0]) if rtp is None else rtp
        found: Tensor = rtp(*xs)
        return found

    def to_cartesian(self, data: Tensor, rtp: ReducedTensorProducts | None = None) -> Tensor:
        """t = Σ_k z_k Q_k: Cartesian tensors of irreps, the inverse of `from_cartesian`.

        Args:
            data: z, (…, dim).
            rtp: see the class.

        Returns:
            (…, 3, 3, …).
        """
        check_rows("data", data, self, self)
        rtp = self.reduced_tensor_products(data) if rtp is None else rtp
        basis = rtp.change_of_basis
        found = rtp.as_tables(data) @ basis.flatten(1)
        return rtp.as_input(found.reshape(*data.shape[:-1], *basis.shape[1:]), data)
