"""Wigner 3j symbols and D matrices in the real basis of e3nn.

C_ijk = C_lmn D_il(R) D_jm(R) D_kn(R) for every rotation R,  Σ C² = 1

Component l + m of degree l goes with sin(|m|α) for m < 0 and cos(mα) for m ≥ 0, α being the angle
about the polar axis y; so degree 1 is (x, y, z).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft.core import recorded
from torchweft.core.operators.operator import (
    compiling,
    constant_when_compiling,
    transformed,
    unwatched,
)
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.rotation import broadcast_named

__all__ = [
    "change_basis_real_to_complex",
    "check_degrees",
    "constant_tensor",
    "entries_3j",
    "so3_generators",
    "su2_generators",
    "wigner_3j",
    "wigner_D",
    "wigner_D_matrices",
    "working_dtype",
]

_tables: dict[tuple[tuple[int, ...], torch.device, torch.dtype], Tensor] = {}


def wigner_3j(
    l1: int,
    l2: int,
    l3: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """C, the invariant tensor of l1 ⊗ l2 ⊗ l3 of Frobenius norm 1: real Wigner 3j symbols.

    Every entry is ± the root of a fraction, known exactly and rounded once to float64.

    Args:
        l1: a degree, 0 or more.
        l2: a degree, 0 or more.
        l3: a degree, from |l1 - l2| to l1 + l2.
        dtype: of the result; None: torch's default dtype.
        device: of the result; None: torch's default device.

    Returns:
        (2 l1 + 1, 2 l2 + 1, 2 l3 + 1), a new tensor; signs and order are e3nn's.

    Raises:
        ShapeError: the degrees do not fulfil |l1 - l2| ≤ l3 ≤ l1 + l2.
        DTypeError: a degree is not an integer.

    Example:
        >>> from torchweft import o3
        >>> C = o3.wigner_3j(1, 1, 1)  # the cross product by 1/√6
        >>> C.shape, round(float(C[0, 1, 2]) * 6**0.5, 6)
        (torch.Size([3, 3, 3]), 1.0)
    """
    check_degrees(l1=l1, l2=l2, l3=l3)
    if not abs(l1 - l2) <= l3 <= l1 + l2:
        raise ShapeError(
            f"degrees {l1} and {l2} do not couple to {l3}: l3 must be from |l1 - l2| to l1 + l2. "
            f"Choose l3 from {abs(l1 - l2)} to {l1 + l2}."
        )
    dtype = torch.get_default_dtype() if dtype is None else dtype
    device = torch.empty(0).device if device is None else torch.device(device)
    return _table((l1, l2, l3), device, dtype).clone()


def wigner_D(l: int, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:  # noqa: E741, N802
    """D_l(α, β, γ), the matrix by which an irrep of degree l transforms under Ry(α) Rx(β) Ry(γ).

        D = Z(α) J Z(β) J Z(γ),  Z a rotation about y,  J = D(half a turn about x + y)

    Args:
        l: the degree, 0 or more.
        alpha: (...), the rotation about y that is applied last, in radians.
        beta: (...), the rotation about x, in radians.
        gamma: (...), the rotation about y that is applied first, in radians.  The three broadcast.

    Returns:
        (..., 2l+1, 2l+1) in the dtype of the angles, orthogonal; D(R1) D(R2) = D(R1 R2), and
        degree 1 is the rotation matrix itself.  Half precision computes in float32.  Differentiable
        to any order, at β = 0 too.

    Raises:
        DTypeError: l is not an integer, or the angles are not real.
        ShapeError: l is negative, or the angles do not broadcast.

    Example:
        >>> from torchweft import o3
        >>> angles = o3.rand_angles(10)
        >>> o3.wigner_D(2, *angles).shape
        torch.Size([10, 5, 5])
        >>> bool((o3.wigner_D(1, *angles) - o3.angles_to_matrix(*angles)).abs().max() < 1e-6)
        True
    """
    check_degrees(l=l)
    alpha, beta, gamma = broadcast_named(alpha=alpha, beta=beta, gamma=gamma)
    dtype = torch.promote_types(torch.promote_types(alpha.dtype, beta.dtype), gamma.dtype)
    work = working_dtype(dtype)
    swap = _table((l,), alpha.device, work)
    inner = _turn(-gamma.to(work), swap).mT  # J Z(γ), as J is symmetric
    return _turn(alpha.to(work), swap @ _turn(beta.to(work), inner)).to(dtype)


def wigner_D_matrices(lmax: int, matrix: Tensor) -> list[Tensor]:  # noqa: N802
    """D^0 … D^lmax of rotations, by D^(l+1)_kn = (2l+3) Σ C_ijk D^l_ip R_jq C_pqn, C = 3j.

    They are polynomials of the matrix: exact at the poles, where Euler angles lose half of the
    digits.

    Args:
        lmax: the highest degree.
        matrix: (..., 3, 3), orthogonal with determinant 1, float32 or float64.

    Returns:
        lmax + 1 tensors (..., 2l+1, 2l+1).
    """
    found = [torch.ones_like(matrix[..., :1, :1]), matrix][: lmax + 1]
    for l in range(1, lmax):  # noqa: E741
        table = _table((l, 1, l + 1), matrix.device, matrix.dtype)
        right = torch.einsum("...jq,pqn->...jpn", matrix, table)
        both = torch.einsum("...ip,...jpn->...ijn", found[-1], right)
        found.append((2 * l + 3) * torch.einsum("ijk,...ijn->...kn", table, both))
    return found


def so3_generators(l: int) -> Tensor:  # noqa: E741
    """X_k = √(l (l+1) (2l+1)) C_ikj, C = 3j(l, 1, l): the generators of rotations of degree l.

    A rotation by an angle t about axis k has the matrix D = exp(t X_k).

    Args:
        l: the degree, 0 or more.

    Returns:
        (3, 2l+1, 2l+1) in torch's default dtype, antisymmetric, for the axes x, y and z;
        [X_0, X_1] = X_2 and cyclic.

    Raises:
        WeftError: l is negative or not an integer.

    Example:
        >>> from torchweft import o3
        >>> X = o3.so3_generators(2)
        >>> bool((X[0] @ X[1] - X[1] @ X[0] - X[2]).abs().max() < 1e-6)
        True
    """
    check_degrees(l=l)
    if l == 0:
        return torch.zeros(3, 1, 1)
    return wigner_3j(l, 1, l).movedim(1, 0) * math.sqrt(l * (l + 1) * (2 * l + 1))


def su2_generators(j: float) -> Tensor:
    """The generators of SU(2) for spin j.

        X = ((L - Lᵀ) / 2, i diag(m), i (L + Lᵀ) / 2),  L_(m-1)m = √((j + m) (j - m + 1))

    Args:
        j: the spin, 0, ½, 1, …; rows and columns are m = -j … j.

    Returns:
        (3, 2j+1, 2j+1), complex and antihermitian; [X_0, X_1] = X_2 and cyclic.

    Raises:
        ShapeError: j is not a spin.

    Example:
        >>> from torchweft import o3
        >>> o3.su2_generators(0.5).shape
        torch.Size([3, 2, 2])
    """
    if j < 0 or 2 * j != round(2 * j):
        raise ShapeError(f"j is {j}: a spin must be half an integer, 0 or more. Pass 0, 0.5, 1 …")
    m = torch.arange(-j, j + 1, dtype=torch.get_default_dtype())
    lower = ((j + m[1:]) * (j - m[1:] + 1)).sqrt().diag(1)
    return torch.stack([lower - lower.mT, 2j * m.diag(), 1j * (lower + lower.mT)]) / 2


def change_basis_real_to_complex(
    l: int,  # noqa: E741
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Q, unitary: Q x has the components m = -l … l of complex spherical harmonics.

        (Q x)_{-m} = (-i)^l (x_m - i x_{-m}) / √2,  (Q x)_m = (-i)^l (-1)^m (x_m + i x_{-m}) / √2,
        (Q x)_0 = (-i)^l x_0,  for m > 0; the phase makes Clebsch-Gordan coefficients real.

    Args:
        l: the degree, 0 or more.
        dtype: of the real numbers, float32 or float64; None: torch's default dtype.
        device: of the result; None: torch's default device.

    Returns:
        (2l+1, 2l+1), complex.

    Example:
        >>> from torchweft import o3
        >>> o3.change_basis_real_to_complex(0)
        tensor([[1.+0.j]])
    """
    check_degrees(l=l)
    found = np.zeros((2 * l + 1, 2 * l + 1), dtype=np.complex128)
    found[l, l] = 1
    for m in range(1, l + 1):
        found[l - m, [l + m, l - m]] = np.array([1, -1j]) / math.sqrt(2)
        found[l + m, [l + m, l - m]] = (-1) ** m * np.array([1, 1j]) / math.sqrt(2)
    table = torch.from_numpy((-1j) ** l * found)
    return table.to(dtype=(dtype or torch.get_default_dtype()).to_complex(), device=device)


def _turn(angle: Tensor, matrix: Tensor) -> Tensor:
    """Z(angle) M: component m becomes cos(mα) M_m - sin(mα) M_-m."""
    size = matrix.shape[-1]
    order = torch.arange(size, device=angle.device, dtype=angle.dtype) - size // 2
    turned = (angle[..., None] * order)[..., None]
    return turned.cos() * matrix - turned.sin() * matrix.flip(-2)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the computation: float64 for float64, float32 for narrower real dtypes."""
    if not dtype.is_floating_point:
        raise DTypeError(
            f"a tensor is {dtype}: coordinates and angles must be real numbers. Call .float()."
        )
    return torch.float64 if dtype == torch.float64 else torch.float32


def constant_tensor(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorate `make(*key, dtype, device)` to be called with (like, *key), and to be cached.

    Where torch traces a call nothing is cached: tensors of a tracer must not outlive it.
    """

    @functools.lru_cache(maxsize=4096)
    def cached(*key: Any) -> Tensor:
        with torch.inference_mode(False):  # autograd may save the tensor
            return make(*key)

    @functools.wraps(make)
    def found(like: Tensor, *key: Any) -> Tensor:
        plain = not compiling() and not transformed() and unwatched(like)
        if not plain:
            return make(*key, like.dtype, like.device)
        return recorded.keep(cached(*key, like.dtype, like.device))

    return found


def check_degrees(**degrees: int) -> None:
    """Raise DTypeError or ShapeError unless all degrees are integers, 0 or more."""
    for name, value in degrees.items():
        if not isinstance(value, int):
            raise DTypeError(
                f"{name} is {value!r}: a degree must be an integer. Pass 0, 1, 2 and so on."
            )
        if value < 0:
            raise ShapeError(f"{name} is {value}: a degree must be 0 or more. Pass 0, 1, 2 …")


@functools.cache
def entries_3j(l1: int, l2: int, l3: int) -> tuple[tuple[int, int, int, float], ...]:
    """(i, j, k, C_ijk) of the nonzero entries, sorted."""
    return tuple(sorted(_entries(l1, l2, l3)))


@functools.cache
def _array(degrees: tuple[int, ...]) -> np.ndarray:
    """The 3j symbol of three degrees; of one, D of half a turn about x + y, which swaps x and y."""
    if len(degrees) == 3:
        table = np.zeros([2 * degree + 1 for degree in degrees])
        for *place, value in entries_3j(*degrees):
            table[tuple(place)] = value
        return table
    swap = np.ones((1, 1))
    turn = np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]])
    for k in range(degrees[0]):
        table = _array((k, 1, k + 1))
        swap = (2 * k + 3) * np.einsum("ijk,ip,jq,pqn->kn", table, swap, turn, table)
    return swap


@constant_when_compiling
def _numbers(degrees: tuple[int, ...]) -> list[Any]:
    return _array(degrees).tolist()  # type: ignore[no-any-return]


def _table(degrees: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """`_array` on a device, cached there: a CUDA graph cannot capture a copy from the host."""
    if torch.compiler.is_compiling():
        numbers = _numbers(tuple(operator.index(degree) for degree in degrees))  # not symbols
        return torch.tensor(numbers, device=device, dtype=dtype)
    key = (degrees, device, dtype)
    if key not in _tables:
        made = torch.from_numpy(_array(degrees)).to(device, dtype, copy=True)
        if type(made) is not Tensor or made.is_inference():
            return made  # of a tracer, or an inference tensor that autograd cannot save
        _tables[key] = made
    return _tables[key]


def _entries(l1: int, l2: int, l3: int) -> Iterator[tuple[int, int, int, float]]:
    """The nonzero entries of the real symbol, unsorted.

    A real component m is (i^a Y_m + i^b Y_-m) / √2.  Of the terms of an entry only one and its
    conjugate obey m3 = m1 + m2, so the entry is twice the real part of one: ± a root, or 0.
    """
    for m1 in range(l1 + 1):
        for m2 in range(-l2 if m1 else 0, l2 + 1):
            m3 = m1 + m2
            if abs(m3) > l3:
                continue
            sign, numerator, denominator = _clebsch_gordan(l1, m1, l2, m2, l3)
            orders = (m1, m2, m3)
            count = sum(m != 0 for m in orders)
            if count:
                numerator, denominator = 4 * numerator, denominator << count
            root = _root(numerator, denominator * (2 * l3 + 1))
            for real in itertools.product(*({m, -m} for m in orders)):
                turns = (
                    l3 - l1 - l2 + _turns(m1, real[0]) + _turns(m2, real[1]) - _turns(m3, real[2])
                )
                if root and turns % 2 == 0:
                    value = sign * root * (-1) ** (turns // 2)
                    yield real[0] + l1, real[1] + l2, real[2] + l3, value


def _turns(m: int, real: int) -> int:
    """k of the coefficient i^k / √2 (1 if m = 0) of Y_m in the real component."""
    if real < 0:
        return 1 + 2 * m if m > 0 else 3
    return 2 * m if m > 0 else 0


def _clebsch_gordan(l1: int, m1: int, l2: int, m2: int, l3: int) -> tuple[int, int, int]:
    """(s, p, q) with ⟨l1 m1 l2 m2 | l3 m1+m2⟩ = s √(p/q), by Racah's sum in binomials.

    √(C(2l1, a) C(2l2, a) / (C(J+1, a) C(2l1, l1-m1) C(2l2, l2-m2) C(2l3, l3-m3)))
        · Σ_k (-1)^k C(a, k) C(b, l1-m1-k) C(c, l2+m2-k),
    J = l1 + l2 + l3,  a = J - 2l3,  b = J - 2l2,  c = J - 2l1
    """
    total = l1 + l2 + l3
    a, b, c = total - 2 * l3, total - 2 * l2, total - 2 * l1
    terms = (
        (-1) ** k * math.comb(a, k) * math.comb(b, l1 - m1 - k) * math.comb(c, l2 + m2 - k)
        for k in range(min(a, l1 - m1, l2 + m2) + 1)
    )
    racah = sum(terms)
    numerator = math.comb(2 * l1, a) * math.comb(2 * l2, a) * racah**2
    denominator = (
        math.comb(total + 1, a)
        * math.comb(2 * l1, l1 - m1)
        * math.comb(2 * l2, l2 - m2)
        * math.comb(2 * l3, l3 - m1 - m2)
    )
    return 1 if racah >= 0 else -1, numerator, denominator


def _root(numerator: int, denominator: int) -> float:
    """√(numerator / denominator), computed with 128 bits or more and rounded once."""
    places = 128 + denominator.bit_length()
    return math.ldexp(math.isqrt((numerator << 2 * places) // denominator), -places)
