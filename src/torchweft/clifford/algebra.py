"""Clifford algebras: blades, grades, paths and the Cayley table, all from the metric."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchweft.errors import DTypeError, ShapeError

__all__ = ["PGA", "SPACETIME", "Algebra", "Term"]

Term = tuple[int, int, int, int]
"""(left blade i, out blade j, right blade k, sign): e_i e_k = sign · e_j."""


T = TypeVar("T")


class _Table(Generic[T]):
    """A cached property without a lock, which torch.compile cannot trace (before Python 3.12)."""

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__

    def __get__(self, algebra: Algebra | None, _: type[Algebra] | None = None) -> T:
        if algebra is None:  # read from the class, as documentation tools do
            return self  # type: ignore[return-value]
        value = algebra.__dict__[self.find.__name__] = self.find(algebra)
        return value


class Algebra:
    """Cl(p, q, r): e_i e_j = −e_j e_i for i ≠ j, and e_i e_i = metric[i] ∈ {−1, 0, 1}.

    A multivector has B = 2ⁿ components, one for each blade, in shortlex order: 1, e1, e2, …, e12,
    e13, …, e1…n.  Two algebras are equal if their metrics are; they hash and pickle by metric.

    Args:
        metric: the squares of the n basis vectors, in any order.

    The grades of the blades are `grades`, and `paths` are the (left, out, right) grades of the
    products that are not zero, in lexicographic order: the order of the P weights of a weighted
    product.

    Raises:
        ShapeError, DTypeError: an entry is not −1, 0 or 1, or the metric is no sequence.

    Example:
        >>> from torchweft import clifford
        >>> space = clifford.Algebra((1, 1, 1))  # or Algebra.cl(3)
        >>> space.num_blades, space.grades, len(space.paths)
        (8, (0, 1, 1, 1, 2, 2, 2, 3), 20)
        >>> clifford.Algebra.cl(3, 0, 1) == clifford.PGA  # GATr's projective algebra
        True
    """

    __slots__ = ("__dict__", "metric", "signature")
    metric: tuple[int, ...]
    signature: str  # the metric as text, which stays constant where torch.compile sees integers

    def __init__(self, metric: Iterable[int]) -> None:
        if not isinstance(metric, Iterable):
            raise DTypeError(
                f"metric is {metric!r}: it must hold the square of each basis vector. Pass "
                "(1, 1, 1), or use Algebra.cl(3)."
            )
        self.metric = tuple(metric)
        wrong = [m for m in self.metric if m not in (-1, 0, 1)]
        if wrong:
            raise ShapeError(
                f"metric is {self.metric}: its entries are the squares of the basis vectors and "
                f"must be -1, 0 or 1, not {wrong[0]!r}. Scale that basis vector to square to ±1."
            )
        self.metric = tuple(int(m) for m in self.metric)
        self.signature = ",".join(map(str, self.metric)) or "-"

    @classmethod
    def cl(cls, p: int, q: int = 0, r: int = 0) -> Algebra:
        """Cl(p, q, r): r null vectors first, then p that square to 1, then q that square to −1.

        Args:
            p: number of basis vectors that square to 1.
            q: number of basis vectors that square to −1.
            r: number of basis vectors that square to 0.

        Returns:
            The algebra.

        Raises:
            ShapeError: a number that is no integer of at least 0.
        """
        for name, count in (("p", p), ("q", q), ("r", r)):
            if not isinstance(count, int) or count < 0:
                raise ShapeError(
                    f"{name} is {count!r}: it must be a number of basis vectors, an integer of "
                    "at least 0. Pass Algebra.cl(p, q, r) as in Algebra.cl(3, 0, 1)."
                )
        return cls((0,) * r + (1,) * p + (-1,) * q)

    @classmethod
    @functools.cache
    def from_signature(cls, signature: str) -> Algebra:
        """The algebra with a `signature`, the same object at each call."""
        return cls(() if signature == "-" else map(int, signature.split(",")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Algebra) and self.metric == other.metric

    def __hash__(self) -> int:
        return hash(self.metric)

    def __repr__(self) -> str:
        return f"Algebra({self.metric})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Algebra, (self.metric,)

    @property
    def n(self) -> int:
        """Number of basis vectors."""
        return len(self.metric)

    @property
    def num_blades(self) -> int:
        """2ⁿ."""
        return 1 << self.n

    @property
    def is_definite(self) -> bool:
        """Whether all basis vectors square to 1, or all to −1."""
        return set(self.metric) in ({1}, {-1}, set())

    @_Table
    def blades(self) -> tuple[int, ...]:
        """Each blade's basis vectors, as a bit mask."""
        return tuple(
            sum(1 << i for i in vectors)
            for grade in range(self.n + 1)
            for vectors in itertools.combinations(range(self.n), grade)
        )

    @_Table
    def positions(self) -> dict[int, int]:
        """Position of the blade with a bit mask."""
        return {blade: i for i, blade in enumerate(self.blades)}

    @_Table
    def grades(self) -> tuple[int, ...]:
        """The grade of each blade: the number of basis vectors that it multiplies."""
        return tuple(blade.bit_count() for blade in self.blades)

    @_Table
    def sizes(self) -> list[int]:
        """Number of blades of each grade, 0 … n."""
        return [math.comb(self.n, grade) for grade in range(self.n + 1)]

    @_Table
    def of_grade(self) -> tuple[range, ...]:
        """The positions of the blades of each grade, 0 … n; they are contiguous."""
        ends = itertools.accumulate(self.sizes, initial=0)
        return tuple(range(*pair) for pair in itertools.pairwise(ends))

    @_Table
    def squares(self) -> tuple[int, ...]:
        """The product of the metric's entries over each blade: ⟨ẽ_j e_j⟩₀."""
        return tuple(self.sign(blade, blade) * self.reversion(blade) for blade in self.blades)

    @_Table
    def terms(self) -> tuple[Term, ...]:
        """The products of two blades that are not zero, by left blade, then right blade."""
        return tuple(
            (i, self.positions[a ^ b], k, sign)
            for i, a in enumerate(self.blades)
            for k, b in enumerate(self.blades)
            if (sign := self.sign(a, b))
        )

    @_Table
    def paths(self) -> tuple[tuple[int, int, int], ...]:
        """(left, out, right) grades of the products that are not zero, in lexicographic order."""
        return tuple(sorted({self.grades_of(term) for term in self.terms}))

    @_Table
    def path_of(self) -> dict[tuple[int, int, int], int]:
        """Position in `paths` of the path of (left, out, right) grades."""
        return {path: p for p, path in enumerate(self.paths)}

    @_Table
    def duals(self) -> tuple[tuple[int, int], ...]:
        """(position, sign) of each blade's complement: e_A ∧ (sign · e_position) = e_1…n."""
        full = self.blades[-1]
        return tuple((self.positions[full ^ a], self.sign(a, full ^ a)) for a in self.blades)

    def grades_of(self, term: Term) -> tuple[int, int, int]:
        """The (left, out, right) grades of a term."""
        i, j, k, _ = term
        return self.grades[i], self.grades[j], self.grades[k]

    def cayley(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The table [left, out, right] of signs: x y = Σ x[i] · table[i, :, k] · y[k]."""
        table = torch.zeros(3 * (self.num_blades,), dtype=dtype)
        i, j, k, sign = (torch.tensor(column) for column in zip(*self.terms, strict=True))
        table[i, j, k] = sign.to(dtype)
        return table

    def sign(self, a: int, b: int) -> int:
        """The sign −1, 0 or 1 of the product of two blades, given as bit masks."""
        sign, high = 1, a >> 1
        while high:  # every vector of a moves past the smaller ones of b
            sign = -sign if (high & b).bit_count() & 1 else sign
            high >>= 1
        for i, square in enumerate(self.metric):
            if a & b & (1 << i):
                sign *= square
        return sign

    @staticmethod
    def reversion(blade: int) -> int:
        """The sign of a blade with its vectors in reverse order."""
        grade = blade.bit_count()
        return -1 if grade * (grade - 1) // 2 % 2 else 1


PGA = Algebra.cl(3, 0, 1)
"""GATr's projective algebra: planes are vectors, points are trivectors, e0 is null and first."""

SPACETIME = Algebra.cl(1, 3)
"""L-GATr's algebra: time squares to 1 and is first, space to −1."""
