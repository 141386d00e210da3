"""Irreducible representations of O(3), lists of them as e3nn writes them, and rows of numbers.

Irreps("64x0e + 32x1o")  is  64 scalars and 32 vectors: 64 + 32·3 = 160 components

A row has a block (mul, 2l+1) for each item, in either order of memory:

mul_ir   component a of copy u of a block is at  offset + u · (2l+1) + a    (e3nn's)
ir_mul                                           offset + a · mul + u       (channels fastest)
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, SupportsIndex, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import DTypeError, ShapeError
from torchweft.o3.irreps.rotation import (
    angles_to_matrix,
    axis_angle_to_matrix,
    check_matrix,
    quaternion_to_matrix,
)
from torchweft.o3.irreps.wigner import check_degrees, wigner_D_matrices, working_dtype

__all__ = [
    "LAYOUTS",
    "Irrep",
    "Irreps",
    "IrrepsLike",
    "MulIr",
    "Sorted",
    "as_block",
    "broadcast_leads",
    "check_layout",
    "check_rows",
    "is_irrep",
    "join",
    "parts_of",
    "side_by_side",
    "split",
    "split_weight",
    "steps",
]

_TERM = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+)([eoy])\s*")
"""[mul x] degree parity; "y" is the parity (-1)^l of spherical harmonics."""


class _Fields(NamedTuple):
    l: int  # noqa: E741 - the field's letter
    p: int


class Irrep(_Fields):
    """An irreducible representation of O(3): degree l, parity p (1 even, -1 odd), dimension 2l + 1.

    Args:
        l: the degree; or, without p, text such as "1o" or "2y" (parity (-1)^l), an Irrep (e3nn's
            too), or a pair (l, p).
        p: the parity, 1 or -1.

    Raises:
        ShapeError: the arguments do not read as an irrep.
        DTypeError: the degree is not an integer.

    Source: names and conventions are those of e3nn, https://github.com/e3nn/e3nn.

    Example:
        >>> from torchweft import o3
        >>> vector = o3.Irrep("1o")
        >>> vector.dim, vector.p
        (3, -1)
        >>> list(vector * vector)  # the irreps of the product of two vectors
        [0e, 1e, 2e]
    """

    __slots__ = ()

    def __new__(cls, l: int | str | tuple[int, int], p: int | None = None) -> Irrep:  # noqa: E741
        """Read an irrep; see the class."""
        if p is None and is_irrep(l):
            l, p = l.l, l.p  # type: ignore[union-attr]  # noqa: E741
        elif p is None and isinstance(l, tuple) and len(l) == 2:
            l, p = l  # noqa: E741
        elif p is None and isinstance(l, str):
            match = _TERM.fullmatch(l)
            l, p = next(_read(l)).ir if match and match[1] is None else (l, None)  # noqa: E741
        if p not in (1, -1):
            raise ShapeError(
                f"{l!r} with parity {p!r} does not read as an irrep: it must be a degree, 0 or "
                "more, and a parity, 1 or -1. Write, for example, Irrep('1o') or Irrep(1, -1)."
            )
        check_degrees(l=l)  # type: ignore[arg-type]
        return super().__new__(cls, l, p)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{self.l}{'e' if self.p == 1 else 'o'}"

    @property
    def dim(self) -> int:
        """2l + 1."""
        return 2 * self.l + 1

    def is_scalar(self) -> bool:
        """Whether the irrep is 0e."""
        return self.l == 0 and self.p == 1

    @staticmethod
    def iterator(lmax: int | None = None) -> Iterator[Irrep]:
        """0e, 0o, 1o, 1e, 2e, 2o, …: all irreps up to degree lmax, or without end."""
        for l in count() if lmax is None else range(lmax + 1):  # noqa: E741
            yield Irrep(l, (-1) ** l)
            yield Irrep(l, -((-1) ** l))

    def __mul__(self, other: Irrep | str) -> Iterator[Irrep]:  # type: ignore[override]
        """The irreps of the product: degrees |l1 - l2| to l1 + l2, of parity p1 p2."""
        other = Irrep(other)
        for l in range(abs(self.l - other.l), self.l + other.l + 1):  # noqa: E741
            yield Irrep(l, self.p * other.p)

    def __rmul__(self, mul: SupportsIndex) -> Irreps:  # type: ignore[override]
        """`mul` copies of the irrep."""
        return Irreps([(mul.__index__(), self)])

    def __add__(self, other: IrrepsLike) -> Irreps:  # type: ignore[override]
        return Irreps(self) + other

    def D_from_angles(  # noqa: N802
        self, alpha: Tensor, beta: Tensor, gamma: Tensor, k: Tensor | None = None
    ) -> Tensor:
        """p^k D(α, β, γ), see `Irreps.D_from_angles`."""
        return Irreps(self).D_from_angles(alpha, beta, gamma, k)

    def D_from_matrix(self, R: Tensor) -> Tensor:  # noqa: N802, N803
        """D(R), see `Irreps.D_from_matrix`."""
        return Irreps(self).D_from_matrix(R)

    def D_from_quaternion(self, q: Tensor, k: Tensor | None = None) -> Tensor:  # noqa: N802
        """p^k D(q), see `Irreps.D_from_quaternion`."""
        return Irreps(self).D_from_quaternion(q, k)

    def D_from_axis_angle(self, axis: Tensor, angle: Tensor) -> Tensor:  # noqa: N802
        """D of a rotation about an axis, see `Irreps.D_from_axis_angle`."""
        return Irreps(self).D_from_axis_angle(axis, angle)


def is_irrep(given: object) -> bool:
    """Whether it is an Irrep, of this module or of e3nn, whose class has the same properties.

    e3nn's is a tuple that has no length.
    """
    return hasattr(given, "l") and hasattr(given, "p")


class MulIr(NamedTuple):
    """`mul` copies of one irrep."""

    mul: int
    ir: Irrep

    @property
    def dim(self) -> int:
        """mul · (2l + 1)."""
        return self.mul * self.ir.dim

    def __repr__(self) -> str:
        return f"{self.mul}x{self.ir}"


class Sorted(NamedTuple):
    """Sorted irreps; item i of the unsorted irreps is item p[i], item j was item inv[j]."""

    irreps: Irreps
    p: tuple[int, ...]
    inv: tuple[int, ...]


IrrepsLike: TypeAlias = (
    "str | Irreps | Irrep | MulIr | Iterable[str | Irrep | tuple[int, str | tuple[int, int]]]"
)
"""Arguments that `Irreps` reads."""


class Irreps:
    """A direct sum of irreps, in order: the layout of a row of features.  Immutable.

    Args:
        irreps: text such as "2x0e+1o" (two scalars, one vector), an Irreps, an Irrep, or a list of
            irreps ("1o" or Irrep) and of pairs (mul, irrep), with the irrep as (l, p) too.  e3nn's
            Irreps and Irrep are accepted, and compare equal to these.

    Raises:
        ShapeError: the argument does not read as irreps.
        DTypeError: the argument is neither text nor a sequence.

    Source: names and conventions are those of e3nn, https://github.com/e3nn/e3nn.

    Example:
        >>> from torchweft import o3
        >>> irreps = o3.Irreps("64x0e + 32x1o")
        >>> irreps.dim  # components of a row: 64 + 32 · 3
        160
        >>> irreps.slices()
        [slice(0, 64, None), slice(64, 160, None)]
        >>> irreps.D_from_matrix(o3.rand_matrix()).shape  # how a rotation acts on a row
        torch.Size([160, 160])
    """

    __slots__ = ("_dim", "_items")

    def __init__(self, irreps: IrrepsLike = ""):
        self._items: tuple[MulIr, ...]
        if isinstance(irreps, Irreps):
            self._items = irreps._items
        elif isinstance(irreps, str):
            self._items = tuple(_read(irreps))
        elif is_irrep(irreps) or hasattr(irreps, "ir"):
            self._items = (_item(irreps),)
        elif isinstance(irreps, Iterable):
            self._items = tuple(map(_item, irreps))
        else:
            raise DTypeError(
                f"irreps is a {type(irreps).__name__}: it must be text or pairs (mul, irrep). "
                "Write, for example, '64x0e+32x1o'."
            )
        self._dim = sum(item.dim for item in self._items)  # every call of a module reads it

    @staticmethod
    def spherical_harmonics(lmax: int, p: int = -1) -> Irreps:
        """The irreps of spherical harmonics: degrees 0 to lmax, each once, with the parities p^l.

        Args:
            lmax: the highest degree.
            p: the parity of a vector, -1 for "1o".

        Example:
            >>> Irreps.spherical_harmonics(2)
            1x0e+1x1o+1x2e
        """
        return Irreps([(1, Irrep(degree, p**degree)) for degree in range(lmax + 1)])

    def __iter__(self) -> Iterator[MulIr]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, i: int) -> MulIr: ...
    @overload
    def __getitem__(self, i: slice) -> Irreps: ...
    def __getitem__(self, i: int | slice) -> MulIr | Irreps:
        return Irreps(self._items[i]) if isinstance(i, slice) else self._items[i]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            try:
                other = Irreps(other)
            except ShapeError:  # the text is not irreps
                return False
        elif isinstance(other, tuple) and hasattr(other, "num_irreps"):  # e3nn's, a tuple of ours
            return tuple.__eq__(self._items, other)
        return self._items == other._items if isinstance(other, Irreps) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._items)

    def __repr__(self) -> str:
        return "+".join(map(str, self._items))

    def __add__(self, other: IrrepsLike) -> Irreps:
        return Irreps(self._items + Irreps(other)._items)

    def __mul__(self, times: int) -> Irreps:
        return Irreps(self._items * times) if isinstance(times, int) else NotImplemented

    __rmul__ = __mul__

    def __contains__(self, ir: Irrep | str) -> bool:
        return Irrep(ir) in (item.ir for item in self)

    def count(self, ir: Irrep | str) -> int:
        """The multiplicity of an irrep, over all items."""
        ir = Irrep(ir)
        return sum(item.mul for item in self if item.ir == ir)

    @property
    def dim(self) -> int:
        """Number of components: Σ mul · (2l + 1)."""
        return self._dim

    @property
    def num_irreps(self) -> int:
        """Number of irreps, copies counted: Σ mul."""
        return sum(item.mul for item in self)

    @property
    def ls(self) -> list[int]:
        """The degree of every irrep, `mul` times."""
        return [item.ir.l for item in self for _ in range(item.mul)]

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

    def is_scalar(self) -> bool:
        """Whether all irreps are 0e."""
        return all(item.ir.is_scalar() for item in self)

    def slices(self) -> list[slice]:
        """The slice of each item's components in a row."""
        found, start = [], 0
        for item in self:
            found.append(slice(start, start + item.dim))
            start += item.dim
        return found

    @property
    def slice_by_mul(self) -> SliceByMul:
        """Slices that count copies, not items.

        `irreps.slice_by_mul[2:5]` has the irreps 2 to 4.
        """
        return SliceByMul(self)

    def simplify(self) -> Irreps:
        """Adjacent items of one irrep are joined; items of multiplicity 0 are dropped.

        Example:
            >>> Irreps("2x0e+3x0e+0x1o+1o").simplify()
            5x0e+1x1o
        """
        found: list[MulIr] = []
        for mul, ir in self.remove_zero_multiplicities():
            if found and found[-1].ir == ir:
                mul += found.pop().mul
            found.append(MulIr(mul, ir))
        return Irreps(found)

    def remove_zero_multiplicities(self) -> Irreps:
        """The items with a multiplicity above 0."""
        return Irreps([item for item in self if item.mul])

    def sort(self) -> Sorted:
        """Sorts by degree, then odd before even; equal irreps stay in order.

        Returns:
            `irreps`, and `p` and `inv`, where item i of these irreps becomes item p[i], item j was
            item inv[j].

        Example:
            >>> Irreps("1o+0e").sort().irreps
            1x0e+1x1o
        """
        numbers = [3 * ir.l + ir.p for _, ir in self]  # torch.compile sorts numbers only
        inv = tuple(sorted(range(len(self)), key=numbers.__getitem__))
        p = tuple(sorted(range(len(self)), key=inv.__getitem__))
        return Sorted(Irreps([self[i] for i in inv]), p, inv)

    def regroup(self) -> Irreps:
        """The irreps sorted and simplified."""
        return self.sort().irreps.simplify()

    def filter(
        self, keep: Chosen | None = None, *, drop: Chosen | None = None, lmax: int | None = None
    ) -> Irreps:
        """Select items.

        Args:
            keep: irreps to keep, or a function of an item that returns whether to keep it.
            drop: irreps to leave out, or a function of an item.
            lmax: the largest degree to keep.

        Raises:
            ShapeError: more than one argument is given.
        """
        if sum(given is not None for given in (keep, drop, lmax)) > 1:
            raise ShapeError(
                f"keep is {keep!r}, drop {drop!r}, lmax {lmax!r}: only one may be given. "
                "Call filter once for each."
            )
        if keep is not None:
            return Irreps([item for item in self if _chosen(item, keep)])
        if drop is not None:
            return Irreps([item for item in self if not _chosen(item, drop)])
        return Irreps([item for item in self if lmax is None or item.ir.l <= lmax])

    def randn(
        self,
        *size: int,
        normalization: str = "component",
        requires_grad: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Normal random numbers, equal to e3nn's for the same seed.

        Args:
            *size: the shape, with one -1 in place of the components, `dim`.
            normalization: "component": each number has variance 1; "norm": each irrep has length 1.
            requires_grad: whether the result requires gradients.
            dtype: of the result; None: torch's default dtype.
            device: of the result; None: torch's default device.

        Returns:
            A tensor of that shape.

        Raises:
            ShapeError: not exactly one -1, or another normalization.

        Example:
            >>> Irreps("2x0e+1o").randn(10, -1).shape
            torch.Size([10, 5])
        """
        if size.count(-1) != 1:
            raise ShapeError(
                f"size is {size}: one of its entries must be -1, the place of the components. "
                "Call, for example, irreps.randn(10, -1)."
            )
        at = size.index(-1)
        before, after = size[:at], size[at + 1 :]
        if normalization == "component":
            x = torch.randn(*before, self.dim, *after, dtype=dtype, device=device)
        elif normalization == "norm":
            shapes = [(*before, mul, ir.dim, *after) for mul, ir in self]
            parts = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]
            units = [a / torch.linalg.vector_norm(a, dim=at + 1, keepdim=True) for a in parts]
            empty = torch.zeros(*before, 0, *after, dtype=dtype, device=device)
            x = torch.cat([empty, *(a.flatten(at, at + 1) for a in units)], at)
        else:
            raise ShapeError(
                f"normalization is {normalization!r}: it must be one of component, norm. "
                'Pass normalization="component".'
            )
        return x.requires_grad_(requires_grad)

    def D_from_matrix(self, R: Tensor) -> Tensor:  # noqa: N802, N803 - e3nn's name
        """D(R), block by block: the matrix by which rows with these irreps transform under R.

        Args:
            R: (..., 3, 3), orthogonal.  Where det R = -1, R is a rotation times the inversion,
                which multiplies each irrep by its parity.

        Returns:
            (..., dim, dim) in the dtype of R, orthogonal.  D is computed as polynomials of R, not
            from angles: differentiable everywhere.

        Raises:
            ShapeError: R is not (..., 3, 3).
            DTypeError: R is not a floating-point tensor.

        Example:
            >>> Irreps("0e+0o+1o").D_from_matrix(-torch.eye(3)).diagonal()  # the inversion
            tensor([ 1., -1., -1., -1., -1.])
        """
        check_matrix("R", R)
        matrix = R.to(working_dtype(R.dtype))
        first, second, third = matrix.detach().unbind(-2)
        sign = (torch.linalg.cross(first, second) * third).sum(-1).sign()[..., None, None]
        degree = max([0, *(item.ir.l for item in self)])
        blocks = wigner_D_matrices(degree, sign * matrix)
        rows = [R.new_zeros(*R.shape[:-2], 0, self.dim)]
        for (mul, ir), where in zip(self, self.slices(), strict=True):
            block = blocks[ir.l] if ir.p == 1 else sign * blocks[ir.l]
            eye = torch.eye(mul, dtype=block.dtype, device=block.device)
            copies = torch.einsum("uv,...ij->...uivj", eye, block).flatten(-4, -3).flatten(-2)
            rows.append(pad(copies, (where.start, self.dim - where.stop)).to(R.dtype))
        return torch.cat(rows, -2)

    def D_from_angles(  # noqa: N802
        self, alpha: Tensor, beta: Tensor, gamma: Tensor, k: Tensor | None = None
    ) -> Tensor:
        """p^k D(α, β, γ): the matrix of the rotation Ry(α) Rx(β) Ry(γ) and of k inversions.

        Args:
            alpha: (...), in radians, the rotation about y that is applied last.
            beta: (...), the rotation about x.
            gamma: (...), the rotation about y that is applied first.
            k: (...), number of inversions; None: none.

        Returns:
            (..., dim, dim) in the dtype of the angles.
        """
        return self.D_from_matrix(_inverted(angles_to_matrix(alpha, beta, gamma), k))

    def D_from_quaternion(self, q: Tensor, k: Tensor | None = None) -> Tensor:  # noqa: N802
        """p^k D(q): the matrix of the rotation of a quaternion and of k inversions.

        Args:
            q: (..., 4), quaternions (w, x, y, z).
            k: (...), number of inversions; None: none.

        Returns:
            (..., dim, dim) in the dtype of q.
        """
        return self.D_from_matrix(_inverted(quaternion_to_matrix(q), k))

    def D_from_axis_angle(self, axis: Tensor, angle: Tensor) -> Tensor:  # noqa: N802
        """D: the matrix of rotations about an axis.

        Args:
            axis: (..., 3), vectors of any length but 0.
            angle: (...), in radians.

        Returns:
            (..., dim, dim) in the common dtype.
        """
        return self.D_from_matrix(axis_angle_to_matrix(axis, angle))


class SliceByMul:
    """A part of irreps by the numbers of their copies, see `Irreps.slice_by_mul`."""

    __slots__ = ("_irreps",)

    def __init__(self, irreps: Irreps):
        self._irreps = irreps

    def __getitem__(self, part: slice) -> Irreps:
        start, stop, step = part.indices(self._irreps.num_irreps)
        if step != 1:
            raise ShapeError(f"the step of {part} is {step}: it must be 1. Leave it out.")
        found, at = [], 0
        for mul, ir in self._irreps:
            copies = min(stop, at + mul) - max(start, at)
            if copies > 0 or copies == mul:
                found.append(MulIr(copies, ir))
            at += mul
        return Irreps(found)


Chosen: TypeAlias = "IrrepsLike | Callable[[MulIr], bool]"
"""Arguments that `filter` reads."""


def _chosen(item: MulIr, choice: Chosen) -> bool:
    return choice(item) if callable(choice) else item.ir in Irreps(choice)


def _inverted(matrix: Tensor, k: Tensor | None) -> Tensor:
    """(-1)^k R."""
    return matrix if k is None else (1 - 2 * (k % 2))[..., None, None] * matrix


def _item(given: object) -> MulIr:
    """(2, "1o"), (2, (1, -1)), "1o" or Irrep("1o") as copies of an irrep; e3nn's too."""
    if is_irrep(given):
        given = Irrep(given)  # type: ignore[arg-type]
    elif isinstance(given, list | tuple) and len(given) == 2 and is_irrep(given[1]):
        given = given[0], Irrep(given[1])
    match given:
        case Irrep():
            return MulIr(1, given)
        case str() if _TERM.fullmatch(given):
            return next(_read(given))
        case (int(mul), (Irrep() | (int(), (1 | -1))) as ir) if mul >= 0 and ir[0] >= 0:
            return MulIr(mul, Irrep(*ir))
        case (int(mul), str(text)) if mul >= 0 and _TERM.fullmatch(text) and "x" not in text:
            return next(_read(text))._replace(mul=mul)
    raise ShapeError(
        f"{given!r} does not read as copies of an irrep: it must be (mul, irrep) with mul 0 or "
        "more and the irrep a degree and a parity, 1 or -1. Write, for example, (32, '1o')."
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


LAYOUTS = ("mul_ir", "ir_mul")


def parts_of(x: Tensor, sizes: Sequence[int], dim: int = -1) -> Sequence[Tensor]:
    """Split x along a dimension; the gradients of the views are one tensor."""
    return (x,) if len(sizes) == 1 else x.split_with_sizes(list(sizes), dim)


def split_weight(
    weight: Tensor | None, shapes: Sequence[tuple[int, ...] | None]
) -> list[Tensor | None]:
    """Views (…, *shape) of a flat weight, None without a shape; their gradients are one tensor."""
    if weight is None:
        return [None] * len(shapes)
    flats = iter(parts_of(weight, [math.prod(shape) for shape in shapes if shape is not None]))
    views: list[Tensor | None] = []
    for shape in shapes:
        if shape is None:
            views.append(None)
        else:
            flat = next(flats)
            views.append(flat.reshape(*flat.shape[:-1], *shape))
    return views


def side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate one or more tensors; a single one is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def split(x: Tensor, irreps: Irreps, layout: str) -> list[Tensor]:
    """Views (…, mul, 2l+1), one for each item of the irreps of x (…, D)."""
    parts = parts_of(x, [item.dim for item in irreps])
    return [as_block(part, item, layout) for part, item in zip(parts, irreps, strict=True)]


def as_block(part: Tensor, item: MulIr, layout: str) -> Tensor:
    """A view (…, mul, 2l+1) of the components (…, mul · (2l+1)) of an item."""
    lead, (mul, ir) = part.shape[:-1], item
    if layout == "mul_ir":
        return part.reshape(*lead, mul, ir.dim)
    return part.reshape(*lead, ir.dim, mul).transpose(-1, -2)


def join(blocks: Sequence[Tensor], layout: str) -> Tensor:
    """Rows (…, D) of one or more blocks (…, mul, 2l+1)."""
    turned = [block if layout == "mul_ir" else block.transpose(-1, -2) for block in blocks]
    return side_by_side([block.flatten(-2) for block in turned], -1)


def broadcast_leads(leads: Sequence[torch.Size]) -> torch.Size:
    """Broadcast leading dimensions.

    Raises:
        ShapeError: they do not broadcast.
    """
    first, *others = leads
    if all(lead == first for lead in others):
        return first
    try:
        found: torch.Size = torch.broadcast_shapes(*leads)  # type: ignore[no-untyped-call]
    except RuntimeError:
        shapes = ", ".join(str(tuple(lead)) for lead in leads)
        raise ShapeError(
            f"the leading dimensions of the inputs are {shapes}: they must broadcast. "
            "Pass one row of each for every row of the output, or dimensions of size 1."
        ) from None
    return found


def steps(item: MulIr, layout: str) -> tuple[int, int]:
    """Strides from one component to the next, and from one copy to the next."""
    return (1, item.ir.dim) if layout == "mul_ir" else (item.mul, 1)


def check_layout(layout: str) -> None:
    """Raise ShapeError unless the layout is one of LAYOUTS."""
    if layout not in LAYOUTS:
        raise ShapeError(
            f"layout is {layout!r}: it must be 'mul_ir', the components of a copy side by side, or "
            "'ir_mul', the copies of a component side by side. Choose the order of your tensors."
        )


def check_rows(name: str, x: Tensor, irreps: Irreps, module: object) -> None:
    """Raise DTypeError or ShapeError unless x is a tensor (…, D)."""
    check_tensors(**{name: x})
    if x.is_complex():
        raise DTypeError(f"{name} is {x.dtype}: rows of irreps are real. Pass {name}.real.")
    if x.dim() == 0 or x.shape[-1] != irreps.dim:
        raise ShapeError(
            f"{name} is {tuple(x.shape)} but {type(module).__name__} takes {irreps}: it must be "
            f"(…, {irreps.dim}). Pass features of these irreps, or build it for yours."
        )
