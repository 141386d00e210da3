"""Irreducible representations of O(3) and lists of them, written as e3nn writes them.

Irreps("64x0e + 32x1o")  is  64 scalars and 32 vectors: 64 + 32·3 = 160 components
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from weft.errors import DTypeError, ShapeError

__all__ = ["Irrep", "Irreps", "IrrepsLike", "MulIr"]

_TERM = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+)([eoy])\s*")
"""[mul x] degree parity; "y" is the parity (-1)^l of spherical harmonics."""


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


IrrepsLike: TypeAlias = "str | Irreps | Irrep | Iterable[tuple[int, str | tuple[int, int]]]"
"""What `Irreps` reads."""


class Irreps:
    """A direct sum of irreps, in order.

    Args:
        irreps: "2x0e+1o", an Irreps, an Irrep, or pairs (mul, irrep) with irreps as "1o" or (l, p).

    Raises:
        ShapeError: what is given does not read as irreps.
        DTypeError: it is neither text nor a sequence.
    """

    __slots__ = ("_items",)

    def __init__(self, irreps: IrrepsLike = ""):
        self._items: tuple[MulIr, ...]
        if isinstance(irreps, Irreps):
            self._items = irreps._items
        elif isinstance(irreps, str):
            self._items = tuple(_read(irreps))
        elif isinstance(irreps, Irrep):
            self._items = (_item((1, irreps)),)
        elif isinstance(irreps, Iterable):
            self._items = tuple(map(_item, irreps))
        else:
            raise DTypeError(
                f"irreps is a {type(irreps).__name__}: it must be text or pairs (mul, irrep). "
                "Write, for example, '64x0e+32x1o'."
            )

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


def _item(pair: object) -> MulIr:
    """(2, "1o") or (2, (1, -1)) as copies of an irrep."""
    match pair:
        case (int(mul), (int(degree), (1 | -1) as parity)) if mul >= 0 and degree >= 0:
            return MulIr(mul, Irrep(degree, parity))
        case (int(mul), str(text)) if mul >= 0 and _TERM.fullmatch(text) and "x" not in text:
            return next(_read(text))._replace(mul=mul)
    raise ShapeError(
        f"{pair!r} does not read as copies of an irrep: it must be (mul, irrep) with mul 0 or more "
        "and the irrep a degree and a parity, 1 or -1. Write, for example, (32, '1o')."
    )


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
        sign = {"e": 1, "o": -1, "y": (-1) ** int(degree)}[parity]
        yield MulIr(int(mul or 1), Irrep(int(degree), sign))
