"""Real spherical harmonics as polynomials of (x, y, z), with y the polar axis.

Y_l^{m≥0} = q_lm(y, r²) Re (z + ix)^m,  Y_l^{-m} = q_lm(y, r²) Im (z + ix)^m,
q_lm = a_lm y q_{l-1,m} - b_lm r² q_{l-2,m}

No angles and no divisions: every gradient is right everywhere, at the poles and at zero too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchweft.core.operators.operator import compiling, transformed, unwatched
from torchweft.errors import ShapeError
from torchweft.o3.backends import refuse_backend
from torchweft.o3.irreps.irreps import Irrep, Irreps, IrrepsLike, MulIr
from torchweft.o3.irreps.rotation import check_last, unit
from torchweft.o3.irreps.wigner import check_degrees, working_dtype
from torchweft.o3.pointwise import (
    MOST_HARMONICS_DEGREE,
    cached_rows,
    first_rows,
    harmonics_key,
    harmonics_scale,
    ladder_factors,
    ladder_seed,
    serves_rows,
)

__all__ = ["SphericalHarmonics", "spherical_harmonics"]

Degrees: TypeAlias = "int | Iterable[int] | IrrepsLike"
"""A degree, degrees in any order and number, or irreps."""


def spherical_harmonics(
    l: Degrees,  # noqa: E741 - e3nn's name
    x: Tensor,
    normalize: bool,
    normalization: str = "integral",
    *,
    backend: str | None = None,
) -> Tensor:
    """Y_l(x), homogeneous polynomials of degree l with Y_l(R x) = D_l(R) Y_l(x).

    Args:
        l: a degree, degrees in any order, or irreps, all of the parities p^l for one p.
        x: (..., 3).
        normalize: evaluate at x / |x|.  The zero vector then gives Y_0, and 0 for l > 0, with
            gradients 0.
        normalization: of Y_l on the unit sphere: |Y_l|² is (2l+1)/4π for "integral" (so that
            ∫ (Y_l^m)² = 1), 2l+1 for "component", 1 for "norm".
        backend: "triton", "numba", "torch", or None for the fastest that can serve.

    Returns:
        (..., Σ 2l+1) in x's dtype; half precision computes in float32.  Differentiable to any
        order.  To degree 6 one kernel on a GPU, one loop of many float32 or float64 vectors on the
        CPU, and one for each gradient; else two to four elementwise operations a component, which
        torch.compile fuses.

    Raises:
        ShapeError: x is not (..., 3), a parity does not fit, or there are no degrees.
        DTypeError: x is not real, or l does not read as degrees.
        BackendError: triton or numba was requested and cannot serve.
    """
    given = tuple(l) if type(l) is list else l
    known = (type(given), given) if type(given) in _HASHABLE else None
    called = known and (known, normalize, normalization, backend)
    y = None if called is None else cached_rows(called, x)
    if y is None:
        y = _first(called, _read(l, None)[0], x, normalize, normalization, backend)
    return y


class SphericalHarmonics(torch.nn.Module):
    """`spherical_harmonics` as a module.

    Args:
        irreps_out: what `spherical_harmonics` takes as l.
        normalize: as there.
        normalization: as there.
        irreps_in: "1o" or "1e", the parity of x; None: "1e" if irreps_out needs it, else "1o".
        backend: as there.

    Attributes:
        irreps_in: one vector.
        irreps_out: of the result.
    """

    def __init__(
        self,
        irreps_out: Degrees,
        normalize: bool,
        normalization: str = "integral",
        irreps_in: IrrepsLike | None = None,
        *,
        backend: str | None = None,
    ):
        super().__init__()
        self.normalize, self.normalization, self.backend = normalize, normalization, backend
        self._degrees, self.irreps_in = _read(irreps_out, irreps_in)
        parity = self.irreps_in[0].ir.p
        self.irreps_out = Irreps(
            [Irrep(degree, parity**degree) for degree in self._degrees]
        ).simplify()
        harmonics_scale(normalization, 0)  # that it is one

    def forward(self, x: Tensor) -> Tensor:
        """Y(x): (..., 3) to (..., irreps_out.dim)."""
        called = self._degrees, self.normalize, self.normalization, self.backend
        y = cached_rows(called, x)
        return _first(called, self._degrees, x, *called[1:]) if y is None else y


_HASHABLE = (int, str, tuple, range, Irreps)
"""What may be given as degrees, and be known again by its value."""


def _first(
    called: Hashable | None,
    degrees: tuple[int, ...],
    x: Tensor,
    normalize: bool,
    normalization: str,
    backend: str | None,
) -> Tensor:
    """The harmonics of a call that is not cached."""
    check_last("x", x, 3)
    size = sum(2 * degree + 1 for degree in degrees)
    if 0 < max(degrees) <= MOST_HARMONICS_DEGREE:
        if serves_rows(x, backend, size):
            return first_rows(called, harmonics_key(degrees, normalize, normalization), x, backend)
    elif backend not in (None, "torch"):
        refuse_backend(backend, x.device.type, f"harmonics of the degrees {degrees}")
    return _evaluate(degrees, x, normalize, normalization)


def _evaluate(degrees: tuple[int, ...], x: Tensor, normalize: bool, normalization: str) -> Tensor:
    # components in front: numbers of an operation then are neighbours
    v, highest = _as(x.movedim(-1, 0).contiguous(), working_dtype(x.dtype)), max(degrees)
    if normalize and highest:
        v = unit(v, 0)
    if highest < len(_LOWEST):
        rows = _lowest(degrees, v)
        found = torch.stack([y for degree in degrees for y in rows[degree]], -1)
        plain = not (compiling() or transformed()) and unwatched(v)
        factors = (_kept_factors if plain else _factors)(degrees, normalization, v.dtype, v.device)
        return _as(found * factors, x.dtype)
    # of a unit vector 1 without a gradient, and 0 of the zero vector
    square = v.any(0).to(v.dtype) if normalize else v.square().sum(0)
    rows = _components(set(degrees), v, square, normalization)
    found = torch.stack([y for degree in degrees for y in rows[degree]])
    return _as(found.movedim(0, -1).contiguous(), x.dtype)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; torch takes as long to convert nothing as to multiply a few numbers."""
    return x if x.dtype == dtype else x.to(dtype)


_LOWEST = (
    (1.0,),
    (math.sqrt(3),) * 3,
    tuple(math.sqrt(15) * root for root in (1, 1, 1 / math.sqrt(3), 1, 0.5)),
)
"""Factors of Y_0, Y_1 and Y_2 in normalization "component", which are not by ladders."""


def _lowest(degrees: Collection[int], v: Tensor) -> dict[int, list[Tensor]]:
    """Y_l^-l … Y_l^l of each degree to 2 at vectors v (3, ...), but for their factors."""
    x, y, z = v.unbind()
    rows = {1: [x, y, z]}
    if 0 in degrees:
        rows[0] = [torch.ones_like(x)]
    if 2 in degrees:
        xx, zz = x * x, z * z
        rows[2] = [x * z, x * y, torch.sub(y * y, xx + zz, alpha=0.5), y * z, zz - xx]
    return rows


def _factors(
    degrees: tuple[int, ...], normalization: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(Σ 2l+1)."""
    found = [
        f * harmonics_scale(normalization, degree) for degree in degrees for f in _LOWEST[degree]
    ]
    return torch.tensor(found, dtype=dtype, device=device)


@functools.lru_cache(maxsize=256)
def _kept_factors(
    degrees: tuple[int, ...], normalization: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Cached for all calls that nothing traces: a tracer's tensors must not outlive it."""
    with torch.inference_mode(False):
        return _factors(degrees, normalization, dtype, device)


def _components(
    degrees: Collection[int], v: Tensor, square: Tensor, normalization: str
) -> dict[int, list[Tensor]]:
    """Y_l^-l … Y_l^l of each degree at vectors v (3, ...) of squared length `square` (...)."""
    x, y, z = v.unbind()
    rows = {degree: [y] * (2 * degree + 1) for degree in degrees}
    cos, sin = z, x  # of z + ix to the power m
    for m in range(max(degrees) + 1):
        if m > 1:
            cos, sin = torch.addcmul(z * cos, x, sin, value=-1), torch.addcmul(z * sin, x, cos)
        for degree, q in _ladder(m, max(degrees), y, square, normalization):
            if degree in rows and m:
                rows[degree][degree - m], rows[degree][degree + m] = q * sin, q * cos
            elif degree in rows:
                rows[degree][degree] = q if isinstance(q, Tensor) else torch.full_like(y, q)
    return rows


def _ladder(
    m: int, lmax: int, y: Tensor, square: Tensor, normalization: str
) -> Iterator[tuple[int, Tensor | float]]:
    """(l, q_lm) for l from m, where q is a number, to lmax."""
    before: Tensor | float = 0.0
    q: Tensor | float = ladder_seed(m, normalization)
    yield m, q
    for degree in range(m + 1, lmax + 1):
        a, b = ladder_factors(degree, m, normalization)
        if isinstance(q, Tensor):
            before, q = q, torch.addcmul(square * (-b * before), y, q, value=a)
        else:
            before, q = q, (a * q) * y
        yield degree, q


def _read(given: Degrees, irreps_in: IrrepsLike | None) -> tuple[tuple[int, ...], Irreps]:
    """The degrees, and the irreps of the vector."""
    irreps: list[Irrep] = []
    degrees: tuple[Any, ...]
    if isinstance(given, str | Irreps | Irrep | MulIr):
        irreps = [ir for mul, ir in Irreps(given) for _ in range(mul)]
        degrees = tuple(ir.l for ir in irreps)
    else:
        degrees = tuple(given) if isinstance(given, Iterable) else (given,)
        for degree in degrees:
            check_degrees(l=degree)
    if not degrees:
        raise ShapeError("there are no degrees: there must be one or more. Pass l=[0, 1].")
    pseudo = any(ir.l % 2 and ir.p == 1 for ir in irreps)
    vector = Irreps(("1e" if pseudo else "1o") if irreps_in is None else irreps_in)
    if vector not in (Irreps("1o"), Irreps("1e")):
        raise ShapeError(
            f"irreps_in is {vector}: spherical harmonics are of one vector. Pass '1o', or '1e'."
        )
    parity = vector[0].ir.p
    for ir in irreps:
        if ir.p != parity**ir.l:
            raise ShapeError(
                f"irreps_out has {ir}, but of {vector} the harmonics of degree {ir.l} must be "
                f"{Irrep(ir.l, parity**ir.l)}. Change that irrep, or irreps_in."
            )
    return degrees, vector
