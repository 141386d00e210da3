"""Functions of the length of an edge: bases and cutoffs.

BesselBasis:       b_n(r) = √(2/r_max) sin(nπ r/r_max) / r,  n = 1 … num_basis
PolynomialCutoff:  f(r) = (1-t)³ Σ_{k<p} (k+1)(k+2)/2 t^k,  t = min(r/r_max, 1)

On a GPU both are one kernel, and so are their gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.rotation import check_last
from torchweft.o3.irreps.wigner import working_dtype
from torchweft.o3.pointwise import bessel_key, cached_rows, cutoff_key, first_rows, serves_rows

__all__ = ["BesselBasis", "PolynomialCutoff", "soft_one_hot_linspace"]

_BASES = ("gaussian", "cosine", "smooth_finite", "fourier", "bessel")


class BesselBasis(torch.nn.Module):
    """b_n(r) = √(2/r_max) sin(nπ r/r_max) / r, orthonormal with weight r² on [0, r_max].

    b_n(0) = √(2/r_max) nπ/r_max, and every derivative is right there.  No cutoff: multiply by one.

    Args:
        r_max: the radius at which all are zero.
        num_basis: how many.
        backend: "triton", "torch", or None for the fastest that can serve.
    """

    def __init__(self, r_max: float, num_basis: int = 8, *, backend: str | None = None):
        super().__init__()
        _check_positive(r_max=r_max, num_basis=num_basis)
        self.r_max, self.num_basis, self.backend = float(r_max), num_basis, backend

    def forward(self, r: Tensor) -> Tensor:
        """(..., 1) to (..., num_basis), in r's dtype; half precision computes in float32."""
        called = "bessel", self.r_max, self.num_basis, self.backend
        y = cached_rows(called, r)
        if y is not None:
            return y
        check_last("r", r, 1)
        if serves_rows(r, self.backend):
            return first_rows(called, bessel_key(self.r_max, self.num_basis), r, self.backend)
        return _bessel(r.to(working_dtype(r.dtype)), self.r_max, self.num_basis).to(r.dtype)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"r_max={self.r_max}, num_basis={self.num_basis}"


class PolynomialCutoff(torch.nn.Module):
    """f(r) = 1 - (p+1)(p+2)/2 t^p + p(p+2) t^(p+1) - p(p+1)/2 t^(p+2),  t = r/r_max.

    Computed as (1-t)³ Σ_{k<p} (k+1)(k+2)/2 t^k, the same polynomial without cancellation.  Zero
    from r_max on, with its gradients; the first two vanish at r_max, the first p-1 at 0.

    Args:
        r_max: where it ends.
        p: 1 or more.
        backend: "triton", "torch", or None for the fastest that can serve.
    """

    def __init__(self, r_max: float, p: int = 6, *, backend: str | None = None):
        super().__init__()
        _check_positive(r_max=r_max, p=p)
        if p != int(p):
            raise DTypeError(f"p is {p!r}: it must be an integer. Pass p=6.")
        self.r_max, self.p, self.backend = float(r_max), int(p), backend

    def forward(self, r: Tensor) -> Tensor:
        """f(r) for r of any shape, in its dtype; half precision computes in float32."""
        if serves_rows(r, self.backend):
            called = "cutoff", self.r_max, self.p, self.backend
            rows = r if r.shape[-1:] == (1,) else r[..., None]
            y = cached_rows(called, rows)
            if y is None:
                y = first_rows(called, cutoff_key(self.r_max, self.p), rows, self.backend)
            return y if rows is r else y.view(r.shape)
        t = (r.to(working_dtype(r.dtype)) / self.r_max).clamp(max=1)
        total = torch.full_like(t, self.p * (self.p + 1) / 2)
        for k in reversed(range(self.p - 1)):
            total = total * t + (k + 1) * (k + 2) / 2
        return ((1 - t) ** 3 * total).to(r.dtype)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"r_max={self.r_max}, p={self.p}"


def soft_one_hot_linspace(
    x: Tensor, start: float, end: float, number: int, basis: str, cutoff: bool
) -> Tensor:
    """y_i(x) = f((x - c_i) / d) / Z with even centres c_i at distance d, Σ y_i² about 1.

    | basis | f(t), or y_i(x) of s = (x - start) / (end - start) |
    |---|---|
    | gaussian | exp(-t²) / 1.12 |
    | cosine | cos(π t/2) where abs(t) < 1 |
    | smooth_finite | 1.14136 exp(2 - 1/(1+t) - 1/(1-t)) where abs(t) < 1 |
    | fourier | cos(iπs), or with a cutoff sin((i+1)πs) in (0, 1), / √(1/4 + number/2) |
    | bessel | √(2/(end-start)) sin((i+1)πs) / (x - start), with a cutoff in (0, 1) |

    Args:
        x: (...).
        start: of the interval.
        end: of the interval.
        number: of functions.
        basis: one of the table.
        cutoff: without one the first and the last centre are start and end; with one they lie
            inside, and all but gaussians are zero outside.

    Returns:
        (..., number), in x's dtype; half precision computes in float32.
    """
    _check_positive(number=number, width=end - start)
    if basis not in _BASES:
        raise ShapeError(
            f"basis is {basis!r}: it must be one of {', '.join(_BASES)}. Pass basis='gaussian'."
        )
    v = x.to(working_dtype(x.dtype))[..., None]
    if basis in ("fourier", "bessel"):
        found = _waves(v - start, end - start, number, basis, cutoff)
    else:
        step = (end - start) / (number + 1 if cutoff else max(number - 1, 1))
        places = torch.arange(number, dtype=v.dtype, device=v.device) + bool(cutoff)
        found = _bump((v - start) / step - places, basis)
    return found.to(x.dtype)


def _bump(t: Tensor, basis: str) -> Tensor:
    if basis == "gaussian":
        return (-t.square()).exp() / 1.12
    inside = t.abs() < 1
    t = torch.where(inside, t, 0)
    if basis == "cosine":
        return torch.where(inside, (math.pi / 2 * t).cos(), 0)
    return torch.where(inside, 1.14136 * (2 - 1 / (1 + t) - 1 / (1 - t)).exp(), 0)


def _waves(x: Tensor, width: float, number: int, basis: str, cutoff: bool) -> Tensor:
    """Sines and cosines of x in [0, width]."""
    inside = (x > 0) & (x < width)
    if basis == "bessel":
        found = _bessel(x, width, number)
    else:
        turns = torch.arange(number, dtype=x.dtype, device=x.device) + bool(cutoff)
        angles = math.pi / width * turns * x
        found = (angles.sin() if cutoff else angles.cos()) / math.sqrt(0.25 + number / 2)
    return torch.where(inside, found, 0) if cutoff else found


def _bessel(r: Tensor, width: float, number: int) -> Tensor:
    """√(2/width) sin(nπ r/width) / r: (..., 1) to (..., number)."""
    roots = torch.arange(1, number + 1, dtype=r.dtype, device=r.device) * (math.pi / width)
    return math.sqrt(2 / width) * roots * _sinc(roots * r)


def _sinc(x: Tensor) -> Tensor:
    """sin x / x, by its series where |x| < 1: derivatives of the quotient cancel there."""
    small = x.abs() < 1
    square = torch.where(small, x, 0).square()
    series = torch.ones_like(x)
    terms = 8 if x.dtype == torch.float32 else 12  # more are lost, in two derivatives too
    for k in reversed(range(1, terms)):
        series = 1 - series * square / (2 * k * (2 * k + 1))
    away = torch.where(small, 1, x)
    return torch.where(small, series, away.sin() / away)


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not value > 0:
            raise ShapeError(f"{name} is {value!r}: it must be positive. Pass a larger {name}.")
