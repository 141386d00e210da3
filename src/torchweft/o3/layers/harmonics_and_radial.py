"""Functions of edges: spherical harmonics of vectors, bases and cutoffs of lengths.

Y_l^{m≥0} = q_lm(y, r²) Re (z + ix)^m,  Y_l^{-m} = q_lm(y, r²) Im (z + ix)^m,
q_lm = a_lm y q_{l-1,m} - b_lm r² q_{l-2,m},  y the polar axis

BesselBasis:       b_n(r) = √(2/r_max) sin(nπ r/r_max) / r,  n = 1 … num_basis
PolynomialCutoff:  f(r) = (1-t)³ Σ_{k<p} (k+1)(k+2)/2 t^k,  t = min(r/r_max, 1)
RadialBasis:       b_n(r) f(r)

Harmonics are polynomials of (x, y, z), without angles and divisions: every gradient is right
everywhere, at the poles and at zero too.  On a GPU each function is one kernel, and so are its
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.core.operators.operator import compiling
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.backends import refuse_backend
from torchweft.o3.edge_vectors.operator import edge_lengths
from torchweft.o3.irreps.irreps import Irrep, Irreps, IrrepsLike, is_irrep
from torchweft.o3.irreps.rotation import check_last, unit
from torchweft.o3.irreps.wigner import check_degrees, constant_tensor, working_dtype
from torchweft.o3.pointwise import cached_rows, first_rows, serves_rows
from torchweft.o3.row_programs import (
    MOST_HARMONICS_DEGREE,
    bessel_key,
    cutoff_key,
    edge_key,
    harmonics_key,
    harmonics_scale,
    ladder_factors,
    ladder_seed,
    radial_basis_key,
)

__all__ = [
    "BesselBasis",
    "PolynomialCutoff",
    "RadialBasis",
    "SphericalHarmonics",
    "soft_one_hot_linspace",
    "soft_unit_step",
    "spherical_harmonics",
]

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
        x: (..., 3), real.
        normalize: whether to evaluate at x / |x|.  The zero vector then gives Y_0, and 0 for l > 0,
            with gradients 0.
        normalization: of Y_l on the unit sphere: |Y_l|² is (2l+1)/4π for "integral" (so that
            ∫ (Y_l^m)² = 1), 2l+1 for "component", 1 for "norm".
        backend: see `torchweft.o3`.

    Returns:
        (..., Σ 2l+1) in x's dtype; half precision computes in float32.  Differentiable to any
        order, at the poles and at 0 too.

    Raises:
        ShapeError: x is not (..., 3), a parity does not fit, or there are no degrees.
        DTypeError: x is not real, or l does not read as degrees.
        BackendError: triton or numba was requested and cannot serve.

    Cost: to degree 6 one kernel on a GPU, one loop over many float32 or float64 vectors on the CPU,
    and one more for each gradient; else two to four elementwise operations a component, which
    torch.compile fuses.

    Source: basis, order and normalisations are e3nn's, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> direction = torch.tensor([[0.0, 0.0, 2.0]])
        >>> o3.spherical_harmonics(1, direction, normalize=True, normalization="component")
        tensor([[0.0000, 0.0000, 1.7321]])
        >>> o3.spherical_harmonics(o3.Irreps("0e+1o+2e"), torch.randn(10, 3), True).shape
        torch.Size([10, 9])
    """
    given = tuple(l) if type(l) is list else l
    called = None
    if type(given) in _HASHABLE:
        called = (type(given), given), normalize, normalization, backend
        y = cached_rows(called, x)
        if y is not None:
            return y[0]
    return _first(called, x, _read(l, None)[0], normalize, normalization, backend)


class SphericalHarmonics(torch.nn.Module):
    """`spherical_harmonics` as a module: Y_l(x) of vectors x.

    Args:
        irreps_out: a degree, degrees in any order, or irreps, as `l` of `spherical_harmonics`.
        normalize: whether to evaluate at x / |x|.
        normalization: "integral", "component" or "norm", see `spherical_harmonics`.
        irreps_in: "1o" or "1e", the parity of x; None: "1e" if irreps_out needs it, else "1o".
        backend: see `torchweft.o3`.

    Attributes:
        irreps_in: one vector.
        irreps_out: of the result.

    Raises:
        ShapeError: parities that do not fit, or no degrees.

    Source: e3nn's layer of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> harmonics = o3.SphericalHarmonics("0e+1o+2e", normalize=True)
        >>> harmonics(torch.randn(10, 3)).shape
        torch.Size([10, 9])
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
        harmonics_scale(normalization, 0)  # raises for another name

    def forward(self, x: Tensor) -> Tensor:
        """The harmonics of x.

        Args:
            x: (..., 3), vectors.

        Returns:
            (..., irreps_out.dim) in x's dtype; half precision computes in float32.
        """
        y = cached_rows(self.called, x)
        return _first(self.called, x, *self.called) if y is None else y[0]

    @property
    def called(self) -> tuple[tuple[int, ...], bool, str, str | None]:
        """Its arguments, as the key of its calls."""
        return self._degrees, self.normalize, self.normalization, self.backend


_HASHABLE = (int, str, tuple, range, Irreps)
"""Types of degrees whose calls are cached by their value."""


def _first(
    called: Hashable | None,
    x: Tensor,
    degrees: tuple[int, ...],
    normalize: bool,
    normalization: str,
    backend: str | None,
) -> Tensor:
    """The harmonics of a call that is not cached; `called` is its key, None: not to be cached."""
    check_last("x", x, 3)
    size = sum(2 * degree + 1 for degree in degrees)
    if 0 < max(degrees) <= MOST_HARMONICS_DEGREE:
        if serves_rows(x, backend, size):
            key = harmonics_key(degrees, normalize, normalization)
            return first_rows(called, key, x, backend)[0]
    elif backend not in (None, "torch"):
        refuse_backend(backend, x.device.type, f"harmonics of the degrees {degrees}")
    return _evaluate(degrees, x, normalize, normalization)


def _evaluate(degrees: tuple[int, ...], x: Tensor, normalize: bool, normalization: str) -> Tensor:
    # components in front: operations then read contiguous numbers
    v, highest = _as(x.movedim(-1, 0).contiguous(), working_dtype(x.dtype)), max(degrees)
    if normalize and highest:
        v = unit(v, 0)
    if highest < len(_LOWEST):
        rows = _lowest(degrees, v)
        found = torch.stack([y for degree in degrees for y in rows[degree]], -1)
        y = found * _factors(v, degrees, normalization)
        return y if y.dtype == x.dtype else y.to(x.dtype)
    # of a unit vector 1 without a gradient, and 0 of the zero vector
    square = v.any(0).to(v.dtype) if normalize else v.square().sum(0)
    rows = _components(set(degrees), v, square, normalization)
    found = torch.stack([y for degree in degrees for y in rows[degree]])
    return _as(found.movedim(0, -1).contiguous(), x.dtype)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype; without a call of torch where it has that dtype."""
    return x if x.dtype == dtype else x.to(dtype)


_LOWEST = (
    (1.0,),
    (math.sqrt(3),) * 3,
    tuple(math.sqrt(15) * root for root in (1, 1, 1 / math.sqrt(3), 1, 0.5)),
)
"""Factors of Y_0, Y_1 and Y_2 in normalization "component", computed without recurrences."""


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


@constant_tensor
def _factors(
    degrees: tuple[int, ...], normalization: str, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(Σ 2l+1): the factor of each component."""
    found = [
        f * harmonics_scale(normalization, degree) for degree in degrees for f in _LOWEST[degree]
    ]
    return torch.tensor(found, dtype=dtype, device=device)


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
    if _has_irreps(given):
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


def _has_irreps(given: Degrees) -> TypeGuard[IrrepsLike]:
    """Whether degrees are given as irreps: text, an Irreps, an Irrep, or a list of them."""
    if isinstance(given, str | Irreps) or is_irrep(given):
        return True
    return isinstance(given, list | tuple) and any(isinstance(ir, str | tuple) for ir in given)


_BASES = ("gaussian", "cosine", "smooth_finite", "fourier", "bessel")


class BesselBasis(torch.nn.Module):
    """b_n(r) = √(2/r_max) sin(nπ r/r_max) / r, orthonormal with weight r² on [0, r_max].

    b_n(0) = √(2/r_max) nπ/r_max, and every derivative at 0 is exact too.  The functions do not
    vanish smoothly at r_max: multiply them by a cutoff, or use `RadialBasis`.

    Args:
        r_max: the radius where all functions are zero, in the unit of r.
        num_basis: number of functions.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: a number that is not positive.

    Source: Gasteiger, Groß, Günnemann: Directional message passing, ICLR 2020.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.BesselBasis(5.0, num_basis=8)(torch.rand(10, 1)).shape
        torch.Size([10, 8])
    """

    def __init__(self, r_max: float, num_basis: int = 8, *, backend: str | None = None):
        super().__init__()
        _check_positive(r_max=r_max, num_basis=num_basis)
        self.r_max, self.num_basis, self.backend = float(r_max), num_basis, backend

    def forward(self, r: Tensor) -> Tensor:
        """The functions at r.

        Args:
            r: (..., 1), lengths.

        Returns:
            (..., num_basis) in r's dtype; half precision computes in float32.
        """
        called = "bessel", self.r_max, self.num_basis, self.backend
        y = cached_rows(called, r)
        if y is not None:
            return y[0]
        check_last("r", r, 1)
        if serves_rows(r, self.backend, self.num_basis):
            return first_rows(called, bessel_key(self.r_max, self.num_basis), r, self.backend)[0]
        return _bessel(r.to(working_dtype(r.dtype)), self.r_max, self.num_basis).to(r.dtype)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"r_max={self.r_max}, num_basis={self.num_basis}"


class PolynomialCutoff(torch.nn.Module):
    """f(r) = 1 - (p+1)(p+2)/2 t^p + p(p+2) t^(p+1) - p(p+1)/2 t^(p+2),  t = r/r_max.

    Computed as (1-t)³ Σ_{k<p} (k+1)(k+2)/2 t^k, the same polynomial without cancellation.  Zero
    from r_max on, with its gradients; the first two derivatives vanish at r_max, the first p-1 at
    0.

    Args:
        r_max: the radius from which on it is zero, in the unit of r.
        p: an integer, 1 or more.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: a number that is not positive.

    Source: Gasteiger, Groß, Günnemann: Directional message passing, ICLR 2020.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.PolynomialCutoff(5.0)(torch.tensor([0.0, 2.5, 6.0]))
        tensor([1.0000, 0.8555, 0.0000])
    """

    def __init__(self, r_max: float, p: int = 6, *, backend: str | None = None):
        super().__init__()
        _check_positive(r_max=r_max, p=p)
        if p != int(p):
            raise DTypeError(f"p is {p!r}: it must be an integer. Pass p=6.")
        self.r_max, self.p, self.backend = float(r_max), int(p), backend

    def forward(self, r: Tensor) -> Tensor:
        """The cutoff at r.

        Args:
            r: lengths, of any shape.

        Returns:
            A tensor of r's shape and dtype; half precision computes in float32.
        """
        check_tensors(r=r)
        rows = r if r.shape[-1:] == (1,) else r[..., None]
        if serves_rows(rows, self.backend, 1):
            called = "cutoff", self.r_max, self.p, self.backend
            found = cached_rows(called, rows)
            if found is None:
                found = first_rows(called, cutoff_key(self.r_max, self.p), rows, self.backend)
            return found[0] if rows is r else found[0].view(r.shape)
        t = (r.to(working_dtype(r.dtype)) / self.r_max).clamp(max=1)
        total = torch.full_like(t, self.p * (self.p + 1) / 2)
        for k in reversed(range(self.p - 1)):
            total = total * t + (k + 1) * (k + 2) / 2
        return ((1 - t) ** 3 * total).to(r.dtype)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"r_max={self.r_max}, p={self.p}"


class RadialBasis(torch.nn.Module):
    """b_n(r) f(r): Bessel functions times a polynomial cutoff, as potentials describe edge lengths.

    `BesselBasis(r_max, num_basis)(r) * PolynomialCutoff(r_max, p)(r)`: zero from r_max on, with its
    gradients.

    Args:
        r_max: the radius from which on all functions are zero, in the unit of r.
        num_basis: number of functions.
        p: of the cutoff, an integer, 1 or more.
        backend: see `torchweft.o3`.

    Raises:
        ShapeError: a number that is not positive.
        DTypeError: an argument that is no number, or a p that is no integer.

    Cost: one kernel on a GPU, and one more for each gradient.

    Source: Gasteiger, Groß, Günnemann: Directional message passing, ICLR 2020.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> basis = o3.RadialBasis(5.0, num_basis=4)
        >>> basis
        RadialBasis(r_max=5.0, num_basis=4, p=6)
        >>> basis(torch.tensor([[1.0], [5.0], [6.0]]))[1:].any()
        tensor(False)
    """

    def __init__(
        self, r_max: float, num_basis: int = 8, p: int = 6, *, backend: str | None = None
    ) -> None:
        super().__init__()
        # no children: the text names them as arguments
        self._factors = (
            BesselBasis(r_max, num_basis, backend=backend),
            PolynomialCutoff(r_max, p, backend=backend),
        )
        self.r_max, self.num_basis, self.p, self.backend = float(r_max), num_basis, int(p), backend

    def forward(self, r: Tensor) -> Tensor:
        """The functions at r, zero from r_max on.

        Args:
            r: (..., 1), lengths.

        Returns:
            (..., num_basis) in r's dtype; half precision computes in float32.
        """
        y = cached_rows(self.called, r)
        if y is not None:
            return y[0]
        check_last("r", r, 1)
        if serves_rows(r, self.backend, self.num_basis):
            key = radial_basis_key(self.r_max, self.num_basis, self.p)
            return first_rows(self.called, key, r, self.backend)[0]
        wide, (bessel, cutoff) = r.to(working_dtype(r.dtype)), self._factors
        found: Tensor = (bessel(wide) * cutoff(wide)).to(r.dtype)
        return found

    @property
    def called(self) -> tuple[str, float, int, int, str | None]:
        """Its arguments, as the key of its calls."""
        return "radial", self.r_max, self.num_basis, self.p, self.backend

    def extra_repr(self) -> str:
        """The arguments."""
        return f"r_max={self.r_max}, num_basis={self.num_basis}, p={self.p}"


def harmonics_and_radial(
    harmonics: SphericalHarmonics, basis: RadialBasis, v: Tensor
) -> tuple[Tensor, Tensor]:
    """`harmonics(v), basis(|v|)`: what potentials know of an edge, in one kernel of each order.

    Args:
        harmonics: of any degrees.
        basis: of any size.
        v: (E, 3).

    Returns:
        (E, harmonics.irreps_out.dim) and (E, num_basis) in v's dtype.  At v = 0 gradients of both
        are 0 for degrees above 0 and of the length.
    """
    called = "edge", *harmonics.called, *basis.called
    found = cached_rows(called, v)
    if found is None:
        degrees, normalize, normalization, backend = harmonics.called
        one = (backend, basis.backend) == (None, None) and 0 < max(degrees) <= MOST_HARMONICS_DEGREE
        if not one or not serves_rows(v, None, harmonics.irreps_out.dim):
            return harmonics(v), basis(edge_lengths(v))
        of_vectors = harmonics_key(degrees, normalize, normalization)
        of_lengths = radial_basis_key(basis.r_max, basis.num_basis, basis.p)
        found = first_rows(called, edge_key(of_vectors, of_lengths), v)
    y, radial = found
    return y, radial


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
        start: start of the interval.
        end: end of the interval.
        number: number of functions.
        basis: one of the table.
        cutoff: without one the first and the last centre are start and end; with one they lie
            inside, and all but gaussians are zero outside.

    Returns:
        (..., number), in x's dtype; half precision computes in float32.

    Raises:
        ShapeError: another basis, or a number of functions below 1.

    Source: e3nn's function of this name, https://github.com/e3nn/e3nn.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> lengths = torch.linspace(0, 5, 10)
        >>> o3.soft_one_hot_linspace(lengths, 0.0, 5.0, 8, "smooth_finite", cutoff=True).shape
        torch.Size([10, 8])
    """
    check_tensors(x=x)
    for name, value in (("start", start), ("end", end)):
        _check_number(name, value)
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


def soft_unit_step(x: Tensor) -> Tensor:
    """exp(-1/x) where x > 0, else 0: smooth, all derivatives vanish at 0.

    Args:
        x: (...).

    Returns:
        (...) in x's dtype; half precision computes in float32.  Differentiable to any order.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.soft_unit_step(torch.tensor([-1.0, 0.0, 1.0]))
        tensor([0.0000, 0.0000, 0.3679])
    """
    check_tensors(x=x)
    v = x.to(working_dtype(x.dtype))
    positive = v > 1 / 746  # below, exp(-1/x) is 0 in float64, and derivatives would be 0 · ∞
    step = (-1 / torch.where(positive, v, 1)).exp()
    return torch.where(positive, step, 0).to(x.dtype)


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
    series = one = torch.ones_like(x)
    # further terms are below the precision, also of two derivatives
    terms = 8 if x.dtype == torch.float32 else 12
    for k in reversed(range(1, terms)):
        series = torch.addcmul(one, series, square, value=-1 / (2 * k * (2 * k + 1)))
    away = torch.where(small, 1, x)
    return torch.where(small, series, away.sin() / away)


def _check_number(name: str, value: object) -> None:
    if not compiling() and not hasattr(value, "__float__"):
        raise DTypeError(f"{name} is {value!r}: it must be a number. Pass {name}=4, for example.")


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        _check_number(name, value)
        if not value > 0:
            raise ShapeError(f"{name} is {value!r}: it must be positive. Pass a larger {name}.")
