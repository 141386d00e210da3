"""Irreducible representations of O(3) and lists of them, written as e3nn writes them.

Irreps("64x0e + 32x1o")  is  64 scalars and 32 vectors: 64 + 32·3 = 160 components
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from weft.errors import ShapeError

__all__ = ["Irrep", "Irreps", "MulIr"]

_TERM = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+)([eo])\s*")


class Irrep(NamedTuple):
    """The irrep of degree l and parity p (1 even, -1 odd); its dimension is 2l + 1."""

    l: int  # noqa: E741 - the field's letter
    p: int

    @property
    def dim(self) -> int:
        """2l + 1."""
        return 2 * self.l + 1

    def __str__(self) -> str:
        return f"{self.l}{'e' if self.p == 1 else 'o'}"


class MulIr(NamedTuple):
    """`mul` copies of one irrep."""

    mul: int
    ir: Irrep

    @property
    def dim(self) -> int:
        """mul · (2l + 1)."""
        return self.mul * self.ir.dim

    def __str__(self) -> str:
        return f"{self.mul}x{self.ir}"


class Irreps:
    """A direct sum of irreps, in order.

    Args:
        irreps: "2x0e+1o", an Irreps, or pairs (mul, irrep) with irreps as "1o" or (l, p).

    Raises:
        ShapeError: what is given does not read as irreps.
    """

    __slots__ = ("_items",)

    def __init__(self, irreps: str | Irreps | Iterable[tuple[int, str | tuple[int, int]]] = ""):
        if isinstance(irreps, Irreps):
            self._items: tuple[MulIr, ...] = irreps._items
        elif isinstance(irreps, str):
            self._items = tuple(_read(irreps))
        else:
            self._items = tuple(MulIr(int(mul), _irrep(ir)) for mul, ir in irreps)

    def __iter__(self) -> Iterator[MulIr]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, i: int) -> MulIr:
        return self._items[i]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, str | Irreps):
            return NotImplemented
        return self._items == Irreps(other)._items

    def __hash__(self) -> int:
        return hash(self._items)

    def __str__(self) -> str:
        return "+".join(map(str, self._items))

    __repr__ = __str__

    @property
    def dim(self) -> int:
        """Σ mul · (2l + 1)."""
        return sum(item.dim for item in self)

    @property
    def num_irreps(self) -> int:
        """Σ mul."""
        return sum(item.mul for item in self)

    @property
    def lmax(self) -> int:
        """The largest degree.

        Raises:
            ShapeError: there are no irreps.
        """
        if not self.num_irreps:
            raise ShapeError(
                "these irreps are empty: lmax needs at least one. Pass irreps such as '1x0e'."
            )
        return max(item.ir.l for item in self if item.mul)


def _irrep(ir: str | tuple[int, int]) -> Irrep:
    if isinstance(ir, str):
        (item,) = _read(ir)
        return item.ir
    return Irrep(*ir)


def _read(text: str) -> Iterator[MulIr]:
    if not text.strip():
        return
    for term in text.split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ShapeError(
                f"irreps {text!r} do not read at {term.strip()!r}: terms are a multiplicity, a "
                "degree and a parity, joined by '+'. Write, for example, '64x0e+32x1o'."
            )
        mul, degree, parity = match.groups()
        yield MulIr(int(mul or 1), Irrep(int(degree), 1 if parity == "e" else -1))
